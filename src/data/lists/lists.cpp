#include "data/lists/lists.h"

#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/lists/shards.h"
#include "data/lists/text_file.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string dumped(const Json& value) {
  return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::optional<double> number_of(const Json& value, bool is_text) {
  if (!is_text) return value.is_number() ? std::optional(value.get<double>()) : std::nullopt;
  const auto text = value.get<std::string>();
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number)
                                                                  : std::nullopt;
}

// `value` gives that of a column. In CSV numbers are texts.
template <class F>
Facts read_facts(F&& value, bool is_csv, const std::string& where) {
  Facts facts;
  for (std::size_t f = 0; f < fact_names.size(); ++f) {
    const Json found = value(fact_names[f]);
    if (found.is_null()) continue;
    const auto number = number_of(found, is_csv);
    WEFT_CHECK(number && std::isfinite(*number), Exit::data,
               "give a number, or leave the value empty", "{}, column {}: {} is no number", where,
               fact_names[f], dumped(found));
    if (*number > 0 || f < static_cast<std::size_t>(Fact::num_frames)) facts.values[f] = *number;
  }
  return facts;
}

template <class F>
std::string read_caption(F&& value, const std::string& where) {
  for (const char* column : {"text", "caption"}) {
    const Json found = value(column);
    if (found.is_null()) continue;
    WEFT_CHECK(found.is_string(), Exit::data, "put the caption in quotes",
               "{}, column {}: {} is not a string", where, column, dumped(found));
    return std::string(trimmed(found.get_ref<const std::string&>()));
  }
  return "";
}

std::string caption_beside(const fs::path& file) {
  for (const char* ending : {".txt", ".TXT"}) {
    const std::string path = fs::path(file).replace_extension(ending).string();
    std::error_code none;
    if (path != file && fs::is_regular_file(path, none))
      return std::string(trimmed(
          read_text_file(path, longest_caption, "is it a caption? shorten it, or move it")));
  }
  return "";
}

// What list_media was asked for.
struct Request {
  const std::string& key;
  const MediaDeck& limits;
  Described described;
  const fs::path& results;
};

std::string caption_beside(const fs::path& file, const Request& request) {
  return request.described == Described::yes ? caption_beside(file) : "";
}

void add_list(const std::string& path, const Request& request, std::vector<MediaItem>& out) {
  check_list_size(path, request.limits);
  TableReader table(path);
  for (TableRow row; table.next(row);) {
    const std::string where = table.where(row);
    WEFT_CHECK(!table.is_csv() || row.fields.size() == table.columns().size(), Exit::data,
               "put a value that has commas in quotes, and give every row all columns",
               "{} has {} values, and there are {} columns", where, row.fields.size(),
               table.columns().size());
    WEFT_CHECK(!row.path.empty(), Exit::data, "name a file, or remove the row",
               "{}, column path: no value", where);
    MediaItem& item = out.emplace_back();
    item.media = {beside_list(path, row.path), MediaTrust::untrusted};
    if (request.described == Described::no) continue;
    item.text = caption_of(table, row);
    item.facts = facts_of(table, row);
  }
}

bool is_medium(const std::string& name) { return kind_of_name(name) != MediumKind::other; }

void add_folder(const std::string& folder, const Request& request, std::vector<MediaItem>& out) {
  const FolderFiles found = files_below(folder, is_medium, request.results);
  WEFT_CHECK(!found.files.empty(), Exit::data,
             "put videos or pictures into it, or name another folder",
             "folder {} has no videos and no pictures{}", folder,
             found.left_out.empty() ? "" : ", but: " + found.left_out);
  tell_left_out(folder, found.left_out, found.only_hidden);
  for (const std::string& file : found.files) {
    MediaItem& item = out.emplace_back();
    item.media = {file, MediaTrust::untrusted};
    item.text = caption_beside(file, request);
    item.below = fs::path(file).lexically_relative(folder).string();
  }
}

void add_named(const std::string& path, const Request& request, std::vector<MediaItem>& out) {
  std::error_code none;
  if (form_of_name(path) != TableForm::none) {
    add_list(path, request, out);
  } else if (ending_of(path) == ".tar") {
    list_shard(path, request.described, out);
  } else if (fs::is_directory(path, none)) {
    add_folder(path, request, out);
  } else {
    refuse_other_forms(path);  // before FFmpeg calls it invalid data
    MediaItem& item = out.emplace_back();
    item.media = {path, MediaTrust::deck};
    item.text = caption_beside(path, request);
  }
}

void add_glob(const std::string& pattern, const Request& request, std::vector<MediaItem>& out) {
  static std::string unreadable;  // glob() takes a plain function
  unreadable.clear();
  glob_t found{};
  const int status = glob(
      pattern.c_str(), 0,
      [](const char* path, int reason) {
        unreadable = fmt::format(": cannot list {}: {}", path, std::strerror(reason));
        return 0;
      },
      &found);  // sorted
  const std::vector<std::string> paths(found.gl_pathv,
                                       found.gl_pathv + (status == 0 ? found.gl_pathc : 0));
  globfree(&found);
  WEFT_CHECK(!paths.empty(), Exit::data,
             fmt::format("check {}, and the directory weft was started in", request.key),
             "no file matches {}{}", pattern, unreadable);
  // "clips/*" means media, folders and shards among all that is there, "clips/*.bin" these files.
  const std::string ending = ending_of(pattern);
  const bool any_ending = ending.empty() || ending.find_first_of("*?[") != ending.npos;
  std::vector<std::string> taken, others;
  for (const std::string& path : paths) {
    std::error_code none;
    if (!request.results.empty() && fs::equivalent(path, request.results, none)) continue;
    const bool other = any_ending && !is_medium(path) && ending_of(path) != ".tar" &&
                       !fs::is_directory(path, none);
    (other ? others : taken).push_back(path);
  }
  const std::string left_out = count_by_ending(others, taken);
  WEFT_CHECK(!taken.empty(), Exit::data, "name videos, pictures, lists or folders",
             "{} matches no videos and no pictures, but: {}", pattern, left_out);
  tell_left_out(pattern, left_out);
  for (const std::string& path : taken) add_named(path, request, out);
}

}  // namespace

Facts facts_of(const TableReader& table, const TableRow& row) {
  return read_facts([&](const char* name) { return table.value(row, name); }, table.is_csv(),
                    table.where(row));
}

Facts facts_of(const Json& object, const std::string& where) {
  return read_facts([&](const char* name) { return member_of(object, name); }, false, where);
}

std::string caption_of(const TableReader& table, const TableRow& row) {
  return read_caption([&](const char* name) { return table.value(row, name); }, table.where(row));
}

std::string caption_of(const Json& object, const std::string& where) {
  return read_caption([&](const char* name) { return member_of(object, name); }, where);
}

std::vector<MediaItem> list_media(const std::vector<std::string>& inputs, const std::string& key,
                                  const MediaDeck& limits, Described described,
                                  const fs::path& results) {
  const Request request{key, limits, described, results};
  std::vector<MediaItem> out;
  for (const std::string& input : inputs) {
    if (is_source_graph(input))
      out.emplace_back().media = {input, MediaTrust::deck};
    else if (is_glob(input))
      add_glob(input, request, out);
    else
      add_named(input, request, out);
  }
  return out;
}

bool is_glob(const std::string& path) {
  std::error_code none;
  return path.find_first_of("*?[") != std::string::npos && !fs::exists(path, none);
}

std::string beside_list(const std::string& list, const std::string& path) {
  if (path.empty() || is_source_graph(path)) return path;
  return (fs::path(list).parent_path() / path).string();
}

void refuse_other_forms(const std::string& path) {
  const std::string ending = ending_of(path);
  WEFT_CHECK(ending != ".tsv" && ending != ".txt" && ending != ".json", Exit::data,
             "a list is CSV (.csv) with a column `path`, or JSON lines (.jsonl)",
             "{} is no list that weft reads", path);
  std::error_code none;
  if (is_medium(path) || !fs::is_regular_file(path, none)) return;
  const File file = File::open(path, Exit::data);
  std::string begin(std::min<std::uint64_t>(16, file.size()), '\0');
  file.read(std::as_writable_bytes(std::span(begin)), 0);
  refuse_other_kinds(path, begin);
}

void check_list_size(const std::string& path, const MediaDeck& limits) {
  const auto size = static_cast<double>(File::open(path, Exit::data).size());
  WEFT_CHECK(size <= limits.max_list_mib * (1 << 20), Exit::data,
             "split the list, or raise media.max_list_mib",
             "{} has {:.1f} MiB, media.max_list_mib = {}", path, size / (1 << 20),
             limits.max_list_mib);
}

std::string missing_file(const std::string& path) {
  if (path.empty() || is_source_graph(path) || access(path.c_str(), R_OK) == 0) return "";
  return errno == ENOENT ? path : fmt::format("{} ({})", path, std::strerror(errno));
}

void report_missing(const std::vector<std::string>& missing, std::size_t all,
                    const std::string& noun, const std::string& hint, bool refuse) {
  if (missing.empty()) return;
  constexpr std::size_t most = 10;
  std::string names;
  for (std::size_t i = 0; i < std::min(missing.size(), most); ++i)
    names += (i == 0 ? "" : ", ") + printable(missing[i], 400);
  if (missing.size() > most) names += fmt::format(" and {} more", missing.size() - most);
  const std::string text = fmt::format("{} of {} {} not there: {}", missing.size(),
                                       counted(static_cast<std::int64_t>(all), noun),
                                       missing.size() == 1 ? "is" : "are", names);
  if (refuse || missing.size() == all) throw Error(Exit::data, text, hint, __FILE__, __LINE__);
  if (log::rank() == 0) log::warn("{} ({})", text, hint);
}

}  // namespace weft
