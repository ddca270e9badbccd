// The safetensors format: a strict reader that trusts nothing in the file, and an atomic writer.
// Format: u64 little-endian header length, JSON header, tensor bytes
// (github.com/huggingface/safetensors).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "core/hash.h"
#include "tensor/dtype.h"

namespace weft {

// Hashes in the metadata, which other programs ignore: "xxh3:NAME" is XXH3-128 of tensor NAME's
// bytes, "xxh3" that of the JSON header with the 32 digits of this very value set to 0. A file has
// all of them or none. If it has them, every read of a whole tensor compares.
struct SafetensorEntry {
  std::string name;
  std::optional<DType> dtype;  // none: a type of the format's that weft does not read, such as fp8
  std::string_view type;       // the format's word for it: "F32"
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes within the data section
  std::optional<Hash128> hash;
};

class SafetensorsFile {
 public:
  // Reads and checks the header: length at most 100 MB and within the file, JSON, no duplicate
  // names, types of the format, products that do not overflow, ranges that match shapes and tile
  // the data section exactly, the header's hash if it has one. Anything else throws Exit::data
  // naming file, tensor and fault. Memory: a few times the header.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::vector<SafetensorEntry>& entries() const { return entries_; }  // in order of the data
  const SafetensorEntry* find(const std::string& name) const;
  // As find, but a missing name throws Exit::data and suggests the nearest one.
  const SafetensorEntry& at(const std::string& name) const;
  // Without the hashes.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool hashed() const { return hashed_; }
  const std::filesystem::path& path() const { return path_; }

  // Reads a tensor's raw bytes into `out` (exactly its size). Like every read, throws Exit::data,
  // naming file and tensor, if the hash differs.
  void read(const SafetensorEntry& entry, std::span<std::byte> out) const;
  // Reads a floating tensor (F32, F16, BF16) converted to float. Exit::data if it is not floating.
  std::vector<float> read_f32(const SafetensorEntry& entry) const;
  // Elements [first, first + out.size()) of one, read alone: as floats, or rounded to bf16. Pieces
  // that follow each other to a tensor's end are compared with its hash then, at no second reading;
  // pieces of one object are for one thread.
  void read_f32(const SafetensorEntry& entry, std::int64_t first, std::span<float> out) const;
  void read_bf16(const SafetensorEntry& entry, std::int64_t first, std::span<bf16> out) const;
  // Reads an integer or bool tensor (I64, I32, U8, BOOL) converted to int64.
  std::vector<std::int64_t> read_i64(const SafetensorEntry& entry) const;

 private:
  // What has been hashed of the tensor that is being read in pieces.
  struct Pieces {
    std::uint64_t begin = 0, next = 0;  // bytes within the data section
    Hasher hasher;
  };

  void take_hashes(const std::string& json);
  void read_part(const SafetensorEntry& entry, std::int64_t first, std::span<std::byte> out) const;
  void compare(const SafetensorEntry& entry, const Hash128& found) const;

  std::filesystem::path path_;
  std::shared_ptr<const File> file_;  // kept open, so that a replaced file cannot be half read
  std::vector<SafetensorEntry> entries_;
  std::vector<std::uint32_t> by_name_;  // indices of entries_, sorted by name
  std::map<std::string, std::string> metadata_;
  std::uint64_t data_offset_ = 0;
  bool hashed_ = false;
  std::shared_ptr<Pieces> pieces_;
};

struct SafetensorWrite {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};
// Writes PATH.tmp, fsyncs, renames. Throws Exit::data with path and reason when the disk refuses.
void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorWrite> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// The same where the tensors come one after the other, in any order: only one needs to be in
// memory.
class SafetensorsWriter {
 public:
  // Writes the header of PATH.tmp. Ignores the bytes in `tensors`.
  SafetensorsWriter(const std::filesystem::path& path, std::span<const SafetensorWrite> tensors,
                    const std::map<std::string, std::string>& metadata = {});
  // Removes PATH.tmp unless finish() has been called.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Tensor i of the list, from byte `first` of it on; every byte once, and those of one tensor in
  // their order.
  void write(std::size_t i, std::span<const std::byte> bytes, std::uint64_t first = 0);
  // Writes the hashes, fsyncs, renames.
  void finish();

 private:
  std::filesystem::path path_, temporary_;
  std::optional<File> file_;
  struct Written {
    std::uint64_t begin = 0;            // in the file
    std::uint64_t bytes = 0, next = 0;  // of the tensor: all, and those that are written
    std::uint64_t digits = 0;           // of its hash, in the header
    std::unique_ptr<Hasher> hasher;     // while only some are written
    Hash128 hash = hash128(std::span<const std::byte>());
  };
  std::vector<Written> tensors_;  // of the list
  std::string header_;            // with zeros for the hashes
  std::uint64_t missing_ = 0;     // bytes
};

// Floats as a file holds them in that type. Exit::data, naming file and tensor, where it has no
// finite number for a finite value.
std::vector<std::byte> floats_as(std::span<const float> values, DType dtype,
                                 const std::filesystem::path& file, const std::string& tensor);

// Whether that is a floating tensor that weft reads: F32, F16 or BF16; and Exit::data if not.
bool is_floating(const SafetensorEntry& entry);
void check_floating(const SafetensorEntry& entry, const std::filesystem::path& file);

namespace detail {

struct SafetensorsHeader {
  std::vector<SafetensorEntry> entries;  // in the order of the header, ranges as written there
  std::map<std::string, std::string> metadata;
};

// Reads the header's structure: names, dtypes, shapes, ranges that match the shapes. Whether the
// ranges tile the file is the caller's to check. Throws Exit::data beginning with `file`.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file);

}  // namespace detail

}  // namespace weft
