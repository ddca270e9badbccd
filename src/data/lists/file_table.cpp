#include "data/lists/file_table.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "media/media_source.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

bool names_a_table(const std::string& input) {
  return form_of_name(input) != TableForm::none && !is_glob(input);
}

std::string table_of_files(const std::vector<MediaItem>& items, TableForm form) {
  const bool csv = form == TableForm::csv;
  const bool texts = std::ranges::any_of(items, [](const MediaItem& i) { return !i.text.empty(); });
  std::string table = !csv ? "" : texts ? "path,text\n" : "path\n";
  for (const MediaItem& item : items) {
    const std::string path = item.media.name();
    WEFT_CHECK(find_non_utf8(path) == path.npos, Exit::data, "rename it",
               "the name of {} is not UTF-8, as tables are", path);
    if (csv) {
      table += csv_cell(path) + (texts ? "," + csv_cell(item.text) : "");
    } else {
      nlohmann::ordered_json row{{"path", path}};
      if (texts) row["text"] = item.text;
      table += dump_json(row);
    }
    table += '\n';
  }
  return table;
}

}  // namespace

FileTable::FileTable(const std::string& input, const std::string& key, const MediaDeck& limits,
                     Described described, const std::string& output, TableForm form)
    : input_(input) {
  if (names_a_table(input)) {
    identity_ = file_identity(input);
    return;
  }
  const std::vector<MediaItem> items = list_media({input}, key, limits, described, output);
  WEFT_CHECK(!items.empty(), Exit::data, "name a table, videos or pictures",
             "{} = {} names no video and no picture", key, input);
  for (const MediaItem& item : items)
    if (!item.media.member.empty()) members_.emplace(item.media.name(), item.media);
  made_ = table_of_files(items, form);
}

TableReader FileTable::open() const {
  if (made_.empty()) return TableReader(input_);
  return TableReader::of_text(made_, input_,
                              made_.starts_with('{') ? TableForm::json_lines : TableForm::csv);
}

std::string FileTable::path(const std::string& named) const {
  return made_.empty() ? beside_list(input_, named) : named;
}

MediaSource FileTable::media(const std::string& path) const {
  const auto member = members_.find(path);
  return member == members_.end() ? MediaSource{path, MediaTrust::untrusted} : member->second;
}

std::string FileTable::path_hint(const std::string& key) const {
  return made_.empty() ? "relative paths begin in the folder of " + key
                       : key + " begins where weft was started";
}

bool FileTable::moved(const std::string& output) const {
  std::error_code none;
  return !fs::equivalent(made_.empty() ? folder_of(input_) : ".", folder_of(output), none);
}

std::string FileTable::absolute(const std::string& path) {
  return path.empty() || is_source_graph(path) ? path
                                               : fs::absolute(path).lexically_normal().string();
}

void FileTable::check_same() const {
  WEFT_CHECK(!made_.empty() || file_identity(input_) == identity_, Exit::data,
             "run the same command again: what is finished is kept",
             "{} has changed since this job read it", input_);
}

void FileTable::write(
    const std::string& output, const std::vector<std::string>& columns,
    const std::function<Values(const TableReader&, const TableRow&)>& values_of) const {
  check_same();
  TableReader table = open();
  WholeFile file(output, Exit::data);
  TableWriter writer(table, columns, [&](std::string_view text) { file.add(text); });
  for (TableRow row; table.next(row);)
    if (const Values values = values_of(table, row)) writer.add(row, *values);
  check_same();
  file.commit(Durable::yes);
}

}  // namespace weft
