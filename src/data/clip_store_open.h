// What HDF5 reports about a clip store when it is opened; for clip_store_*.cpp only.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/clip_source.h"

namespace weft {

// In addition to Bucket; all of length `clips`.
struct StoredBucket {
  std::vector<std::uint64_t> offset;  // of the clip's first byte in the file
  std::vector<std::uint64_t> xxh3;    // of the clip's bytes
  std::vector<ClipInfo> info;
  // The text features, if the bucket has any: rows [offset i, offset i+1), the first row at
  // `text_begin`.
  std::vector<std::uint64_t> text_offset, text_xxh3;
  std::uint64_t text_begin = 0;
};

// Of a store of labelled images: where each of image_arrays (data/images/image_store_open.h) lies,
// in their order.
struct StoredArray {
  std::uint64_t offset = 0, bytes = 0;
};

// Everything except the clips' bytes. Buckets are in the order of their names.
struct StoreFacts {
  std::string made_by;  // the attribute, "" where there is none
  std::vector<Bucket> buckets;
  std::vector<StoredBucket> stored;
  std::vector<std::string> warnings;

  // Of a store of labelled images, which has no buckets.
  bool images = false;
  std::int64_t num_classes = 0;
  std::uint64_t tables_xxh3 = 0;
  std::vector<StoredArray> arrays;
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

// XXH3-64 over these fields.
std::uint64_t hash_of_tables(const Bucket& bucket, const StoredBucket& stored);

// Checks a store of `bytes` bytes as open_clip_store promises, and closes it again. Damage may
// crash the HDF5 library: see clip_store_child.h. `alive` is called between HDF5 calls.
StoreFacts open_checked(
    const std::string& path, std::uint64_t bytes, const std::function<void()>& alive = [] {});

}  // namespace weft
