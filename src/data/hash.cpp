#include "data/hash.h"

#include <xxhash.h>

#include "core/error.h"

// libxxhash's own choice of the widest vectors the processor has. Not every build of the library
// carries it, hence weak; the plain function gives the same hash, more slowly.
extern "C" [[gnu::weak]] XXH_errorcode XXH3_64bits_update_dispatch(XXH3_state_t* state,
                                                                   const void* input, size_t bytes);

namespace weft {

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

}  // namespace weft
