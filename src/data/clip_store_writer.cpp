#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "data/clip_store.h"
#include "data/clip_store_open.h"
#include "data/hdf5.h"

namespace weft {
namespace {

struct OpenBucket {
  Bucket bucket;
  h5::Handle group, clips;
  std::vector<hsize_t> dims;  // of the dataset; dims[0] counts the clips so far
  StoredBucket stored;
  // Text features are spooled to a separate file: their number of rows is known only at the end.
  std::string spool_path;
  int spool = -1;

  OpenBucket() = default;
  OpenBucket(const OpenBucket&) = delete;
  OpenBucket& operator=(const OpenBucket&) = delete;
  ~OpenBucket() {
    if (spool >= 0) close(spool);
    if (!spool_path.empty()) unlink(spool_path.c_str());
  }
  std::size_t text_row() const {
    return static_cast<std::size_t>(bucket.text_channels) * size_of(bucket.text_dtype);
  }
};

h5::Handle new_group(hid_t where, const std::string& name) {
  const h5::Handle how(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
  H5Pset_obj_track_times(how, false);
  return {H5Gcreate2(where, name.c_str(), H5P_DEFAULT, how, H5P_DEFAULT), H5Gclose};
}

// A rename is safe only once the file's bytes are on disk before its new name is.
void sync(const std::filesystem::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool ok = fd >= 0 && fsync(fd) == 0;
  const std::string reason = std::strerror(errno);
  if (fd >= 0) close(fd);
  WEFT_CHECK(ok, Exit::data, "check the disk", "cannot flush {} to the disk: {}", path.string(),
             reason);
}

}  // namespace

struct ClipStoreWriter::State {
  std::string path, temporary;
  h5::Handle file, root;
  std::deque<OpenBucket> buckets;
  bool committed = false;

  // All failing HDF5 calls of the writer are reported here.
  void check(bool ok, const std::string& what) const {
    if (ok) return;
    const std::string reason = h5::last_error();
    throw Error(Exit::data,
                fmt::format("cannot write clip store {}: {}: {}", temporary, what, reason),
                h5::hint_for(reason, temporary, "is the disk full, or the directory not writable?"),
                __FILE__, __LINE__);
  }

  void write_attribute(hid_t where, const char* name, std::int64_t value) {
    const h5::Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const h5::Handle a(H5Acreate2(where, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    check(a.valid() && H5Awrite(a, H5T_NATIVE_INT64, &value) >= 0, name);
  }

  void write_attribute(hid_t where, const char* name, const std::string& text) {
    const h5::Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const h5::Handle type = h5::string_type(text.size() + 1);
    const h5::Handle a(H5Acreate2(where, name, type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
    check(a.valid() && H5Awrite(a, type, text.c_str()) >= 0, name);
  }

  void write_attribute(hid_t where, const char* name, const std::vector<float>& values) {
    const hsize_t n = values.size();
    const h5::Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
    const h5::Handle a(H5Acreate2(where, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    check(a.valid() && H5Awrite(a, H5T_NATIVE_FLOAT, values.data()) >= 0, name);
  }

  // `n` values; `memory` is how they lie in memory.
  void write_table(const OpenBucket& b, const char* name, hid_t type, hid_t memory,
                   const void* values, hsize_t n) {
    const h5::Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
    const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(how, false);
    const h5::Handle d(H5Dcreate2(b.group, name, type, space, H5P_DEFAULT, how, H5P_DEFAULT),
                       H5Dclose);
    check(d.valid() && H5Dwrite(d, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0, name);
  }

  void write_table(const OpenBucket& b, const char* name,
                   const std::vector<std::uint64_t>& values) {
    write_table(b, name, H5T_STD_U64LE, H5T_NATIVE_UINT64, values.data(), values.size());
  }

  // `of` picks a text of each clip.
  template <class F>
  void write_texts(const OpenBucket& b, const std::string& name, F of) {
    std::string all;
    std::vector<std::uint64_t> ends;
    for (const ClipInfo& info : b.stored.info) {
      all += of(info);
      ends.push_back(all.size());
    }
    write_table(b, name.c_str(), H5T_STD_U8LE, H5T_NATIVE_UINT8, all.data(), all.size());
    write_table(b, (name + "_end").c_str(), ends);
  }

  void write_tables(OpenBucket& b) {
    // Asking for offsets is quadratic in HDF5 1.10 (half a second for 10,000 clips): done once here
    // instead of at every opening.
    std::vector<hsize_t> at(b.dims.size(), 0);
    for (; at[0] < b.dims[0]; ++at[0]) {
      unsigned filters = 0;
      haddr_t address = 0;
      hsize_t size = 0;
      check(H5Dget_chunk_info_by_coord(b.clips, at.data(), &filters, &address, &size) >= 0,
            "offset");
      b.stored.offset.push_back(address);
    }
    std::vector<float> fps;
    for (const ClipInfo& info : b.stored.info) fps.push_back(info.fps);
    write_table(b, "fps", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, fps.data(), fps.size());
    write_table(b, "xxh3", b.stored.xxh3);
    write_table(b, "offset", b.stored.offset);
    write_texts(b, "sources", [](const ClipInfo& info) { return info.source; });
    write_texts(b, "captions", [](const ClipInfo& info) { return info.text; });
    b.bucket.clips = std::ssize(b.stored.info);
    b.bucket.longest_text = 0;
    // Clear the fields that this bucket does not store: a reader leaves them at their defaults when
    // it computes the hash.
    if (b.bucket.dtype == DType::u8) {
      b.bucket.moments = false;
      b.bucket.scale.clear(), b.bucket.shift.clear();
    }
    if (b.bucket.text_channels == 0) {
      b.stored.text_offset.clear();
      b.bucket.text_dtype = Bucket().text_dtype;
    }
    const auto& rows = b.stored.text_offset;
    for (std::size_t i = 1; i < rows.size(); ++i)
      b.bucket.longest_text =
          std::max(b.bucket.longest_text, static_cast<std::int64_t>(rows[i] - rows[i - 1]));
    write_attribute(b.group, "tables_xxh3",
                    static_cast<std::int64_t>(hash_of_tables(b.bucket, b.stored)));
    if (b.bucket.text_channels == 0) return;
    write_table(b, "text_offset", b.stored.text_offset);
    write_table(b, "text_xxh3", b.stored.text_xxh3);
    copy_text(b);
  }

  // Copies the spool into one contiguous dataset, so that a row's place follows from its number.
  void copy_text(const OpenBucket& b) {
    const auto channels = static_cast<hsize_t>(b.bucket.text_channels);
    const hsize_t rows = b.stored.text_offset.back(), dims[2] = {rows, channels};
    const h5::Handle half = h5::half_type();
    const hid_t type = b.bucket.text_dtype == DType::f32    ? H5T_IEEE_F32LE
                       : b.bucket.text_dtype == DType::bf16 ? H5T_STD_U16LE
                                                            : static_cast<hid_t>(half);
    const h5::Handle space(H5Screate_simple(2, dims, nullptr), H5Sclose);
    const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(how, false);
    H5Pset_layout(how, H5D_CONTIGUOUS);
    H5Pset_fill_time(how, H5D_FILL_TIME_NEVER);
    const h5::Handle d(
        H5Dcreate2(b.group, "text_features", type, space, H5P_DEFAULT, how, H5P_DEFAULT), H5Dclose);
    check(d.valid(), "text_features");
    const hsize_t piece = std::max<hsize_t>(1, (hsize_t{4} << 20) / b.text_row());
    std::vector<std::byte> buffer(std::min(piece, rows) * b.text_row());
    for (hsize_t at = 0; at < rows; at += piece) {
      const hsize_t count[2] = {std::min(piece, rows - at), channels}, from[2] = {at, 0};
      const std::size_t bytes = count[0] * b.text_row();
      WEFT_CHECK(pread(b.spool, buffer.data(), bytes, static_cast<off_t>(at * b.text_row())) ==
                     static_cast<ssize_t>(bytes),
                 Exit::data, "check the disk", "cannot read {} back: {}", b.spool_path,
                 std::strerror(errno));
      const h5::Handle memory(H5Screate_simple(2, count, nullptr), H5Sclose);
      const h5::Handle file_space(H5Dget_space(d), H5Sclose);
      check(H5Sselect_hyperslab(file_space, H5S_SELECT_SET, from, nullptr, count, nullptr) >= 0 &&
                H5Dwrite(d, type, memory, file_space, H5P_DEFAULT, buffer.data()) >= 0,
            "text_features");
    }
  }

  void spool_text(OpenBucket& b, std::span<const std::byte> text) {
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t wrote = write(b.spool, text.data() + done, text.size() - done);
      if (wrote < 0 && errno == EINTR) continue;
      WEFT_CHECK(wrote > 0, Exit::data, "is the disk full?", "cannot write {}: {}", b.spool_path,
                 std::strerror(errno));
      done += static_cast<std::size_t>(wrote);
    }
    b.stored.text_offset.push_back(b.stored.text_offset.back() + text.size() / b.text_row());
    b.stored.text_xxh3.push_back(XXH3_64bits(text.data(), text.size()));
  }
};

ClipStoreWriter::ClipStoreWriter(const std::string& path, const std::string& made_by)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  s.path = path;
  s.temporary = path + ".tmp";
  std::error_code failed;
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty())
    std::filesystem::create_directories(folder, failed);
  WEFT_CHECK(!failed, Exit::data, "name a path in a folder that can be made", "cannot write {}: {}",
             path, failed.message());
  const h5::Handle access = h5::file_access();
  // Clips begin at multiples of 1 MiB, which suits parallel file systems; only those of 4 MiB and
  // more, so that at most a fifth of the file is padding.
  H5Pset_alignment(access, hsize_t{4} << 20, hsize_t{1} << 20);
  // The first HDF5 format with checksums over its structure; readable since HDF5 1.10 (2016).
  H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  const h5::Handle top_group(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_obj_track_times(top_group, false);  // the same clips make the same file, byte by byte
  unlink(s.temporary.c_str());               // what a killed job has left, or a link
  s.file = {H5Fcreate(s.temporary.c_str(), H5F_ACC_TRUNC, top_group, access), H5Fclose};
  s.check(s.file.valid(), "create");
  s.root = new_group(s.file, "clips");
  s.check(s.root.valid(), "create /clips");
  const h5::Handle top(H5Gopen2(s.file, "/", H5P_DEFAULT), H5Gclose);
  s.write_attribute(top, "schema_version", clip_store_version);
  s.write_attribute(top, "format", "weft clips");
  if (!made_by.empty()) s.write_attribute(top, "made_by", made_by);
}

ClipStoreWriter::~ClipStoreWriter() {
  if (state_->committed) return;
  const h5::QuietErrors quiet;
  const std::string temporary = state_->temporary;
  state_.reset();  // closes everything
  unlink(temporary.c_str());
}

int ClipStoreWriter::add_bucket(const Bucket& bucket) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  // HDF5 keeps a chunk's size in 32 bits.
  WEFT_CHECK(bucket.clip_bytes() > 0 && bucket.clip_bytes() < (std::size_t{1} << 32), Exit::usage,
             "choose fewer frames or a lower resolution",
             "a clip of bucket {} has {} bytes; a clip store holds clips of 1 byte to 4 GiB",
             bucket.name, bucket.clip_bytes());
  const auto size = [](std::int64_t n) { return static_cast<hsize_t>(n); };
  const bool pixels = bucket.dtype == DType::u8;
  WEFT_ASSERT(pixels ? bucket.channels == 3
                     : bucket.dtype == DType::f32 || bucket.dtype == DType::f16);
  WEFT_ASSERT(bucket.scale.size() == bucket.shift.size() &&
              (bucket.scale.empty() ? !bucket.moments
                                    : std::ssize(bucket.scale) == bucket.model_channels()));
  OpenBucket& b = s.buckets.emplace_back();
  b.bucket = bucket;
  b.stored.text_offset = {0};
  if (pixels)
    b.dims = {0, size(bucket.frames), size(bucket.height), size(bucket.width), 3};
  else
    b.dims = {0, size(bucket.channels), size(bucket.frames), size(bucket.height),
              size(bucket.width)};
  b.group = new_group(s.root, bucket.name);
  s.check(b.group.valid(), "create bucket " + bucket.name);
  s.write_attribute(b.group, "pixel_frames", bucket.pixel_frames);
  s.write_attribute(b.group, "pixel_height", bucket.pixel_height);
  s.write_attribute(b.group, "pixel_width", bucket.pixel_width);
  if (!pixels) s.write_attribute(b.group, "kind", bucket.moments ? "moments" : "latents");
  if (!bucket.scale.empty()) {
    s.write_attribute(b.group, "scale", bucket.scale);
    s.write_attribute(b.group, "shift", bucket.shift);
  }
  if (bucket.text_channels > 0) {
    b.spool_path = fmt::format("{}.text{}", s.temporary, s.buckets.size() - 1);
    unlink(b.spool_path.c_str());  // what a killed job has left, or a link
    b.spool = open(b.spool_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    WEFT_CHECK(b.spool >= 0, Exit::data, "check the directory's permissions", "cannot make {}: {}",
               b.spool_path, std::strerror(errno));
  }

  std::vector<hsize_t> chunk = b.dims, limit = b.dims;
  chunk[0] = 1;
  limit[0] = H5S_UNLIMITED;
  const h5::Handle half = h5::half_type();
  const hid_t type = pixels                       ? H5T_STD_U8LE
                     : bucket.dtype == DType::f32 ? H5T_IEEE_F32LE
                                                  : static_cast<hid_t>(half);
  const h5::Handle space(
      H5Screate_simple(static_cast<int>(b.dims.size()), b.dims.data(), limit.data()), H5Sclose);
  const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(how, false);
  H5Pset_chunk(how, static_cast<int>(chunk.size()), chunk.data());
  H5Pset_fill_time(how, H5D_FILL_TIME_NEVER);  // every chunk is written whole
  b.clips = {H5Dcreate2(b.group, pixels ? "frames" : "latents", type, space, H5P_DEFAULT, how,
                        H5P_DEFAULT),
             H5Dclose};
  s.check(b.clips.valid(), "create the clips of bucket " + bucket.name);
  return static_cast<int>(s.buckets.size()) - 1;
}

void ClipStoreWriter::append(int bucket, std::span<const std::byte> clip, const ClipInfo& info,
                             std::span<const std::byte> text) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  OpenBucket& b = s.buckets.at(static_cast<std::size_t>(bucket));
  WEFT_ASSERT(clip.size() == b.bucket.clip_bytes());
  WEFT_ASSERT(text.empty() || (b.bucket.text_channels > 0 && text.size() % b.text_row() == 0));
  std::vector<hsize_t> at(b.dims.size(), 0);
  at[0] = b.dims[0]++;
  s.check(H5Dset_extent(b.clips, b.dims.data()) >= 0, "extend bucket " + b.bucket.name);
  // Straight to the file: no conversion, no chunk cache.
  s.check(H5Dwrite_chunk(b.clips, H5P_DEFAULT, 0, at.data(), clip.size(), clip.data()) >= 0,
          "write a clip of bucket " + b.bucket.name);
  b.stored.info.push_back(info);
  b.stored.xxh3.push_back(XXH3_64bits(clip.data(), clip.size()));
  if (b.bucket.text_channels > 0) s.spool_text(b, text);
}

void ClipStoreWriter::commit() {
  State& s = *state_;
  WEFT_ASSERT(!s.committed);
  {
    const h5::QuietErrors quiet;
    for (OpenBucket& b : s.buckets) {
      s.write_tables(b);
      s.check(b.clips.close_now() && b.group.close_now(), "close bucket " + b.bucket.name);
    }
    s.check(s.root.close_now() && s.file.close_now(), "close");
  }
  sync(s.temporary);
  rename_file(s.temporary, s.path, Exit::data);
  s.committed = true;
  // Sync the directory too: the rename itself must survive a power cut.
  const auto directory = std::filesystem::absolute(s.path).parent_path();
  sync(directory);
}

}  // namespace weft
