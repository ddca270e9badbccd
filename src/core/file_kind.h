// What the first bytes of a file tell before anything decodes it.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include "core/error.h"

namespace weft {

struct FileKind {
  const char* what = nullptr;  // "a Parquet table"; null: none that is known here
  const char* hint = nullptr;  // what to do with it
  bool stands_in = false;      // for a file that was not fetched: a web page, a pointer of Git LFS
};

// What a file is that neither FFmpeg nor the picture libraries read, by its first bytes. `begin` is
// the beginning of a file that should be footage, a picture or sound; 512 bytes are enough.
FileKind unreadable_kind(std::span<const std::byte> begin);

// For the reader of another format that cannot make sense of a file: throws Error(code) if its
// first bytes tell what it is instead. `hint`: of kinds that do not merely stand in for the file.
void refuse_other_kind(const std::filesystem::path& file, Exit code, const char* hint);

}  // namespace weft
