// The table of `weft score`: its rows and files, and the table that is written at the end.
#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/lists.h"
#include "jobs/score/score.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- What is read ----

ScoreRows read(const Deck& all) {
  const ScoreDeck& deck = all.get<ScoreDeck>();
  ScoreRows rows;
  const TableForm in = form_of_name(deck.input), out = form_of_name(deck.output);
  WEFT_CHECK(is_glob(deck.input) || in == TableForm::none || in == out || out == TableForm::none,
             Exit::usage, "give both the same ending: rows keep their form",
             "score.input = {}, but score.output = {}", deck.input, deck.output);
  rows.table = FileTable(deck.input, "score.input", all.media, Described::no, deck.output,
                         out == TableForm::json_lines ? out : TableForm::csv);
  TableReader table = rows.table.open();
  std::vector<std::string> paths;
  for (TableRow row; table.next(row);) paths.push_back(rows.table.path(row.path));
  std::tie(rows.begin, rows.end) = shard_of(deck.shard, std::ssize(paths));
  std::unordered_set<std::string_view> known;
  std::vector<std::string> missing;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::string& path = paths[i];
    if (!known.insert(path).second) continue;
    rows.files.push_back({path, rows.table.media(path), i - rows.begin < deck.pictures});
    if (std::string why = missing_file(rows.files.back().media.path); !why.empty())
      missing.push_back(std::move(why));
  }
  report_missing(missing, rows.files.size(), "file", rows.table.path_hint("score.input"));
  return rows;
}

}  // namespace

std::pair<std::int64_t, std::int64_t> shard_of(const std::string& shard, std::int64_t rows) {
  if (shard.empty()) return {0, rows};
  std::int64_t k = 0, n = 0;
  const char *begin = shard.data(), *end = begin + shard.size();
  const auto first = std::from_chars(begin, end, k);
  bool good = first.ec == std::errc() && first.ptr != end && *first.ptr == '/';
  if (good) {
    const auto second = std::from_chars(first.ptr + 1, end, n);
    good = second.ec == std::errc() && second.ptr == end && k >= 1 && n <= 1'000'000 && k <= n;
  }
  WEFT_CHECK(good, Exit::usage, "write \"K/N\" with K from 1 to N, such as \"1/8\"",
             "score.shard = \"{}\"", shard);
  return {rows * (k - 1) / n, rows * k / n};
}

ScoreRows read_rows(const Deck& deck, MPI_Comm world) {
  ScoreRows rows;
  const Json j = from_first_rank(world, [&] {
    shard_of(deck.get<ScoreDeck>().shard, 0);  // before a long table is read
    rows = read(deck);
    Json files = Json::array();
    for (const ScoreFile& f : rows.files)
      files.push_back(
          {f.path, f.media.path, f.media.member, f.media.begin, f.media.bytes, f.drawn});
    return Json{rows.begin, rows.end, std::move(files)};
  });
  if (log::rank() == 0) return rows;
  rows.begin = j.at(0);
  rows.end = j.at(1);
  for (const Json& f : j.at(2))
    rows.files.push_back(
        {f.at(0), {f.at(1), MediaTrust::untrusted, f.at(2), f.at(3), f.at(4)}, f.at(5)});
  return rows;
}

// ---- What is written ----

fs::path parts_folder(const ScoreDeck& deck) { return deck.output + ".parts"; }

fs::path page_file(const ScoreDeck& deck) { return deck.output + ".html"; }

void write_output(const Deck& deck, const ScoreRows& rows, const ListEngine& engine,
                  const ListReport& report, ScoreSummary& summary) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  summary.input = s.input;
  summary.output = s.output;
  summary.folder = engine.settings().directory;
  summary.files = std::ssize(rows.files);
  summary.faults = report.failures;
  const ManifestLines lines = engine.lines();
  std::unordered_map<std::string_view, std::size_t> places;
  for (std::size_t i = 0; i < rows.files.size(); ++i) places.emplace(rows.files[i].path, i);
  for (std::size_t i = 0; i < rows.files.size() && rows.files[i].drawn; ++i)
    if (const auto line = lines.find(engine.items()[i].name); line != lines.end())
      if (const Json j = line->second.parsed(); j.contains("picture")) {
        const Json count = j.value("ocr", Json());
        summary.pictures.emplace_back(
            fmt::format("{}: {}", rows.files[i].path,
                        count.is_number_integer() ? counted(count.get<std::int64_t>(), "region")
                                                  : "no count"),
            j["picture"]);
      }

  std::vector<std::string> columns = {"ocr"};
  for (const std::string& c : s.columns) columns.push_back("ocr_" + c);
  const bool moved = rows.table.moved(s.output);
  if (moved) columns.push_back("path");
  // All null for a file that has no result: it was given up, or failed without a line.
  const auto values_of = [&](const std::string& row_path) {
    std::vector<Json> values(columns.size());
    const std::string path = rows.table.path(row_path);
    if (moved) values.back() = FileTable::absolute(path);
    const ListItem& item = engine.items()[places.at(path)];
    const auto found = lines.find(item.name);
    if (found == lines.end() || found->second.key != item.key) return values;
    const Json line = found->second.parsed();
    values[0] = line.value("ocr", Json());
    for (std::size_t i = 0; i < s.columns.size(); ++i)
      values[i + 1] = line.value(s.columns[i], Json());
    return values;
  };

  std::int64_t at = 0;
  rows.table.write(s.output, columns, [&](const TableReader&, const TableRow& row) {
    const std::int64_t number = at++;
    if (number < rows.begin || number >= rows.end) return FileTable::Values();
    std::vector<Json> values = values_of(row.path);
    ++summary.rows;
    if (!values[0].is_number_integer()) {
      ++summary.without;
      return FileTable::Values(values);
    }
    ++summary.histogram[values[0].get<std::int64_t>()];
    if (s.maximum < 0 || values[0] <= s.maximum) return FileTable::Values(values);
    ++summary.left_out;
    return FileTable::Values();
  });
}

}  // namespace weft
