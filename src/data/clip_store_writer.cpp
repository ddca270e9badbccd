#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

#include "core/error.h"
#include "core/hash.h"
#include "data/clip_store.h"
#include "data/hdf5.h"
#include "data/store_file.h"

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

}  // namespace

struct ClipStoreWriter::State {
  explicit State(const std::string& path) : file(path, "clip store", true) {}

  StoreWriter file;  // outlives all handles
  h5::Handle clips;  // the group
  std::deque<OpenBucket> buckets;

  // Asking for offsets is quadratic in HDF5 1.10 (half a second for 10,000 clips): done once here
  // instead of at every opening.
  void find_clips(OpenBucket& b) {
    std::vector<hsize_t> at(b.dims.size(), 0);
    for (at[0] = b.stored.offset.size(); at[0] < b.dims[0]; ++at[0]) {
      unsigned filters = 0;
      haddr_t address = 0;
      hsize_t size = 0;
      file.check(H5Dget_chunk_info_by_coord(b.clips, at.data(), &filters, &address, &size) >= 0,
                 "offset");
      b.stored.offset.push_back(address);
    }
  }

  // Makes room for one more clip; returns its number.
  hsize_t extend(OpenBucket& b) {
    const hsize_t index = b.dims[0]++;
    file.check(H5Dset_extent(b.clips, b.dims.data()) >= 0, "extend bucket " + b.bucket.name);
    return index;
  }

  void write_tables(OpenBucket& b) {
    find_clips(b);
    std::vector<float> fps;
    PackedTexts sources, captions;
    for (const ClipInfo& info : b.stored.info) {
      fps.push_back(info.fps);
      sources.add(info.source);
      captions.add(info.text);
    }
    file.table<float>(b.group, "fps", fps);
    file.table<std::uint64_t>(b.group, "xxh3", b.stored.xxh3);
    file.table<std::uint64_t>(b.group, "offset", b.stored.offset);
    file.texts(b.group, "sources", sources);
    file.texts(b.group, "captions", captions);
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
    file.attribute(b.group, "tables_xxh3",
                   static_cast<std::int64_t>(hash_of_tables(b.bucket, b.stored)));
    if (b.bucket.text_channels == 0) return;
    file.table<std::uint64_t>(b.group, "text_offset", b.stored.text_offset);
    file.table<std::uint64_t>(b.group, "text_xxh3", b.stored.text_xxh3);
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
    const h5::Handle d =
        file.new_dataset(b.group, "text_features", type, dims, StoreWriter::Fill::none);
    const hsize_t piece = std::max<hsize_t>(1, (hsize_t{4} << 20) / b.text_row());
    std::vector<std::byte> buffer(std::min(piece, rows) * b.text_row());
    for (hsize_t at = 0; at < rows; at += piece) {
      const hsize_t count[2] = {std::min(piece, rows - at), channels}, from[2] = {at, 0};
      const std::size_t bytes = count[0] * b.text_row();
      WEFT_CHECK(pread(b.spool, buffer.data(), bytes, static_cast<off_t>(at * b.text_row())) ==
                     static_cast<ssize_t>(bytes),
                 Exit::data, "check the disk", "cannot read {} back: {}", b.spool_path,
                 std::strerror(errno));
      file.write_part(d, "text_features", type, from, count, buffer.data());
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

ClipStoreWriter::ClipStoreWriter(const std::string& path, const std::string& made_by) {
  const h5::QuietErrors quiet;
  state_ = std::make_unique<State>(path);
  StoreWriter& file = state_->file;
  state_->clips = file.new_group(file.file(), "clips");
  const h5::Handle top = file.top();
  file.attribute(top, "schema_version", clip_store_version);
  file.attribute(top, "format", "weft clips");
  if (!made_by.empty()) file.attribute(top, "made_by", made_by);
}

ClipStoreWriter::~ClipStoreWriter() {
  const h5::QuietErrors quiet;
  state_.reset();
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
  b.group = s.file.new_group(s.clips, bucket.name);
  s.file.attribute(b.group, "pixel_frames", bucket.pixel_frames);
  s.file.attribute(b.group, "pixel_height", bucket.pixel_height);
  s.file.attribute(b.group, "pixel_width", bucket.pixel_width);
  if (!pixels) s.file.attribute(b.group, "kind", bucket.moments ? "moments" : "latents");
  if (!bucket.scale.empty()) {
    s.file.attribute(b.group, "scale", bucket.scale);
    s.file.attribute(b.group, "shift", bucket.shift);
  }
  if (bucket.text_channels > 0) {
    b.spool_path = fmt::format("{}.text{}", s.file.temporary(), s.buckets.size() - 1);
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
  H5Pset_fill_time(how, H5D_FILL_TIME_NEVER);    // every chunk is written whole
  H5Pset_alloc_time(how, H5D_ALLOC_TIME_EARLY);  // a clip has its place before its bytes come
  b.clips = {H5Dcreate2(b.group, pixels ? "frames" : "latents", type, space, H5P_DEFAULT, how,
                        H5P_DEFAULT),
             H5Dclose};
  s.file.check(b.clips.valid(), "create the clips of bucket " + bucket.name);
  return static_cast<int>(s.buckets.size()) - 1;
}

std::uint64_t ClipStoreWriter::append(int bucket, std::span<const std::byte> clip,
                                      const ClipInfo& info, std::span<const std::byte> text) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  OpenBucket& b = s.buckets.at(static_cast<std::size_t>(bucket));
  WEFT_ASSERT(clip.size() == b.bucket.clip_bytes());
  WEFT_ASSERT(text.empty() || (b.bucket.text_channels > 0 && text.size() % b.text_row() == 0));
  std::vector<hsize_t> at(b.dims.size(), 0);
  at[0] = s.extend(b);
  // Straight to the file: no conversion, no chunk cache.
  s.file.check(H5Dwrite_chunk(b.clips, H5P_DEFAULT, 0, at.data(), clip.size(), clip.data()) >= 0,
               "write a clip of bucket " + b.bucket.name);
  s.file.start_writeback();
  b.stored.info.push_back(info);
  ClipHash hash;
  hash.update(clip.data(), clip.size());
  b.stored.xxh3.push_back(hash.digest());
  if (b.bucket.text_channels > 0) s.spool_text(b, text);
  return b.stored.xxh3.back();
}

void ClipStoreWriter::reserve(int bucket, const ClipInfo& info, std::uint64_t xxh3) {
  const h5::QuietErrors quiet;
  OpenBucket& b = state_->buckets.at(static_cast<std::size_t>(bucket));
  WEFT_ASSERT(b.bucket.text_channels == 0);
  state_->extend(b);
  b.stored.info.push_back(info);
  b.stored.xxh3.push_back(xxh3);
}

const std::vector<std::uint64_t>& ClipStoreWriter::offsets(int bucket) {
  const h5::QuietErrors quiet;
  OpenBucket& b = state_->buckets.at(static_cast<std::size_t>(bucket));
  state_->find_clips(b);
  return b.stored.offset;
}

const std::string& ClipStoreWriter::temporary() const { return state_->file.temporary(); }

void ClipStoreWriter::commit() {
  State& s = *state_;
  const h5::QuietErrors quiet;
  for (OpenBucket& b : s.buckets) {
    s.write_tables(b);
    s.file.check(b.clips.close_now() && b.group.close_now(), "close bucket " + b.bucket.name);
  }
  s.file.check(s.clips.close_now(), "close /clips");
  s.file.commit();
}

}  // namespace weft
