// The work of `weft generate`: prompts, their texts, and the clips one by one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/deck.h"
#include "jobs/generate/options.h"
#include "jobs/generate/parts.h"
#include "jobs/generate/prompts/mask_strategy.h"
#include "jobs/generate/prompts/prompts.h"
#include "jobs/generate/prompts/sizes.h"

namespace weft {

struct ClipItem {
  std::int64_t prompt = 0;  // place in GenerateJob::prompts
  std::int64_t sample = 0;  // of generate.num_samples
  std::string name;         // of the file, without directory and ending
  PixelSize pixels;         // as asked for, of one loop
  std::int64_t latent_frames = 1, latent_height = 1, latent_width = 1;
  double cost = 0;                  // operations, about
  std::vector<std::int64_t> texts;  // [loop], places in GenerateJob::texts
  std::vector<MaskGroup> masks;     // without what loops add
  std::string key;  // hash of all that decides its pixels: a finished clip of the same key is not
                    // made again

  // Stands for this clip in Philox's counter: of the prompt and the sample alone, so that slices of
  // a prompt file, more samples and other rank counts make the same clips.
  std::uint64_t noise_id(const std::vector<Prompt>& prompts) const;
};

// How loops overlap, in frames (docs/generate_reference.md, Loops).
struct LoopLengths {
  std::int64_t condition_latents = 0;  // that a clip begins with of the one before
  std::int64_t condition_frames = 0;   // the same in pixel frames, dropped from its beginning
};

struct GenerateJob {
  std::vector<Prompt> prompts;
  std::vector<std::string> texts;  // each once
  std::vector<ClipItem> items;     // prompt after prompt
  LoopLengths loops;

  // Pixel frames of an item with all its loops.
  std::int64_t total_frames(const ClipItem& item, const GenerateDeck& deck) const;
  // Items from the costliest on; equal ones in their order.
  std::vector<std::int64_t> longest_first() const;
};

// Checks everything that the deck asks for of these prompts, but for weights. `weights` stands for
// the weights in the keys. Exit::usage or Exit::data as jobs/generate/prompts/sizes.h and
// mask_strategy.h say; reference files must be there.
GenerateJob plan_generate_job(const Deck& deck, std::vector<Prompt> prompts, const ClipParts& parts,
                              const std::string& weights);

}  // namespace weft
