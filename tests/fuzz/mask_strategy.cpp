// A mask strategy behind three bytes: frames of the clip, of each of two references, and the
// alignment. What is placed lies within both.
#include "jobs/generate/prompts.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  if (size < 3) return 0;
  const std::int64_t frames = data[0], given = data[1], align = data[2] % 8;
  const std::string text(fuzz::text_of(data + 3, size - 3));
  std::vector<MaskGroup> groups;
  if (!fuzz::accepts([&] { groups = parse_mask_strategy(text, "mask"); })) return 0;
  for (std::int64_t loop = 0; loop < 3; ++loop)
    fuzz::accepts([&] {
      const auto placed = place_references(groups, loop, frames, {given, given}, align, "mask");
      for (const Placement& p : placed)
        fuzz::require(p.from >= 0 && p.to >= 0 && p.length >= 1 && p.length <= given - p.from &&
                          p.length <= frames - p.to,
                      "frames outside");
      edit_ratios(placed, frames);
    });
  fuzz::accepts([&] {
    const LatentRange r = frames_taken(groups, 3, 0, given, frames, align, "mask");
    fuzz::require(r.first >= 0 && r.first <= r.last && r.last <= given, "a range outside");
  });
  return 0;
}
