#include "media/media_source.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/error.h"

namespace weft {
namespace {

// None of these has an option that names a file. `movie`, `lut3d`, `drawtext`, `metadata`,
// `sendcmd`, `zmq`, `curves`, `frei0r`, `life` and `cellauto` have one, and others may: anything
// not listed is refused.
constexpr std::array sources = {
    "allrgb",     "allyuv",      "color",      "colorchart", "colorspectrum", "gradients",
    "mandelbrot", "nullsrc",     "pal100bars", "pal75bars",  "rgbtestsrc",    "sierpinski",
    "smptebars",  "smptehdbars", "testsrc",    "testsrc2",   "yuvtestsrc"};
constexpr std::array filters = {
    "blend",  "boxblur", "crop",      "drawbox", "drawgrid", "edgedetect", "eq",     "fade",
    "format", "fps",     "framestep", "gblur",   "hflip",    "hstack",     "hue",    "lutrgb",
    "lutyuv", "negate",  "noise",     "null",    "overlay",  "pad",        "rotate", "scale",
    "select", "setpts",  "setsar",    "settb",   "split",    "tblend",     "tpad",   "transpose",
    "trim",   "vflip",   "vignette",  "vstack"};

bool is_word(std::string_view s) {
  return !s.empty() && std::all_of(s.begin(), s.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

// Returns the name in [a][b]name=options[c], if all labels are plain words.
std::string_view name_of(std::string_view filter, const std::string& graph) {
  const auto broken = [&](bool good) {
    WEFT_CHECK(good, Exit::data, "write labels as [name], before and after a filter",
               "lavfi:{}: \"{}\" is not a filter", graph, filter);
  };
  const auto labels = [&](std::string_view text) {
    while (!text.empty()) {
      const auto end = text.find(']');
      broken(text.front() == '[' && end != std::string_view::npos &&
             is_word(text.substr(1, end - 1)));
      text.remove_prefix(end + 1);
    }
  };
  std::size_t begin = 0;
  while (begin < filter.size() && filter[begin] == '[') {
    const auto end = filter.find(']', begin);
    broken(end != std::string_view::npos);
    begin = end + 1;
  }
  labels(filter.substr(0, begin));
  std::string_view rest = filter.substr(begin);
  if (const auto label = rest.find('['); label != std::string_view::npos) {
    labels(rest.substr(label));
    rest = rest.substr(0, label);
  }
  const std::string_view name = rest.substr(0, rest.find('='));
  broken(is_word(name));
  return name;
}

}  // namespace

void check_source_graph(const std::string& graph) {
  const bool plain = std::all_of(graph.begin(), graph.end(), [](char c) {
    return c > ' ' && c < 0x7f && c != '\'' && c != '\\' && c != '"';
  });
  WEFT_CHECK(plain, Exit::data, "write it without blanks, quotes and backslashes",
             "lavfi:{} has characters that are not allowed in a source", graph);
  for (std::size_t at = 0; at <= graph.size();) {
    const std::size_t end = std::min(graph.find_first_of(",;", at), graph.size());
    const std::string_view name = name_of(std::string_view(graph).substr(at, end - at), graph);
    at = end + 1;
    const bool known = std::find(sources.begin(), sources.end(), name) != sources.end() ||
                       std::find(filters.begin(), filters.end(), name) != filters.end();
    WEFT_CHECK(known, Exit::data,
               fmt::format("filters that touch no file are allowed: {}, {}",
                           fmt::join(sources, ", "), fmt::join(filters, ", ")),
               "lavfi:{}: filter \"{}\" is not allowed", graph, name);
  }
}

}  // namespace weft
