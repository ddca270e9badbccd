#include "formats/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>

namespace weft {

struct Hasher::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

// Seed 0, so that `xxhsum -H2` on a file gives the same digits.
Hash128 hash128(std::span<const std::byte> bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  return {h.high64, h.low64};
}

Hasher::Hasher() : state_(std::make_unique<State>()) { reset(); }
Hasher::~Hasher() = default;
void Hasher::reset() { XXH3_128bits_reset(state_->xxh); }
void Hasher::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(state_->xxh, bytes.data(), bytes.size());
}
Hash128 Hasher::value() const {
  const XXH128_hash_t h = XXH3_128bits_digest(state_->xxh);
  return {h.high64, h.low64};
}

std::string to_hex(const Hash128& hash) {
  return fmt::format("{:016x}{:016x}", hash.high, hash.low);
}

std::optional<Hash128> hash_from_hex(std::string_view hex) {
  if (hex.size() != 32) return std::nullopt;
  Hash128 h;
  for (auto* half : {&h.high, &h.low}) {
    const std::string_view part = half == &h.high ? hex.substr(0, 16) : hex.substr(16);
    const auto [end, error] = std::from_chars(part.data(), part.data() + 16, *half, 16);
    if (error != std::errc() || end != part.data() + 16) return std::nullopt;
  }
  // One value, one spelling: a flipped bit that turns a into A must not pass.
  if (to_hex(h) != hex) return std::nullopt;
  return h;
}

}  // namespace weft
