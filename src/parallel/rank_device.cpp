#include "parallel/rank_device.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "tensor/device_inventory.h"

namespace weft {
namespace {

constexpr std::size_t uuid_length = 40;  // "GPU-" and 36 characters

// Every rank's list of UUIDs, in order of rank.
std::vector<std::vector<std::string>> gather_gpus(const std::vector<std::string>& mine,
                                                  MPI_Comm host) {
  int ranks = 1;
  MPI_Comm_size(host, &ranks);
  std::string text;
  for (std::string uuid : mine) text += (uuid.resize(uuid_length, ' '), uuid);
  const int bytes = static_cast<int>(text.size());
  std::vector<int> sizes(static_cast<std::size_t>(ranks)), offsets(sizes.size() + 1, 0);
  MPI_Allgather(&bytes, 1, MPI_INT, sizes.data(), 1, MPI_INT, host);
  std::partial_sum(sizes.begin(), sizes.end(), offsets.begin() + 1);
  std::string all(static_cast<std::size_t>(offsets.back()), ' ');
  MPI_Allgatherv(text.data(), bytes, MPI_CHAR, all.data(), sizes.data(), offsets.data(), MPI_CHAR,
                 host);
  std::vector<std::vector<std::string>> lists(sizes.size());
  for (std::size_t r = 0; r < lists.size(); ++r)
    for (int at = offsets[r]; at < offsets[r + 1]; at += static_cast<int>(uuid_length))
      lists[r].push_back(all.substr(static_cast<std::size_t>(at), uuid_length));
  return lists;
}

}  // namespace

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
  const auto lists = gather_gpus(visible.uuids, host);
  MPI_Comm_free(&host);
  const bool here =
      std::all_of(lists.begin(), lists.end(), [](const auto& l) { return !l.empty(); });
  // Where there is a GPU that cannot be used, `auto` does not mean the CPU: a job of many GPU hours
  // would crawl there after one line in its log.
  std::string none;
  const std::vector<GpuFacts> unusable =
      visible.failed ? inventory_gpus(none) : std::vector<GpuFacts>();
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
               "ask the scheduler for GPUs (--gpus-per-node=N --gpu-bind=none), check "
               "CUDA_VISIBLE_DEVICES and the driver with weft doctor, or use device.kind = "
               "\"auto\" or \"cpu\"",
               "device.kind = \"cuda\": {}", why.empty() ? "a rank sees no GPU" : why);
    if (log::rank() == 0) log::info("device    CPU ({})", why.empty() ? "a rank sees no GPU" : why);
    return chosen;
  }

  // Every rank computes the same assignment, so none needs to be sent: each rank in turn takes, of
  // the GPUs that it sees, the one with the fewest users so far.
  std::map<std::string, int> users;
  std::string mine;
  int index = 0;
  for (std::size_t r = 0; r < lists.size(); ++r) {
    const auto best = std::min_element(
        lists[r].begin(), lists[r].end(),
        [&](const std::string& a, const std::string& b) { return users[a] < users[b]; });
    ++users[*best];
    if (static_cast<int>(r) == chosen.host_rank) {
      mine = *best;
      index = static_cast<int>(best - lists[r].begin());
    }
  }
  const auto crowded =
      std::find_if(users.begin(), users.end(), [](const auto& u) { return u.second > 1; });
  int sharing = crowded != users.end() ? 1 : 0;
  WEFT_CHECK(
      sharing == 0 || share, Exit::usage,
      "start as many ranks a host as it has GPUs, or set device.share = true (slower: ranks of "
      "one GPU reduce through the host)",
      "{} ranks on this host see {} GPUs: {} would serve {} ranks", chosen.host_ranks, users.size(),
      crowded->first.substr(0, crowded->first.find_last_not_of(' ') + 1), crowded->second);
  chosen.shared = users[mine] > 1;
  use_gpu(index);
  return chosen;
}

}  // namespace weft
