#include "parallel/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "core/error.h"

namespace weft {

std::shared_ptr<SharedMemory> SharedMemory::make(MPI_Comm host, std::size_t bytes) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(host, &rank);
  MPI_Comm_size(host, &ranks);
  // Keeps the arrays of one process apart.
  static std::atomic<int> made = 0;
  using Name = std::array<char, 64>;
  Name name{};
  fmt::format_to_n(name.data(), name.size() - 1, "/weft-{}-{}", getpid(), made++);
  std::shared_ptr<SharedMemory> memory(new SharedMemory(bytes));
  memory->arrays_.assign(ranks, nullptr);
  memory->arrays_[rank] = memory->map(name.data(), true);
  std::vector<Name> names(ranks);
  MPI_Allgather(name.data(), static_cast<int>(name.size()), MPI_CHAR, names.data(),
                static_cast<int>(name.size()), MPI_CHAR, host);
  int whole = memory->arrays_[rank] != nullptr;
  for (int r = 0; r < ranks && whole != 0; ++r) {
    if (r == rank) continue;
    memory->arrays_[r] = memory->map(names[r].data(), false);
    whole = memory->arrays_[r] != nullptr;
  }
  MPI_Allreduce(MPI_IN_PLACE, &whole, 1, MPI_INT, MPI_MIN, host);
  // Every rank has mapped the memory now, or failed: the name is no longer needed.
  shm_unlink(name.data());
  return whole != 0 ? memory : nullptr;
}

SharedMemory::~SharedMemory() {
  for (std::byte* p : arrays_)
    if (p != nullptr) munmap(p, bytes_);
}

// Null on failure.
std::byte* SharedMemory::map(const char* name, bool fresh) const {
  const int file = shm_open(name, fresh ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, S_IRUSR | S_IWUSR);
  if (file < 0) return nullptr;
  void* p = MAP_FAILED;
  // Reserve the space now: if /dev/shm ran full later, a write to the map would raise a signal.
  if (!fresh || posix_fallocate(file, 0, static_cast<off_t>(bytes_)) == 0)
    p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
}

}  // namespace weft
