#include "data/lists/shards.h"

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/lists/text_file.h"

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
  ShardReader(const std::string& path, Described described, std::vector<MediaItem>& out)
      : path_(path), described_(described), out_(out), bytes_(path), archive_(archive_read_new()) {
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
    throw Error(Exit::data,
                fmt::format("cannot read {}{}: {}", path_,
                            last_.empty() ? "" : " behind its member " + printable(last_),
                            printable(why == nullptr ? "no reason given" : why)),
                "a shard is a whole tar file, not compressed: copy it again, or unpack it with "
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

    // Of "a.seg.png", a map beside "a.jpg", the ending is ".seg.png", which is no picture's.
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
    sample_.facts = facts_of(object, name);
    sample_.json_caption = caption_of(object, name);
  }

  std::string content(archive_entry* entry, const std::string& name) {
    const la_int64_t bytes = archive_entry_size(entry);
    WEFT_CHECK(bytes >= 0 && static_cast<std::uint64_t>(bytes) <= longest_caption, Exit::data,
               "leave it out of the shard, or shorten it", "{} has {} bytes, more than a MiB",
               where(name), bytes);
    std::string text(static_cast<std::size_t>(bytes), '\0');
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
  ShardBytes bytes_;
  std::unique_ptr<archive, FreeArchive> archive_;
  Sample sample_;
  bool in_sample_ = false;
  std::int64_t links_ = 0, bare_ = 0;
};

}  // namespace

void list_shard(const std::string& path, Described described, std::vector<MediaItem>& out) {
  ShardReader(path, described, out).read();
}

}  // namespace weft
