#include "jobs/score/rows.h"

#include <charconv>
#include <unordered_set>

#include "core/error.h"
#include "core/file.h"
#include "data/table.h"
#include "parallel/broadcast.h"

namespace weft {
namespace {

ScoreRows read(const ScoreDeck& deck) {
  ScoreRows rows;
  rows.identity = file_identity(deck.input);
  TableReader table(deck.input);
  TableRow row;
  std::vector<std::string> paths;
  while (table.next(row)) paths.push_back(row.path);
  std::tie(rows.begin, rows.end) = shard_of(deck.shard, std::ssize(paths));
  std::unordered_set<std::string_view> known;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::string& path = paths[static_cast<std::size_t>(i)];
    // The broadcast separates paths by zeros, and no file has one in its name.
    WEFT_CHECK(path.find('\0') == std::string::npos, Exit::data, "is it a text file?",
               "{}, row {}: the path has a zero byte", deck.input, i + 1);
    if (known.insert(path).second) rows.files.push_back({path, i - rows.begin < deck.pictures});
  }
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

ScoreRows read_rows(const ScoreDeck& deck, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  ScoreRows rows;
  std::string text;  // of paths, each ended by a zero byte, 'd' in front of those to be drawn
  if (rank == 0) {
    shard_of(deck.shard, 0);  // before a long table is read
    rows = read(deck);
    for (const ScoreFile& f : rows.files) text += (f.drawn ? 'd' : '-') + f.path + '\0';
  }
  broadcast_sized(text, world);
  broadcast_sized(rows.identity, world);
  std::vector<std::int64_t> range = {rows.begin, rows.end};
  broadcast_sized(range, world);
  if (rank == 0) return rows;
  rows.begin = range[0];
  rows.end = range[1];
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\0', at);
    rows.files.push_back({text.substr(at + 1, end - at - 1), text[at] == 'd'});
    at = end + 1;
  }
  return rows;
}

}  // namespace weft
