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

// Texts with an embedded checksum (XXH3-64), so that a flipped bit is detected: JSON objects
// as their last member "xxh3", other texts as a last line "# xxh3 ...". A text without a seal comes
// from an older weft, or from a person.
// `object` ends with "}" and has a member.
std::string seal_json(std::string object);
// `text` ends with a line's end.
std::string seal_text(std::string text);

// False if the text carries a hash that does not match. One newline may follow.
bool seal_holds(std::string_view text);
// Whether an unparsable line may be a sealed one that a killed job left unfinished: it is the
// file's last, and ends before its seal.
bool is_cut_off(std::string_view line, bool last);

}  // namespace weft
