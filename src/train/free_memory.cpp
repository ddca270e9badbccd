#include "train/free_memory.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tensor/device.h"

namespace weft {
namespace {

// The number in a file of the system, or the greatest there is where it has none ("max").
std::size_t number_in(const char* file) {
  std::ifstream in(file);
  std::size_t n = 0;
  return in >> n ? n : std::numeric_limits<std::size_t>::max();
}

std::size_t host_bytes() {
  std::size_t available = 0;
  std::ifstream in("/proc/meminfo");
  for (std::string key, line; in >> key; std::getline(in, line))
    if (key == "MemAvailable:" && in >> available) break;
  available *= 1024;
  const std::size_t limit = number_in("/sys/fs/cgroup/memory.max");
  const std::size_t used = number_in("/sys/fs/cgroup/memory.current");
  if (used < limit) available = std::min(available, limit - used);
  return available;
}

}  // namespace

std::size_t free_memory(MPI_Comm world) {
  const std::size_t free = on_cuda() ? device_runtime().free_bytes() : host_bytes();
  // Ranks of a host that name the same GPU, or none, share.
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  unsigned long long mine = 0;
  if (on_cuda())
    mine =
        std::hash<std::string>{}(visible_gpus().at(static_cast<std::size_t>(this_device().index)));
  int ranks = 1;
  MPI_Comm_size(host, &ranks);
  std::vector<unsigned long long> all(static_cast<std::size_t>(ranks));
  MPI_Allgather(&mine, 1, MPI_UNSIGNED_LONG_LONG, all.data(), 1, MPI_UNSIGNED_LONG_LONG, host);
  MPI_Comm_free(&host);
  const auto sharing = static_cast<std::size_t>(std::count(all.begin(), all.end(), mine));
  return (free - free / 16) / sharing;
}

}  // namespace weft
