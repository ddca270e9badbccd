// The verdict: host and libraries first, then devices and measurements.

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "core/clock.h"
#include "core/log.h"
#include "doctor/doctor.h"

namespace weft {
namespace {

using Ranks = std::vector<RankFacts>;
using Findings = std::vector<Finding>;

void ok(Findings& f, std::string what) {
  f.push_back({Finding::Level::ok, std::move(what), "", Exit::done});
}
void warn(Findings& f, std::string what, std::string todo) {
  f.push_back({Finding::Level::warn, std::move(what), std::move(todo), Exit::done});
}
void fail(Findings& f, std::string what, std::string todo, Exit code = Exit::usage) {
  f.push_back({Finding::Level::fail, std::move(what), std::move(todo), code});
}

std::vector<int> ranks_with(const Ranks& ranks, const std::function<bool(const RankFacts&)>& is) {
  std::vector<int> out;
  for (const RankFacts& r : ranks)
    if (is(r)) out.push_back(r.rank);
  return out;
}

// Ranks of each host, in order.
std::map<std::string, std::vector<const RankFacts*>> by_host(const Ranks& ranks) {
  std::map<std::string, std::vector<const RankFacts*>> hosts;
  for (const RankFacts& r : ranks) hosts[r.host].push_back(&r);
  return hosts;
}

// "1.10.8 on ranks 0,2-3; 1.12.0 on rank 1"
std::string groups_text(const Groups& groups) {
  std::string text;
  for (const auto& [value, who] : groups)
    text += fmt::format("{}{} on {}", text.empty() ? "" : "; ", value.empty() ? "none" : value,
                        ranks_text(who));
  return text;
}

std::string get(const std::map<std::string, std::string>& m, const std::string& name) {
  const auto at = m.find(name);
  return at == m.end() ? "" : at->second;
}

// --- Versions.

void judge_versions(const Ranks& ranks, Findings& out) {
  std::set<std::string> names;
  for (const RankFacts& r : ranks)
    for (const auto& [name, version] : r.versions) names.insert(name);
  // The system's own versions may differ a little between nodes; those that compute or communicate
  // may not.
  const std::set<std::string> may_differ = {"Linux", "glibc", "CUDA driver", "cuDNN"};
  int alike = 0;
  for (const std::string& name : names) {
    const Groups groups =
        group_by(ranks, [&](const RankFacts& r) { return get(r.versions, name); });
    if (groups.size() == 1) {
      ++alike;
    } else if (may_differ.count(name) != 0) {
      warn(out, fmt::format("{} differs: {}", name, groups_text(groups)),
           "ask for nodes of one kind and one system image");
    } else {
      fail(out, fmt::format("{} differs: {}", name, groups_text(groups)),
           name == "weft"
               ? "start one and the same build on every node: copy it, or use a shared folder"
               : "give every node the same modules and LD_LIBRARY_PATH (mpirun -x, srun "
                 "--export), or use the bundle (make bundle)");
    }
  }
  if (alike == static_cast<int>(names.size()))
    ok(out, fmt::format("{} versions alike on all ranks", alike));
  const Groups cpus =
      group_by(ranks, [](const RankFacts& r) { return r.cpu + ", " + r.instructions; });
  if (cpus.size() > 1)
    warn(out, fmt::format("processors differ: {}", groups_text(cpus)),
         "ask for nodes of one kind (srun --constraint): all wait for the slowest, and results "
         "depend on who computed what");
}

// --- Environment.

bool starts_with(const std::string& name, std::initializer_list<const char*> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const char* p) { return name.rfind(p, 0) == 0; });
}

// Set by the launcher for each rank or node, or rightly different from rank to rank. Open MPI's
// parameters are taken for such, except those that say how messages go.
bool differs_by_nature(const std::string& name) {
  if (starts_with(name, {"OMPI_MCA_"}))
    return !starts_with(name, {"OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_osc",
                               "OMPI_MCA_coll", "OMPI_MCA_mpi_", "OMPI_MCA_opal_"});
  return starts_with(name,
                     {"OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_", "CUDA_VISIBLE_DEVICES",
                      "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE", "OMP_PLACES", "GOMP_CPU_AFFINITY"});
}

// Paths may differ and still lead to the same libraries; the versions show whether they do.
bool is_path(const std::string& name) {
  const auto ends = [&](const char* end) {
    const std::string e = end;
    return name.size() >= e.size() && name.compare(name.size() - e.size(), e.size(), e) == 0;
  };
  return starts_with(name, {"LD_"}) || ends("_HOME") || ends("_PATH") || ends("_DIR") ||
         ends("_ROOT");
}

// "/a:/b:/a:" means the same as "/a:/b".
std::string without_repeats(const std::string& paths) {
  std::vector<std::string> seen;
  std::istringstream in(paths);
  for (std::string p; std::getline(in, p, ':');)
    if (!p.empty() && std::find(seen.begin(), seen.end(), p) == seen.end()) seen.push_back(p);
  return fmt::format("{}", fmt::join(seen, ":"));
}

void judge_environment(const Ranks& ranks, Findings& out) {
  std::set<std::string> names;
  for (const RankFacts& r : ranks)
    for (const auto& [name, value] : r.environment)
      if (!differs_by_nature(name)) names.insert(name);
  bool alike = true;
  for (const std::string& name : names) {
    const Groups groups = group_by(ranks, [&](const RankFacts& r) {
      const auto at = r.environment.find(name);
      if (at == r.environment.end()) return std::string("not set");
      return fmt::format("\"{}\"", is_path(name) ? without_repeats(at->second) : at->second);
    });
    if (groups.size() == 1) continue;
    alike = false;
    const std::string text = fmt::format("{} differs: {}", name, groups_text(groups));
    const std::string todo = fmt::format(
        "set it in the job script for all (Open MPI: mpirun -x {0}; MPICH: mpiexec "
        "-genv {0} VALUE; Slurm: srun --export=ALL)",
        name);
    if (is_path(name))
      warn(out, text, todo);
    else
      fail(out, text, todo);
  }
  if (alike)
    ok(out, fmt::format("{} variables of the environment alike on all ranks", names.size()));
}

// --- The launcher.

void judge_launch(const Ranks& ranks, Findings& out) {
  const RankFacts& first = ranks.front();
  const auto size = std::to_string(ranks.size());
  // An mpirun or mpiexec in a job script says how many ranks it has started, and so does srun
  // --mpi=pmi2; Slurm's own numbers are then those of the launcher's daemons.
  const auto started = [](const RankFacts& r) {
    const std::string by_mpirun = get(r.environment, "OMPI_COMM_WORLD_SIZE");
    return by_mpirun.empty() ? get(r.environment, "PMI_SIZE") : by_mpirun;
  };
  std::string tasks = started(first);
  if (tasks.empty()) tasks = get(first.environment, "SLURM_STEP_NUM_TASKS");
  const bool by_srun = get(first.environment, "SLURM_STEP_NUM_TASKS") == tasks;
  if (ranks.size() == 1 && !tasks.empty() && tasks != "1")
    fail(out,
         by_srun ? fmt::format("srun started {} tasks, but each is alone: MPI sees 1 rank", tasks)
                 : fmt::format("the launcher started {} tasks, but each is alone: MPI sees 1 rank",
                               tasks),
         by_srun ? "use srun --mpi=pmix (Open MPI), pmi2 (MPICH) or cray_shasta (Cray MPICH), of "
                   "which srun --mpi=list shows what there is, or mpirun in the job script"
                 : "use the launcher of the MPI that weft --version names");
  const auto others = ranks_with(ranks, [&](const RankFacts& r) {
    const std::string id = get(r.environment, "SLURM_PROCID");
    return started(r).empty() && !id.empty() && id != std::to_string(r.rank);
  });
  if (ranks.size() > 1 && !others.empty())
    warn(out, fmt::format("MPI numbers {} unlike Slurm", ranks_text(others)),
         "messages of weft name MPI's ranks, those of Slurm its own tasks");
}

// --- Cores and NUMA nodes.

std::vector<int> numbers_of(const std::vector<const RankFacts*>& some) {
  std::vector<int> out;
  for (const RankFacts* r : some) out.push_back(r->rank);
  return out;
}

void judge_cores(const Ranks& ranks, Findings& out) {
  bool fine = true;
  for (const auto& [host, here] : by_host(ranks)) {
    const int online = here.front()->host_cores;
    const auto bound = [&](const RankFacts& r) {
      return static_cast<int>(r.cores.size()) < online;
    };
    // Two bound ranks on the same cores take turns, however many other cores are idle.
    std::map<std::vector<int>, std::vector<int>> crowded;
    for (std::size_t i = 0; i < here.size(); ++i)
      for (std::size_t j = i + 1; j < here.size(); ++j) {
        if (!bound(*here[i]) || !bound(*here[j])) continue;
        std::vector<int> common;
        std::set_intersection(here[i]->cores.begin(), here[i]->cores.end(), here[j]->cores.begin(),
                              here[j]->cores.end(), std::back_inserter(common));
        std::set<int> both(here[i]->cores.begin(), here[i]->cores.end());
        both.insert(here[j]->cores.begin(), here[j]->cores.end());
        if (common.empty() || here[i]->threads + here[j]->threads <= static_cast<int>(both.size()))
          continue;
        for (const int r : {here[i]->rank, here[j]->rank}) {
          auto& who = crowded[common];
          if (std::find(who.begin(), who.end(), r) == who.end()) who.push_back(r);
        }
      }
    for (auto& [cores, who] : crowded) {
      std::sort(who.begin(), who.end());
      fine = false;
      fail(out,
           fmt::format("{} on {} are bound to the same core{} {}", ranks_text(who), host,
                       cores.size() == 1 ? "" : "s",
                       ranks_text(cores).substr(cores.size() == 1 ? 5 : 6)),
           "give each its own (Open MPI: mpirun --map-by slot:PE=CORES --bind-to core; MPICH: "
           "mpiexec -bind-to core:CORES; Slurm: srun --cpus-per-task)");
    }
    int threads = 0;
    std::set<int> cores;
    for (const RankFacts* r : here) {
      threads += r->threads;
      cores.insert(r->cores.begin(), r->cores.end());
    }
    double usable = static_cast<double>(cores.size());
    const double quota = here.front()->quota_cores;
    if (crowded.empty() && threads > static_cast<int>(cores.size())) {
      fine = false;
      warn(out,
           fmt::format("{} on {} compute with {} on {}", ranks_text(numbers_of(here)), host,
                       counted(threads, "thread"), counted(std::ssize(cores), "core")),
           "start fewer ranks there, or set run.threads");
    }
    if (quota > 0 && quota < usable - 0.5) {
      fine = false;
      warn(out,
           fmt::format("{}: the control group grants {:.1f} of {}", host, quota,
                       counted(std::ssize(cores), "core")),
           "ask the scheduler or container for more (--cpus-per-task, --cpus), or set run.threads");
    }
    std::vector<int> wide;
    for (const RankFacts* r : here)
      if (here.size() > 1 && r->numa.size() > 1) wide.push_back(r->rank);
    if (!wide.empty()) {
      fine = false;
      warn(out, fmt::format("{} on {} may run on several NUMA nodes", ranks_text(wide), host),
           "bind each to one (Open MPI: mpirun --map-by numa --bind-to numa; MPICH: mpiexec "
           "-bind-to numa; Slurm: srun --cpu-bind=cores)");
    }
  }
  if (fine) ok(out, "every rank has cores of its own");
}

// --- Memory and limits.

void judge_memory(const Ranks& ranks, Findings& out) {
  const std::size_t before = out.size();
  for (const auto& [host, here] : by_host(ranks)) {
    const RankFacts& r = *here.front();
    const double each = r.available_gib / static_cast<double>(here.size());
    if (each < 1)
      warn(out,
           fmt::format("{}: {:.1f} GiB of memory are free for {}", host, r.available_gib,
                       counted(std::ssize(here), "rank")),
           "see who holds memory there (top), or start fewer ranks");
    // Messages between ranks of a host, and NCCL's, go through /dev/shm.
    if (here.size() > 1 && r.shared_memory_gib < 0.5)
      warn(out, fmt::format("{}: /dev/shm has {:.2f} GiB", host, r.shared_memory_gib),
           "give the container more: docker run --shm-size=8g or --ipc=host");
  }
  const auto limited = [&](const std::string& name, std::int64_t least, const std::string& todo,
                           const std::function<bool(const RankFacts&)>& matters) {
    const auto who = ranks_with(ranks, [&](const RankFacts& r) {
      const auto at = r.limits.find(name);
      return at != r.limits.end() && at->second >= 0 && at->second < least && matters(r);
    });
    if (who.empty()) return;
    const auto value = ranks[who.front()].limits.at(name);
    warn(out, fmt::format("limit of {} is {} on {}", name, value, ranks_text(who)), todo);
  };
  const auto always = [](const RankFacts&) { return true; };
  limited("stack", 4 << 20, "ulimit -s 8192 in the job script", always);
  limited("open files", 1024, "ulimit -n 4096 in the job script", always);
  limited("locked memory", std::int64_t{1} << 30,
          "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK): InfiniBand and "
          "pinned memory need it",
          [](const RankFacts& r) { return r.has_fabric || !r.gpu.empty(); });
  const auto never = ranks_with(ranks, [](const RankFacts& r) { return r.huge_pages == "never"; });
  if (!never.empty())
    warn(
        out, fmt::format("transparent huge pages are off on {}", ranks_text(never)),
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; steps on the CPU are "
        "a few percent slower without");
  if (out.size() == before) ok(out, "memory and limits suffice");
}

// The verdict on GPUs, known answers and speed.
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

}  // namespace

std::vector<Finding> judge(const Ranks& ranks) {
  Findings out;
  judge_versions(ranks, out);
  judge_environment(ranks, out);
  judge_launch(ranks, out);
  judge_cores(ranks, out);
  judge_memory(ranks, out);
  judge_gpus(ranks, out);
  judge_operations(ranks, out);
  judge_results(ranks, out);
  judge_speed(ranks, out);
  return out;
}

Exit verdict(const Findings& findings) {
  Exit code = Exit::done;
  for (const Finding& f : findings) {
    if (f.level != Finding::Level::fail) continue;
    if (f.code == Exit::hardware) return Exit::hardware;
    code = Exit::usage;
  }
  return code;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    text += fmt::format("{}{}", i == 0 ? "" : ",", ranks[i]);
    if (j > i) text += fmt::format("-{}", ranks[j]);
    i = j + 1;
  }
  return text;
}

Groups group_by(const Ranks& ranks, const std::function<std::string(const RankFacts&)>& value) {
  std::map<std::string, std::vector<int>> found;
  for (const RankFacts& r : ranks) found[value(r)].push_back(r.rank);
  Groups groups(found.begin(), found.end());
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
  return groups;
}

}  // namespace weft
