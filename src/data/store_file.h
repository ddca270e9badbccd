// A store of clips or of labelled images, opened: its file, and the structure that HDF5 found in
// it.
//
// The structure is read in a process of its own. HDF5 trusts what it reads: a damaged file can
// crash it or keep it busy for ever, and then the child dies and not the rank. The rank receives
// the child's findings through a pipe and never calls HDF5 on a file that it reads; so nothing is
// read twice, and ranks need not agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/clip_source.h"

namespace weft {

class StoreReader;  // data/hdf5.h

// The exit code when SIGKILL ended one of the job's processes, as mpirun reports it: 128 + 9.
inline constexpr Exit exit_killed{137};

// What is stored of the clips of a bucket, in addition to Bucket; all of length `clips`.
struct StoredBucket {
  std::vector<std::uint64_t> offset;  // of the clip's first byte in the file
  std::vector<std::uint64_t> xxh3;    // of the clip's bytes
  std::vector<ClipInfo> info;
  // The text features, if the bucket has any: rows [offset i, offset i+1), the first row at
  // `text_begin`.
  std::vector<std::uint64_t> text_offset, text_xxh3;
  std::uint64_t text_begin = 0;
};

// A store of labelled images: all but the pixels and labels, and where these begin.
struct StoredImages {
  std::int64_t num_classes = 0;
  std::vector<std::uint32_t> height, width;
  std::vector<std::uint64_t> xxh3, labels_xxh3;
  std::vector<std::string> sources, class_names;
  // Since version 2: RGB of each label; in how many images each label occurs, [256].
  std::vector<std::uint8_t> palette;
  std::vector<std::uint64_t> label_images;
  // Since version 3, of each label: LabelCounts::pixels and pixels_of_images.
  std::vector<std::uint64_t> label_pixels, label_image_pixels;

  std::uint64_t tables_xxh3 = 0;
  std::uint64_t pixels_begin = 0, labels_begin = 0, labels_bytes = 0;
};

// Everything except the bytes of clips or images.
struct StoreFacts {
  std::vector<std::string> warnings;
  bool holds_images = false;
  StoredImages images;

  std::uint64_t bytes = 0;      // of the file
  std::string made_by;          // the attribute, "" where there is none
  std::vector<Bucket> buckets;  // in the order of their names
  std::vector<StoredBucket> stored;
};

// Calls `f` on each field that a bucket's hash covers, always in the same order. The positions
// where HDF5 put the bytes are not covered: h5repack may move them.
template <class F, class B, class S>
void each_hashed_field(F&& f, B& bucket, S& stored) {
  f(bucket.name), f(bucket.frames), f(bucket.height), f(bucket.width), f(bucket.channels);
  f(bucket.dtype), f(bucket.clips), f(bucket.pixel_frames), f(bucket.pixel_height);
  f(bucket.pixel_width), f(bucket.moments), f(bucket.scale), f(bucket.shift);
  f(bucket.text_channels), f(bucket.longest_text), f(bucket.text_dtype);
  f(stored.xxh3), f(stored.info), f(stored.text_offset), f(stored.text_xxh3);
}

// XXH3-64 over a bucket's fields (clip_store.cpp).
std::uint64_t hash_of_tables(const Bucket& bucket, const StoredBucket& stored);
// ClipSource::content_id() of these buckets: the tables hold the clips' hashes (clip_store.cpp).
std::string content_id_of(std::span<const Bucket> buckets, std::span<const StoredBucket> stored);

// What each kind of store reads of its file (clip_store.cpp, images/image_store.cpp).
void read_clip_facts(StoreReader& reader, StoreFacts& facts);
void read_image_facts(StoreReader& reader, StoreFacts& facts);

// Reads the structure of a store in this process, checks it as open_clip_store() promises, and
// closes it again. `alive` is called between HDF5 calls.
StoreFacts open_checked(
    const std::string& path, const std::function<void()>& alive = [] {});

// From now on read_store() starts `command` with one more argument, the path. Without a command
// (the default) it reads in this process. A child that gives no sign of life for `silence` seconds,
// or `silence_at_stop` once the job is asked to stop, is given up.
void read_stores_with(std::vector<std::string> command, double silence = 300,
                      double silence_at_stop = 5);

// The same as open_checked() by that command. Throws Exit::data as it does, when the child crashes
// or is silent; exit_killed when something killed it; Exit::stopped when it was given up for a
// request to stop.
StoreFacts read_store(const std::string& path);

// Called at the start of main, before MPI: in a child it does the child's work and returns the exit
// code. Otherwise it makes read_store() start this program.
std::optional<int> serve_as_store_reader(int argc, char** argv);

// From now on a StoreFile of one of these paths reads that copy of it (data/stage.h). Called once,
// before any thread opens a store: nothing guards it.
void read_copies_of_stores(std::map<std::string, std::string> copies);

class StoreFile {
 public:
  // Opens the file and has its structure read. Throws Exit::data. Warnings have been logged.
  explicit StoreFile(const std::string& path);
  StoreFile(StoreFile&& other) noexcept;
  ~StoreFile();

  // For messages: names the copy too, if one is read.
  const std::string& path() const { return path_; }
  // What to do about damaged bytes: with a copy, that it is to be removed.
  std::string damage_hint() const;
  std::uint64_t bytes() const { return bytes_; }
  // As ClipSource's. Before facts are taken out.
  std::string content_id() const;
  // The owner takes out what it keeps.
  StoreFacts& facts() { return facts_; }

  // Reads out.size() bytes from `offset` by pread, past HDF5 and its lock, and returns their
  // XXH3-64 if `hashed`, else 0. Safe from several threads at once. Throws Exit::data: "cannot read
  // WHAT in PATH".
  std::uint64_t read(const std::string& what, std::uint64_t offset, std::span<std::byte> out,
                     bool hashed) const;

 private:
  std::string path_, copy_;  // copy_: of the copy that is read, "" if none is
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  StoreFacts facts_;
};

}  // namespace weft
