#include "data/aspect.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "config/deck.h"
#include "core/error.h"

namespace weft {
namespace {

struct Size {
  int height, width;
};

// clang-format off
// One row a key of the video resolutions, one {H, W} a resolution.
struct VideoRow {
  const char* key;
  Size size[8];
};
constexpr VideoRow video_rows[] = {
    //        144p        240p        360p        480p
    //        720p        1080p        2k        4k
    {"0.38", {{117, 312}, {196, 522}, {294, 784}, {392, 1046},
             {588, 1568}, {882, 2352}, {1176, 3136}, {1764, 4704}}},
    {"0.43", {{125, 291}, {210, 490}, {314, 732}, {420, 980},
             {628, 1466}, {942, 2198}, {1256, 2930}, {1886, 4400}}},
    {"0.48", {{133, 277}, {222, 462}, {332, 692}, {444, 925},
             {666, 1388}, {998, 2080}, {1330, 2770}, {1996, 4158}}},
    {"0.50", {{135, 270}, {226, 452}, {340, 680}, {452, 904},
             {678, 1356}, {1018, 2036}, {1358, 2716}, {2036, 4072}}},
    {"0.53", {{139, 262}, {232, 438}, {350, 662}, {466, 880},
             {698, 1318}, {1048, 1980}, {1398, 2640}, {2096, 3960}}},
    {"0.54", {{141, 260}, {236, 436}, {352, 652}, {470, 870},
             {706, 1306}, {1058, 1958}, {1412, 2612}, {2118, 3918}}},
    {"0.56", {{144, 256}, {240, 426}, {360, 640}, {480, 854},
             {720, 1280}, {1080, 1920}, {1440, 2560}, {2160, 3840}}},
    {"0.62", {{151, 241}, {252, 404}, {380, 608}, {506, 810},
             {758, 1212}, {1138, 1820}, {1518, 2428}, {2276, 3642}}},
    {"0.67", {{156, 234}, {262, 393}, {392, 588}, {522, 784},
             {784, 1176}, {1176, 1764}, {1568, 2352}, {2352, 3528}}},
    {"0.75", {{166, 221}, {276, 368}, {416, 554}, {554, 738},
             {832, 1110}, {1248, 1664}, {1662, 2216}, {2494, 3326}}},
    {"1.00", {{192, 192}, {320, 320}, {480, 480}, {640, 640},
             {960, 960}, {1440, 1440}, {1920, 1920}, {2880, 2880}}},
    {"1.33", {{221, 165}, {370, 278}, {554, 416}, {740, 555},
             {1108, 832}, {1662, 1246}, {2218, 1664}, {3326, 2494}}},
    {"1.50", {{235, 156}, {392, 262}, {588, 392}, {784, 522},
             {1176, 784}, {1764, 1176}, {2352, 1568}, {3528, 2352}}},
    {"1.78", {{256, 144}, {426, 240}, {640, 360}, {854, 480},
             {1280, 720}, {1920, 1080}, {2560, 1440}, {3840, 2160}}},
    {"1.89", {{263, 139}, {440, 232}, {660, 350}, {880, 466},
             {1320, 698}, {1980, 1048}, {2638, 1396}, {3958, 2096}}},
    {"2.00", {{271, 135}, {452, 226}, {678, 340}, {906, 454},
             {1358, 680}, {2036, 1018}, {2716, 1358}, {4072, 2036}}},
    {"2.08", {{277, 132}, {462, 222}, {692, 332}, {924, 444},
             {1386, 666}, {2078, 998}, {2772, 1330}, {4156, 1994}}},
};
struct SquareRow {
  const char* key;
  Size size;
};
// Resolution 256; those of 512, 1024 and 2048 are 2, 4 and 8 times as high and wide.
constexpr SquareRow rows_256[] = {
    {"0.25", {128, 512}}, {"0.26", {128, 496}}, {"0.27", {128, 480}}, {"0.28", {128, 464}},
    {"0.32", {144, 448}}, {"0.33", {144, 432}}, {"0.35", {144, 416}}, {"0.40", {160, 400}},
    {"0.42", {160, 384}}, {"0.48", {176, 368}}, {"0.50", {176, 352}}, {"0.52", {176, 336}},
    {"0.57", {192, 336}}, {"0.60", {192, 320}}, {"0.68", {208, 304}}, {"0.72", {208, 288}},
    {"0.78", {224, 288}}, {"0.82", {224, 272}}, {"0.88", {240, 272}}, {"0.94", {240, 256}},
    {"1.00", {256, 256}}, {"1.07", {256, 240}}, {"1.13", {272, 240}}, {"1.21", {272, 224}},
    {"1.29", {288, 224}}, {"1.38", {288, 208}}, {"1.46", {304, 208}}, {"1.67", {320, 192}},
    {"1.75", {336, 192}}, {"2.00", {352, 176}}, {"2.09", {368, 176}}, {"2.40", {384, 160}},
    {"2.50", {400, 160}}, {"2.89", {416, 144}}, {"3.00", {432, 144}}, {"3.11", {448, 144}},
    {"3.62", {464, 128}}, {"3.75", {480, 128}}, {"3.88", {496, 128}}, {"4.00", {512, 128}},
};
// Resolution 2880.
constexpr SquareRow rows_2880[] = {
    {"0.25", {1408, 5760}}, {"0.26", {1408, 5568}}, {"0.27", {1408, 5376}},
    {"0.28", {1408, 5184}}, {"0.32", {1600, 4992}}, {"0.33", {1600, 4800}},
    {"0.34", {1600, 4672}}, {"0.40", {1792, 4480}}, {"0.42", {1792, 4288}},
    {"0.47", {1920, 4096}}, {"0.49", {1920, 3904}}, {"0.51", {1920, 3776}},
    {"0.55", {2112, 3840}}, {"0.59", {2112, 3584}}, {"0.68", {2304, 3392}},
    {"0.72", {2304, 3200}}, {"0.78", {2496, 3200}}, {"0.83", {2496, 3008}},
    {"0.89", {2688, 3008}}, {"0.93", {2688, 2880}}, {"1.00", {2880, 2880}},
    {"1.07", {2880, 2688}}, {"1.12", {3008, 2688}}, {"1.21", {3008, 2496}},
    {"1.28", {3200, 2496}}, {"1.39", {3200, 2304}}, {"1.47", {3392, 2304}},
    {"1.70", {3584, 2112}}, {"1.82", {3840, 2112}}, {"2.03", {3904, 1920}},
    {"2.13", {4096, 1920}}, {"2.39", {4288, 1792}}, {"2.50", {4480, 1792}},
    {"2.92", {4672, 1600}}, {"3.00", {4800, 1600}}, {"3.12", {4992, 1600}},
    {"3.68", {5184, 1408}}, {"3.82", {5376, 1408}}, {"3.95", {5568, 1408}},
    {"4.00", {5760, 1408}},
};
// clang-format on

struct Resolution {
  std::string name;
  std::int64_t area;
  std::vector<AspectSize> sizes;
};

std::vector<Resolution> make_resolutions() {
  const std::array<std::pair<const char*, std::int64_t>, 8> video = {{{"144p", 36864},
                                                                      {"240p", 102240},
                                                                      {"360p", 230400},
                                                                      {"480p", 409920},
                                                                      {"720p", 921600},
                                                                      {"1080p", 2073600},
                                                                      {"2k", 3686400},
                                                                      {"4k", 8294400}}};
  std::vector<Resolution> all;
  for (std::size_t i = 0; i < video.size(); ++i) {
    all.push_back({video[i].first, video[i].second, {}});
    for (const VideoRow& row : video_rows)
      all.back().sizes.push_back({row.key, row.size[i].height, row.size[i].width});
  }
  for (const int scale : {1, 2, 4, 8}) {
    const std::int64_t side = 256 * scale;
    all.push_back({std::to_string(side), side * side, {}});
    for (const SquareRow& row : rows_256)
      all.back().sizes.push_back({row.key, row.size.height * scale, row.size.width * scale});
  }
  all.push_back({"2880", 8294400, {}});
  for (const SquareRow& row : rows_2880)
    all.back().sizes.push_back({row.key, row.size.height, row.size.width});
  return all;
}

const std::vector<Resolution>& resolutions() {
  static const std::vector<Resolution> all = make_resolutions();
  return all;
}

const Resolution& find(const std::string& name) {
  for (const Resolution& r : resolutions())
    if (r.name == name) return r;
  const std::string near = nearest_name(name, resolution_names());
  std::string list;
  for (const std::string& known : resolution_names()) list += (list.empty() ? "" : ", ") + known;
  throw Error(Exit::usage, fmt::format("unknown resolution \"{}\"", name),
              near.empty() ? "there are " + list : fmt::format("did you mean \"{}\"?", near),
              __FILE__, __LINE__);
}

}  // namespace

const std::vector<std::string>& resolution_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Resolution& r : resolutions()) all.push_back(r.name);
    return all;
  }();
  return names;
}

std::int64_t resolution_area(const std::string& resolution) { return find(resolution).area; }

const std::vector<AspectSize>& aspect_sizes(const std::string& resolution) {
  return find(resolution).sizes;
}

const AspectSize& nearest_aspect(const std::string& resolution, std::int64_t height,
                                 std::int64_t width) {
  WEFT_ASSERT(height > 0 && width > 0);
  const double ratio = static_cast<double>(height) / static_cast<double>(width);
  const auto distance = [&](const AspectSize& s) {
    return std::abs(std::strtod(s.key.c_str(), nullptr) - ratio);
  };
  const auto& sizes = find(resolution).sizes;
  return *std::min_element(
      sizes.begin(), sizes.end(),
      [&](const AspectSize& a, const AspectSize& b) { return distance(a) < distance(b); });
}

bool area_suffices(const std::string& resolution, std::int64_t height, std::int64_t width) {
  return static_cast<double>(height * width) >= 0.8 * static_cast<double>(find(resolution).area);
}

}  // namespace weft
