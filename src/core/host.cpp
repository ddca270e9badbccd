#include "core/host.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace weft {
namespace {

namespace fs = std::filesystem;

// The number at the start of a system file; nothing if there is none ("max") or no file.
std::optional<double> number_in(const fs::path& file) {
  std::ifstream in(file);
  double n = 0;
  if (in >> n) return n;
  return std::nullopt;
}

std::optional<double> number_in(const fs::path& dir, const char* v2, const char* v1) {
  // Version 2 of control groups first, then version 1.
  const auto n = number_in(dir / v2);
  return n ? n : number_in(dir / v1);
}

// The number after `key` in a file of "key number ..." lines.
std::optional<double> value_of(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  double n = 0;
  for (std::string word, rest; in >> word; std::getline(in, rest))
    if (word == key && in >> n) return n;
  return std::nullopt;
}

bool names(const std::string& list, std::string_view controller) {
  std::istringstream in(list);
  for (std::string name; std::getline(in, name, ',');)
    if (name == controller) return true;
  return false;
}

// Directories of the control groups that may limit `controller` for this process. /proc/self/cgroup
// has a line a tree, "ID:CONTROLLERS:PATH"; version 2 has one tree, with id 0 and no controllers
// named. Inside a container the path may be the host's while the mounted tree begins at the
// container's group: directories that do not exist limit nothing.
std::vector<fs::path> control_groups(std::string_view controller, const fs::path& root) {
  std::vector<fs::path> dirs;
  const fs::path mounts = root / "sys/fs/cgroup";
  std::ifstream own(root / "proc/self/cgroup");
  for (std::string line; std::getline(own, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::vector<fs::path> trees;
    if (controllers.empty())
      trees = {mounts, mounts / "unified"};
    else if (names(controllers, controller))
      trees = {mounts / controllers};
    for (const fs::path& tree : trees)
      for (fs::path at = fs::path(line.substr(second + 1)).relative_path();;
           at = at.parent_path()) {
        dirs.push_back(tree / at);
        if (at.empty()) break;
      }
  }
  return dirs;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{"?"};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

HostMemory host_memory(const fs::path& root) {
  const fs::path info = root / "proc/meminfo";
  double total = 1024 * value_of(info, "MemTotal:").value_or(0);
  double available = 1024 * value_of(info, "MemAvailable:").value_or(0);
  for (const fs::path& dir : control_groups("memory", root)) {
    const auto limit = number_in(dir, "memory.max", "memory.limit_in_bytes");
    if (!limit) continue;
    total = std::min(total, *limit);
    // Usage includes cached files; the kernel frees the inactive ones when memory gets short.
    const double used = number_in(dir, "memory.current", "memory.usage_in_bytes").value_or(0);
    // Version 1 counts the groups below in total_inactive_file; version 2 has inactive_file only,
    // which includes them.
    auto cached = value_of(dir / "memory.stat", "total_inactive_file");
    if (!cached) cached = value_of(dir / "memory.stat", "inactive_file");
    available = std::min(available, *limit - std::max(0.0, used - cached.value_or(0)));
  }
  return {static_cast<std::size_t>(total), static_cast<std::size_t>(std::max(0.0, available))};
}

double quota_cores(const fs::path& root) {
  double cores = 0;
  const auto add = [&](double quota, double period) {
    if (quota > 0 && period > 0)
      cores = cores > 0 ? std::min(cores, quota / period) : quota / period;
  };
  for (const fs::path& dir : control_groups("cpu", root)) {
    std::ifstream in(dir / "cpu.max");
    double quota = 0, period = 0;
    if (in >> quota >> period) add(quota, period);
    // -1: no limit.
    add(number_in(dir / "cpu.cfs_quota_us").value_or(-1),
        number_in(dir / "cpu.cfs_period_us").value_or(0));
  }
  return cores;
}

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

FileSystem file_system_of_type(std::uint32_t f_type) {
  switch (f_type) {
    case 0xEF53:
      return {"ext4"};
    case 0x58465342:
      return {"XFS"};
    case 0x9123683E:
      return {"Btrfs"};
    case 0x2FC12FC1:
      return {"ZFS"};
    case 0x01021994:
      return {"tmpfs"};
    case 0x794C7630:
      return {"overlay"};
    case 0x65735546:
      return {"FUSE"};
    case 0x0BD00BD0:
      return {"Lustre", true};
    case 0x6969:
      return {"NFS", true};
    case 0x47504653:
      return {"GPFS", true};
    case 0x19830326:
      return {"BeeGFS", true};
    case 0x00C36400:
      return {"CephFS", true};
    case 0x5346414F:
      return {"AFS", true};
    case 0xFF534D42:
    case 0xFE534D42:
    case 0x517B:
      return {"CIFS", true};
    default:
      return {fmt::format("type {:#x}", f_type)};
  }
}

std::string size_text(double bytes) {
  return bytes >= (1ull << 30) ? fmt::format("{:.2f} GiB", gib(bytes))
                               : fmt::format("{:.2f} MiB", bytes / (1 << 20));
}

}  // namespace weft

#ifndef WEFT_COMMIT
#define WEFT_COMMIT "unknown"
#endif
#ifndef WEFT_VERSION
#define WEFT_VERSION "0"
#endif

namespace weft {

std::string version_line() {
  return fmt::format("weft {} (commit {}, g++ {})", WEFT_VERSION, WEFT_COMMIT, __VERSION__);
}

}  // namespace weft
