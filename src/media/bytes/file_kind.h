// What a file is that neither FFmpeg nor the picture libraries read, by its first bytes.
#pragma once

#include <cstddef>
#include <span>

namespace weft {

struct FileKind {
  const char* what = nullptr;  // "a Parquet table"; null: none that is known here
  const char* hint = nullptr;  // what to do with it
};

// Of the beginning of a file that should be footage, a picture or sound; 512 bytes are enough.
FileKind unreadable_kind(std::span<const std::byte> begin);

}  // namespace weft
