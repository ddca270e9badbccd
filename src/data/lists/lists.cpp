#include "data/lists/lists.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/ranges.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/lists/table.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t longest_name = 4096;

// A file as libarchive's bytes: a member that is not wanted is skipped without reading it.
class ShardBytes {
 public:
  explicit ShardBytes(const std::string& path) : file_(File::open(path, Exit::data)) {
    size_ = file_.size();
  }

  static la_ssize_t read(archive* a, void* self, const void** block) {
    ShardBytes& b = *static_cast<ShardBytes*>(self);
    const std::uint64_t count = std::min<std::uint64_t>(b.block_.size(), b.size_ - b.at_);
    try {
      b.file_.read(std::span(b.block_).first(count), b.at_);
    } catch (const Error& e) {  // must not pass through frames of C
      archive_set_error(a, EIO, "%s", e.what());
      return ARCHIVE_FATAL;
    }
    b.at_ += count;
    *block = b.block_.data();
    return static_cast<la_ssize_t>(count);
  }
  static la_int64_t skip(archive*, void* self, la_int64_t wanted) {
    ShardBytes& b = *static_cast<ShardBytes*>(self);
    const auto count =
        std::min(static_cast<std::uint64_t>(std::max<la_int64_t>(0, wanted)), b.size_ - b.at_);
    b.at_ += count;
    return static_cast<la_int64_t>(count);
  }

  std::uint64_t size() const { return size_; }

 private:
  File file_;
  std::uint64_t size_ = 0, at_ = 0;
  std::vector<std::byte> block_ = std::vector<std::byte>(std::size_t{32} << 10);
};

struct FreeArchive {
  void operator()(archive* a) const { archive_read_free(a); }
};

// What a sample has so far.
struct Sample {
  std::string key;
  std::optional<MediaSource> video, picture;
  std::optional<std::string> caption;  // of a file of its own
  std::string json_caption;
  Facts facts;
};

class ShardReader {
 public:
  ShardReader(const std::string& path, Described described, std::vector<MediaItem>& out,
              const Columns& more)
      : path_(path),
        described_(described),
        out_(out),
        more_(more),
        bytes_(path),
        archive_(archive_read_new()) {
    WEFT_ASSERT(archive_ != nullptr);
    archive_read_support_format_tar(archive_.get());
    archive_read_set_open_callback(archive_.get(), nullptr);
    archive_read_set_read_callback(archive_.get(), ShardBytes::read);
    archive_read_set_skip_callback(archive_.get(), ShardBytes::skip);
    archive_read_set_callback_data(archive_.get(), &bytes_);
    check(archive_read_open1(archive_.get()));
  }

  void read() {
    archive_entry* entry = nullptr;
    for (;;) {
      const int status = archive_read_next_header(archive_.get(), &entry);
      if (status == ARCHIVE_EOF) break;
      check(status);
      take(entry);
    }
    end_sample();
    if (links_ > 0 && log::rank() == 0)
      log::warn("{} has {}, left out: a shard holds its media itself", path_,
                counted(links_, "link"));
    if (bare_ > 0)
      log::info("ingest: {} has {} without a video or picture", path_, counted(bare_, "sample"));
  }

 private:
  void check(int status) {
    if (status == ARCHIVE_OK || status == ARCHIVE_WARN) return;
    const char* why = archive_error_string(archive_.get());
    throw Error(
        Exit::data,
        fmt::format("cannot read {}{}: {}", path_,
                    last_.empty() ? "" : " behind its member " + printable(last_),
                    printable(why == nullptr ? "no reason given" : why)),
        "a shard must be a complete, uncompressed tar file: copy it again, or unpack it with "
        "gunzip or zstd -d",
        __FILE__, __LINE__);
  }

  // Where messages find a member.
  std::string where(const std::string& name) const { return path_ + "/" + printable(name); }

  void take(archive_entry* entry) {
    const char* utf8 = archive_entry_pathname_utf8(entry);
    const char* raw = utf8 != nullptr ? utf8 : archive_entry_pathname(entry);
    const std::string name = raw == nullptr ? "" : raw;
    last_ = name;
    if (archive_entry_hardlink(entry) != nullptr || archive_entry_filetype(entry) == AE_IFLNK) {
      ++links_;
      return;
    }
    const std::string base = fs::path(name).filename().string();
    if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_sparse_count(entry) > 0 ||
        base.empty() || base.starts_with('.'))
      return;
    const std::size_t dot = base.find('.');
    const std::string key = name.substr(0, name.size() - base.size()) + base.substr(0, dot);
    std::string ending = dot == std::string::npos ? "" : base.substr(dot);
    std::ranges::transform(ending, ending.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (key != sample_.key) end_sample();
    sample_.key = key;
    in_sample_ = true;

    // The ending of "a.seg.png", a map beside "a.jpg", is ".seg.png", which is no picture's.
    const MediumKind kind =
        ending.find('.', 1) == std::string::npos ? kind_of_name("x" + ending) : MediumKind::other;
    if (kind != MediumKind::other) {
      take_medium(entry, name, kind == MediumKind::video ? sample_.video : sample_.picture);
    } else if (described_ == Described::no) {
      return;
    } else if (ending == ".txt" || ending == ".text" || ending == ".caption") {
      sample_.caption = trimmed(content(entry, name));
    } else if (ending == ".json") {
      take_json(content(entry, name), where(name));
    }
  }

  void take_medium(archive_entry* entry, const std::string& name,
                   std::optional<MediaSource>& medium) {
    WEFT_CHECK(!medium, Exit::data, "give each sample one video, or one picture, of its name",
               "{} is of the same sample as {}", where(name), printable(medium->member));
    const la_int64_t begin = archive_filter_bytes(archive_.get(), 0);
    const la_int64_t bytes = archive_entry_size(entry);
    WEFT_CHECK(
        begin >= 0 && bytes >= 0 && static_cast<std::uint64_t>(begin) <= bytes_.size() &&
            static_cast<std::uint64_t>(bytes) <= bytes_.size() - static_cast<std::uint64_t>(begin),
        Exit::data, "copy the shard again", "{} is cut off: the shard ends before it does",
        where(name));
    medium = MediaSource{path_, MediaTrust::untrusted, printable(name, longest_name),
                         static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(bytes)};
  }

  void take_json(const std::string& text, const std::string& name) {
    const auto object = try_parse_json<nlohmann::ordered_json>(text);
    WEFT_CHECK(object.is_object(), Exit::data, "repair it, or leave it out of the shard",
               "{} is no JSON object", name);
    sample_.facts = facts_of(object, name, more_);
    sample_.json_caption = caption_of(object, name);
  }

  std::string content(archive_entry* entry, const std::string& name) {
    const la_int64_t bytes = archive_entry_size(entry);
    WEFT_CHECK(bytes >= 0 && static_cast<std::uint64_t>(bytes) <= longest_caption, Exit::data,
               "leave it out of the shard, or shorten it", "{} has {} bytes, more than a MiB",
               where(name), bytes);
    std::string text(bytes, '\0');
    std::size_t at = 0;
    while (at < text.size()) {
      const la_ssize_t got = archive_read_data(archive_.get(), text.data() + at, text.size() - at);
      if (got <= 0) {
        check(got < 0 ? static_cast<int>(got) : ARCHIVE_FATAL);
        break;
      }
      at += static_cast<std::size_t>(got);
    }
    text.resize(at);
    return checked_text(std::move(text), where(name));
  }

  void end_sample() {
    if (!in_sample_) return;
    in_sample_ = false;
    Sample sample = std::move(sample_);
    sample_ = {};
    if (!sample.video && !sample.picture) {
      ++bare_;
      return;
    }
    MediaItem& item = out_.emplace_back();
    item.media = std::move(sample.video ? *sample.video : *sample.picture);
    item.text = sample.caption.value_or(sample.json_caption);
    item.facts = sample.facts;
  }

  std::string path_, last_;
  Described described_;
  std::vector<MediaItem>& out_;
  const Columns& more_;
  ShardBytes bytes_;
  std::unique_ptr<archive, FreeArchive> archive_;
  Sample sample_;
  bool in_sample_ = false;
  std::int64_t links_ = 0, bare_ = 0;
};

}  // namespace

void list_shard(const std::string& path, Described described, std::vector<MediaItem>& out,
                const Columns& more) {
  ShardReader(path, described, out, more).read();
}

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string dumped(const Json& value) {
  return printable(dump_json(value, -1, ' ', false, Json::error_handler_t::replace));
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
Facts read_facts(F&& value, bool is_csv, const std::string& where, const Columns& more) {
  Facts facts(more.size());
  for (std::size_t f = 0; f < facts.values.size(); ++f) {
    const std::string name = f < fact_names.size() ? fact_names[f] : more[f - fact_names.size()];
    const Json found = value(name);
    if (found.is_null()) continue;
    const auto number = number_of(found, is_csv);
    WEFT_CHECK(number && std::isfinite(*number), Exit::data,
               "give a number, or leave the value empty", "{}, column {}: {} is no number", where,
               name, dumped(found));
    const bool measure = f >= static_cast<std::size_t>(Fact::num_frames) && f < fact_names.size();
    if (*number > 0 || !measure) facts.values[f] = *number;
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
  for (const char* ending : {".txt", ".TXT", ".Txt", "_caption.txt"}) {
    const std::string path = fs::path(file).replace_extension().string() + ending;
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
  const Columns& more;
  bool alone;  // one input, without others that could be made
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
    item.facts = facts_of(table, row, request.more);
  }
}

bool is_medium(const std::string& name) { return kind_of_name(name) != MediumKind::other; }

void add_folder(const std::string& folder, const Request& request, std::vector<MediaItem>& out) {
  const FolderFiles found = files_below(folder, is_medium, request.results);
  if (found.files.empty() && !request.alone)  // it fails by its name
    out.emplace_back().media = {(fs::path(folder) / "").parent_path().string(), MediaTrust::deck};
  WEFT_CHECK(!found.files.empty() || !request.alone, Exit::data,
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
    list_shard(path, request.described, out, request.more);
  } else if (fs::is_directory(path, none)) {
    add_folder(path, request, out);
  } else {
    try {
      refuse_other_forms(path);  // before FFmpeg calls it invalid data
    } catch (const Error& e) {
      if (request.alone) throw;
      if (log::rank() == 0) log::warn("{} ({})", e.what(), e.hint());
    }
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

Facts facts_of(const TableReader& table, const TableRow& row, const Columns& more) {
  return read_facts([&](const std::string& name) { return table.value(row, name); }, table.is_csv(),
                    table.where(row), more);
}

Facts facts_of(const Json& object, const std::string& where, const Columns& more) {
  return read_facts([&](const std::string& name) { return member_of(object, name); }, false, where,
                    more);
}

std::string caption_of(const TableReader& table, const TableRow& row) {
  return read_caption([&](const char* name) { return table.value(row, name); }, table.where(row));
}

std::string caption_of(const Json& object, const std::string& where) {
  return read_caption([&](const char* name) { return member_of(object, name); }, where);
}

std::vector<MediaItem> list_media(const std::vector<std::string>& inputs, const std::string& key,
                                  const MediaDeck& limits, Described described,
                                  const fs::path& results, const Columns& more) {
  const Request request{key, limits, described, results, more, inputs.size() == 1};
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
             "{} is not a list that weft can read", path);
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

namespace {

// The absolute path of a file, without links in its folder's. Files of a folder ask once.
class CanonicalPaths {
 public:
  std::string operator()(const std::string& path) {
    std::error_code none;
    const fs::path absolute = fs::absolute(path, none);
    const auto [folder, added] = folders_.try_emplace(absolute.parent_path().string());
    if (added) folder->second = fs::weakly_canonical(folder->first, none);
    return (folder->second / absolute.filename()).string();
  }

 private:
  std::unordered_map<std::string, fs::path> folders_;
};

bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

std::size_t join_scores(const std::string& path, const MediaDeck& limits,
                        std::vector<MediaItem>& items, const Columns& more) {
  check_list_size(path, limits);
  TableReader table(path);
  struct Row {
    Facts facts;
    std::int64_t line = 0;
  };
  CanonicalPaths canonical;
  std::unordered_map<std::string, Row> rows;
  const auto has = [&](const auto& name) { return table.column(name) != std::string::npos; };
  bool any = std::ranges::any_of(fact_names, has) || std::ranges::any_of(more, has);
  for (TableRow row; table.next(row);) {
    if (row.path.empty()) continue;
    const Row found{facts_of(table, row, more), row.line};
    for (const double value : found.facts.values) any = any || !std::isnan(value);
    const auto [known, added] = rows.emplace(canonical(beside_list(path, row.path)), found);
    WEFT_CHECK(
        added || std::ranges::equal(known->second.facts.values, found.facts.values, same_value),
        Exit::data, "keep one of these rows", "{}, column path: {} has other scores in line {}",
        table.where(row), printable(row.path), known->second.line);
  }
  WEFT_CHECK(any, Exit::data,
             fmt::format("give it one of the columns {}, or name others in ingest.min or "
                         "ingest.max",
                         fmt::join(fact_names, ", ")),
             "{} has no score of an item, but: {}", path, columns_in(path));
  std::size_t joined = 0;
  for (MediaItem& item : items) {
    if (is_source_graph(item.media.path)) continue;
    const auto row = rows.find(canonical(item.media.name()));
    if (row == rows.end()) continue;
    ++joined;
    const Facts& facts = row->second.facts;
    item.facts.values.resize(facts.values.size(), Facts().values.front());
    for (std::size_t f = 0; f < facts.values.size(); ++f)
      if (!std::isnan(facts.values[f])) item.facts.values[f] = facts.values[f];
  }
  return joined;
}

}  // namespace weft
