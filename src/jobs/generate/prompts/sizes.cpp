#include "jobs/generate/prompts/sizes.h"

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "core/error.h"
#include "data/aspect.h"
#include "jobs/generate/options.h"

namespace weft {
namespace {

const std::vector<std::pair<std::string, std::string>> ratios = {
    {"3:8", "0.38"},   {"9:21", "0.43"}, {"12:25", "0.48"}, {"1:2", "0.50"},  {"9:17", "0.53"},
    {"27:50", "0.54"}, {"9:16", "0.56"}, {"5:8", "0.62"},   {"2:3", "0.67"},  {"3:4", "0.75"},
    {"1:1", "1.00"},   {"4:3", "1.33"},  {"3:2", "1.50"},   {"16:9", "1.78"}, {"17:9", "1.89"},
    {"2:1", "2.00"},   {"50:27", "2.08"}};

// Seconds at 24 frames a second, cut to whole chunks of 17 frames.
const std::vector<std::pair<std::string, std::int64_t>> lengths = {
    {"1x", 51},  {"2s", 51},  {"2x", 102},  {"4s", 102},  {"4x", 204},
    {"8s", 204}, {"8x", 408}, {"16s", 408}, {"16x", 816}, {"32s", 816}};

template <class T>
std::vector<std::string> names_of(const std::vector<std::pair<std::string, T>>& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.push_back(name);
  return names;
}

}  // namespace

std::string aspect_key(const std::string& ratio) {
  for (const auto& [name, key] : ratios)
    if (name == ratio) return key;
  throw Error(Exit::usage, fmt::format("unknown aspect ratio \"{}\"", ratio),
              fmt::format("height:width, one of {}; or set generate.image_size",
                          fmt::join(names_of(ratios), ", ")),
              __FILE__, __LINE__);
}

std::int64_t frame_count(const std::string& text) {
  // A name, or both of a length with a slash between them.
  for (const auto& [name, frames] : lengths)
    for (const auto& [other, same] : lengths)
      if (text == name || (same == frames && text == name + "/" + other)) return frames;
  std::int64_t frames = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), frames);
  WEFT_CHECK(
      failed == std::errc() && end == text.data() + text.size() && frames >= 1 && frames <= 100000,
      Exit::usage,
      fmt::format("a number from 1 on, or one of {}", fmt::join(names_of(lengths), ", ")),
      "unknown length of a clip \"{}\"", text);
  return frames;
}

PixelSize clip_size(const GenerateDeck& deck, const std::string& num_frames,
                    const std::string& resolution, const std::string& aspect_ratio) {
  PixelSize size{frame_count(num_frames), 0, 0};
  if (!deck.image_size.empty()) {
    WEFT_CHECK(deck.image_size.size() == 2, Exit::usage,
               "write height and width, such as [240, 426]", "generate.image_size has {} numbers",
               deck.image_size.size());
    size.height = deck.image_size[0];
    size.width = deck.image_size[1];
    return size;
  }
  const std::string key = aspect_key(aspect_ratio);
  const auto& known = aspect_sizes(resolution);
  const auto found =
      std::find_if(known.begin(), known.end(), [&](const AspectSize& s) { return s.key == key; });
  if (found == known.end()) {
    std::vector<std::string> there;
    for (const auto& [name, k] : ratios)
      for (const AspectSize& s : known)
        if (s.key == k) there.push_back(name);
    throw Error(
        Exit::usage,
        fmt::format("resolution {} has no size for aspect ratio {}", resolution, aspect_ratio),
        fmt::format("it has {}; or set generate.image_size", fmt::join(there, ", ")), __FILE__,
        __LINE__);
  }
  size.height = found->height;
  size.width = found->width;
  return size;
}

}  // namespace weft
