// Reading clips: plain pread at the places that HDF5 named when the store was opened
// (clip_store_open.cpp). HDF5 itself, and its global lock, are out of the way from then on.
#include "data/clip_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/clip_store_child.h"
#include "data/images/image_source.h"
#include "data/images/image_store.h"
#include "data/images/shapes.h"
#include "data/store_file.h"
#include "data/synthetic.h"
#include "data/text_images/text_source.h"

namespace weft {
namespace {

constexpr const char* h5_magic = "\x89HDF\r\n\x1a\n";

class ClipStore : public ClipSource {
 public:
  ClipStore(StoreFile file, bool verify) : file_(std::move(file)), verify_(verify) {
    buckets_ = std::move(file_.facts().buckets);
    stored_ = std::move(file_.facts().stored);
  }

  const std::vector<Bucket>& buckets() const override { return buckets_; }

  ClipInfo info(int bucket, std::int64_t index) const override {
    return at(bucket, index).info[static_cast<std::size_t>(index)];
  }

  // The tables hold the clips' hashes.
  std::string content_id() const override {
    std::string text;
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      text += fmt::format("{:016x}", hash_of_tables(buckets_[b], stored_[b]));
    return to_hex(hash128(text));
  }

  void read(int bucket, std::int64_t index, std::span<std::byte> out) const override {
    const StoredBucket& stored = at(bucket, index);
    const auto clip = static_cast<std::size_t>(index);
    const Bucket& b = buckets_[static_cast<std::size_t>(bucket)];
    WEFT_ASSERT(out.size() == b.clip_bytes());
    read_bytes("clip", b, index, stored.offset[clip], stored.xxh3[clip], out);
  }

  std::int64_t text_tokens(int bucket, std::int64_t index) const override {
    const auto& offset = at(bucket, index).text_offset;
    if (offset.empty()) return 0;
    const auto i = static_cast<std::size_t>(index);
    return static_cast<std::int64_t>(offset[i + 1] - offset[i]);
  }

  std::vector<float> read_text(int bucket, std::int64_t index) const override {
    const StoredBucket& stored = at(bucket, index);
    const Bucket& b = buckets_[static_cast<std::size_t>(bucket)];
    const auto values = static_cast<std::size_t>(text_tokens(bucket, index) * b.text_channels);
    if (values == 0) return {};
    const std::size_t bytes = size_of(b.text_dtype);
    std::vector<std::byte> raw(values * bytes);
    const auto i = static_cast<std::size_t>(index);
    const auto row = static_cast<std::uint64_t>(b.text_channels) * bytes;
    read_bytes("caption", b, index, stored.text_begin + stored.text_offset[i] * row,
               stored.text_xxh3[i], raw);
    std::vector<float> out(values);
    if (b.text_dtype == DType::f32) {
      std::memcpy(out.data(), raw.data(), raw.size());
      return out;
    }
    for (std::size_t k = 0; k < values; ++k) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, raw.data() + k * 2, 2);
      out[k] = b.text_dtype == DType::f16 ? static_cast<float>(std::bit_cast<f16>(bits))
                                          : static_cast<float>(std::bit_cast<bf16>(bits));
    }
    return out;
  }

 private:
  const StoredBucket& at(int bucket, std::int64_t index) const {
    WEFT_ASSERT(bucket >= 0 && static_cast<std::size_t>(bucket) < buckets_.size());
    WEFT_ASSERT(index >= 0 && index < buckets_[static_cast<std::size_t>(bucket)].clips);
    return stored_[static_cast<std::size_t>(bucket)];
  }

  // Reads a clip's bytes, or those of its caption's features (`what`), from one place in the file.
  void read_bytes(const char* what, const Bucket& b, std::int64_t index, std::uint64_t offset,
                  std::uint64_t xxh3, std::span<std::byte> out) const {
    const std::uint64_t found =
        file_.read(fmt::format("{} {} of bucket {}", what, index, b.name), offset, out, verify_);
    if (!verify_) return;
    if (found == xxh3) return;
    const auto& stored = stored_[static_cast<std::size_t>(&b - buckets_.data())];
    throw DamagedClip(
        Exit::data,
        fmt::format("{} {} of bucket {} in {} is damaged: XXH3 is {:016x}, expected {:016x} ({})",
                    what, index, b.name, file_.path(), found, xxh3,
                    stored.info[static_cast<std::size_t>(index)].source),
        "the file was damaged after it was made: copy it again, or make it again; or let "
        "data.max_damaged skip such clips",
        __FILE__, __LINE__);
  }

  // Written only by the constructor, so reading needs no lock.
  StoreFile file_;
  bool verify_;
  std::vector<Bucket> buckets_;
  std::vector<StoredBucket> stored_;
};

}  // namespace

bool is_hdf5(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char begin[8] = {};
  const bool same = pread(fd, begin, 8, 0) == 8 && std::memcmp(begin, h5_magic, 8) == 0;
  close(fd);
  return same;
}

void warn_of_replacing(const std::string& path) {
  std::error_code none;
  if (log::rank() == 0 && std::filesystem::exists(path, none))
    log::warn("{} is there already: the new store replaces it once it is complete", path);
}

void check_store_path(const std::string& path, const std::string& key) {
  std::error_code none;
  const auto there = std::filesystem::status(path, none);
  WEFT_CHECK(!std::filesystem::is_directory(there) && !std::filesystem::is_other(there),
             Exit::usage, fmt::format("name a file in {}", key), "{} = {} is a {}", key, path,
             std::filesystem::is_directory(there) ? "folder" : "pipe or device");
}

std::unique_ptr<FolderLock> lock_store(const std::string& path, const std::string& key) {
  if (log::rank() != 0) return nullptr;
  check_store_path(path, key);
  return std::make_unique<FolderLock>(path + ".lock", "store " + path, key, Exit::data);
}

std::string stored_made_by(const std::string& path) {
  if (!is_hdf5(path)) return "";
  std::error_code none;
  try {
    return read_store(path, std::filesystem::file_size(path, none)).made_by;
  } catch (const Error& e) {
    log::warn("{}", e.what());
    return "";
  }
}

std::unique_ptr<ClipSource> open_clip_store(const std::string& path, bool verify) {
  StoreFile file(path);
  WEFT_CHECK(!file.facts().images, Exit::data, "give a store that was cut from videos",
             "{} holds labelled images, not clips", path);
  return std::make_unique<ClipStore>(std::move(file), verify);
}

std::unique_ptr<ClipSource> open_clip_source(const DataDeck& data, const MediaDeck& limits) {
  if (is_synthetic(data.path))
    return make_synthetic_source(data.path.substr(synthetic_prefix.size()));
  if (is_shapes(data.path))
    return make_image_source(open_labelled_images(data.path, data.verify), data);
  if (is_text_list(data.path)) return make_text_source(open_text_images(data.path, limits), data);
  StoreFile file(data.path);
  if (file.facts().images)
    return make_image_source(make_image_store(std::move(file), data.verify), data);
  return std::make_unique<ClipStore>(std::move(file), data.verify);
}

namespace {

// "moments: ..." in words, and the VAE's constants.
std::string latents_text(const Bucket& b) {
  std::string text = fmt::format("      {} of {}x{}x{} footage",
                                 b.moments ? "moments (means, log variances)" : "latents",
                                 b.pixel_frames, b.pixel_height, b.pixel_width);
  if (!b.scale.empty())
    text += fmt::format(", {} vae.shift=[{:g}] vae.scale=[{:g}]",
                        b.moments ? "to be drawn with" : "made with", fmt::join(b.shift, ","),
                        fmt::join(b.scale, ","));
  return text + "\n";
}

}  // namespace

std::string describe_store(const std::string& path) {
  StoreFile file(path);
  if (file.facts().images) return describe_image_store(std::move(file));
  const auto store = std::make_unique<ClipStore>(std::move(file), true);
  std::string out = fmt::format("clip store {}\n", printable(path));
  std::int64_t clips = 0;
  std::uint64_t bytes = 0;
  std::vector<std::byte> clip;
  const auto& buckets = store->buckets();
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& b = buckets[i];
    float slowest = 0, fastest = 0;
    std::string captions;
    int shown = 0;
    std::int64_t tokens = 0;
    clip.resize(b.clip_bytes());
    for (std::int64_t c = 0; c < b.clips; ++c) {
      store->read(static_cast<int>(i), c, clip);  // throws when damaged
      tokens += store->text_tokens(static_cast<int>(i), c);
      store->read_text(static_cast<int>(i), c);
      const ClipInfo info = store->info(static_cast<int>(i), c);
      slowest = c == 0 ? info.fps : std::min(slowest, info.fps);
      fastest = std::max(fastest, info.fps);
      if (shown < 3) {
        captions += fmt::format(
            "      {}  {}\n", printable(info.source),
            info.text.empty() ? "(no caption)" : "\"" + printable(info.text, 2000) + "\"");
        ++shown;
      }
    }
    const std::string shape =
        b.dtype == DType::u8
            ? fmt::format("[{},{},{},{}]", b.frames, b.height, b.width, b.channels)
            : fmt::format("[{},{},{},{}]", b.channels, b.frames, b.height, b.width);
    out += fmt::format("  bucket {}: {}, {} {}, {:.1f} MB, fps {:g} to {:g}\n{}", b.name,
                       counted(b.clips, "clip"), name_of(b.dtype), shape,
                       1e-6 * static_cast<double>(b.clip_bytes()) * static_cast<double>(b.clips),
                       slowest, fastest, captions);
    if (b.dtype != DType::u8) out += latents_text(b);
    if (b.text_channels > 0)
      out += fmt::format("      text features: {}, at most {} a clip, {} [{}]\n",
                         counted(tokens, "token"), b.longest_text, name_of(b.text_dtype),
                         b.text_channels);
    clips += b.clips;
    bytes += b.clip_bytes() * static_cast<std::uint64_t>(b.clips);
  }
  out += fmt::format("  {} in {}, {:.1f} MB, every hash verified\n", counted(clips, "clip"),
                     counted(std::ssize(buckets), "bucket"), 1e-6 * static_cast<double>(bytes));
  return out;
}

}  // namespace weft
