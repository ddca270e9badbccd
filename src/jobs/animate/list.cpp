#include "jobs/animate/list.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "config/deck.h"
#include "core/error.h"
#include "core/log.h"
#include "data/lists/lists.h"
#include "data/lists/table.h"
#include "jobs/segment/inputs.h"
#include "parallel/mpi.h"

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
    if (is_column(column, c.name)) return c.key;
    known.emplace_back(c.name);
  }
  const std::string near = nearest_name(column, known);
  throw Error(Exit::data, fmt::format("{}: unknown column \"{}\"", where, printable(column, 60)),
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

// Whether a key's value is a path, which in a list begins in the list's folder.
bool is_path(const std::string& key) {
  static const std::set<std::string> paths = {"animate.picture",      "animate.speech",
                                              "animate.ref_eyeblink", "animate.ref_pose",
                                              "animate.landmarks",    "animate.coefficients"};
  return paths.contains(key);
}

KeyValues values_of(const TableReader& table, const TableRow& row, const std::string& file) {
  std::vector<std::string> names = table.columns();
  for (const auto& [name, value] : row.object.items()) names.push_back(name);  // of JSON lines
  KeyValues values;
  for (const std::string& name : names) {
    const std::string key = key_of(name, table.where(row));
    const Json value = table.value(row, name);
    if (value.is_null()) continue;
    WEFT_CHECK(!value.is_object(), Exit::data, "give a text, a number, a list, true or false",
               "{}: {} is an object", table.where(row), name);
    WEFT_CHECK(
        !value.is_string() || value.get_ref<const std::string&>().find('\0') == std::string::npos,
        Exit::data, "write it without", "{}: {} has a zero byte", table.where(row), name);
    if (!value.is_string())
      values.emplace_back(key, value.dump());
    else if (is_path(key))
      values.emplace_back(key, beside_list(file, value.get<std::string>()));
    else
      values.emplace_back(key, as_value(key, value.get<std::string>()));
  }
  return values;
}

std::vector<Row> read_list(const std::string& file, const MediaDeck& limits) {
  std::error_code none;
  constexpr const char* pairs =
      "pictures and speech come in pairs: give a list (.csv or .jsonl) with columns picture and "
      "speech";
  WEFT_CHECK(!fs::is_directory(file, none), Exit::data, pairs, "animate.input = {} is a folder",
             file);
  if (form_of_name(file) == TableForm::none) {
    refuse_other_forms(file);
    throw Error(Exit::data, fmt::format("animate.input = {} is no list", file), pairs, __FILE__,
                __LINE__);
  }
  WEFT_CHECK(fs::exists(file, none), Exit::data,
             "check animate.input, and the directory weft was started in", "{} is not there", file);
  check_list_size(file, limits);
  TableReader table(file, "");
  std::set<std::string> seen;
  for (const std::string& column : table.columns())
    WEFT_CHECK(seen.insert(key_of(column, file)).second, Exit::data, "name each column once",
               "{} has the column {} twice", file, printable(column));
  std::vector<Row> rows;
  for (TableRow row; table.next(row);)
    rows.push_back({table.where(row), values_of(table, row, file)});
  WEFT_CHECK(!rows.empty(), Exit::data, "give it a row for each clip", "{} lists no clip", file);
  return rows;
}

// Names files of the clips that are not there, before any work.
void check_files(const std::vector<ClipRequest>& clips) {
  std::vector<std::string> missing;
  std::size_t incomplete = 0;
  std::map<std::string, bool> there;
  for (const ClipRequest& c : clips) {
    const AnimateDeck& a = c.animate;
    bool whole = true;
    for (const std::string* file :
         {&a.picture, &a.speech, &a.ref_eyeblink, &a.ref_pose, &a.landmarks, &a.coefficients}) {
      if (file->empty()) continue;
      const auto [known, is_new] = there.emplace(*file, true);
      if (is_new)
        if (std::string why = missing_file(*file); !why.empty()) {
          known->second = false;
          missing.push_back(std::move(why));
        }
      whole = whole && known->second;
    }
    incomplete += whole ? 0 : 1;
  }
  report_missing(missing, there.size(), "file", missing_hint, incomplete == clips.size());
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
  WEFT_CHECK(
      good, Exit::data,
      fmt::format("a name is that of a file in the output folder: no slash, no dot in front, "
                  "at most {} bytes",
                  longest_name),
      "{}: the name \"{}\" cannot be taken", where, printable(name, 60));
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
    check_files(clips);
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
