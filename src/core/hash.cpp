#include "core/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>
#include <initializer_list>

#include "core/error.h"

// libxxhash's own dispatch to the widest vectors of the processor. Not every build of the library
// contains it, hence weak; the plain function gives the same hash, more slowly.
extern "C" [[gnu::weak]] XXH_errorcode XXH3_64bits_update_dispatch(XXH3_state_t* state,
                                                                   const void* input, size_t bytes);

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
  // Only lower case is accepted: a flipped bit that turns a into A must be noticed.
  if (to_hex(h) != hex) return std::nullopt;
  return h;
}

void ClipHash::Free::operator()(void* state) const {
  XXH3_freeState(static_cast<XXH3_state_t*>(state));
}

ClipHash::ClipHash() : state_(XXH3_createState()) {
  WEFT_ASSERT(state_ != nullptr);
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_.get()));
}

void ClipHash::update(const std::byte* data, std::size_t bytes) {
  auto* state = static_cast<XXH3_state_t*>(state_.get());
  if (XXH3_64bits_update_dispatch != nullptr)
    XXH3_64bits_update_dispatch(state, data, bytes);
  else
    XXH3_64bits_update(state, data, bytes);
}

std::uint64_t ClipHash::digest() const {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_.get()));
}

namespace {

constexpr std::size_t digits = 16;

struct Form {
  std::string_view before, after;  // of the digits
  std::string_view lost;           // what stood there before the text was sealed
};
constexpr Form json{",\"xxh3\":\"", "\"}", "}"}, lines{"# xxh3 ", "", ""};

std::string hash_of(std::string_view text) {
  return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

}  // namespace

std::string seal_json(std::string object) {
  const std::string hash = hash_of(object);
  // The hash covers the object as it was, closing brace included; the brace then follows the seal.
  object.pop_back();
  return object.append(json.before).append(hash).append(json.after);
}

std::string seal_text(std::string text) {
  const std::string hash = hash_of(text);
  return text.append(lines.before).append(hash).append("\n");
}

bool seal_holds(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  for (const Form& form : {json, lines}) {
    const std::size_t length = form.before.size() + digits + form.after.size();
    if (text.size() < length || !text.ends_with(form.after)) continue;
    const std::string_view seal = text.substr(text.size() - length);
    if (!seal.starts_with(form.before)) continue;
    const std::string sealed = std::string(text.substr(0, text.size() - length)).append(form.lost);
    return seal.substr(form.before.size(), digits) == hash_of(sealed);
  }
  return true;
}

bool is_cut_off(std::string_view line, bool last) {
  return last && line.find(json.before) == line.npos;
}

}  // namespace weft
