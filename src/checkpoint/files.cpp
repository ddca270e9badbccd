#include "checkpoint/files.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace weft::checkpoint {

void (*at_site)(const char* site) = nullptr;

namespace {

[[noreturn]] void refuse(const std::string& what, int reason, const std::string& hint) {
  throw Error(Exit::checkpoint, fmt::format("{}: {}", what, std::strerror(reason)), hint, __FILE__,
              __LINE__);
}

// Removes a tree or throws; never follows a link out of it.
void remove_tree(const fs::path& path) {
  std::error_code ec;
  fs::remove_all(path, ec);
  if (ec)
    throw Error(Exit::checkpoint, fmt::format("cannot delete {}: {}", path.string(), ec.message()),
                "delete it by hand", __FILE__, __LINE__);
}

fs::path temporary(const fs::path& run_dir, std::int64_t step) {
  return run_dir / (step_name(step) + ".tmp");
}

// Exchanges two names in one atomic step; false where the file system cannot.
bool exchange(const fs::path& a, const fs::path& b) {
  return syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

std::string step_name(std::int64_t step) { return fmt::format("step_{}", step); }

// Accepts one spelling per step: with "step_020" two directories could claim the same step.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with("step_")) return std::nullopt;
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + 5, end, step);
  if (error != std::errc() || stop != end || step < 0 || name != step_name(step))
    return std::nullopt;
  return step;
}

std::vector<std::int64_t> list_steps(const fs::path& run_dir) {
  std::vector<std::int64_t> steps;
  std::error_code ec;
  fs::directory_iterator it(run_dir, ec);
  if (ec == std::errc::no_such_file_or_directory) return steps;
  if (ec)
    throw Error(Exit::checkpoint,
                fmt::format("cannot read directory {}: {}", run_dir.string(), ec.message()),
                "check run.dir and its permissions", __FILE__, __LINE__);
  for (; it != fs::directory_iterator(); it.increment(ec)) {
    const auto step = step_of(it->path().filename().string());
    if (step && it->symlink_status(ec).type() == fs::file_type::directory) steps.push_back(*step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

std::optional<std::string> read_latest(const fs::path& run_dir) {
  std::error_code ec;
  const fs::path latest = run_dir / "latest";
  const fs::file_status status = fs::symlink_status(latest, ec);
  if (!fs::exists(status)) return std::nullopt;
  // A file or directory in its place is not weft's; the text returned names no step.
  if (status.type() != fs::file_type::symlink) return "(not a link)";
  return fs::read_symlink(latest, ec).string();
}

// Saves, clips and logs need a few more descriptors than are open now.
static void probe_open_files() {
  constexpr int wanted = 32;
  std::vector<int> opened;
  int reason = 0;
  while (reason == 0 && std::ssize(opened) < wanted) {
    const int fd = ::dup(STDERR_FILENO);
    if (fd >= 0)
      opened.push_back(fd);
    else
      reason = errno;
  }
  for (const int fd : opened) ::close(fd);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  WEFT_CHECK(reason != EMFILE, Exit::checkpoint, "raise ulimit -n",
             "a process may open {} files here (ulimit -n), and this one needs {} more than that",
             limit.rlim_cur, wanted - std::ssize(opened));
}

// Writing and syncing one page reveals full disks, quotas, read-only mounts and file size limits
// now rather than at the first save, hours into the training.
void probe_directory(const fs::path& run_dir, int rank) {
  probe_open_files();
  std::error_code ec;
  fs::create_directories(run_dir, ec);
  if (ec)
    throw Error(Exit::checkpoint,
                fmt::format("cannot create directory {}: {}", run_dir.string(), ec.message()),
                "set run.dir to a place that every host can write to", __FILE__, __LINE__);
  const fs::path probe = run_dir / fmt::format(".probe_{}_{}", rank, getpid());
  ::unlink(probe.c_str());
  try {
    File file = File::create(probe, Exit::checkpoint);
    const std::array<std::byte, 4096> page{};
    file.write(page, 0);
    file.sync();
    file.close();
  } catch (...) {
    ::unlink(probe.c_str());
    throw;
  }
  ::unlink(probe.c_str());
}

void check_own_files(const fs::path& run_dir) {
  struct stat status {};
  if (::stat(run_dir.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) != 0)
    log::warn("{} can be written by every user of this host, checkpoints too: chmod o-w {}",
              run_dir.string(), run_dir.string());
  for (const char* name :
       {"deck.toml", "run.json", "metrics.jsonl", "metrics.jsonl.tmp", "status.json", "matmul.txt",
        "trace.json", "trace.json.tmp", "latest", "lock"}) {
    const fs::path path = run_dir / name;
    if (::lstat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) continue;
    if (name == std::string_view("latest") && !S_ISDIR(status.st_mode)) continue;  // is replaced
    WEFT_CHECK(false, Exit::checkpoint, "remove it, or choose another run.dir",
               "{} is {}, not a file of weft's", path.string(),
               S_ISLNK(status.st_mode)   ? "a link"
               : S_ISDIR(status.st_mode) ? "a directory"
                                         : "a pipe or device");
  }
}

void check_file_size(const fs::path& shard, std::uint64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  WEFT_CHECK(bytes <= limit.rlim_cur, Exit::checkpoint,
             "ulimit -f unlimited, or more ranks, which write less each",
             "{} will have {} bytes, a file of this process may have {} (ulimit -f)",
             shard.string(), bytes, limit.rlim_cur);
}

void check_free_space(const fs::path& run_dir, std::uint64_t bytes) {
  struct statvfs disk {};
  // Some network file systems do not report their size.
  if (::statvfs(run_dir.c_str(), &disk) != 0 || disk.f_blocks == 0) return;
  const std::uint64_t free = std::uint64_t{disk.f_bavail} * disk.f_frsize;
  WEFT_CHECK(bytes <= free, Exit::checkpoint, "free some space or choose another run.dir",
             "a checkpoint of {} takes {} bytes, its file system has {} left", run_dir.string(),
             bytes, free);
}

void clear_remains(const fs::path& run_dir) {
  // Collected first and changed later: entries must not move while the directory is iterated.
  std::vector<fs::path> remains;
  std::vector<std::int64_t> replaced, moved_aside;
  std::error_code ec;
  for (fs::directory_iterator it(run_dir, ec); it != fs::directory_iterator(); it.increment(ec)) {
    const std::string name = it->path().filename().string();
    const auto step = step_of(name.substr(0, name.size() - std::min<std::size_t>(4, name.size())));
    if (step && name.ends_with(".tmp")) {
      // A save cut off between exchange and read-back: step_N.tmp is the older, verified checkpoint
      // of the same step, and step_N the unproven one.
      const fs::path now = run_dir / step_name(*step);
      if (fs::exists(it->path() / verified_name, ec) && fs::exists(now, ec) &&
          !fs::exists(now / verified_name, ec))
        replaced.push_back(*step);
      else
        remains.push_back(it->path());
    } else if (step && name.ends_with(".old")) {
      moved_aside.push_back(*step);
    } else if (name == "latest.tmp" || name.starts_with(".probe_")) {
      remains.push_back(it->path());
    }
  }
  for (const std::int64_t step : replaced) withdraw(run_dir, step);
  for (const fs::path& path : remains) remove_tree(path);
  // publish() without an atomic exchange was cut off: unless step_N is there, .old holds the only
  // copy of it.
  for (const std::int64_t step : moved_aside) {
    const fs::path old = run_dir / (step_name(step) + ".old"), now = run_dir / step_name(step);
    if (fs::exists(now, ec))
      remove_tree(old);
    else
      rename_file(old, now, Exit::checkpoint);
  }
}

void publish(const fs::path& run_dir, std::int64_t step) {
  const fs::path from = temporary(run_dir, step), to = run_dir / step_name(step);
  std::error_code ec;
  if (!fs::exists(fs::symlink_status(to, ec))) {
    rename_file(from, to, Exit::checkpoint);
  } else if (!exchange(from, to)) {
    // Without an atomic exchange there is a moment without step_N: `latest` may dangle, and a
    // restart at that moment uses an older checkpoint. The older step_N ends up where an exchange
    // would have put it, since withdraw() looks for it there.
    const fs::path aside = run_dir / (step_name(step) + ".old");
    remove_tree(aside);
    rename_file(to, aside, Exit::checkpoint);
    rename_file(from, to, Exit::checkpoint);
    rename_file(aside, from, Exit::checkpoint);
  }
  pass("renamed");
  sync_directory(run_dir, Exit::checkpoint);
}

// If publish() displaced an older step_N, that one is at step_N.tmp and returns to its place.
void withdraw(const fs::path& run_dir, std::int64_t step) {
  const fs::path old = temporary(run_dir, step), now = run_dir / step_name(step);
  std::error_code ec;
  if (fs::exists(fs::symlink_status(old, ec))) {
    if (!exchange(old, now)) return remove_tree(now);
    return remove_tree(old);
  }
  remove_tree(now);
}

// The order matters: the mark must be on disk before `latest` can point at the step.
void mark_verified(const fs::path& run_dir, std::int64_t step, const std::string& hash) {
  const fs::path dir = run_dir / step_name(step);
  replace_file(dir / verified_name, hash + "\n", Exit::checkpoint, Durable::yes);
  pass("marked");
  // A link cannot be changed in place; renaming a new one over it is atomic.
  const fs::path link = run_dir / "latest.tmp";
  ::unlink(link.c_str());
  if (::symlink(step_name(step).c_str(), link.c_str()) != 0)
    refuse(fmt::format("cannot create link {}", link.string()), errno,
           "the file system must know symbolic links");
  pass("linked");
  rename_file(link, run_dir / "latest", Exit::checkpoint);
  sync_directory(run_dir, Exit::checkpoint);
  pass("latest");
}

void delete_older(const fs::path& run_dir, std::int64_t step, int keep) {
  int kept = 0;
  std::error_code ec;
  for (const std::int64_t s : list_steps(run_dir)) {
    if (s > step) continue;
    const fs::path dir = run_dir / step_name(s);
    if (kept < keep) {
      if (fs::exists(dir / verified_name, ec)) ++kept;
      continue;
    }
    // Renamed first: an interrupted deletion must not leave half a checkpoint under a step's name.
    const fs::path doomed = temporary(run_dir, s);
    remove_tree(doomed);
    rename_file(dir, doomed, Exit::checkpoint);
    pass("deleting");
    remove_tree(doomed);
  }
}

}  // namespace weft::checkpoint
