// What a prompt asks for, as Open-Sora writes it (docs/generate.md, Prompts, Sizes,
// Masks; opensora/utils/inference_utils.py at v1.2.0): the size of its clip, where references go in
// it, and the texts with their options.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/deck.h"
#include "jobs/generate/options.h"
#include "media/media_source.h"

namespace weft {

struct PixelSize {
  std::int64_t frames = 1, height = 0, width = 0;
  auto operator<=>(const PixelSize&) const = default;
};

// The key of data/aspect.h's tables for an aspect ratio H:W as Open-Sora writes it: "9:16" ->
// "0.56". Exit::usage names the nearest one of those that there are.
std::string aspect_key(const std::string& ratio);

// Frames of a clip: a number, "2s", "2x" and so on ("1x/2s" too). Exit::usage otherwise.
std::int64_t frame_count(const std::string& text);

// Size in pixels of generate.image_size, or of resolution and aspect ratio. Exit::usage for a
// resolution without that ratio, and for sizes below 8 pixels.
PixelSize clip_size(const GenerateDeck& deck, const std::string& num_frames,
                    const std::string& resolution, const std::string& aspect_ratio);

// One group of "loop,reference,reference start,target start,length,edit ratio"; trailing ones may
// be left out.
struct MaskGroup {
  std::int64_t loop = 0, reference = 0, reference_start = 0, target_start = 0, length = 1;
  double edit = 0;
};

// The groups of a strategy, separated by semicolons; none for "". Exit::data, beginning with
// `where`, for anything else than 1 to 6 numbers a group, and edit ratios outside [0, 1].
std::vector<MaskGroup> parse_mask_strategy(const std::string& text, const std::string& where);

// Latent frames [from, from + length) of a reference that go to [to, to + length) of the clip.
struct Placement {
  std::int64_t reference = 0, from = 0, to = 0, length = 0;
  double edit = 0;
};

// The groups of `loop` as placements, in order: negative starts count from the end, starts snap to
// multiples of `align` (0: not at all), lengths are cut to what there is. `references`: latent
// frames of each one. Exit::data, beginning with `where`, for a reference that is not there or a
// group that has no frame left.
std::vector<Placement> place_references(const std::vector<MaskGroup>& groups, std::int64_t loop,
                                        std::int64_t frames,
                                        const std::vector<std::int64_t>& references,
                                        std::int64_t align, const std::string& where);

// The latent frames [first, last) of a reference of `given` that groups of loops 0 to `loops` - 1
// take, as above; {0, 0} where none does.
struct LatentRange {
  std::int64_t first = 0, last = 0;
};
LatentRange frames_taken(const std::vector<MaskGroup>& groups, std::int64_t loops,
                         std::int64_t reference, std::int64_t given, std::int64_t frames,
                         std::int64_t align, const std::string& where);

// The multiple of `align` that `position` of `frames` snaps to: the nearest, ties down, and never
// up to where no whole chunk of `align` frames is left.
std::int64_t snap(std::int64_t position, std::int64_t align, std::int64_t frames);

// What edit ratios make of `frames` latent frames: 1 where nothing was placed
// (docs/models/stdit3.md, Sampling).
std::vector<float> edit_ratios(const std::vector<Placement>& placements, std::int64_t frames);

struct Prompt {
  std::int64_t index =
      0;  // its line in the file, or place in generate.prompts, from 0: names and noise follow it
  std::string text;  // without options; what prompt_as_path names files by
  struct Segment {
    std::int64_t from_loop = 0;
    std::string text;  // with scores
  };
  std::vector<Segment> segments;        // the first from loop 0 on
  std::vector<std::string> references;  // files
  MediaTrust named_by =
      MediaTrust::untrusted;  // who named them: the prompt, or generate.references
  std::string mask_strategy;
  bool own_references = false, own_mask = false;  // the prompt's, not the deck's
  // weft's own options, so that one file may ask for clips of many sizes; empty: the deck's.
  std::string num_frames, resolution, aspect_ratio;
  std::optional<std::string> negative;  // likewise, instead of generate.negative_prompt

  // What counts in that loop.
  const std::string& text_of_loop(std::int64_t loop) const;
};

// The prompts [start_index, end_index) of generate.prompt_file or generate.prompts, or
// generate.prompt_generator for each number in [start_index, end_index), each with its place in
// generate.references and generate.mask_strategies. Exit::data names file and line of a prompt that
// is empty, not UTF-8, has broken JSON or an unknown option; Exit::usage where there are no
// prompts, lists of other lengths, or more than generate.max_clips clips; Exit::data for a file
// larger than limits.max_list_mib.
//
// An empty prompt is refused, where the original makes a clip of nothing but the scores: it is
// nearly always a slip.
//
// `refine`, where it is given, gets the texts of all segments and returns what to take instead,
// before scores are added. The same text is refined once, but for prompt_generator, where `numbers`
// has the prompt's number of each and is not empty.
using RefineTexts = std::function<std::vector<std::string>(
    const std::vector<std::string>& texts, const std::vector<std::int64_t>& numbers)>;
std::vector<Prompt> read_prompts(const GenerateDeck& deck, const RefineTexts& refine = {},
                                 const MediaDeck& limits = {});

// The same for a deck. Where no text is encoded (`encoded` false) every text is the null caption,
// and no prompt need be given: then there is one, without text.
std::vector<Prompt> read_prompts(const Deck& deck, bool encoded, const RefineTexts& refine = {});

// Where the user wrote it, for messages.
std::string place_of(const GenerateDeck& deck, const Prompt& prompt);

// One prompt, still without scores. `where` names it in messages.
Prompt parse_prompt(const std::string& line, const std::string& where, const GenerateDeck& deck);

// The scores that the deck asks for behind the text, each unless the text speaks of it already.
std::string append_scores(const std::string& text, const GenerateDeck& deck);

// Files of a list with semicolons between them; none for "".
std::vector<std::string> split_references(const std::string& list);

// `text` as the name of a file: no slashes, control characters or leading dots, at most 180 bytes,
// whole characters.
std::string file_name_of(const std::string& text);

}  // namespace weft
