// The table of files that a job reads and writes again with columns of its own.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/lists/lists.h"
#include "data/lists/table.h"

namespace weft {

// What a key of a deck names: a table, by its ending; or a folder, a glob, a shard or a file, of
// which a table is made with a row for each file: with `path` and, where any has one, `text`.
class FileTable {
 public:
  FileTable() = default;
  // On one rank. `key` of the deck names the input; what is in `output` is none of it. `form`: of a
  // table that is made. Exit::data where there is no file, or one whose name is not UTF-8.
  FileTable(const std::string& input, const std::string& key, const MediaDeck& limits,
            Described described, const std::string& output, TableForm form);

  TableReader open() const;
  // The path of a file that a row names, from where weft was started.
  std::string path(const std::string& named) const;
  // How that file is read: it may be a member of a shard.
  MediaSource media(const std::string& path) const;
  // What relative paths begin in, for hints.
  std::string path_hint(const std::string& key) const;

  // Where `output` lies in another folder than that in which the paths of the table begin, its
  // paths are written as absolute ones, which lead to the same files.
  bool moved(const std::string& output) const;
  static std::string absolute(const std::string& path);  // empty ones and FFmpeg's sources stay

  // Reads the table again, row by row, and writes each with these columns, but for rows without
  // values. Exit::data if it has changed since it was read first.
  using Values = std::optional<std::vector<nlohmann::ordered_json>>;
  void write(const std::string& output, const std::vector<std::string>& columns,
             const std::function<Values(const TableReader&, const TableRow&)>& values_of) const;

 private:
  void check_same() const;

  std::string input_;
  std::string identity_;  // of the table's file
  std::string made_;      // the table that was made, where there is no file
  std::unordered_map<std::string, MediaSource> members_;  // of shards, by their names
};

}  // namespace weft
