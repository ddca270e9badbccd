#include <fmt/format.h>
#include <gnu/libc-version.h>
#include <hdf5.h>
#include <mpi.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <dnnl.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/mpi.h"
#include "doctor/doctor.h"
#include "ops/dispatch.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"

extern "C" {
#include <libavformat/avformat.h>
#include <libavutil/avutil.h>
}

extern char** environ;

namespace weft {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuProcess, pid, name, memory_gib)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuFacts, uuid, name, driver, bus, numa_node, memory_gib,
                                   used_gib, pcie_width, pcie_width_most, ecc_uncorrected,
                                   rows_failed, slowdown, mig, processes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankFault, code, stage, what, hint)
namespace detail {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankFacts, rank, host_rank, host_ranks, core_sharers, pid, host,
                                   cpu, instructions, cores, numa, host_cores, host_numa_nodes,
                                   threads, quota_cores, memory_gib, available_gib,
                                   shared_memory_gib, huge_pages, limits, has_fabric, versions,
                                   environment, device, gpu, no_gpu, shares_gpu, host_gpus,
                                   measured, wrong, operations, file, file_system, communicator,
                                   faults)
}  // namespace detail
void to_json(nlohmann::json& j, const RankFacts& f) { detail::to_json(j, f); }
void from_json(const nlohmann::json& j, RankFacts& f) { detail::from_json(j, f); }

namespace {

std::string first_line(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// "0-3,8" -> 0 1 2 3 8, as the kernel writes sets of cores.
std::vector<int> parse_set(const std::string& text) {
  std::vector<int> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    int first = 0, last = 0;
    const int read = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (read < 1) continue;
    for (int i = first; i <= (read == 2 ? last : first); ++i) out.push_back(i);
  }
  return out;
}

std::vector<int> bound_cores() {
  // The kernel's mask may be longer than cpu_set_t; the call fails until the set is long enough.
  for (std::size_t most = 1024; most <= (1u << 16); most *= 2) {
    cpu_set_t* set = CPU_ALLOC(most);
    const std::size_t bytes = CPU_ALLOC_SIZE(most);
    CPU_ZERO_S(bytes, set);
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    std::vector<int> cores;
    for (std::size_t i = 0; ok && i < most; ++i)
      if (CPU_ISSET_S(i, bytes, set)) cores.push_back(static_cast<int>(i));
    CPU_FREE(set);
    if (ok) return cores;
  }
  return {};
}

void add_numa(RankFacts& f) {
  std::set<int> nodes;
  int all = 0;
  const std::filesystem::path root = "/sys/devices/system/node";
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(root, none)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("node", 0) != 0 || name.size() == 4 || std::isdigit(name[4]) == 0) continue;
    const std::vector<int> its = parse_set(first_line(entry.path() / "cpulist"));
    if (its.empty()) continue;  // memory alone
    ++all;
    for (const int core : f.cores)
      if (std::find(its.begin(), its.end(), core) != its.end())
        nodes.insert(std::stoi(name.substr(4)));
  }
  f.numa.assign(nodes.begin(), nodes.end());
  f.host_numa_nodes = std::max(1, all);
}

void add_memory(RankFacts& f) {
  const HostMemory memory = host_memory();
  f.memory_gib = gib(memory.total);
  f.available_gib = gib(memory.available);
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0)
    f.shared_memory_gib =
        gib(static_cast<double>(shm.f_blocks) * static_cast<double>(shm.f_frsize));
  const std::string pages = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::size_t open = pages.find('['), close = pages.find(']');
  if (open != std::string::npos && close != std::string::npos)
    f.huge_pages = pages.substr(open + 1, close - open - 1);
  const std::array<std::pair<const char*, __rlimit_resource>, 3> wanted = {
      {{"locked memory", RLIMIT_MEMLOCK}, {"stack", RLIMIT_STACK}, {"open files", RLIMIT_NOFILE}}};
  for (const auto& [name, resource] : wanted) {
    rlimit limit{};
    getrlimit(resource, &limit);
    f.limits[name] =
        limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
  }
}

void add_versions(RankFacts& f) {
  f.versions["weft"] = version_line().substr(version_line().find(' ') + 1);
  for (const LibraryVersion& l : library_versions())
    if (!l.found.empty()) f.versions[l.name] = l.found;
  utsname kernel{};
  uname(&kernel);
  f.versions["Linux"] = kernel.release;
  f.versions["glibc"] = gnu_get_libc_version();
}

void add_environment(RankFacts& f) {
  constexpr std::array prefixes = {"OMP_",
                                   "GOMP_",
                                   "KMP_",
                                   "MKL_",
                                   "DNNL_",
                                   "ONEDNN_",
                                   "CUDA_",
                                   "NVIDIA_",
                                   "NCCL_",
                                   "WEFT_",
                                   "UCX_",
                                   "OMPI_MCA_",
                                   "OMPI_COMM_WORLD_",
                                   "MPICH_",
                                   "MPIR_CVAR_",
                                   "FI_",
                                   "PMI_RANK",
                                   "PMI_SIZE",
                                   "HDF5_",
                                   "SLURM_",
                                   "PMIX_RANK",
                                   "LD_PRELOAD",
                                   "LD_LIBRARY_PATH",
                                   "MALLOC_",
                                   "ROCR_VISIBLE"};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equal = text.find('=');
    if (equal == std::string::npos) continue;
    for (const char* p : prefixes)
      if (text.rfind(p, 0) == 0) f.environment[text.substr(0, equal)] = text.substr(equal + 1);
  }
}

// describe_cpu() names the model first.
std::string cpu_model() {
  const std::string all = describe_cpu();
  return all.substr(0, all.find(", "));
}

}  // namespace

RankFacts rank_facts(MPI_Comm world) {
  RankFacts f;
  MPI_Comm_rank(world, &f.rank);
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &f.host_rank);
  MPI_Comm_size(host, &f.host_ranks);
  int used = 0;
  f.core_sharers = count_core_sharers(host, used);
  MPI_Comm_free(&host);
  f.host = host_name();
  f.pid = static_cast<int>(getpid());
  f.cpu = cpu_model();
  f.instructions = ops::cpu_instructions();
  if (ops::cpu_multiplies_bf16()) f.instructions += " with bf16";
  f.cores = bound_cores();
  f.host_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  add_numa(f);
  add_memory(f);
  f.quota_cores = quota_cores();
  std::error_code none;
  f.has_fabric = !std::filesystem::is_empty("/sys/class/infiniband", none) && !none;
  add_versions(f);
  add_environment(f);
  return f;
}

std::vector<RankFacts> gather_facts(const RankFacts& mine, MPI_Comm world) {
  // Names and environment values may hold any bytes, and dump() would throw on invalid UTF-8.
  const std::string text =
      dump_json(nlohmann::json(mine), -1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::vector<RankFacts> facts;
  for (const std::string& of_rank : gather_texts(text, world))
    facts.push_back(parse_json(of_rank).get<RankFacts>());
  return facts;
}

// Versions of the libraries.
namespace {

// mpi.h of the MPIs that people use; others do not say.
std::string mpi_of_header() {
#if defined(OPEN_MPI)
  return fmt::format("Open MPI v{}.{}.{}", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION,
                     OMPI_RELEASE_VERSION);
#elif defined(I_MPI_VERSION)
  return fmt::format("Intel MPI {}", I_MPI_VERSION);
#elif defined(MVAPICH2_VERSION)
  return fmt::format("MVAPICH2 {}", MVAPICH2_VERSION);
#elif defined(MPICH_VERSION)
  return fmt::format("MPICH {}", MPICH_VERSION);
#else
  return "";
#endif
}

std::string dotted(unsigned version) {  // as FFmpeg packs it
  return fmt::format("{}.{}.{}", version >> 16, version >> 8 & 255, version & 255);
}

}  // namespace

LibraryVersion mpi_version() { return {"MPI", mpi_library(), mpi_of_header()}; }

std::vector<LibraryVersion> library_versions() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  const dnnl_version_t* dnnl = dnnl_version();
  std::vector<LibraryVersion> all = {
      mpi_version(),
      {"HDF5", fmt::format("{}.{}.{}", major, minor, release),
       fmt::format("{}.{}.{}", H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE)},
      {"oneDNN", fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch),
       fmt::format("{}.{}.{}", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH)},
      {"FFmpeg", av_version_info(), ""},
      {"libavformat", dotted(avformat_version()), dotted(LIBAVFORMAT_VERSION_INT)}};
  std::map<std::string, std::string> built;
  if (&add_cuda_headers != nullptr) add_cuda_headers(built);
  const std::map<std::string, std::string> found = cuda_library_versions();
  for (const auto& [name, version] : found) all.push_back({name, version, built[name]});
  for (const auto& [name, version] : built)
    if (!version.empty() && found.count(name) == 0) all.push_back({name, "", version});
  return all;
}

std::string version_text() {
  std::string text = version_line() + "\n";
  const auto line = [&](const auto&... columns) {
    text += fmt::format("  {:<13} {:<24} {}", columns...);
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  };
  line("library", "found", "compiled against");
  for (const LibraryVersion& l : library_versions())
    line(l.name, l.found.empty() ? "not found" : l.found, l.built);
  text += fmt::format("  CPU: {}\n", describe_cpu());
  std::string why;
  const std::vector<GpuFacts> gpus = inventory_gpus(why);
  for (std::size_t i = 0; i < gpus.size(); ++i)
    text += fmt::format("  GPU {}: {}, {:.1f} GiB, driver {}\n", i, gpus[i].name,
                        gpus[i].memory_gib, gpus[i].driver);
  if (gpus.empty()) text += fmt::format("  no GPU: {}\n", why);
  return text;
}

}  // namespace weft
