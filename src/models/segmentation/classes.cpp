#include "models/segmentation/classes.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/log.h"
#include "data/ingest/ingest_images.h"
#include "data/lists/table.h"
#include "models/segmentation/options.h"
#include "text/utf8.h"

namespace weft {

std::vector<std::string> class_names(const Deck& deck, const std::vector<std::string>& of_data) {
  const SegmentationDeck& model = deck.get<SegmentationDeck>();
  std::vector<std::string> names = of_data;
  if (!model.class_names.empty()) {
    names = read_class_names(model.class_names, deck.media);
    WEFT_CHECK(std::ssize(names) == model.num_classes, Exit::usage,
               "name a file with a line for each class",
               "model.class_names = \"{}\" has {} names, and model.num_classes = {}",
               model.class_names, names.size(), model.num_classes);
  }
  names.resize(model.num_classes);
  for (std::size_t c = 0; c < names.size(); ++c) {
    check_utf8(names[c], fmt::format("the name of class {}", c));
    for (char& letter : names[c])  // they are printed
      if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) letter = '_';
    if (names[c].empty()) names[c] = fmt::format("class {}", c);
  }
  return names;
}

namespace {

// ADE20K's, as the original draws them: 0xRRGGBB.
constexpr std::array<std::uint32_t, 150> ade20k = {
    0x787878, 0xb47878, 0x06e6e6, 0x503232, 0x04c803, 0x787850, 0x8c8c8c, 0xcc05ff, 0xe6e6e6,
    0x04fa07, 0xe005ff, 0xebff07, 0x96053d, 0x787846, 0x08ff33, 0xff0652, 0x8fff8c, 0xccff04,
    0xff3307, 0xcc4603, 0x0066c8, 0x3de6fa, 0xff0633, 0x0b66ff, 0xff0747, 0xff09e0, 0x0907e6,
    0xdcdcdc, 0xff095c, 0x7009ff, 0x08ffd6, 0x07ffe0, 0xffb806, 0x0aff47, 0xff290a, 0x07ffff,
    0xe0ff08, 0x6608ff, 0xff3d06, 0xffc207, 0xff7a08, 0x00ff14, 0xff0829, 0xff0599, 0x0633ff,
    0xeb0cff, 0xa09614, 0x00a3ff, 0x8c8c8c, 0xfa0a0f, 0x14ff00, 0x1fff00, 0xff1f00, 0xffe000,
    0x99ff00, 0x0000ff, 0xff4700, 0x00ebff, 0x00adff, 0x1f00ff, 0x0bc8c8, 0xff5200, 0x00fff5,
    0x003dff, 0x00ff70, 0x00ff85, 0xff0000, 0xffa300, 0xff6600, 0xc2ff00, 0x008fff, 0x33ff00,
    0x0052ff, 0x00ff29, 0x00ffad, 0x0a00ff, 0xadff00, 0x00ff99, 0xff5c00, 0xff00ff, 0xff00f5,
    0xff0066, 0xffad00, 0xff0014, 0xffb8b8, 0x001fff, 0x00ff3d, 0x0047ff, 0xff00cc, 0x00ffc2,
    0x00ff52, 0x000aff, 0x0070ff, 0x3300ff, 0x00c2ff, 0x007aff, 0x00ffa3, 0xff9900, 0x00ff0a,
    0xff7000, 0x8fff00, 0x5200ff, 0xa3ff00, 0xffeb00, 0x08b8aa, 0x8500ff, 0x00ff5c, 0xb800ff,
    0xff001f, 0x00b8ff, 0x00d6ff, 0xff0070, 0x5cff00, 0x00e0ff, 0x70e0ff, 0x46b8a0, 0xa300ff,
    0x9900ff, 0x47ff00, 0xff00a3, 0xffcc00, 0xff008f, 0x00ffeb, 0x85ff00, 0xff00eb, 0xf500ff,
    0xff007a, 0xfff500, 0x0abed4, 0xd6ff00, 0x00ccff, 0x1400ff, 0xffff00, 0x0099ff, 0x0029ff,
    0x00ffcc, 0x2900ff, 0x29ff00, 0xad00ff, 0x00f5ff, 0x4700ff, 0x7a00ff, 0x00ffb8, 0x005cff,
    0xb8ff00, 0x0085ff, 0xffd600, 0x19c2c2, 0x66ff00, 0x5c00ff};

// The colours of other classes. From black and white on, each is the one of the 216 colours of a
// 6x6x6 cube that is farthest in CIELAB from those before it: of 11 classes no two are closer than
// 51, of 64 than 22 (of ADE20K's first 11 than 7).
constexpr std::array<std::uint32_t, 64> distinct = {
    0x0000ff, 0x00ff00, 0xff0000, 0xcc3399, 0xffcc00, 0x006600, 0x0099ff, 0x00ffcc,
    0x996633, 0x000066, 0xff00ff, 0x339999, 0xccff66, 0x9966ff, 0xcc99cc, 0xff3366,
    0x660033, 0x003366, 0x990000, 0xffcc99, 0x999900, 0x333300, 0xff9933, 0x99ccff,
    0x99cc99, 0x33cc66, 0x666666, 0xff9999, 0x99ffff, 0xff99ff, 0x6600cc, 0xffff99,
    0xffff00, 0x009966, 0x660066, 0x66cc00, 0x6666cc, 0xff6633, 0xcc33cc, 0x33ff66,
    0x99cc66, 0x666600, 0x330033, 0x993333, 0x666699, 0x330000, 0x660099, 0xffffcc,
    0xffcc66, 0x999966, 0xcc6699, 0x0099cc, 0x009900, 0x003333, 0x336633, 0xffcccc,
    0xcc0066, 0x0066ff, 0xff9966, 0xcccc00, 0xcc9900, 0x996666, 0xff0099, 0x99ff00};

constexpr Rgb split(std::uint32_t hex) {
  return {static_cast<std::uint8_t>(hex >> 16), static_cast<std::uint8_t>(hex >> 8),
          static_cast<std::uint8_t>(hex)};
}

}  // namespace

Rgb class_colour(std::int64_t c) {
  if (c < 0) return {};
  if (c < std::ssize(ade20k)) return split(ade20k[c]);
  // Steps of an odd number through all of 24 bits: neighbours differ in every channel.
  const auto n = static_cast<std::uint32_t>(c - std::ssize(ade20k) + 1);
  return split((n * 0x9e3779u) & 0xffffffu);
}

std::vector<Rgb> label_palette(std::int64_t classes, std::span<const std::uint8_t> of_data) {
  std::vector<Rgb> palette(1);
  std::set<std::uint32_t> different;
  bool coloured = false;
  for (std::int64_t c = 0; c < classes && std::ssize(of_data) >= 3 * (classes + 1); ++c) {
    const std::uint8_t* rgb = of_data.data() + 3 * (c + 1);
    palette.push_back({rgb[0], rgb[1], rgb[2]});
    different.insert(std::uint32_t{rgb[0]} << 16 | std::uint32_t{rgb[1]} << 8 | rgb[2]);
    coloured = coloured || rgb[0] != rgb[1] || rgb[1] != rgb[2];
  }
  if (coloured && std::ssize(different) == classes) return palette;
  palette.resize(1);
  constexpr auto own = std::ssize(distinct), of_ade20k = std::ssize(ade20k);
  for (std::int64_t c = 0; c < classes; ++c)
    palette.push_back(classes == of_ade20k ? class_colour(c)
                      : c < own            ? split(distinct[c])
                                           : class_colour(of_ade20k + c - own));
  return palette;
}

namespace {

constexpr const char* colours_hint =
    "give a colour for each class, as [\"#804080\", \"#f423e8\"], or a file with one a line";

// "#rrggbb", or "R G B" of a file.
std::optional<Rgb> read_colour(const std::string& text) {
  if (text.starts_with('#')) {
    std::uint32_t hex = 0;
    const auto [end, error] = std::from_chars(text.data() + 1, text.data() + text.size(), hex, 16);
    if (text.size() != 7 || error != std::errc() || end != text.data() + 7) return std::nullopt;
    return split(hex);
  }
  std::istringstream values(text);
  int r = -1, g = -1, b = -1;
  values >> r >> g >> b;
  if (values.fail() || !(values >> std::ws).eof()) return std::nullopt;
  for (const int v : {r, g, b})
    if (v < 0 || v > 255) return std::nullopt;
  return Rgb{static_cast<std::uint8_t>(r), static_cast<std::uint8_t>(g),
             static_cast<std::uint8_t>(b)};
}

// model.palette, with the texts of a file it names.
std::vector<std::string> colour_texts(const std::vector<std::string>& key) {
  if (key.size() != 1 || key[0].starts_with('#')) return key;
  std::vector<std::string> texts;
  std::istringstream lines(read_text_file(key[0], longest_text, ""));
  for (std::string line; std::getline(lines, line);)
    if (const std::string_view text = trimmed(line); !text.empty()) texts.emplace_back(text);
  return texts;
}

}  // namespace

std::vector<Rgb> label_palette(const Deck& deck, std::span<const std::uint8_t> of_data) {
  const SegmentationDeck& model = deck.get<SegmentationDeck>();
  if (model.palette.empty()) return label_palette(model.num_classes, of_data);
  std::vector<Rgb> palette(1);
  for (const std::string& text : colour_texts(model.palette)) {
    const std::optional<Rgb> colour = read_colour(text);
    WEFT_CHECK(colour.has_value(), Exit::usage, colours_hint,
               "model.palette: \"{}\" is no colour \"#rrggbb\"", printable(text));
    palette.push_back(*colour);
  }
  WEFT_CHECK(std::ssize(palette) == model.num_classes + 1, Exit::usage, colours_hint,
             "model.palette has {} colours, and model.num_classes = {}", palette.size() - 1,
             model.num_classes);
  return palette;
}

std::string describe_palette(const Deck& deck) {
  if (deck.get<SegmentationDeck>().palette.empty()) return "";
  std::string text = "palette";
  for (const Rgb colour : label_palette(deck)) text += " " + css_colour(colour);
  return text + "\n";
}

std::string css_colour(Rgb colour) {
  return fmt::format("#{:02x}{:02x}{:02x}", colour.r, colour.g, colour.b);
}

std::string legend_svg(std::span<const std::string> names, std::span<const Rgb> palette) {
  constexpr std::size_t row = 20, column = 240, most_rows = 30;
  const std::size_t rows = std::min(names.size(), most_rows),
                    columns = (names.size() + most_rows - 1) / most_rows;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      columns * column + 10, rows * row + 10);
  for (std::size_t c = 0; c < names.size(); ++c) {
    std::string name;
    for (const char letter : names[c]) switch (letter) {
        case '<':
          name += "&lt;";
          break;
        case '&':
          name += "&amp;";
          break;
        default:
          name += letter;
      }
    const std::size_t x = c / most_rows * column + 5, y = c % most_rows * row + 5;
    svg += fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"28\" height=\"16\" fill=\"{}\" stroke=\"#888\"/>"
        "<text x=\"{}\" y=\"{}\">{} {}</text>\n",
        x, y, css_colour(palette[c + 1]), x + 36, y + 13, c, name);
  }
  return svg + "</svg>\n";
}

std::vector<float> frequency_weights(const LabelledImages& images, std::int64_t classes,
                                     const std::string& by) {
  const LabelCounts counts = images.label_counts();
  WEFT_CHECK(!counts.pixels.empty(), Exit::usage,
             "ingest the images again, which counts them; or give train.class_weight",
             "train.class_weight_by = \"{}\", and the data has no counts of pixels", by);
  // The share of each class that occurs: of the labelled pixels of the images that have it, or of
  // all.
  double labelled = 0, occurring = 0;
  for (std::int64_t c = 0; c < classes; ++c) {
    labelled += static_cast<double>(counts.pixels[c + 1]);
    occurring += counts.pixels[c + 1] > 0 ? 1 : 0;
  }
  const bool median = by == "median_frequency";
  std::vector<double> shares(classes), sorted;
  for (std::int64_t c = 0; c < classes; ++c) {
    if (counts.pixels[c + 1] == 0) continue;
    shares[c] = static_cast<double>(counts.pixels[c + 1]) /
                (median ? static_cast<double>(counts.pixels_of_images[c + 1]) : labelled);
    sorted.push_back(shares[c]);
  }
  double middle = occurring > 0 ? 1 / occurring : 1;  // of the inverse frequency: the mean share
  if (median && !sorted.empty()) {
    std::ranges::sort(sorted);
    const std::size_t half = sorted.size() / 2;
    middle = sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }
  std::vector<float> weights(classes, 1.0f);
  for (std::int64_t c = 0; c < classes; ++c)
    if (shares[c] > 0) weights[c] = static_cast<float>(middle / shares[c]);
  return weights;
}

}  // namespace weft
