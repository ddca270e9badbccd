#include "data/ingest/parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "core/error.h"
#include "core/hash.h"

namespace weft {
namespace {

// What is copied and hashed is still in the cache then.
constexpr std::size_t piece = std::size_t{1} << 20;

void write_all(int fd, std::span<const std::byte> bytes, std::uint64_t offset,
               const std::string& path) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote =
        pwrite(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (wrote < 0 && errno == EINTR) continue;
    WEFT_CHECK(wrote > 0, Exit::data, "is the disk full, or the directory not writable?",
               "cannot write {}: {}", path, std::strerror(errno));
    done += static_cast<std::size_t>(wrote);
  }
}

void read_all(int fd, std::span<std::byte> bytes, std::uint64_t offset, const std::string& path) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got =
        pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    WEFT_CHECK(got > 0, Exit::data, "check the disk, and run the same command again",
               "cannot read {} back: {}", path, got < 0 ? std::strerror(errno) : "it is cut off");
    done += static_cast<std::size_t>(got);
  }
}

// Closes on every way out.
struct OpenFile {
  int fd = -1;
  ~OpenFile() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

int BucketedWriter::id_of(const Bucket& bucket) {
  const auto found = ids_.find(bucket.name);
  if (found != ids_.end()) return found->second;
  return ids_.emplace(bucket.name, writer_.add_bucket(bucket)).first->second;
}

std::uint64_t BucketedWriter::append(const Bucket& bucket, std::span<const std::byte> clip,
                                     const ClipInfo& info) {
  ++written_.clips;
  written_.bytes += clip.size();
  auto& [of, clips] = written_.buckets[bucket.name];
  of = bucket;
  ++clips;
  return writer_.append(id_of(bucket), clip, info);
}

std::vector<std::vector<std::uint64_t>> BucketedWriter::lay_out(
    const std::vector<std::vector<CutClip>>& ranks, std::int64_t limit) {
  std::vector<std::array<std::int64_t, 3>> order;  // video, rank, index on that rank
  for (std::size_t r = 0; r < ranks.size(); ++r)
    for (std::size_t i = 0; i < ranks[r].size(); ++i)
      order.push_back(
          {ranks[r][i].video, static_cast<std::int64_t>(r), static_cast<std::int64_t>(i)});
  std::ranges::sort(order);
  if (limit > 0 && std::ssize(order) > limit) order.resize(static_cast<std::size_t>(limit));
  std::vector<std::pair<int, std::int64_t>> places;  // bucket, index in it
  for (const auto& [video, rank, index] : order) {
    const CutClip& clip = ranks[rank][index];
    const int id = id_of(clip.bucket);
    auto& [of, clips] = written_.buckets[clip.bucket.name];
    of = clip.bucket;
    writer_.reserve(id, clip.info, clip.xxh3);
    places.emplace_back(id, clips++);
    ++written_.clips;
    written_.bytes += clip.bucket.clip_bytes();
  }
  std::vector<std::vector<std::uint64_t>> offsets(ranks.size());
  for (std::size_t k = 0; k < order.size(); ++k)
    offsets[order[k][1]].push_back(writer_.offsets(places[k].first).at(places[k].second));
  return offsets;
}

PartFile::~PartFile() {
  if (fd_ >= 0) ::close(fd_);
  if (made_) unlink(path_.c_str());
}

std::uint64_t PartFile::append(std::span<const std::byte> clip) {
  if (fd_ < 0) {
    unlink(path_.c_str());  // what a killed job has left, or a link
    fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    WEFT_CHECK(fd_ >= 0, Exit::data, "check the directory's permissions", "cannot make {}: {}",
               path_, std::strerror(errno));
    made_ = true;
  }
  ClipHash hash;
  for (std::size_t at = 0; at < clip.size(); at += piece) {
    const auto part = clip.subspan(at, std::min(piece, clip.size() - at));
    hash.update(part.data(), part.size());
    write_all(fd_, part, bytes_ + at, path_);
  }
  bytes_ += clip.size();
  return hash.digest();
}

void PartFile::close() {
  if (fd_ < 0) return;
  // Network file systems tell here that a disk is full.
  WEFT_CHECK(::close(std::exchange(fd_, -1)) == 0, Exit::data, "is the disk full?",
             "cannot write {}: {}", path_, std::strerror(errno));
}

void copy_part(const std::string& part_path, const std::vector<CutClip>& clips,
               std::span<const std::uint64_t> offsets, const std::string& store) {
  if (offsets.empty()) return;
  WEFT_ASSERT(offsets.size() <= clips.size());
  const OpenFile from{open(part_path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW)};
  WEFT_CHECK(from.fd >= 0, Exit::data, "every rank must see the folder of ingest.output",
             "cannot open {}: {}", part_path, std::strerror(errno));
  const OpenFile to{open(store.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW)};
  WEFT_CHECK(to.fd >= 0, Exit::data, "every rank must see the folder of ingest.output",
             "cannot open {}, which rank 0 has made: {}", store, std::strerror(errno));
  std::vector<std::byte> buffer(piece);
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const std::uint64_t bytes = clips[i].bucket.clip_bytes();
    ClipHash hash;
    for (std::uint64_t at = 0; at < bytes; at += piece) {
      const auto part = std::span(buffer).first(std::min<std::uint64_t>(piece, bytes - at));
      read_all(from.fd, part, begin + at, part_path);
      hash.update(part.data(), part.size());
      write_all(to.fd, part, offsets[i] + at, store);
    }
    WEFT_CHECK(hash.digest() == clips[i].xxh3, Exit::data,
               "check the disk, and run the same command again",
               "the clip of {} in {} is damaged: XXH3 is {:016x}, expected {:016x}",
               clips[i].info.source, part_path, hash.digest(), clips[i].xxh3);
    begin += bytes;
    // It goes to the disk while the next clips are copied.
    sync_file_range(to.fd, static_cast<off_t>(offsets[i]), static_cast<off_t>(bytes),
                    SYNC_FILE_RANGE_WRITE);
  }
  WEFT_CHECK(fsync(to.fd) == 0, Exit::data, "is the disk full?", "cannot write {} to the disk: {}",
             store, std::strerror(errno));
}

// Numbers first, then three texts, of any bytes.
std::string to_text(const std::vector<CutClip>& clips) {
  std::string text;
  for (const CutClip& c : clips) {
    const Bucket& b = c.bucket;
    text += fmt::format("{} {} {} {} {} {} {} {} {} ", c.video, c.xxh3, b.frames, b.height, b.width,
                        std::bit_cast<std::uint32_t>(c.info.fps), b.name.size(),
                        c.info.source.size(), c.info.text.size());
    text.append(b.name).append(c.info.source).append(c.info.text);
  }
  return text;
}

std::vector<CutClip> from_text(const std::string& text) {
  std::vector<CutClip> clips;
  std::size_t at = 0;
  const auto number = [&]<class T>(T& value) {
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), value);
    WEFT_ASSERT(error == std::errc());
    at = static_cast<std::size_t>(end - text.data()) + 1;
  };
  while (at < text.size()) {
    CutClip& c = clips.emplace_back();
    std::uint32_t fps = 0;
    std::size_t name = 0, source = 0, caption = 0;
    number(c.video), number(c.xxh3);
    number(c.bucket.frames), number(c.bucket.height), number(c.bucket.width);
    number(fps), number(name), number(source), number(caption);
    c.bucket.pixel_frames = c.bucket.frames;
    c.bucket.pixel_height = c.bucket.height;
    c.bucket.pixel_width = c.bucket.width;
    c.info.fps = std::bit_cast<float>(fps);
    c.bucket.name = text.substr(at, name);
    c.info.source = text.substr(at + name, source);
    c.info.text = text.substr(at + name + source, caption);
    at += name + source + caption;
  }
  return clips;
}

}  // namespace weft
