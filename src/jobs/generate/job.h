// The work of `weft generate`: the parts that make clips, the clips one by one, and which of them
// are sampled together.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "jobs/generate/options.h"
#include "jobs/generate/prompts.h"
#include "models/interfaces.h"

namespace weft {

// The deck, with what it leaves to the model in [generate].
Deck with_model_defaults(const Deck& deck);
// Collective. Also the codec's scale and shift, as the latents of data.path have them where it
// leaves them empty.
Deck complete_deck(const Deck& deck, MPI_Comm world);

// The model's parts, still without weights. They stay where they are.
struct ClipParts {
  // Exit::usage where the denoiser's latents are neither pixels nor the codec's, or the codec has
  // no scale.
  explicit ClipParts(const Deck& deck);

  std::unique_ptr<Denoiser> denoiser;
  std::unique_ptr<VideoCodec> codec;
  std::unique_ptr<TextEncoder> texts;  // null: every text is the null caption
  // All that decides a clip besides weights and texts (config/deck_table.h, identity).
  std::set<std::string> tables;

  bool on_pixels = false;  // the denoiser's latents are the frames themselves
  // Exit::usage where the denoiser cannot take the encoder's features.
  void check_texts() const;
  // Whether texts are encoded.
  bool encodes_texts() const { return texts != nullptr && texts->lacks().empty(); }
};

struct ClipItem {
  std::int64_t prompt = 0;  // place in GenerateJob::prompts
  std::int64_t sample = 0;  // of generate.num_samples
  std::string name;         // of the file, without directory and ending
  PixelSize pixels;         // as asked for, of one loop
  std::int64_t latent_frames = 1, latent_height = 1, latent_width = 1;
  double cost = 0;                  // operations, about
  std::vector<std::int64_t> texts;  // [loop], places in GenerateJob::texts
  // Likewise, of the negative prompt, for all loops; -1: guidance takes the null caption.
  std::int64_t negative = -1;
  std::vector<MaskGroup> masks;  // without what loops add
  std::int64_t area = 0;         // of a frame, as asked for
  bool picture = false;  // its first reference is the picture that it begins with (PictureStart)
  std::string key;  // hash of all that decides its pixels: a finished clip of the same key is not
                    // made again

  // Stands for this clip in Philox's counter: of the prompt and the sample alone, so that slices of
  // a prompt file, more samples and other rank counts make the same clips.
  std::uint64_t noise_id(const std::vector<Prompt>& prompts) const;
};

// How loops overlap, in frames (docs/generate.md, Loops).
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

// Exit::data where the latents of the deck's data were encoded by another checkpoint than these
// weights of the codec: what a model learnt on them, they do not decode.
void check_codec_of_latents(const Deck& deck, const VideoCodec& codec, const ModelSource& weights);

// Exit::data unless `encoder` is the one that encoded the captions of a training (`trained`:
// train/trainer.h, encoder_of_captions; "": not known). `where` names them.
void check_text_encoder(const std::string& trained, const std::string& where,
                        const TextEncoder& encoder);

// Checks everything that the deck asks for of these prompts, but for weights. `weights` stands for
// the weights in the keys. Exit::usage or Exit::data as prompts.h says; reference files must be
// there.
GenerateJob plan_generate_job(const Deck& deck, std::vector<Prompt> prompts, const ClipParts& parts,
                              const std::string& weights);

// Places in GenerateJob::items: clips of one size and length, which make one tensor, all with
// negative prompts or none, without references, masks or loops; or any one clip.
using ClipBatch = std::vector<std::int64_t>;

// The most clips of a size in one batch.
using BatchLimits = std::map<PixelSize, std::int64_t>;

// For all sizes among the items `order`: generate.batch_size, but no more than each of `groups` has
// on average, rounded up.
BatchLimits limit_batches(const Deck& deck, const GenerateJob& job,
                          const std::vector<std::int64_t>& order, int groups);

// Every item of `order` in one batch, the costliest batches first.
std::vector<ClipBatch> make_batches(const Deck& deck, const GenerateJob& job,
                                    const std::vector<std::int64_t>& order,
                                    const BatchLimits& limits);

}  // namespace weft
