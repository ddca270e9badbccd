// A list of pictures with polygons, as JSON lines and in ICDAR's form: not trusted.
#include "data/text_images/text_list.h"

#include <cmath>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto text = fuzz::text_of(data, size);
  fuzz::put("gt_a.txt", text);
  for (const auto& path : {fuzz::put("list.jsonl", text), fuzz::put("list.txt", "a.jpg\n")})
    fuzz::accepts([&] {
      for (const TextListEntry& entry : read_text_list(path.string(), {}))
        for (const TextRegion& region : entry.regions) {
          fuzz::require(region.polygon.size() >= 3, "a polygon of less than three points");
          for (const Point& p : region.polygon)
            fuzz::require(std::abs(p.x) <= 1e6 && std::abs(p.y) <= 1e6, "a point far away");
        }
    });
  return 0;
}
