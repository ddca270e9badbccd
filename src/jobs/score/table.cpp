// The table of `weft score`: its rows and files, and the table that is written at the end.
#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/lists.h"
#include "data/lists/table.h"
#include "jobs/engine/file_table.h"
#include "jobs/score/score.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- What is read ----

bool is_table(const ScoreDeck& deck) { return names_a_table(deck.input); }

void check_files(const ScoreDeck& deck, const ScoreRows& rows) {
  std::vector<std::string> missing;
  for (const ScoreFile& f : rows.files)
    if (std::string why = missing_file(f.media.path); !why.empty())
      missing.push_back(std::move(why));
  report_missing(missing, rows.files.size(), "file",
                 is_table(deck) ? "relative paths begin in the folder of score.input"
                                : "score.input begins where weft was started");
}

ScoreRows read(const Deck& all) {
  const ScoreDeck& deck = all.get<ScoreDeck>();
  ScoreRows rows;
  std::unordered_map<std::string, MediaSource> members;  // of shards
  if (is_table(deck)) {
    const TableForm in = form_of_name(deck.input), out = form_of_name(deck.output);
    WEFT_CHECK(in == out || out == TableForm::none, Exit::usage,
               "give both the same ending: rows keep their form",
               "score.input = {}, but score.output = {}", deck.input, deck.output);
    rows.identity = file_identity(deck.input);
  } else {
    const auto items =
        list_media({deck.input}, "score.input", all.media, Described::no, deck.output);
    WEFT_CHECK(!items.empty(), Exit::data, "name a table, videos or pictures",
               "score.input = {} names no video and no picture", deck.input);
    for (const MediaItem& item : items)
      if (!item.media.member.empty()) members.emplace(item.media.name(), item.media);
    rows.made = table_of_files(items, form_of_name(deck.output) == TableForm::json_lines
                                          ? TableForm::json_lines
                                          : TableForm::csv);
  }
  TableReader table = open_table(deck, rows);
  std::vector<std::string> paths;
  for (TableRow row; table.next(row);) paths.push_back(path_of_row(deck, row.path));
  std::tie(rows.begin, rows.end) = shard_of(deck.shard, std::ssize(paths));
  std::unordered_set<std::string_view> known;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::string& path = paths[i];
    if (!known.insert(path).second) continue;
    const auto member = members.find(path);
    rows.files.push_back(
        {path, member == members.end() ? MediaSource{path, MediaTrust::untrusted} : member->second,
         i - rows.begin < deck.pictures});
  }
  check_files(deck, rows);
  return rows;
}

}  // namespace

TableReader open_table(const ScoreDeck& deck, const ScoreRows& rows) {
  if (is_table(deck)) return TableReader(deck.input);
  return TableReader::of_text(rows.made, deck.input,
                              rows.made.starts_with('{') ? TableForm::json_lines : TableForm::csv);
}

std::string path_of_row(const ScoreDeck& deck, const std::string& path) {
  return is_table(deck) ? beside_list(deck.input, path) : path;
}

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
    return Json{rows.begin, rows.end, rows.identity, rows.made, std::move(files)};
  });
  if (log::rank() == 0) return rows;
  rows = {j.at(0).get<std::int64_t>(),
          j.at(1).get<std::int64_t>(),
          j.at(2).get<std::string>(),
          j.at(3).get<std::string>(),
          {}};
  for (const Json& f : j.at(4))
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
  const auto check_same = [&] {
    WEFT_CHECK(!rows.made.empty() || file_identity(s.input) == rows.identity, Exit::data,
               "run the same command again: what is scored is kept",
               "{} has changed since this job read it", s.input);
  };
  check_same();
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
  const bool moved = paths_have_moved(s.input, s.output);
  if (moved) columns.push_back("path");
  // All null for a file that has no result: it was given up, or failed without a line.
  const auto values_of = [&](const std::string& row_path) {
    std::vector<Json> values(columns.size());
    const std::string path = path_of_row(s, row_path);
    if (moved) values.back() = moved_path(path);
    const ListItem& item = engine.items()[places.at(path)];
    const auto found = lines.find(item.name);
    if (found == lines.end() || found->second.key != item.key) return values;
    const Json line = found->second.parsed();
    values[0] = line.value("ocr", Json());
    for (std::size_t i = 0; i < s.columns.size(); ++i)
      values[i + 1] = line.value(s.columns[i], Json());
    return values;
  };

  TableReader table = open_table(s, rows);
  WholeFile out(s.output, Exit::data);
  TableWriter writer(table, columns, [&](std::string_view text) { out.add(text); });
  TableRow row;
  for (std::int64_t i = 0; table.next(row); ++i) {
    if (i < rows.begin) continue;
    if (i >= rows.end) break;
    const std::vector<Json> values = values_of(row.path);
    ++summary.rows;
    if (values[0].is_number_integer())
      ++summary.histogram[values[0].get<std::int64_t>()];
    else
      ++summary.without;
    if (s.maximum >= 0 && values[0].is_number_integer() && values[0] > s.maximum)
      ++summary.left_out;
    else
      writer.add(row, values);
  }
  check_same();
  out.commit(Durable::yes);
}

}  // namespace weft
