#include "jobs/score/rows.h"

#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/file.h"
#include "data/lists/lists.h"
#include "data/lists/text_file.h"
#include "parallel/mpi.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

bool is_table(const ScoreDeck& deck) {
  return form_of_name(deck.input) != TableForm::none && !is_glob(deck.input);
}

// A table of what score.input names, which is none, in the form of the output.
std::string table_of(const std::vector<MediaItem>& items, TableForm form) {
  std::string text = form == TableForm::csv ? "path\n" : "";
  for (const MediaItem& item : items) {
    const std::string path = item.media.name();
    WEFT_CHECK(find_non_utf8(path) == path.npos, Exit::data, "rename it",
               "the name of {} is not UTF-8, as tables are", path);
    text += form == TableForm::csv ? csv_cell(path) : Json{{"path", path}}.dump();
    text += '\n';
  }
  return text;
}

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
    rows.made =
        table_of(items, form_of_name(deck.output) == TableForm::json_lines ? TableForm::json_lines
                                                                           : TableForm::csv);
  }
  TableReader table = open_table(deck, rows);
  std::vector<std::string> paths;
  for (TableRow row; table.next(row);) paths.push_back(path_of_row(deck, row.path));
  std::tie(rows.begin, rows.end) = shard_of(deck.shard, std::ssize(paths));
  std::unordered_set<std::string_view> known;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::string& path = paths[static_cast<std::size_t>(i)];
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
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  ScoreRows rows;
  std::vector<std::uint8_t> binary;  // paths may be of any bytes
  if (rank == 0) {
    shard_of(deck.get<ScoreDeck>().shard, 0);  // before a long table is read
    rows = read(deck);
    Json files = Json::array();
    for (const ScoreFile& f : rows.files)
      files.push_back(
          {f.path, f.media.path, f.media.member, f.media.begin, f.media.bytes, f.drawn});
    Json::to_cbor(Json{rows.begin, rows.end, rows.identity, rows.made, std::move(files)}, binary);
  }
  broadcast_sized(binary, world);
  if (rank == 0) return rows;
  const Json j = Json::from_cbor(binary);
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

}  // namespace weft
