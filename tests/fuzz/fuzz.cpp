#include "fuzz.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace weft::fuzz {

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

const std::filesystem::path& scratch() {
  static const struct Directory {
    std::filesystem::path path;
    Directory() {
      const std::filesystem::path memory = "/dev/shm";
      const bool there = access(memory.c_str(), W_OK) == 0;
      path = (there ? memory : std::filesystem::temp_directory_path()) /
             ("weft_fuzz_" + std::to_string(getpid()));
      std::filesystem::create_directories(path);
    }
    ~Directory() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  } directory;
  return directory.path;
}

std::filesystem::path put(const std::string& name, std::string_view text) {
  const std::filesystem::path path = scratch() / name;
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  require(bool(out), "cannot write " + path.string());
  return path;
}

std::vector<std::string> pieces_of(std::string_view text, std::size_t count) {
  std::vector<std::string> pieces(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t end = i + 1 < count ? text.find('\0') : text.npos;
    pieces[i] = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  return pieces;
}

}  // namespace weft::fuzz
