#include "parallel/rank_device.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "core/mpi.h"
#include "parallel/host_gpus.h"
#include "tensor/device.h"

namespace weft {
namespace {

// What every rank of the host sees, in order of rank.
std::vector<HostRank> gather_ranks(const HostRank& mine, MPI_Comm host) {
  // A rank's node, then UUID and node of each GPU.
  std::string text = fmt::format("{}\n", mine.node);
  for (const SeenGpu& gpu : mine.gpus) text += fmt::format("{} {}\n", gpu.uuid, gpu.node);
  std::vector<HostRank> ranks;
  for (const std::string& of_rank : texts_of_ranks(text, host)) {
    std::istringstream in(of_rank);
    HostRank& rank = ranks.emplace_back();
    in >> rank.node;
    for (SeenGpu gpu; in >> gpu.uuid >> gpu.node;) rank.gpus.push_back(gpu);
  }
  return ranks;
}

// The NUMA node of the core that this thread runs on: its own, where the launcher binds ranks.
int node_here() {
  unsigned core = 0, node = 0;
  return getcpu(&core, &node) == 0 ? static_cast<int>(node) : -1;
}

cpu_set_t cores_of(pid_t process) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(process, sizeof cores, &cores) != 0)
    for (long c = 0; c < std::min<long>(CPU_SETSIZE, sysconf(_SC_NPROCESSORS_ONLN)); ++c)
      CPU_SET(c, &cores);
  return cores;
}

// Open MPI's mpirun binds one or two ranks to a core each, whatever the host has, unless it is told
// otherwise. Itself it may use all cores that the job has.
void warn_if_most_cores_idle(int ranks, int used) {
  if (log::rank() != 0 || std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr ||
      std::getenv("OMP_NUM_THREADS") != nullptr)
    return;
  const cpu_set_t of_launcher = cores_of(getppid());
  int granted = CPU_COUNT(&of_launcher);
  if (const char* text = std::getenv("SLURM_CPUS_ON_NODE"); text != nullptr && std::atoi(text) > 0)
    granted = std::min(granted, std::atoi(text));
  static bool said = false;
  if (2 * used > granted || std::exchange(said, true)) return;
  log::warn(
      "mpirun has bound {} of this host to {} of its {} cores; the others idle. mpirun --bind-to "
      "none lets the ranks share all, --map-by slot:PE=CORES gives each its own",
      counted(ranks, "rank"), used, granted);
}

}  // namespace

int count_core_sharers(MPI_Comm host, int& used) {
  const cpu_set_t mine = cores_of(0);
  cpu_set_t all;
  int sum = CPU_COUNT(&mine);
  MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, host);
  MPI_Allreduce(&mine, &all, sizeof mine, MPI_BYTE, MPI_BOR, host);
  used = CPU_COUNT(&all);
  return (sum + used - 1) / used;
}

std::vector<std::size_t> assign_gpus(const std::vector<HostRank>& ranks) {
  constexpr auto none = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> places(ranks.size(), none);
  while (std::ranges::find(places, none) != places.end()) {
    // A round, in which a GPU gets one rank at most.
    std::map<std::string, std::size_t> holders;
    std::set<std::string> asked;
    // Gives rank r the first of its GPUs that is free, or else one whose holder can take another.
    const std::function<bool(std::size_t, bool)> give = [&](std::size_t r, bool near) {
      const std::vector<SeenGpu>& gpus = ranks[r].gpus;
      for (const bool held : {false, true})
        for (std::size_t g = 0; g < gpus.size(); ++g) {
          if (near && (gpus[g].node < 0 || gpus[g].node != ranks[r].node)) continue;
          const auto holder = holders.find(gpus[g].uuid);
          if ((holder != holders.end()) != held) continue;
          if (held && (!asked.insert(gpus[g].uuid).second || !give(holder->second, near))) continue;
          holders[gpus[g].uuid] = r;
          places[r] = g;
          return true;
        }
      return false;
    };
    // Near pairs come first, or a rank without a near GPU would take that of a later rank.
    for (const bool near : {true, false})
      for (std::size_t r = 0; r < ranks.size(); ++r)
        if (places[r] == none) {
          asked.clear();
          give(r, near);
        }
  }
  return places;
}

RankDevice choose_device(const std::string& kind, bool share, MPI_Comm world) {
  RankDevice chosen;
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &chosen.host_rank);
  MPI_Comm_size(host, &chosen.host_ranks);
  int used = 0;
  chosen.core_sharers = count_core_sharers(host, used);
  warn_if_most_cores_idle(chosen.host_ranks, used);
  if (kind == "cpu") {
    MPI_Comm_free(&host);
    return chosen;
  }

  const VisibleGpus visible = visible_gpus();
  std::string why = visible.why;
  std::string none;
  const std::vector<GpuFacts> facts = inventory_gpus(none);
  HostRank own;
  own.node = node_here();
  for (std::size_t i = 0; i < visible.uuids.size(); ++i) {
    // A slice (MIG) has a UUID of its own, which NVML does not list.
    const auto known = std::find_if(facts.begin(), facts.end(), [&](const GpuFacts& g) {
      return g.uuid == visible.uuids[i] || g.bus == visible.buses[i];
    });
    own.gpus.push_back({visible.uuids[i], known != facts.end() ? known->numa_node : -1});
  }
  const std::vector<HostRank> ranks = gather_ranks(own, host);
  MPI_Comm_free(&host);
  const bool here =
      std::all_of(ranks.begin(), ranks.end(), [](const auto& r) { return !r.gpus.empty(); });
  // Where there is a GPU that cannot be used, `auto` does not mean the CPU: a job of many GPU hours
  // would crawl there after one line in its log.
  const std::vector<GpuFacts> unusable = visible.failed ? facts : std::vector<GpuFacts>();
  int everywhere[2] = {here, unusable.empty()};
  MPI_Allreduce(MPI_IN_PLACE, everywhere, 2, MPI_INT, MPI_MIN, world);
  WEFT_CHECK(unusable.empty(), Exit::usage,
             "update the driver, or put NVIDIA's cuda-compat on LD_LIBRARY_PATH (docs/gpu.md); "
             "device.kind = \"cpu\" computes on the CPU",
             "this host has {} (driver {}), which cannot be used: {}",
             unusable.front().name.empty() ? "a GPU" : unusable.front().name,
             unusable.front().driver, why);
  WEFT_CHECK(everywhere[1] != 0, Exit::usage, "see that rank's error",
             "a GPU of another rank's host cannot be used");
  if (everywhere[0] == 0) {
    if (here) why = "another rank sees no GPU";
    WEFT_CHECK(kind != "cuda", Exit::usage,
               built_with_cuda()
                   ? "ask the scheduler for GPUs (--gpus-per-node=N --gpu-bind=none), check "
                     "CUDA_VISIBLE_DEVICES and the driver with weft doctor, or use device.kind = "
                     "\"auto\" or \"cpu\""
                   : "build weft where nvcc is on the PATH (docs/gpu.md), or use device.kind = "
                     "\"auto\" or \"cpu\"",
               "device.kind = \"cuda\": {}", why.empty() ? "a rank sees no GPU" : why);
    if (log::rank() == 0) log::info("device    CPU ({})", why.empty() ? "a rank sees no GPU" : why);
    return chosen;
  }

  // Every rank computes the same assignment, so none needs to be sent.
  const std::vector<std::size_t> places = assign_gpus(ranks);
  const auto uuid_of = [&](std::size_t r) { return ranks[r].gpus[places[r]].uuid; };
  std::map<std::string, int> users;
  for (std::size_t r = 0; r < ranks.size(); ++r) ++users[uuid_of(r)];
  const auto me = static_cast<std::size_t>(chosen.host_rank);
  const auto crowded =
      std::find_if(users.begin(), users.end(), [](const auto& u) { return u.second > 1; });
  int sharing = crowded != users.end() ? 1 : 0;
  WEFT_CHECK(
      sharing == 0 || share, Exit::usage,
      "start as many ranks a host as it has GPUs, or set device.share = true (slower: ranks of "
      "one GPU reduce through the host)",
      "{} ranks on this host see {} GPUs: {} would serve {} ranks", chosen.host_ranks, users.size(),
      crowded->first, crowded->second);
  chosen.shared = users[uuid_of(me)] > 1;
  use_gpu(static_cast<int>(places[me]));
  return chosen;
}

}  // namespace weft
