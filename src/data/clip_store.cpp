// Reading a store of clips: its structure by HDF5, in a process of its own (store_file.h), then the
// clips by plain pread at the places that HDF5 named. HDF5 and its global lock are out of the way
// from then on.
#include "data/clip_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/hdf5.h"
#include "data/images/image_source.h"
#include "data/images/image_store.h"
#include "data/mixed_source.h"
#include "data/store_file.h"
#include "data/synthetic.h"
#include "data/text_images/text_images.h"

namespace weft {
namespace {

// Buckets of up to this many clips ask HDF5 for the place of each one (quadratic in HDF5 1.10).
constexpr std::int64_t ask_for_each = 2048;
// In larger buckets the stored offsets are compared with HDF5's at this many clips, the first and
// the last included.
constexpr std::int64_t spot_checks = 64;

// Reads one bucket after another, with the store's name at hand for messages.
class BucketReader {
 public:
  BucketReader(StoreReader& reader, std::int64_t version, std::vector<std::string>& warnings)
      : r_(reader), version_(version), warnings_(warnings) {}

  // Reads the shape first, then the tables, whose length follows from it.
  void read(const std::string& name, Bucket& bucket, StoredBucket& stored) {
    const std::string where = "bucket " + name;
    h5::Handle group(H5Gopen2(r_.file(), ("clips/" + name).c_str(), H5P_DEFAULT), H5Gclose);
    check(group.valid(), where, "is not a group");
    bucket.name = name;
    bucket.pixel_frames = positive_attribute(group, where, "pixel_frames");
    bucket.pixel_height = positive_attribute(group, where, "pixel_height");
    bucket.pixel_width = positive_attribute(group, where, "pixel_width");
    read_shape(group, where, bucket);

    const auto n = static_cast<std::size_t>(bucket.clips);
    const auto fps = r_.table<float>(group, where, "fps", n);
    stored.xxh3 = r_.table<std::uint64_t>(group, where, "xxh3", n);
    const bool packed = version_ >= first_hashed_tables;
    auto source =
        packed ? r_.texts(group, where, "sources", n) : r_.strings(group, where, "source", n);
    auto text =
        packed ? r_.texts(group, where, "captions", n) : r_.strings(group, where, "text", n);
    for (std::size_t i = 0; i < n; ++i) {
      check(fps[i] > 0 && fps[i] < 1e6f, where, fmt::format("clip {} has fps {}", i, fps[i]));
      stored.info.push_back({fps[i], std::move(source[i]), std::move(text[i])});
    }
    find_clips(group, where, bucket, stored);
    if (r_.has(group, "text_features")) {
      read_text_shape(group, where, bucket, stored);
      stored.text_xxh3 = r_.table<std::uint64_t>(group, where, "text_xxh3", n);
    }
    if (packed)
      r_.check_hash(where, hash_of_tables(bucket, stored),
                    static_cast<std::uint64_t>(r_.attribute(group, where, "tables_xxh3")));
  }

 private:
  void check(bool ok, const std::string& where, const std::string& fault) const {
    r_.check(ok, where, fault);
  }
  std::int64_t positive_attribute(hid_t object, const std::string& where, const char* name) const {
    const std::int64_t value = r_.attribute(object, where, name);
    check(value > 0, where, fmt::format("has {} = {}", name, value));
    return value;
  }

  // The kind of latents, and the VAE's constants.
  void read_kind(hid_t group, const std::string& where, Bucket& bucket) {
    if (H5Aexists(group, "kind") > 0) {
      const std::string kind = r_.text_attribute(group, where, "kind");
      check(kind == "moments" || kind == "latents", where,
            fmt::format("holds \"{}\", and not latents or moments", kind));
      bucket.moments = kind == "moments";
    }
    check(!bucket.moments || bucket.channels % 2 == 0, where,
          fmt::format("has moments of {} channels, an odd number", bucket.channels));
    bucket.scale = r_.float_attribute(group, where, "scale", bucket.model_channels());
    bucket.shift = r_.float_attribute(group, where, "shift", bucket.model_channels());
    check(bucket.scale.empty() == bucket.shift.empty(), where,
          "has only one of the attributes scale and shift");
    check(!bucket.moments || !bucket.scale.empty(), where,
          "has moments, but no attributes scale and shift");
    for (const float s : bucket.scale) check(s > 0, where, fmt::format("has a scale of {}", s));
  }

  // Type and shape of the clips. No dimension is trusted before the file is found large enough for
  // it.
  void read_shape(hid_t group, const std::string& where, Bucket& bucket) {
    const bool pixels = r_.has(group, "frames");
    const bool latents = r_.has(group, "latents");
    check(pixels != latents, where,
          pixels ? "has both frames and latents" : "has no dataset frames or latents");
    const char* name = pixels ? "frames" : "latents";
    const h5::Handle clips = r_.dataset(group, where, name);
    const h5::Handle type(H5Dget_type(clips), H5Tclose);
    const h5::Handle half = h5::half_type();
    if (pixels) {
      check(H5Tequal(type, H5T_STD_U8LE) > 0, where, "has frames of another type than uint8");
      bucket.dtype = DType::u8;
    } else {
      const bool f32 = H5Tequal(type, H5T_IEEE_F32LE) > 0;
      check(f32 || H5Tequal(type, half) > 0, where,
            "has latents of another type than little-endian float32 or float16");
      bucket.dtype = f32 ? DType::f32 : DType::f16;
    }
    const auto dims = r_.dims_of(clips);
    check(dims.size() == 5, where,
          fmt::format("has {} of {} dimensions, expected 5: {}", name, dims.size(),
                      pixels ? "[N,T,H,W,3]" : "[N,C,T,H,W]"));
    check(dims[0] > 0, where, "holds no clip");
    std::uint64_t clip_bytes = size_of(bucket.dtype), total = 0;
    for (int i = 1; i < 5; ++i) {
      check(dims[i] > 0 && dims[i] < (hsize_t{1} << 31) &&
                !__builtin_mul_overflow(clip_bytes, dims[i], &clip_bytes),
            where, fmt::format("has an impossible dimension {} of {}: {}", i, name, dims[i]));
    }
    check(!__builtin_mul_overflow(clip_bytes, dims[0], &total) && total <= r_.bytes(), where,
          fmt::format("claims {} clips of {} bytes, more than the file's {} bytes: damaged or "
                      "truncated",
                      dims[0], clip_bytes, r_.bytes()));
    const auto dim = [&](int i) { return static_cast<std::int64_t>(dims[i]); };
    bucket.clips = dim(0);
    bucket.channels = pixels ? dim(4) : dim(1);
    bucket.frames = pixels ? dim(1) : dim(2);
    bucket.height = pixels ? dim(2) : dim(3);
    bucket.width = pixels ? dim(3) : dim(4);
    check(!pixels || bucket.channels == 3, where,
          fmt::format("has pixels of {} channels, expected 3", bucket.channels));

    const h5::Handle how(H5Dget_create_plist(clips), H5Pclose);
    hsize_t chunk[5] = {};
    const bool chunked = H5Pget_layout(how) == H5D_CHUNKED && H5Pget_chunk(how, 5, chunk) == 5;
    check(chunked && chunk[0] == 1 && std::equal(chunk + 1, chunk + 5, dims.begin() + 1), where,
          fmt::format("does not store one clip a chunk in {}", name));
    check(H5Pget_nfilters(how) == 0, where,
          fmt::format("stores {} through a filter (compressed?)", name));
    if (!pixels) read_kind(group, where, bucket);
  }

  // Type and shape of the text features and which rows belong to which clip; checks that they lie
  // inside the file.
  void read_text_shape(hid_t group, const std::string& where, Bucket& bucket,
                       StoredBucket& stored) {
    const h5::Handle rows = r_.dataset(group, where, "text_features");
    const h5::Handle type(H5Dget_type(rows), H5Tclose);
    const h5::Handle half = h5::half_type();
    const bool f32 = H5Tequal(type, H5T_IEEE_F32LE) > 0, bf16 = H5Tequal(type, H5T_STD_U16LE) > 0;
    check(f32 || bf16 || H5Tequal(type, half) > 0, where,
          "has text_features of another type than little-endian float32, float16 or uint16 (bf16)");
    bucket.text_dtype = f32 ? DType::f32 : bf16 ? DType::bf16 : DType::f16;
    const auto dims = r_.dims_of(rows);
    check(dims.size() == 2 && dims[1] > 0 && dims[1] < (hsize_t{1} << 24), where,
          "has text_features that are not [tokens, channels]");
    bucket.text_channels = static_cast<std::int64_t>(dims[1]);
    const std::uint64_t row = dims[1] * size_of(bucket.text_dtype);
    stored.text_begin = r_.place_of(rows, where, "text_features", dims[0], row);
    stored.text_offset = r_.table<std::uint64_t>(group, where, "text_offset",
                                                 static_cast<std::size_t>(bucket.clips) + 1);
    const auto& offset = stored.text_offset;
    check(offset.front() == 0 && offset.back() == dims[0] &&
              std::is_sorted(offset.begin(), offset.end()),
          where, "has a table text_offset that does not divide text_features among the clips");
    for (std::size_t i = 1; i < offset.size(); ++i)
      bucket.longest_text =
          std::max(bucket.longest_text, static_cast<std::int64_t>(offset[i] - offset[i - 1]));
  }

  // Where HDF5 stores a clip. A chunk of a different size than the clip means a filter or damage.
  std::uint64_t ask(hid_t clips, std::int64_t index, std::size_t clip_bytes,
                    const std::string& where) {
    r_.alive();
    const hsize_t at[5] = {static_cast<hsize_t>(index), 0, 0, 0, 0};
    unsigned filters = 0;
    haddr_t address = HADDR_UNDEF;
    hsize_t size = 0;
    check(H5Dget_chunk_info_by_coord(clips, at, &filters, &address, &size) >= 0 &&
              address != HADDR_UNDEF && size == clip_bytes,
          where, fmt::format("has no data for clip {}", index));
    return address;
  }

  // Fills stored.offset and checks that every clip lies inside the file: a store truncated while it
  // was copied is detected here, not in the middle of a run.
  void find_clips(hid_t group, const std::string& where, const Bucket& bucket,
                  StoredBucket& stored) {
    const std::size_t clip_bytes = bucket.clip_bytes();
    const h5::Handle clips =
        r_.dataset(group, where, bucket.dtype == DType::u8 ? "frames" : "latents");
    const auto n = static_cast<std::size_t>(bucket.clips);
    bool known = false;
    if (bucket.clips > ask_for_each && r_.has(group, "offset")) {
      stored.offset = r_.table<std::uint64_t>(group, where, "offset", n);
      known = true;
      for (std::int64_t i = 0; i < spot_checks && known; ++i) {
        const std::int64_t clip = (bucket.clips - 1) * i / (spot_checks - 1);
        known = ask(clips, clip, clip_bytes, where) == stored.offset[clip];
      }
      if (!known)
        // The result is right either way, but the user should know why the job starts slowly.
        warnings_.push_back(
            fmt::format("clip store {}: {} has stale offsets (was it repacked?); asking HDF5 for "
                        "the place of each of its {} clips, which takes longer",
                        r_.path(), where, bucket.clips));
    }
    stored.offset.resize(n);
    for (std::int64_t i = 0; i < bucket.clips; ++i) {
      std::uint64_t& offset = stored.offset[i];
      if (!known) offset = ask(clips, i, clip_bytes, where);
      check(offset <= r_.bytes() && clip_bytes <= r_.bytes() - offset, where,
            fmt::format("clip {} ends at byte {} of a file of {}: truncated", i,
                        offset + clip_bytes, r_.bytes()));
    }
  }

  StoreReader& r_;
  std::int64_t version_;
  std::vector<std::string>& warnings_;
};

// The buckets' names, sorted: sample ids count clips in this order, so it depends on the names
// alone.
std::vector<std::string> bucket_names(const StoreReader& r) {
  h5::Handle group(H5Gopen2(r.file(), "clips", H5P_DEFAULT), H5Gclose);
  r.check(group.valid(), "/clips", "is not a group");
  std::vector<std::string> found;
  const auto add = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
    static_cast<std::vector<std::string>*>(out)->emplace_back(name);
    return 0;
  };
  r.check(H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, add, &found) >= 0, "/clips",
          "cannot be listed");
  r.check(!found.empty(), "/clips", "holds no bucket");
  return found;
}

}  // namespace

std::uint64_t hash_of_tables(const Bucket& bucket, const StoredBucket& stored) {
  ClipHash hash;
  const auto add = [&hash](const void* from, std::size_t bytes) {
    hash.update(static_cast<const std::byte*>(from), bytes);
  };
  const auto number = [&add](auto value) { add(&value, sizeof value); };
  const auto field = [&]<class T>(const T& value) {
    if constexpr (std::is_same_v<T, DType> || std::is_same_v<T, bool>) {
      number(static_cast<std::uint64_t>(value));
    } else if constexpr (std::is_same_v<T, std::vector<ClipInfo>>) {
      for (const ClipInfo& info : value) {
        number(info.fps);
        for (const std::string& text : {info.source, info.text}) {
          number(static_cast<std::uint64_t>(text.size()));
          add(text.data(), text.size());
        }
      }
    } else if constexpr (std::is_arithmetic_v<T>) {
      number(value);
    } else {
      number(static_cast<std::uint64_t>(value.size()));
      add(value.data(), value.size() * sizeof(typename T::value_type));
    }
  };
  each_hashed_field(field, bucket, stored);
  return hash.digest();
}

std::string content_id_of(std::span<const Bucket> buckets, std::span<const StoredBucket> stored) {
  std::string text;
  for (std::size_t b = 0; b < buckets.size(); ++b)
    text += fmt::format("{:016x}", hash_of_tables(buckets[b], stored[b]));
  return to_hex(hash128(text));
}

void read_clip_facts(StoreReader& r, StoreFacts& facts) {
  const h5::Handle top = r.top();
  WEFT_CHECK(H5Aexists(top, "schema_version") > 0 && r.has(r.file(), "clips"), Exit::data,
             "data.path must be a file that `weft ingest` made",
             "{} is an HDF5 file, but no clip store", r.path());
  const std::int64_t version = r.attribute(top, "/", "schema_version");
  r.check(version >= oldest_clip_store_version && version <= clip_store_version, "",
          fmt::format("has schema version {}, this weft reads {} to {}", version,
                      oldest_clip_store_version, clip_store_version));
  if (H5Aexists(top, "made_by") > 0) facts.made_by = r.text_attribute(top, "/", "made_by");
  BucketReader reader(r, version, facts.warnings);
  for (const std::string& name : bucket_names(r))
    reader.read(name, facts.buckets.emplace_back(), facts.stored.emplace_back());
}

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
    return at(bucket, index).info[index];
  }

  std::string content_id() const override { return content_id_of(buckets_, stored_); }

  void read(int bucket, std::int64_t index, std::span<std::byte> out) const override {
    const StoredBucket& stored = at(bucket, index);
    const auto clip = static_cast<std::size_t>(index);
    const Bucket& b = buckets_[bucket];
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
    const Bucket& b = buckets_[bucket];
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
    WEFT_ASSERT(index >= 0 && index < buckets_[bucket].clips);
    return stored_[bucket];
  }

  // Reads a clip's bytes, or those of its caption's features (`what`), from one place in the file.
  void read_bytes(const char* what, const Bucket& b, std::int64_t index, std::uint64_t offset,
                  std::uint64_t xxh3, std::span<std::byte> out) const {
    const std::uint64_t found =
        file_.read(fmt::format("{} {} of bucket {}", what, index, b.name), offset, out, verify_);
    if (!verify_) return;
    if (found == xxh3) return;
    const auto& stored = stored_[&b - buckets_.data()];
    throw DamagedClip(
        Exit::data,
        fmt::format("{} {} of bucket {} in {} is damaged: XXH3 is {:016x}, expected {:016x} ({})",
                    what, index, b.name, file_.path(), found, xxh3, stored.info[index].source),
        file_.damage_hint() + "; or let data.max_damaged skip such clips", __FILE__, __LINE__);
  }

  // Written only by the constructor, so reading needs no lock.
  StoreFile file_;
  bool verify_;
  std::vector<Bucket> buckets_;
  std::vector<StoredBucket> stored_;
};

}  // namespace

bool is_hdf5(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // it may be a pipe
  if (fd < 0) return false;
  char begin[8] = {};
  const bool same = pread(fd, begin, 8, 0) == 8 && std::memcmp(begin, h5_magic, 8) == 0;
  close(fd);
  return same;
}

void warn_of_replacing(const std::string& path) {
  std::error_code none;
  if (log::rank() == 0 && std::filesystem::exists(path, none))
    log::warn("{} is there already: the new one replaces it once it is complete", path);
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
  try {
    return read_store(path).made_by;
  } catch (const Error& e) {
    if (e.code() != Exit::data) throw;
    log::warn("{}", e.what());
    return "";
  }
}

std::unique_ptr<ClipSource> open_clip_store(const std::string& path, bool verify) {
  StoreFile file(path);
  WEFT_CHECK(!file.facts().holds_images, Exit::data, "give a store that was cut from videos",
             "{} holds labelled images, not clips", path);
  return std::make_unique<ClipStore>(std::move(file), verify);
}

namespace {

std::unique_ptr<ClipSource> open_one(const std::string& path, const DataDeck& data,
                                     const MediaDeck& limits) {
  if (is_synthetic(path)) return make_synthetic_source(path.substr(synthetic_prefix.size()));
  if (is_shapes(path)) return make_image_source(open_labelled_images(path, data.verify), data);
  if (is_text_list(path)) return make_text_source(open_text_images(path, limits), data);
  StoreFile file(path);
  if (file.facts().holds_images)
    return make_image_source(make_image_store(std::move(file), data.verify), data);
  return std::make_unique<ClipStore>(std::move(file), data.verify);
}

bool is_same_store(const std::string& one, const std::string& other) {
  std::error_code not_files;
  return one == other || std::filesystem::equivalent(one, other, not_files);
}

}  // namespace

std::string encoder_in(const std::string& text) {
  const std::size_t at = text.find(encoder_mark);
  return at == text.npos ? "" : text.substr(at, text.find('\n', at) - at);
}

std::string checkpoint_in(const std::string& text) {
  const std::string_view name = "manifest.json ";
  const std::size_t at = text.find(name);
  if (at == text.npos) return "";
  std::istringstream in(text.substr(at + name.size()));
  std::string size, time, step, kind;
  in >> size >> time >> step >> kind;
  return fmt::format("{} {} {}", size, step, kind);
}

void check_encoders(const std::vector<std::string>& paths) {
  struct Known {
    std::string value, store;
  } texts, clips;
  const auto differs = [](Known& first, const std::string& value, const std::string& store) {
    if (first.value.empty()) first = {value, store};
    return !value.empty() && value != first.value;
  };
  for (const std::string& path : log::rank() == 0 ? paths : std::vector<std::string>()) {
    const std::string made_by = stored_made_by(path);
    WEFT_CHECK(!differs(texts, encoder_in(made_by), path), Exit::data,
               "encode all stores with one tokenizer and one t5.weights",
               "the captions of {} and {} were encoded by different text encoders", texts.store,
               path);
    WEFT_CHECK(!differs(clips, checkpoint_in(made_by), path), Exit::data,
               "encode all stores with one checkpoint of the VAE",
               "the clips of {} and {} were encoded by different checkpoints", clips.store, path);
  }
}

std::vector<std::string> captions_by_id(const ClipSource& source) {
  std::vector<std::string> captions;
  for (int b = 0; b < std::ssize(source.buckets()); ++b) {
    check_holds_clips(source.buckets()[b]);
    for (std::int64_t i = 0; i < source.buckets()[b].clips; ++i) {
      const auto id = static_cast<std::size_t>(source.sample_id(b, i));
      if (captions.size() <= id) captions.resize(id + 1);
      captions[id] = source.info(b, i).text;
    }
  }
  return captions;
}

std::unique_ptr<ClipSource> open_clip_source(const DataDeck& data, const MediaDeck& limits) {
  const std::vector<std::string> paths = data.all_paths();
  const auto prefix_of = [&](std::size_t i) {
    return data.prompt_prefixes.empty() ? std::string() : data.prompt_prefixes.at(i);
  };
  if (paths.size() == 1 && data.keep.empty() && prefix_of(0).empty())
    return open_one(paths.front(), data, limits);
  if (paths.size() > 1) check_encoders(paths);
  std::vector<MixedStore> stores;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const double weight = data.weights.empty() ? 0 : data.weights.at(i);
    const auto same = std::ranges::find_if(
        stores, [&](const MixedStore& s) { return is_same_store(s.name, paths[i]); });
    if (same == stores.end()) {
      stores.push_back({paths[i], open_one(paths[i], data, limits), weight, 1, prefix_of(i)});
      continue;
    }
    // One store, so that its passes are one too: no clip comes twice before all others have come.
    WEFT_CHECK(same->prefix == prefix_of(i), Exit::usage,
               "give the store one prefix wherever data.path names it",
               "data.path names {} twice, with different data.prompt_prefixes", paths[i]);
    same->weight += weight;
    same->times += 1;
  }
  return mix_stores(std::move(stores), !data.weights.empty(), data);
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
  if (file.facts().holds_images) return describe_image_store(std::move(file));
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
