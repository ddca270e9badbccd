// XXH3-64 of a clip's bytes, fed piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace weft {

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
