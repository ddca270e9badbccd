// Opening a clip store. The file may come from anywhere and may be damaged: sizes are compared with
// the file's before they are used, and every fault ends in one message that names the bucket.
#include "data/clip_store_open.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/hash.h"
#include "data/clip_store.h"
#include "data/hdf5.h"
#include "data/images/image_store_open.h"

namespace weft {
namespace {

constexpr const char* remake = "make the store again with `weft ingest` or `weft encode`";

// Buckets of up to this many clips ask HDF5 for the place of each one (quadratic in HDF5 1.10).
constexpr std::int64_t ask_for_each = 2048;
// In larger buckets the stored offsets are compared with HDF5's at this many clips, the first and
// the last included.
constexpr std::int64_t spot_checks = 64;

// Everything that opening does, with the file's name at hand for its messages.
class Opener {
 public:
  Opener(const std::string& path, std::uint64_t bytes, const std::function<void()>& alive)
      : path_(path), bytes_(bytes), alive_(alive) {
    const h5::Handle access = h5::file_access();  // its end would clear the reason of a failure
    file_ = {H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), H5Fclose};
    if (!file_.valid()) {
      const std::string reason = h5::last_error();
      const bool cut = reason.find("truncated") != std::string::npos;
      throw Error(Exit::data,
                  fmt::format("clip store {} {}: {}", path,
                              cut ? "is truncated" : "cannot be opened", reason),
                  cut ? "copy it again, or make it again with `weft ingest`"
                      : h5::hint_for(reason, path, remake),
                  __FILE__, __LINE__);
    }
    const h5::Handle top(H5Gopen2(file_, "/", H5P_DEFAULT), H5Gclose);
    WEFT_CHECK(H5Aexists(top, "schema_version") > 0 && H5Lexists(file_, "clips", H5P_DEFAULT) > 0,
               Exit::data, "data.path must be a file that `weft ingest` made",
               "{} is an HDF5 file, but no clip store", path);
    version_ = attribute(top, "/", "schema_version");
    WEFT_CHECK(version_ >= oldest_clip_store_version && version_ <= clip_store_version, Exit::data,
               remake, "clip store {} has schema version {}, this weft reads {} to {}", path,
               version_, oldest_clip_store_version, clip_store_version);
  }

  std::string made_by() {
    const h5::Handle top(H5Gopen2(file_, "/", H5P_DEFAULT), H5Gclose);
    return H5Aexists(top, "made_by") > 0 ? text_attribute(top, "/", "made_by") : "";
  }

  // The buckets' names, sorted: sample ids count clips in this order, so it depends on the names
  // alone.
  std::vector<std::string> names() {
    h5::Handle group(H5Gopen2(file_, "clips", H5P_DEFAULT), H5Gclose);
    check(group.valid(), "/clips", "is not a group");
    std::vector<std::string> found;
    const auto add = [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
      static_cast<std::vector<std::string>*>(out)->emplace_back(name);
      return 0;
    };
    check(H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, add, &found) >= 0, "/clips",
          "cannot be listed");
    check(!found.empty(), "/clips", "holds no bucket");
    return found;
  }

  // Reads the shape first, then the tables, whose length follows from it.
  void read(const std::string& name, Bucket& bucket, StoredBucket& stored) {
    const std::string where = "bucket " + name;
    h5::Handle group(H5Gopen2(file_, ("clips/" + name).c_str(), H5P_DEFAULT), H5Gclose);
    check(group.valid(), where, "is not a group");
    bucket.name = name;
    bucket.pixel_frames = positive_attribute(group, where, "pixel_frames");
    bucket.pixel_height = positive_attribute(group, where, "pixel_height");
    bucket.pixel_width = positive_attribute(group, where, "pixel_width");
    read_shape(group, where, bucket);

    const auto n = static_cast<std::size_t>(bucket.clips);
    std::vector<float> fps(n);
    stored.xxh3.resize(n);
    read_table(group, where, "fps", H5T_FLOAT, H5T_NATIVE_FLOAT, n, fps.data());
    read_table(group, where, "xxh3", H5T_INTEGER, H5T_NATIVE_UINT64, n, stored.xxh3.data());
    const bool packed = version_ >= first_hashed_tables;
    auto source =
        packed ? read_texts(group, where, "sources", n) : read_strings(group, where, "source", n);
    auto text =
        packed ? read_texts(group, where, "captions", n) : read_strings(group, where, "text", n);
    for (std::size_t i = 0; i < n; ++i) {
      check(fps[i] > 0 && fps[i] < 1e6f, where, fmt::format("clip {} has fps {}", i, fps[i]));
      stored.info.push_back({fps[i], std::move(source[i]), std::move(text[i])});
    }
    find_clips(group, where, bucket, stored);
    if (has(group, "text_features")) {
      read_text_shape(group, where, bucket, stored);
      stored.text_xxh3.resize(n);
      read_table(group, where, "text_xxh3", H5T_INTEGER, H5T_NATIVE_UINT64, n,
                 stored.text_xxh3.data());
    }
    if (!packed) return;
    const auto want = static_cast<std::uint64_t>(attribute(group, where, "tables_xxh3"));
    const std::uint64_t found = hash_of_tables(bucket, stored);
    check(found == want, where,
          fmt::format("has damaged tables: their XXH3 is {:016x}, expected {:016x}", found, want));
  }

  std::vector<std::string> warnings;

 private:
  void check(bool ok, const std::string& where, const std::string& fault) const {
    WEFT_CHECK(ok, Exit::data, remake, "clip store {}: {} {}", path_, where, fault);
  }

  static bool has(hid_t group, const char* name) { return H5Lexists(group, name, H5P_DEFAULT) > 0; }

  std::int64_t attribute(hid_t object, const std::string& where, const char* name) {
    std::int64_t value = 0;
    const h5::Handle a(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
    check(a.valid(), where, fmt::format("has no attribute {}", name));
    const h5::Handle space(H5Aget_space(a), H5Sclose);
    const h5::Handle type(H5Aget_type(a), H5Tclose);
    check(H5Sget_simple_extent_npoints(space) == 1 && H5Tget_class(type) == H5T_INTEGER &&
              H5Aread(a, H5T_NATIVE_INT64, &value) >= 0,
          where, fmt::format("has an attribute {} that is not one whole number", name));
    return value;
  }
  std::int64_t positive_attribute(hid_t object, const std::string& where, const char* name) {
    const std::int64_t value = attribute(object, where, name);
    check(value > 0, where, fmt::format("has {} = {}", name, value));
    return value;
  }

  // The text has a fixed length, or a variable one as in version 2.
  std::string text_attribute(hid_t object, const std::string& where, const char* name) {
    const h5::Handle a(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
    const h5::Handle type(a.valid() ? H5Aget_type(a) : H5I_INVALID_HID, H5Tclose);
    const h5::Handle space(a.valid() ? H5Aget_space(a) : H5I_INVALID_HID, H5Sclose);
    check(type.valid() && H5Tget_class(type) == H5T_STRING &&
              H5Sget_simple_extent_npoints(space) == 1,
          where, fmt::format("has an attribute {} that is not one text", name));
    const auto refuse = [&](bool ok) {
      check(ok, where, fmt::format("has an unreadable attribute {}", name));
    };
    if (H5Tis_variable_str(type) > 0) {
      const h5::Handle memory = h5::string_type();
      H5Tset_cset(memory, H5Tget_cset(type));
      char* text = nullptr;
      refuse(H5Aread(a, memory, &text) >= 0);
      const std::string value = text == nullptr ? "" : text;
      H5free_memory(text);
      return value;
    }
    refuse(H5Tget_size(type) <= bytes_);
    std::string value(H5Tget_size(type), '\0');
    refuse(H5Aread(a, type, value.data()) >= 0);
    value.resize(std::min(value.size(), value.find('\0')));
    return value;
  }

  // `n` finite numbers; none if the attribute is missing.
  std::vector<float> float_attribute(hid_t object, const std::string& where, const char* name,
                                     std::int64_t n) {
    if (H5Aexists(object, name) <= 0) return {};
    std::vector<float> values(static_cast<std::size_t>(n));
    const h5::Handle a(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
    check(a.valid(), where, fmt::format("has an unreadable attribute {}", name));
    const h5::Handle space(H5Aget_space(a), H5Sclose);
    const h5::Handle type(H5Aget_type(a), H5Tclose);
    check(H5Sget_simple_extent_npoints(space) == n && H5Tget_class(type) == H5T_FLOAT &&
              H5Aread(a, H5T_NATIVE_FLOAT, values.data()) >= 0 &&
              std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }),
          where, fmt::format("has an attribute {} that is not {} finite numbers", name, n));
    return values;
  }

  // The kind of latents, and the VAE's constants.
  void read_kind(hid_t group, const std::string& where, Bucket& bucket) {
    if (H5Aexists(group, "kind") > 0) {
      const std::string kind = text_attribute(group, where, "kind");
      check(kind == "moments" || kind == "latents", where,
            fmt::format("holds \"{}\", and not latents or moments", kind));
      bucket.moments = kind == "moments";
    }
    check(!bucket.moments || bucket.channels % 2 == 0, where,
          fmt::format("has moments of {} channels, an odd number", bucket.channels));
    bucket.scale = float_attribute(group, where, "scale", bucket.model_channels());
    bucket.shift = float_attribute(group, where, "shift", bucket.model_channels());
    check(bucket.scale.empty() == bucket.shift.empty(), where,
          "has only one of the attributes scale and shift");
    check(!bucket.moments || !bucket.scale.empty(), where,
          "has moments, but no attributes scale and shift");
    for (const float s : bucket.scale) check(s > 0, where, fmt::format("has a scale of {}", s));
  }

  h5::Handle open_dataset(hid_t group, const std::string& where, const char* name) {
    check(H5Lexists(group, name, H5P_DEFAULT) > 0, where, fmt::format("has no dataset {}", name));
    h5::Handle d(H5Dopen2(group, name, H5P_DEFAULT), H5Dclose);
    check(d.valid(), where,
          fmt::format("has an unreadable dataset {}: {}", name, h5::last_error()));
    return d;
  }

  std::vector<hsize_t> dims_of(hid_t dataset) {
    const h5::Handle space(H5Dget_space(dataset), H5Sclose);
    const int rank = H5Sget_simple_extent_ndims(space);
    std::vector<hsize_t> dims(static_cast<std::size_t>(std::max(rank, 0)));
    if (rank > 0) H5Sget_simple_extent_dims(space, dims.data(), nullptr);
    return dims;
  }

  // Type and shape of the clips. No dimension is trusted before the file is found large enough for
  // it.
  void read_shape(hid_t group, const std::string& where, Bucket& bucket) {
    const bool pixels = H5Lexists(group, "frames", H5P_DEFAULT) > 0;
    const bool latents = H5Lexists(group, "latents", H5P_DEFAULT) > 0;
    check(pixels != latents, where,
          pixels ? "has both frames and latents" : "has no dataset frames or latents");
    const char* name = pixels ? "frames" : "latents";
    const h5::Handle clips = open_dataset(group, where, name);
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
    const auto dims = dims_of(clips);
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
    check(!__builtin_mul_overflow(clip_bytes, dims[0], &total) && total <= bytes_, where,
          fmt::format("claims {} clips of {} bytes, more than the file's {} bytes: damaged or "
                      "truncated",
                      dims[0], clip_bytes, bytes_));
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
    const h5::Handle rows = open_dataset(group, where, "text_features");
    const h5::Handle type(H5Dget_type(rows), H5Tclose);
    const h5::Handle half = h5::half_type();
    const bool f32 = H5Tequal(type, H5T_IEEE_F32LE) > 0, bf16 = H5Tequal(type, H5T_STD_U16LE) > 0;
    check(f32 || bf16 || H5Tequal(type, half) > 0, where,
          "has text_features of another type than little-endian float32, float16 or uint16 (bf16)");
    bucket.text_dtype = f32 ? DType::f32 : bf16 ? DType::bf16 : DType::f16;
    const auto dims = dims_of(rows);
    check(dims.size() == 2 && dims[1] > 0 && dims[1] < (hsize_t{1} << 24), where,
          "has text_features that are not [tokens, channels]");
    bucket.text_channels = static_cast<std::int64_t>(dims[1]);
    const std::uint64_t row = dims[1] * size_of(bucket.text_dtype);
    check(dims[0] <= bytes_ / row, where,
          fmt::format("claims {} rows of text_features, more than the file's {} bytes: damaged or "
                      "truncated",
                      dims[0], bytes_));
    const h5::Handle how(H5Dget_create_plist(rows), H5Pclose);
    check(H5Pget_layout(how) == H5D_CONTIGUOUS && H5Pget_external_count(how) == 0, where,
          "does not store text_features in one piece");
    // Without rows the dataset has no place in the file.
    if (dims[0] > 0) {
      const haddr_t begin = H5Dget_offset(rows);
      check(begin != HADDR_UNDEF && begin <= bytes_ && dims[0] * row <= bytes_ - begin, where,
            "has text_features beyond the end of the file: truncated");
      stored.text_begin = begin;
    }
    stored.text_offset.resize(static_cast<std::size_t>(bucket.clips) + 1);
    read_table(group, where, "text_offset", H5T_INTEGER, H5T_NATIVE_UINT64,
               stored.text_offset.size(), stored.text_offset.data());
    const auto& offset = stored.text_offset;
    check(offset.front() == 0 && offset.back() == dims[0] &&
              std::is_sorted(offset.begin(), offset.end()),
          where, "has a table text_offset that does not divide text_features among the clips");
    for (std::size_t i = 1; i < offset.size(); ++i)
      bucket.longest_text =
          std::max(bucket.longest_text, static_cast<std::int64_t>(offset[i] - offset[i - 1]));
  }

  // One value a clip into `out`, which holds n. The shape is compared before anything is read, so
  // that a table of another length cannot run over.
  void read_table(hid_t group, const std::string& where, const char* name, H5T_class_t kind,
                  hid_t memory, std::size_t n, void* out) {
    alive_();
    const h5::Handle d = open_dataset(group, where, name);
    const auto dims = dims_of(d);
    check(dims.size() == 1 && dims[0] == n, where,
          fmt::format("has a table {} that is not one value a clip", name));
    const h5::Handle type(H5Dget_type(d), H5Tclose);
    check(H5Tget_class(type) == kind, where, fmt::format("has a table {} of a wrong type", name));
    check(kind != H5T_STRING || H5Tis_variable_str(type) > 0, where,
          fmt::format("has a table {} that is not of variable-length strings", name));
    check(H5Dread(d, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, out) >= 0, where,
          fmt::format("has an unreadable table {}: {}", name, h5::last_error()));
  }

  std::vector<std::string> read_strings(hid_t group, const std::string& where, const char* name,
                                        std::size_t n) {
    // The file may hold ASCII or UTF-8: read as what it is.
    const h5::Handle d = open_dataset(group, where, name);
    const h5::Handle stored(H5Dget_type(d), H5Tclose);
    const h5::Handle type = h5::string_type();
    if (H5Tget_class(stored) == H5T_STRING) H5Tset_cset(type, H5Tget_cset(stored));
    std::vector<char*> pointers(n, nullptr);
    read_table(group, where, name, H5T_STRING, type, n, pointers.data());
    std::vector<std::string> out;
    for (const char* p : pointers) out.emplace_back(p == nullptr ? "" : p);
    const h5::Handle space(H5Dget_space(d), H5Sclose);
    H5Dvlen_reclaim(type, space, H5P_DEFAULT, pointers.data());
    return out;
  }

  // One text per clip, from one array of bytes and the position where each text ends.
  std::vector<std::string> read_texts(hid_t group, const std::string& where, const char* name,
                                      std::size_t n) {
    std::vector<std::uint64_t> ends(n);
    read_table(group, where, (std::string(name) + "_end").c_str(), H5T_INTEGER, H5T_NATIVE_UINT64,
               n, ends.data());
    check(std::is_sorted(ends.begin(), ends.end()) && ends.back() <= bytes_, where,
          fmt::format("has a table {}_end that does not divide {}", name, name));
    std::string all(ends.back(), '\0');
    read_table(group, where, name, H5T_INTEGER, H5T_NATIVE_UINT8, all.size(), all.data());
    std::vector<std::string> out;
    std::uint64_t begin = 0;
    for (const std::uint64_t end : ends) {
      out.push_back(all.substr(begin, end - begin));
      begin = end;
    }
    return out;
  }

  // Where HDF5 stores a clip. A chunk of a different size than the clip means a filter or damage.
  std::uint64_t ask(hid_t clips, std::int64_t index, std::size_t clip_bytes,
                    const std::string& where) {
    alive_();
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
        open_dataset(group, where, bucket.dtype == DType::u8 ? "frames" : "latents");
    stored.offset.resize(static_cast<std::size_t>(bucket.clips));
    bool known = false;
    if (bucket.clips > ask_for_each && H5Lexists(group, "offset", H5P_DEFAULT) > 0) {
      read_table(group, where, "offset", H5T_INTEGER, H5T_NATIVE_UINT64, stored.offset.size(),
                 stored.offset.data());
      known = true;
      for (std::int64_t i = 0; i < spot_checks && known; ++i) {
        const std::int64_t clip = (bucket.clips - 1) * i / (spot_checks - 1);
        known =
            ask(clips, clip, clip_bytes, where) == stored.offset[static_cast<std::size_t>(clip)];
      }
      if (!known)
        // The result is right either way, but the user should know why the job starts slowly.
        warnings.push_back(
            fmt::format("clip store {}: {} has stale offsets (was it repacked?); asking HDF5 for "
                        "the place of each of its {} clips, which takes longer",
                        path_, where, bucket.clips));
    }
    for (std::int64_t i = 0; i < bucket.clips; ++i) {
      std::uint64_t& offset = stored.offset[static_cast<std::size_t>(i)];
      if (!known) offset = ask(clips, i, clip_bytes, where);
      check(offset <= bytes_ && clip_bytes <= bytes_ - offset, where,
            fmt::format("clip {} ends at byte {} of a file of {}: truncated", i,
                        offset + clip_bytes, bytes_));
    }
  }

  std::string path_;
  std::uint64_t bytes_;
  std::function<void()> alive_;
  std::int64_t version_ = 0;
  h5::Handle file_;
};

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

StoreFacts open_checked(const std::string& path, std::uint64_t bytes,
                        const std::function<void()>& alive) {
  const h5::QuietErrors quiet;
  if (std::optional<StoreFacts> images = open_images_checked(path, bytes, alive)) return *images;
  Opener opener(path, bytes, alive);
  StoreFacts facts;
  facts.made_by = opener.made_by();
  for (const std::string& name : opener.names()) {
    facts.buckets.emplace_back();
    facts.stored.emplace_back();
    opener.read(name, facts.buckets.back(), facts.stored.back());
  }
  facts.warnings = std::move(opener.warnings);
  return facts;
}

}  // namespace weft
