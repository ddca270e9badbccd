// XXH3 (xxhash.com), 128 bits for files and 64 for clips: fast enough to hash all state at every
// save, wide enough that accidental damage is always found. It does not protect against deliberate
// changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace weft {

struct Hash128 {
  std::uint64_t high = 0, low = 0;
  bool operator==(const Hash128&) const = default;
};

Hash128 hash128(std::span<const std::byte> bytes);
inline Hash128 hash128(std::string_view text) { return hash128(std::as_bytes(std::span(text))); }

// The same over pieces.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  void reset();
  void add(std::span<const std::byte> bytes);
  Hash128 value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// 32 lower-case hexadecimal digits, high half first, as xxhsum -H2 prints them.
std::string to_hex(const Hash128& hash);
std::optional<Hash128> hash_from_hex(std::string_view hex);

// XXH3-64 of bytes given piece by piece: the clips of a store.
class ClipHash {
 public:
  ClipHash();
  void update(const std::byte* data, std::size_t bytes);
  std::uint64_t digest() const;

 private:
  struct Free {
    void operator()(void* state) const;
  };
  std::unique_ptr<void, Free> state_;
};

}  // namespace weft
