// The verdict on GPUs, known answers and speed.
#include <algorithm>
#include <map>
#include <set>

#include "core/log.h"
#include "core/statistics.h"
#include "doctor/judge.h"

namespace weft::verdicts {
namespace {

// A rank this much slower than the median holds all others up.
constexpr double slow = 0.8;

void judge_one_gpu(const std::string& host, const GpuFacts& g,
                   const std::vector<const RankFacts*>& here, Findings& out) {
  std::vector<int> users;
  bool wished = true;
  for (const RankFacts* r : here)
    if (r->gpu == g.uuid) {
      users.push_back(r->rank);
      wished = wished && r->shares_gpu;
    }
  const std::string name = fmt::format("GPU {} on {}", g.uuid, host);
  if (users.size() > 1 && !wished)
    fail(out, fmt::format("{} serves {}", name, ranks_text(users)),
         "start as many ranks a host as it has GPUs, or set device.share = true");
  if (users.size() > 1 && wished)
    warn(out, fmt::format("{} serves {}, as device.share asks", name, ranks_text(users)),
         "fit for trying out: its ranks take turns and reduce through the host");
  std::vector<std::string> others;
  for (const GpuProcess& p : g.processes) {
    const auto ours =
        std::find_if(here.begin(), here.end(), [&](const RankFacts* r) { return r->pid == p.pid; });
    if (ours == here.end()) {
      others.push_back(fmt::format("{} (process {}, {:.1f} GiB)", p.name.empty() ? "?" : p.name,
                                   p.pid, p.memory_gib));
    } else if ((*ours)->gpu != g.uuid) {
      fail(out,
           fmt::format("rank {} holds a context on {}, which is not its own", (*ours)->rank, name),
           "a library that it loads opens every GPU: set CUDA_VISIBLE_DEVICES for each rank");
    }
  }
  // Other processes matter only on a GPU that one of the ranks uses.
  if (!others.empty() && !users.empty()) {
    // In a container NVML reports the host's process numbers, for the ranks' own processes too.
    const bool hidden = std::none_of(g.processes.begin(), g.processes.end(), [&](const auto& p) {
      return std::any_of(here.begin(), here.end(),
                         [&](const RankFacts* r) { return r->pid == p.pid; });
    });
    if (!hidden || others.size() > users.size())
      warn(out, fmt::format("{} is also used by {}", name, fmt::join(others, ", ")),
           hidden ? "in a container process numbers are the host's: some of these may be weft's own"
                  : "wait for them, or ask for GPUs of your own (srun --exclusive)");
  }
  if (users.empty()) return;
  if (g.ecc_uncorrected > 0 || g.rows_failed)
    fail(out,
         g.rows_failed
             ? fmt::format("{} has a bad memory row that could not be replaced", name)
             : fmt::format("{} has had {} uncorrected memory errors", name, g.ecc_uncorrected),
         "leave this node out (srun --exclude) and report it", Exit::hardware);
  if (!g.slowdown.empty())
    warn(out, fmt::format("{} runs slowed down by {}", name, g.slowdown),
         "report the node: its cooling or power supply is at its limit");
  if (g.pcie_width > 0 && g.pcie_width < g.pcie_width_most)
    warn(out, fmt::format("{} uses {} of {} PCIe lanes", name, g.pcie_width, g.pcie_width_most),
         "report the node if copies between host and device are slow above");
  for (const RankFacts* r : here)
    if (r->gpu == g.uuid && g.numa_node >= 0 && r->host_numa_nodes > 1 &&
        std::find(r->numa.begin(), r->numa.end(), g.numa_node) == r->numa.end())
      warn(out,
           fmt::format("rank {} runs on NUMA node {}, its GPU is at node {}", r->rank,
                       fmt::join(r->numa, ","), g.numa_node),
           "bind ranks to cores, with all of the node's GPUs in sight: srun --cpu-bind=cores "
           "--gpu-bind=none, or mpirun --map-by numa --bind-to core");
}

}  // namespace

void judge_gpus(const Ranks& ranks, Findings& out) {
  const std::size_t before = out.size();
  const Groups kinds = group_by(ranks, [](const RankFacts& r) { return r.device; });
  if (kinds.size() > 1)
    warn(out, fmt::format("devices differ: {}", groups_text(kinds)),
         "ask for nodes of one kind: all wait for the slowest");
  int unused = 0;
  for (const auto& [host, here] : by_host(ranks)) {
    std::set<std::string> taken;
    for (const RankFacts* r : here) taken.insert(r->gpu);
    for (const GpuFacts& g : here.front()->host_gpus) {
      judge_one_gpu(host, g, here, out);
      if (taken.count(g.uuid) == 0 && !g.mig) ++unused;
    }
  }
  // A rank that could not take its device is a fault of its own (below), not a choice of the CPU.
  const auto failed = ranks_with(ranks, [](const RankFacts& r) {
    return std::any_of(r.faults.begin(), r.faults.end(),
                       [](const RankFault& f) { return f.stage == "device"; });
  });
  if (!failed.empty()) return;
  const auto on_gpu = ranks_with(ranks, [](const RankFacts& r) { return !r.gpu.empty(); });
  if (on_gpu.empty() && unused > 0)
    warn(out,
         fmt::format("all ranks compute on the CPU, though there are {} GPUs: {}", unused,
                     ranks.front().no_gpu),
         "see install.md for a build with CUDA, or device.kind in the deck");
  else if (on_gpu.empty())
    ok(out, fmt::format("all ranks compute on the CPU: {}", ranks.front().no_gpu));
  else if (out.size() == before)
    ok(out, "every rank has a GPU of its own, and no other process is on it");
}

// --- Results and faults.

void judge_operations(const Ranks& ranks, Findings& out) {
  std::set<std::string> names;
  std::vector<std::string> wrong;
  for (const RankFacts& r : ranks)
    for (const auto& [name, count] : r.operations) {
      names.insert(name);
      if (count > 0)
        wrong.push_back(fmt::format("{} on rank {} on {} {} ({})", name, r.rank, r.host, r.gpu,
                                    counted(count, "value")));
    }
  if (!wrong.empty())
    fail(
        out, fmt::format("operations compute wrong results: {}", fmt::join(wrong, ", ")),
        "leave that node out (srun --exclude) and report it; if all ranks fail alike, report a bug "
        "of weft with the library versions above",
        Exit::hardware);
  else if (!names.empty())
    ok(out,
       fmt::format("operations compute right results on every rank: {}", fmt::join(names, ", ")));
}

void judge_results(const Ranks& ranks, Findings& out) {
  std::set<std::string> names;
  for (const RankFacts& r : ranks)
    for (const auto& [name, wrong] : r.wrong) names.insert(name);
  for (const std::string& name : names) {
    std::string who;
    for (const RankFacts& r : ranks) {
      const auto at = r.wrong.find(name);
      if (at != r.wrong.end() && at->second > 0)
        who += fmt::format("{}rank {} on {} {} ({} values)", who.empty() ? "" : ", ", r.rank,
                           r.host, r.gpu, at->second);
    }
    if (!who.empty())
      fail(out, fmt::format("{}: not the known answer on {}", name, who),
           "leave that node out (srun --exclude) and report it; if other nodes fail alike, report "
           "the library versions above",
           Exit::hardware);
  }
  if (std::none_of(ranks.begin(), ranks.end(), [](const RankFacts& r) {
        return std::any_of(r.wrong.begin(), r.wrong.end(),
                           [](const auto& w) { return w.second > 0; });
      }))
    ok(out,
       fmt::format("known answers right to the bit on every rank: {}", fmt::join(names, ", ")));
  std::map<std::string, std::pair<std::vector<int>, const RankFault*>> faults;
  for (const RankFacts& r : ranks)
    for (const RankFault& f : r.faults) {
      auto& entry = faults[f.stage + ": " + f.what];
      entry.first.push_back(r.rank);
      entry.second = &f;
    }
  for (const auto& [text, entry] : faults) {
    const auto code = static_cast<Exit>(entry.second->code);
    fail(out, fmt::format("{} ({})", text, ranks_text(entry.first)), entry.second->hint,
         code == Exit::hardware || code == Exit::hang ? Exit::hardware : Exit::usage);
  }
}

// --- Speed.

void judge_speed(const Ranks& ranks, Findings& out) {
  std::set<std::string> names;
  for (const RankFacts& r : ranks)
    for (const auto& [name, value] : r.measured)
      // An all-reduce is one number for all; a write waits for a disk that others write to as well.
      if (name.rfind("all-reduce", 0) != 0 && name.rfind("file write", 0) != 0) names.insert(name);
  bool fine = true;
  for (const std::string& name : names) {
    std::vector<double> all;
    for (const RankFacts& r : ranks)
      if (const auto at = r.measured.find(name); at != r.measured.end()) all.push_back(at->second);
    const double middle = median(all);
    std::string who;
    for (const RankFacts& r : ranks) {
      const auto at = r.measured.find(name);
      if (at != r.measured.end() && at->second < slow * middle)
        who += fmt::format("{}rank {} on {} ({:.3g})", who.empty() ? "" : ", ", r.rank, r.host,
                           at->second);
    }
    if (who.empty()) continue;
    fine = false;
    warn(
        out, fmt::format("{}: slower than the median of {:.3g}: {}", name, middle, who),
        "see what else runs on that node, its clocks and temperature; leave it out if it stays so");
  }
  if (fine && ranks.size() > 1)
    ok(out, "no rank is 20 % slower than the median in anything that was measured");
}

}  // namespace weft::verdicts
