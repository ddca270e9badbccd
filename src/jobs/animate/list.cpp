#include "jobs/animate/list.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "config/set_keys.h"
#include "core/error.h"
#include "core/json.h"
#include "data/table.h"
#include "jobs/segment/inputs.h"
#include "parallel/broadcast.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using KeyValues = std::vector<std::pair<std::string, std::string>>;

constexpr std::size_t longest_name = 180;  // bytes; endings and marks come behind it

struct Row {
  std::string where;
  KeyValues values;
};

// The key that a column sets.
std::string key_of(const std::string& column, const std::string& where) {
  std::vector<std::string> known;
  for (const ListColumn& c : list_columns()) {
    if (column == c.name) return c.key;
    known.emplace_back(c.name);
  }
  const std::string near = nearest_name(column, known);
  std::string shown = as_utf8(column.substr(0, 60));
  for (char& c : shown)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  throw Error(Exit::data, fmt::format("{}: unknown column \"{}\"", where, shown),
              near.empty() ? "docs/animate.md lists the columns"
                           : fmt::format("did you mean \"{}\"?", near),
              __FILE__, __LINE__);
}

// A cell as an override has it: lists may also be numbers with spaces between them.
std::string as_value(const std::string& key, const std::string& cell) {
  if (!key.starts_with("sadtalker.input_") || cell.find('[') != cell.npos) return cell;
  std::string list = "[";
  bool gap = false;
  for (const char c : cell) {
    if (c == ' ') {
      gap = list.size() > 1;
      continue;
    }
    if (gap && c != ',' && list.back() != ',') list += ',';
    gap = false;
    list += c;
  }
  return list + "]";
}

KeyValues values_of_csv(const TableReader& table, const TableRow& row) {
  KeyValues values;
  const std::vector<std::string> cells = table.values(row);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (cells[i].empty()) continue;
    const std::string key = key_of(table.columns()[i], "the header");
    values.emplace_back(key, as_value(key, cells[i]));
  }
  return values;
}

KeyValues values_of_json(const TableRow& row, const std::string& where) {
  KeyValues values;
  const auto object = parse_json<Json>(row.text);
  for (const auto& [name, value] : object.items()) {
    const std::string key = key_of(name, where);
    if (value.is_null()) continue;
    WEFT_CHECK(!value.is_object(), Exit::data, "give a text, a number, a list, true or false",
               "{}: {} is an object", where, name);
    values.emplace_back(key,
                        value.is_string() ? as_value(key, value.get<std::string>()) : value.dump());
  }
  return values;
}

std::vector<Row> read_list(const std::string& file, const MediaDeck& limits) {
  std::error_code none;
  WEFT_CHECK(fs::exists(file, none), Exit::data,
             "check animate.input, and the directory weft was started in", "{} is not there", file);
  const auto most = static_cast<std::uintmax_t>(limits.max_list_mib * (1 << 20));
  WEFT_CHECK(fs::file_size(file, none) <= most || none, Exit::data,
             "raise media.max_list_mib, or cut the list",
             "{} is larger than media.max_list_mib = {}", file, limits.max_list_mib);
  TableReader table(file, "");
  std::set<std::string> seen;
  for (const std::string& column : table.columns()) {
    key_of(column, file);
    WEFT_CHECK(seen.insert(column).second, Exit::data, "name each column once",
               "{} has the column {} twice", file, column);
  }
  std::vector<Row> rows;
  TableRow row;
  while (table.next(row)) {
    const std::string where = fmt::format("{}, line {}", file, row.line);
    rows.push_back(
        {where, table.is_csv() ? values_of_csv(table, row) : values_of_json(row, where)});
  }
  WEFT_CHECK(!rows.empty(), Exit::data, "give it a row for each clip", "{} lists no clip", file);
  return rows;
}

// Printed, and a file's name: UTF-8 without control characters or slashes.
std::string plain(const std::string& text) {
  std::string name = as_utf8(text);
  for (char& c : name)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '/') c = '_';
  while (!name.empty() && name.front() == '.') name.erase(0, 1);
  std::size_t end = std::min(name.size(), longest_name - 20);
  while (end < name.size() && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80) --end;
  name.resize(end);
  return name.empty() ? "clip" : name;
}

void check_name(const std::string& name, const std::string& where) {
  const bool good = !name.starts_with('.') && name.size() <= longest_name &&
                    name == as_utf8(name) && std::ranges::none_of(name, [](char c) {
                      return static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '/';
                    });
  std::string shown = as_utf8(name.substr(0, 60));
  for (char& c : shown)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  WEFT_CHECK(
      good, Exit::data,
      fmt::format("a name is that of a file in the output folder: no slash, no dot in front, "
                  "at most {} bytes",
                  longest_name),
      "{}: the name \"{}\" cannot be taken", where, shown);
}

// Names that rows give stand; the others are made of picture and speech, with a number where one is
// taken.
void name_clips(std::vector<ClipRequest>& clips) {
  std::map<std::string, std::string> taken;  // name: where
  for (const ClipRequest& c : clips) {
    const std::string& name = c.animate.name;
    if (name.empty()) continue;
    check_name(name, c.where);
    const auto [other, is_new] = taken.emplace(name, c.where);
    WEFT_CHECK(is_new, Exit::data, "give each clip a name of its own, or none",
               "{} and {} both have the name \"{}\"", other->second, c.where, name);
  }
  for (ClipRequest& c : clips) {
    c.name = c.animate.name;
    if (!c.name.empty()) continue;
    const std::string speech = c.animate.speech.empty() ? c.animate.coefficients : c.animate.speech;
    const std::string stem =
        plain(fs::path(c.animate.picture).stem().string() + "_" + fs::path(speech).stem().string());
    c.name = stem;
    for (int n = 2; !taken.emplace(c.name, c.where).second; ++n)
      c.name = fmt::format("{}-{}", stem, n);
  }
}

// No result may replace an input.
void keep_inputs(const std::vector<ClipRequest>& clips, const fs::path& output) {
  std::set<fs::path> results;
  std::error_code none;
  const fs::path folder = fs::weakly_canonical(output, none);
  for (const ClipRequest& c : clips) results.insert(folder / (c.name + ".mp4"));
  for (const ClipRequest& c : clips)
    for (const std::string* file : {&c.animate.picture, &c.animate.speech, &c.animate.ref_eyeblink,
                                    &c.animate.ref_pose, &c.animate.input})
      WEFT_CHECK(file->empty() || !results.contains(fs::weakly_canonical(*file, none)), Exit::usage,
                 "choose another animate.output", "{}: a result would replace {}", c.where, *file);
}

ClipRequest request_of(const Deck& deck, const Row& row) {
  Deck mine = deck;
  set_keys(mine, row.values, row.where);
  ClipRequest c{"", row.where, mine.get<AnimateDeck>(), mine.get<SadtalkerDeck>()};
  WEFT_CHECK(!c.animate.picture.empty(), Exit::data, "give it a picture, or set animate.picture",
             "{}: no picture", row.where);
  WEFT_CHECK(!c.animate.speech.empty(), Exit::data, "give it a speech, or set animate.speech",
             "{}: no speech", row.where);
  return c;
}

std::vector<ClipRequest> requests_of(const Deck& deck, const std::vector<Row>& rows) {
  std::vector<ClipRequest> clips;
  clips.reserve(rows.size());
  for (const Row& row : rows) clips.push_back(request_of(deck, row));
  name_clips(clips);
  return clips;
}

}  // namespace

const std::vector<ListColumn>& list_columns() {
  static const std::vector<ListColumn> columns = {
      {"picture", "animate.picture"},
      {"speech", "animate.speech"},
      {"name", "animate.name"},
      {"ref_eyeblink", "animate.ref_eyeblink"},
      {"ref_pose", "animate.ref_pose"},
      {"landmarks", "animate.landmarks"},
      {"coefficients", "animate.coefficients"},
      {"enhancer", "animate.enhancer"},
      {"enhancer_scale", "animate.enhancer_scale"},
      {"seed", "animate.seed"},
      {"pose_style", "sadtalker.pose_style"},
      {"expression_scale", "sadtalker.expression_scale"},
      {"still", "sadtalker.still"},
      {"preprocess", "sadtalker.preprocess"},
      {"size", "sadtalker.size"},
      {"input_yaw", "sadtalker.input_yaw"},
      {"input_pitch", "sadtalker.input_pitch"},
      {"input_roll", "sadtalker.input_roll"},
  };
  return columns;
}

std::vector<ClipRequest> list_clips(const Deck& deck, MPI_Comm world) {
  const AnimateDeck& a = deck.get<AnimateDeck>();
  WEFT_CHECK(!a.input.empty() || (!a.picture.empty() && !a.speech.empty()), Exit::usage,
             "set animate.input = \"clips.csv\", or animate.picture and animate.speech (--picture, "
             "--speech)",
             "there is nothing to animate");
  WEFT_CHECK(a.input.empty() || a.name.empty(), Exit::usage,
             "give the list a column `name`, or leave out animate.name",
             "animate.name = \"{}\" would be the name of every clip of {}", a.name, a.input);
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  std::vector<Row> rows;
  std::vector<std::uint8_t> binary;  // texts may be of any bytes
  if (rank == 0) {
    rows = a.input.empty() ? std::vector<Row>{{"the deck", {}}} : read_list(a.input, deck.media);
    // Checked before others have them, so that one rank reports what is wrong.
    const std::vector<ClipRequest> clips = requests_of(deck, rows);
    keep_inputs(clips, a.output);
    Json j = Json::array();
    for (const Row& row : rows) j.push_back({row.where, row.values});
    Json::to_cbor(j, binary);
    broadcast_sized(binary, world);
    return clips;
  }
  broadcast_sized(binary, world);
  for (const Json& j : Json::from_cbor(binary)) rows.push_back({j.at(0), j.at(1).get<KeyValues>()});
  return requests_of(deck, rows);
}

}  // namespace weft
