#include "data/stage.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "config/deck_table.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "data/images/labelled_images.h"
#include "data/store_file.h"
#include "data/synthetic.h"
#include "data/text_images/text_images.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// Several blocks are read at once: one read alone waits for one server of a parallel file system,
// while the others are idle.
constexpr std::uint64_t streams = 4;

// "$TMPDIR/weft", "${TMPDIR}": the folder that it names on this node.
fs::path folder_of(const std::string& stage) {
  if (!stage.starts_with('$')) return written_path(stage, "data.stage");
  const bool braces = stage.starts_with("${");
  const std::size_t begin = braces ? 2 : 1;
  const std::size_t end = std::min(stage.size(), stage.find(braces ? '}' : '/', begin));
  const std::string name = stage.substr(begin, end - begin);
  const char* value = std::getenv(name.c_str());
  WEFT_CHECK(value != nullptr && *value != '\0', Exit::usage,
             "name a folder on a disk of the node, or leave data.stage empty",
             "data.stage = \"{}\": {} is not set", stage, name.empty() ? "$" : name);
  return value + stage.substr(std::min(stage.size(), end + (braces ? 1 : 0)));
}

// Temporary folders are open to all users of a node, and a hash does not tell who wrote a file:
// copies lie in a folder that nobody else can write.
void check_is_ours(const fs::path& folder) {
  struct stat found {};
  const bool there = ::lstat(folder.c_str(), &found) == 0;
  WEFT_CHECK(there && S_ISDIR(found.st_mode) && found.st_uid == geteuid() &&
                 (found.st_mode & (S_IWGRP | S_IWOTH)) == 0,
             Exit::data, "remove it, or choose another data.stage",
             "{} is not a folder that this user alone can write", folder.string());
}

using Stop = std::function<bool()>;

void throw_if_stopped(const Stop& stop) {
  WEFT_CHECK(!stop(), Exit::stopped, "run the same command to resume",
             "stopped on request while stores were copied (data.stage)");
}

// The user's folder in `stage`, locked against other jobs of this user on the node.
class LockedFolder {
 public:
  LockedFolder(const fs::path& stage, const Stop& stop)
      : path_(stage / fmt::format("weft-stores-{}", geteuid())) {
    if (::mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST)
      fail("cannot make the folder {}: {}", path_, errno);
    check_is_ours(path_);
    const fs::path file = path_ / "lock";
    fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd_ < 0) fail("cannot open {}: {}", file, errno);
    try {
      lock(file, stop);
    } catch (...) {
      ::close(fd_);
      throw;
    }
  }
  ~LockedFolder() { ::close(fd_); }
  LockedFolder(const LockedFolder&) = delete;
  LockedFolder& operator=(const LockedFolder&) = delete;

  const fs::path& path() const { return path_; }

 private:
  // Polls, because a request to stop does not interrupt flock(): another thread takes the signals.
  void lock(const fs::path& file, const Stop& stop) {
    for (bool waits = false; ::flock(fd_, LOCK_EX | LOCK_NB) != 0;) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) fail("cannot lock {}: {}", file, errno);
      throw_if_stopped(stop);
      if (!std::exchange(waits, true))
        log::info("stage     waits for another job that copies to {}", path_.string());
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }

  [[noreturn]] static void fail(fmt::format_string<std::string, std::string> what,
                                const fs::path& path, int reason) {
    throw Error(Exit::data, fmt::format(what, path.string(), std::string(std::strerror(reason))),
                "data.stage is a folder on a disk of each node, which is there before the job: "
                "$TMPDIR, /tmp or what your site names",
                __FILE__, __LINE__);
  }

  fs::path path_;
  int fd_ = -1;
};

// Hands the bytes of a file, read by `read`, to `write` a block at a time, from several threads.
// Their hash.
Hash128 transfer(std::uint64_t bytes, const Stop& stop,
                 const std::function<void(std::span<std::byte>, std::uint64_t)>& read,
                 const std::function<void(std::span<const std::byte>, std::uint64_t)>& write) {
  const std::uint64_t block = staging_block, blocks = (bytes + block - 1) / block;
  std::vector<Hash128> hashes(blocks);
  std::atomic<std::uint64_t> next = 0;
  std::mutex guard;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      std::vector<std::byte> buffer(std::min(block, bytes));
      for (std::uint64_t b = next++; b < blocks; b = next++) {
        throw_if_stopped(stop);
        const std::uint64_t offset = b * block;
        const auto piece = std::span(buffer).first(std::min(block, bytes - offset));
        read(piece, offset);
        hashes[b] = hash128(piece);
        write(piece, offset);
      }
    } catch (...) {
      const std::lock_guard hold(guard);
      if (!failure) failure = std::current_exception();
      next = blocks;
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t t = 1; t < std::min(streams, blocks); ++t) try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // a limit of threads: fewer do it too
    }
  work();
  for (std::thread& t : threads) t.join();
  if (failure) std::rethrow_exception(failure);
  return hash128(std::as_bytes(std::span(hashes)));
}

Hash128 hash_of_copy(const fs::path& path, std::uint64_t bytes, const Stop& stop) {
  const File file = File::open(path, Exit::data, false);
  return transfer(
      bytes, stop, [&](std::span<std::byte> to, std::uint64_t offset) { file.read(to, offset); },
      [](std::span<const std::byte>, std::uint64_t) {});
}

// A store, and what its copies' names begin with.
struct StoreToCopy {
  std::string path;
  StoreFile store;
  std::string name;
};

// What this host's drafts have in their names. No host's name has an "@".
std::string draft_mark() { return "tmp@" + host_name() + "@"; }

// The copy of that store; empty if there is none. Its bytes were compared when it was made; each
// clip's hash is compared again when it is read.
fs::path find_copy(const fs::path& folder, const StoreToCopy& source) {
  std::error_code none;
  for (const fs::path& entry : entries_of(folder, Exit::data))
    if (entry.filename().string().starts_with(source.name) && entry.extension() == ".h5" &&
        fs::file_size(entry, none) == source.store.bytes())
      return entry;
  return {};
}

fs::path make_copy(const fs::path& folder, const StoreToCopy& source, const Stop& stop) {
  const std::uint64_t bytes = source.store.bytes();
  // Another node's differs, should the folder be shared.
  const fs::path draft = folder / fmt::format("{}{}{}", source.name, draft_mark(), ::getpid());
  try {
    File file = File::create(draft, Exit::data);
    const Hash128 hash = transfer(
        bytes, stop,
        [&](std::span<std::byte> to, std::uint64_t offset) {
          source.store.read("bytes to copy", offset, to, false);
        },
        [&](std::span<const std::byte> from, std::uint64_t offset) { file.write(from, offset); });
    file.sync();
    file.drop_cache();  // so that the disk is read
    file.close();
    const Hash128 found = hash_of_copy(draft, bytes, stop);
    WEFT_CHECK(found == hash, Exit::hardware,
               "this node's disk or memory is faulty: leave the node out (sbatch --exclude), or "
               "choose another data.stage",
               "the copy of {} in {} does not read back as written: expected hash {}, got {}",
               source.path, folder.string(), to_hex(hash), to_hex(found));
    const fs::path copy = folder / (source.name + to_hex(hash) + ".h5");
    rename_file(draft, copy, Exit::data);
    return copy;
  } catch (...) {
    std::error_code none;
    fs::remove(draft, none);
    throw;
  }
}

void check_space(const fs::path& folder, const std::vector<const StoreToCopy*>& missing) {
  std::uint64_t need = 0, others = 0;
  for (const StoreToCopy* source : missing) need += source->store.bytes();
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) != 0 || disk.f_blocks == 0) return;
  const std::uint64_t free = std::uint64_t{disk.f_bavail} * disk.f_frsize;
  if (need <= free) return;
  std::error_code none;
  for (const fs::path& entry : entries_of(folder, Exit::data)) {
    const auto bytes = fs::file_size(entry, none);
    if (!none) others += bytes;
  }
  const auto text = [](std::uint64_t bytes) { return size_text(static_cast<double>(bytes)); };
  WEFT_CHECK(false, Exit::data,
             "remove copies there that no job reads any more, choose another data.stage, or leave "
             "it empty, which reads the stores where they are",
             "data.stage: {} has {} left, and {} to copy {} {}{}", folder.string(), text(free),
             counted(std::ssize(missing), "store"), missing.size() == 1 ? "has" : "have",
             text(need), others > 0 ? "; the copies that are there have " + text(others) : "");
}

void warn_of_network(const fs::path& folder) {
  struct statfs disk {};
  if (::statfs(folder.c_str(), &disk) != 0) return;
  const FileSystem kind = file_system_of_type(static_cast<std::uint32_t>(disk.f_type));
  if (kind.network)
    log::warn(
        "data.stage: {} is on {}, not on a disk of this node: copies there gain nothing, and all "
        "nodes write them; choose another folder ($TMPDIR, /tmp), or leave data.stage empty",
        folder.string(), kind.name);
}

void rows(Rows& r, StageDeck& d) {
  r.text("stage", d.stage,
         "Folder on a disk of each node, such as $TMPDIR, to which weft train copies the stores of "
         "data.path and validation.path, once a node, before it reads them; the copies stay there. "
         "Empty: they are read where they are.")
      .decides = false;
}

}  // namespace

std::uint64_t staging_block = std::uint64_t{16} << 20;

DeckTable stage_table() { return deck_table<StageDeck>("data", rows); }

bool is_store_path(const std::string& path) {
  return !is_synthetic(path) && !is_shapes(path) && !is_text_list(path);
}

Staged stage_stores(const std::vector<std::string>& paths, const std::string& stage,
                    const Stop& stop) {
  Staged staged;
  const LockedFolder folder(folder_of(stage), stop);
  staged.folder = folder.path().string();
  warn_of_network(folder.path());
  // Drafts of jobs that were killed: a live job of this host would hold the lock. Those of another
  // host may be alive, where the folder is shared and locks are not.
  std::error_code none;
  for (const fs::path& entry : entries_of(folder.path(), Exit::data))
    if (entry.filename().string().find(draft_mark()) != std::string::npos) fs::remove(entry, none);

  std::vector<StoreToCopy> all;
  all.reserve(paths.size());
  std::vector<const StoreToCopy*> missing;
  for (const std::string& path : paths) {
    all.push_back({path, StoreFile(path), ""});
    StoreToCopy& source = all.back();
    source.name = fmt::format("{}-{}-", source.store.content_id(), source.store.bytes());
    staged.bytes += source.store.bytes();
    const fs::path copy = find_copy(folder.path(), source);
    if (!copy.empty())
      staged.copies[path] = copy.string();
    else if (std::ranges::find(missing, source.name, &StoreToCopy::name) == missing.end())
      missing.push_back(&source);
  }
  check_space(folder.path(), missing);
  std::map<std::string, std::string> made;  // by name
  for (const StoreToCopy* source : missing) {
    made[source->name] = make_copy(folder.path(), *source, stop).string();
    staged.bytes_copied += source->store.bytes();
  }
  // Two paths may name one store.
  for (const StoreToCopy& source : all)
    if (!staged.copies.contains(source.path)) staged.copies[source.path] = made.at(source.name);
  return staged;
}

void check_same_copies(const std::string& store,
                       const std::vector<std::pair<std::string, std::string>>& copies) {
  // The name has the content, the size and the hash of what was read.
  std::map<std::string, std::vector<std::string>> hosts;
  for (const auto& [host, copy] : copies) hosts[fs::path(copy).filename().string()].push_back(host);
  if (hosts.size() < 2) return;
  constexpr std::size_t most = 8;
  std::string found;
  for (const auto& [name, where] : hosts) {
    found += fmt::format("{}{} on {}", found.empty() ? "" : "; ", name,
                         fmt::join(std::span(where).first(std::min(most, where.size())), ", "));
    if (where.size() > most) found += fmt::format(" and {} more", where.size() - most);
  }
  WEFT_CHECK(false, Exit::hardware,
             "remove these copies and start again; if the same host differs again, leave it out "
             "(sbatch --exclude)",
             "data.stage: the nodes' copies of {} differ: a host misread it, or the store was "
             "rewritten meanwhile: {}",
             store, found);
}

}  // namespace weft
