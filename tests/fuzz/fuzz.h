// What the fuzz targets (targets.cpp) share. libFuzzer drives them (make fuzz), or driver.cpp
// (ctest).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace weft::fuzz {

// Which target LLVMFuzzerTestOneInput runs: by name. libFuzzer's has it from WEFT_FUZZ_TARGET.
void choose(std::string_view name);

// A finding unless `holds`: says `what` and aborts.
void require(bool holds, const std::string& what);

// Whether `parse` takes its input. An Error is the other outcome, unless it admits a bug of weft's.
template <class F>
bool accepts(F&& parse) {
  try {
    parse();
    return true;
  } catch (const Error& e) {
    require(e.code() != Exit::internal, e.what());
    return false;
  }
}

// A directory of this process in memory, removed at its end.
const std::filesystem::path& scratch();
// Writes scratch()/name and returns its path.
std::filesystem::path put(const std::string& name, std::string_view text);

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// The pieces between zero bytes, `count` of them: missing ones are empty, the last has the rest.
std::vector<std::string> pieces_of(std::string_view text, std::size_t count);

}  // namespace weft::fuzz
