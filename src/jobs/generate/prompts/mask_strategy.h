// Where reference frames go in a clip, in Open-Sora's notation (docs/generate_reference.md, Masks).
// All positions are latent frames.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

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

}  // namespace weft
