#include "data/text_images/text_list.h"

#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/lists/lists.h"
#include "data/lists/table.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* json_hint =
    "a line is {\"path\": \"a.jpg\", \"polygons\": [{\"points\": [[0, 0], [9, 0], [9, 9]], "
    "\"ignore\": false}]}";
constexpr const char* icdar_hint = "a line is x1,y1,x2,y2,x3,y3,x4,y4,text";
constexpr std::size_t most_points = 1'000;  // geometry's time grows with their square
constexpr double farthest = 1e6;

constexpr const char* too_long = "split the list, or raise media.max_list_mib";

std::uint64_t most_bytes(const MediaDeck& limits) {
  return static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20));
}

// The file's text, of any encoding: what the regions say does not count.
std::string slurp(const std::string& path, const MediaDeck& limits) {
  std::string text = read_whole(path, most_bytes(limits), Exit::data, too_long);
  if (text.starts_with(byte_order_mark)) text.erase(0, byte_order_mark.size());
  return text;
}

std::string read_list(const std::string& path, const MediaDeck& limits) {
  return read_text_file(path, most_bytes(limits), too_long);
}

// Calls `take` for each line that is not empty, with its number.
template <class F>
void each_line(std::string_view text, F&& take) {
  std::size_t line = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string_view one = text.substr(at, end - at);
    at = end + 1;
    ++line;
    if (one.ends_with('\r')) one.remove_suffix(1);
    if (one.find_first_not_of(" \t") != std::string_view::npos) take(one, line);
  }
}

bool is_coordinate(double v) { return std::isfinite(v) && std::abs(v) <= farthest; }

TextRegion read_region(const nlohmann::json& region, const std::string& where) {
  WEFT_CHECK(region.is_object() && region.contains("points") && region["points"].is_array(),
             Exit::data, json_hint, "{}: \"{}\" is not an object with `points`", where,
             printable(dump_json(region, -1, ' ', true, nlohmann::json::error_handler_t::replace)));
  TextRegion out;
  const auto& points = region["points"];
  WEFT_CHECK(points.size() >= 3 && points.size() <= most_points, Exit::data,
             fmt::format("a polygon has 3 to {} points", most_points), "{} has {} points", where,
             points.size());
  for (const auto& p : points) {
    const bool pair = p.is_array() && p.size() == 2 && p[0].is_number() && p[1].is_number();
    const Point point = pair ? Point{p[0].get<double>(), p[1].get<double>()} : Point{NAN, NAN};
    WEFT_CHECK(is_coordinate(point.x) && is_coordinate(point.y), Exit::data, json_hint,
               "{}: {} is not a point [x, y] in pixels", where,
               printable(dump_json(p, -1, ' ', true, nlohmann::json::error_handler_t::replace)));
    out.polygon.push_back(point);
  }
  if (const auto ignore = region.find("ignore"); ignore != region.end()) {
    WEFT_CHECK(ignore->is_boolean(), Exit::data, json_hint, "{}: `ignore` is not true or false",
               where);
    out.ignore = ignore->get<bool>();
  }
  return out;
}

std::vector<TextListEntry> read_json_lines(const std::string& list, const MediaDeck& limits) {
  std::vector<TextListEntry> entries;
  each_line(read_list(list, limits), [&](std::string_view text, std::size_t line) {
    const auto object = try_parse_json(text);
    const auto path = object.is_object() ? object.find("path") : object.end();
    WEFT_CHECK(
        path != object.end() && path->is_string() && !path->get_ref<const std::string&>().empty(),
        Exit::data, json_hint, "list {}, line {}: not a JSON object with a text `path`", list,
        line);
    const auto polygons = object.find("polygons");
    WEFT_CHECK(polygons != object.end() && polygons->is_array(), Exit::data, json_hint,
               "list {}, line {}: no list `polygons`; without text it is []", list, line);
    TextListEntry& e = entries.emplace_back();
    e.name = path->get<std::string>();
    e.path = beside_list(list, e.name);
    for (std::size_t i = 0; i < polygons->size(); ++i)
      e.regions.push_back(read_region(
          (*polygons)[i], fmt::format("list {}, line {}, polygon {}", list, line, i + 1)));
  });
  return entries;
}

TextRegion read_icdar_line(std::string_view text, const std::string& file, std::size_t line) {
  TextRegion out;
  std::array<double, 8> values{};
  for (double& v : values) {
    const std::size_t end = std::min(text.find(','), text.size());
    std::string_view one = text.substr(0, end);
    one.remove_prefix(std::min(one.find_first_not_of(" \t"), one.size()));
    one.remove_suffix(one.size() - std::min(one.find_last_not_of(" \t") + 1, one.size()));
    const auto [stop, error] = std::from_chars(one.data(), one.data() + one.size(), v);
    WEFT_CHECK(error == std::errc() && stop == one.data() + one.size() && is_coordinate(v),
               Exit::data, icdar_hint, "{}, line {}: \"{}\" is not a coordinate in pixels", file,
               line, printable(one));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  for (std::size_t i = 0; i < values.size(); i += 2)
    out.polygon.push_back({values[i], values[i + 1]});
  out.ignore = text == "###";
  return out;
}

// The regions of a picture in ICDAR's form.
std::vector<TextRegion> read_icdar(const std::string& picture, const MediaDeck& limits) {
  const fs::path folder = fs::path(picture).parent_path();
  const std::string name = "gt_" + fs::path(picture).stem().string() + ".txt";
  std::string file = (folder / name).string();
  if (!is_there(file, Exit::data)) file = (folder / "gt" / name).string();
  WEFT_CHECK(is_there(file, Exit::data), Exit::data,
             fmt::format("put {} into the picture's folder or its subfolder gt; the file is empty "
                         "if the picture has no text",
                         name),
             "picture {} has no polygons", picture);
  std::vector<TextRegion> regions;
  each_line(slurp(file, limits), [&](std::string_view text, std::size_t line) {
    regions.push_back(read_icdar_line(text, file, line));
  });
  return regions;
}

}  // namespace

std::vector<TextListEntry> read_text_list(const std::string& path, const MediaDeck& limits) {
  std::vector<TextListEntry> entries;
  std::error_code none;
  if (fs::is_directory(path, none)) {
    for (const std::string& picture : list_pictures(path))
      entries.push_back({picture, picture, read_icdar(picture, limits)});
  } else if (form_of_name(path) == TableForm::json_lines) {
    entries = read_json_lines(path, limits);
  } else {
    each_line(read_list(path, limits), [&](std::string_view line, std::size_t number) {
      WEFT_CHECK(is_picture_name(std::string(line)), Exit::data,
                 "a .txt list has the path of a picture a line: .jpg, .png, .bmp or .webp",
                 "list {}, line {}: \"{}\" is no picture", path, number, printable(line));
      TextListEntry& e = entries.emplace_back();
      e.name = line;
      e.path = beside_list(path, e.name);
      e.regions = read_icdar(e.path, limits);
    });
  }
  WEFT_CHECK(!entries.empty(), Exit::data,
             form_of_name(path) == TableForm::json_lines
                 ? json_hint
                 : "a .txt list has the path of a picture a line",
             "list {} names no picture", path);
  return entries;
}

}  // namespace weft
