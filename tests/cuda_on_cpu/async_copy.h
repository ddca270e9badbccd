// cp.async of one thread: what was asked for, in groups.
#pragma once

#include <cstddef>
#include <vector>

namespace emulation {

struct AsyncCopies {
  struct Copy {
    void* to;
    const void* from;  // null: zeros
    int bytes;
  };
  std::vector<Copy> copies;         // not yet done, oldest first
  std::vector<std::size_t> groups;  // committed: number of copies in each, oldest first
  std::size_t open = 0;             // copies of the group not yet committed

  void clear() {
    copies.clear();
    groups.clear();
    open = 0;
  }
};

}  // namespace emulation
