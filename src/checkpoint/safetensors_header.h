// The JSON header of a safetensors file, read without trust. Used only by this folder's files.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace weft::detail {

// Bytes: the limit of the format's own implementation; more is an attack or an accident.
inline constexpr std::uint64_t longest_header = 100'000'000;

// Metadata keys of hashes begin so: "xxh3" of the header, "xxh3:NAME" of tensor NAME.
inline constexpr std::string_view hash_key = "xxh3";
// The header's hash as it stands in the JSON that weft writes.
inline std::string header_hash_json(const std::string& digits) {
  return "\"" + std::string(hash_key) + "\":\"" + digits + "\"";
}

struct SafetensorsHeader {
  std::vector<SafetensorEntry> entries;  // in the order of the header, ranges as written there
  std::map<std::string, std::string> metadata;
};

// Reads the header's structure: names, dtypes, shapes, ranges that match the shapes. Whether the
// ranges tile the file is the caller's to check. Throws Exit::data beginning with `file`.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file);

// The format's own spelling of a type.
const char* format_name(DType t);

}  // namespace weft::detail
