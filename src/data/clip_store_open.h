// What opening a clip store finds out through HDF5, for clip_store.cpp alone.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "data/clip_source.h"

namespace weft {

// Beside Bucket, all of length `clips`.
struct StoredBucket {
  std::vector<std::uint64_t> offset;  // of the clip's first byte in the file
  std::vector<std::uint64_t> xxh3;    // of the clip's bytes
  std::vector<ClipInfo> info;
  // Of the text features, if the bucket has any: rows [offset i, offset i+1) from `text_begin` on.
  std::vector<std::uint64_t> text_offset, text_xxh3;
  std::uint64_t text_begin = 0;
};

// Checks a store of `bytes` bytes as open_clip_store promises and closes it again. Buckets are in
// the order of their names.
std::pair<std::vector<Bucket>, std::vector<StoredBucket>> open_checked(const std::string& path,
                                                                       std::uint64_t bytes);

}  // namespace weft
