#include "parallel/rank_device.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "parallel/mpi.h"
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

}  // namespace

std::vector<std::size_t> assign_gpus(const std::vector<HostRank>& ranks) {
  std::map<std::string, int> users;
  std::vector<std::size_t> places;
  for (const HostRank& rank : ranks) {
    const auto worth = [&](const SeenGpu& gpu) {
      const bool far = rank.node < 0 || gpu.node < 0 || gpu.node != rank.node;
      return std::pair(users[gpu.uuid], far);
    };
    const auto best =
        std::min_element(rank.gpus.begin(), rank.gpus.end(),
                         [&](const SeenGpu& a, const SeenGpu& b) { return worth(a) < worth(b); });
    ++users[best->uuid];
    places.push_back(static_cast<std::size_t>(best - rank.gpus.begin()));
  }
  return places;
}

RankDevice choose_device(const std::string& kind, bool share, MPI_Comm world) {
  RankDevice chosen;
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &chosen.host_rank);
  MPI_Comm_size(host, &chosen.host_ranks);
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
  for (const std::string& uuid : visible.uuids) {
    const auto known =
        std::find_if(facts.begin(), facts.end(), [&](const GpuFacts& g) { return g.uuid == uuid; });
    own.gpus.push_back({uuid, known != facts.end() ? known->numa_node : -1});
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
