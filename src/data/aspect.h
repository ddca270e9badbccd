// Open-Sora's buckets: the heights and widths that clips of a resolution may have. Sizes are those
// of opensora/datasets/aspect.py (v1.2.0); keys are spelt alike in all tables ("1.00"), where the
// original spells some "1.0" and then refuses 13 pairs that resolve here, and 0.56 stands before
// 0.62 at 4k too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

// One shape of a resolution. `key` is about height / width: "0.56" is a landscape 16:9.
struct AspectSize {
  std::string key;
  std::int64_t height = 0, width = 0;
};

// "144p", "240p", "360p", "480p", "720p", "1080p", "2k", "4k" with 17 shapes; "256", "512", "1024",
// "2048", "2880" with 40. In this order.
const std::vector<std::string>& resolution_names();

// The nominal number of pixels of a clip of this resolution. Throws Exit::usage on an unknown name,
// naming the nearest.
std::int64_t resolution_area(const std::string& resolution);

// All shapes of a resolution, in the order of the table. Throws Exit::usage as above.
const std::vector<AspectSize>& aspect_sizes(const std::string& resolution);

// The shape whose key is nearest to height / width; the first among equals.
const AspectSize& nearest_aspect(const std::string& resolution, std::int64_t height,
                                 std::int64_t width);

// Whether footage of that size may be made into clips of that resolution: it has at least 0.8 of
// the pixels, so that nothing is enlarged much.
bool area_suffices(const std::string& resolution, std::int64_t height, std::int64_t width);

}  // namespace weft
