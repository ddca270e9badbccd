// Memory that the ranks of one host share: each has an array of its own, which the others read.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace weft {

class SharedMemory {
 public:
  // Collective. `bytes` of zeros for each rank of `host`, whose ranks are all on one host. Null on
  // every rank if one of them has no room. The memory has no name that could stay behind however
  // the job ends, and releasing it needs no other rank.
  static std::shared_ptr<SharedMemory> make(MPI_Comm host, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The array of a rank of `host`, its own included, where this process sees it.
  std::byte* of(int rank) const { return arrays_[rank]; }
  std::size_t bytes() const { return bytes_; }

 private:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes) {}
  std::byte* map(const char* name, bool fresh) const;

  std::size_t bytes_;
  std::vector<std::byte*> arrays_;
};

}  // namespace weft
