#include "data/stage.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>

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

// Several reads of this size under way at once: one alone waits for one server of a parallel file
// system, while the others are idle.
constexpr std::uint64_t block = std::uint64_t{16} << 20;
constexpr std::uint64_t streams = 4;

// "$TMPDIR/weft", "${TMPDIR}": the folder that it names on this node.
fs::path folder_of(const std::string& stage) {
  if (!stage.starts_with('$')) return stage;
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

// The user's folder in `stage`, locked against other jobs of this user on the node.
class Shelf {
 public:
  explicit Shelf(const fs::path& stage) : path_(stage / fmt::format("weft-stores-{}", geteuid())) {
    if (::mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST)
      fail("cannot make the folder {}: {}", path_, errno);
    check_is_ours(path_);
    const fs::path file = path_ / "lock";
    fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd_ < 0) fail("cannot open {}: {}", file, errno);
    if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
    if (errno == EWOULDBLOCK) {
      log::info("stage     waits for another job that copies to {}", path_.string());
      while (::flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
      }
      return;
    }
    const int reason = errno;
    ::close(fd_);
    fail("cannot lock {}: {}", file, reason);
  }
  ~Shelf() { ::close(fd_); }
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;

  const fs::path& path() const { return path_; }

 private:
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
Hash128 transfer(std::uint64_t bytes,
                 const std::function<void(std::span<std::byte>, std::uint64_t)>& read,
                 const std::function<void(std::span<const std::byte>, std::uint64_t)>& write) {
  const std::uint64_t blocks = (bytes + block - 1) / block;
  std::vector<Hash128> hashes(blocks);
  std::atomic<std::uint64_t> next = 0;
  std::mutex guard;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      std::vector<std::byte> buffer(std::min(block, bytes));
      for (std::uint64_t b = next++; b < blocks; b = next++) {
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

Hash128 hash_of_copy(const fs::path& path, std::uint64_t bytes) {
  const File file = File::open(path, Exit::data, false);
  return transfer(
      bytes, [&](std::span<std::byte> to, std::uint64_t offset) { file.read(to, offset); },
      [](std::span<const std::byte>, std::uint64_t) {});
}

// A store, and what its copies' names begin with.
struct Wanted {
  std::string path;
  StoreFile store;
  std::string name;
};

// The intact copy of that store; empty if there is none. A damaged one is removed.
fs::path copy_on(const fs::path& shelf, const Wanted& wanted) {
  for (const fs::path& entry : entries_of(shelf, Exit::data)) {
    const std::string name = entry.filename().string();
    if (!name.starts_with(wanted.name) || entry.extension() != ".h5") continue;
    std::error_code failed;
    if (fs::file_size(entry, failed) == wanted.store.bytes() && !failed) {
      const std::string hash = to_hex(hash_of_copy(entry, wanted.store.bytes()));
      if (name == wanted.name + hash + ".h5") return entry;
    }
    log::warn("{}, a copy of {}, is damaged: it is made again", entry.string(), wanted.path);
    fs::remove(entry, failed);
    WEFT_CHECK(!failed, Exit::data, "remove it, or choose another data.stage",
               "cannot remove {}: {}", entry.string(), failed.message());
  }
  return {};
}

fs::path make_copy(const fs::path& shelf, const Wanted& wanted) {
  const std::uint64_t bytes = wanted.store.bytes();
  const fs::path draft = shelf / (wanted.name + "tmp");
  try {
    File file = File::create(draft, Exit::data);
    const Hash128 hash = transfer(
        bytes,
        [&](std::span<std::byte> to, std::uint64_t offset) {
          wanted.store.read("bytes to copy", offset, to, false);
        },
        [&](std::span<const std::byte> from, std::uint64_t offset) { file.write(from, offset); });
    file.sync();
    file.drop_cache();  // so that the disk is read
    file.close();
    const Hash128 found = hash_of_copy(draft, bytes);
    WEFT_CHECK(found == hash, Exit::hardware,
               "this node's disk or memory is faulty: leave the node out (sbatch --exclude), or "
               "choose another data.stage",
               "the copy of {} in {} reads back otherwise than it was written: its hash is {}, "
               "expected {}",
               wanted.path, shelf.string(), to_hex(found), to_hex(hash));
    const fs::path copy = shelf / (wanted.name + to_hex(hash) + ".h5");
    rename_file(draft, copy, Exit::data);
    return copy;
  } catch (...) {
    std::error_code none;
    fs::remove(draft, none);
    throw;
  }
}

void check_space(const fs::path& shelf, const std::vector<const Wanted*>& missing) {
  std::uint64_t need = 0, others = 0;
  for (const Wanted* w : missing) need += w->store.bytes();
  struct statvfs disk {};
  if (::statvfs(shelf.c_str(), &disk) != 0 || disk.f_blocks == 0) return;
  const std::uint64_t free = std::uint64_t{disk.f_bavail} * disk.f_frsize;
  if (need <= free) return;
  std::error_code none;
  for (const fs::path& entry : entries_of(shelf, Exit::data)) {
    const auto bytes = fs::file_size(entry, none);
    if (!none) others += bytes;
  }
  const auto text = [](std::uint64_t bytes) { return size_text(static_cast<double>(bytes)); };
  WEFT_CHECK(false, Exit::data,
             others > 0 ? "remove copies there that no job reads any more, choose another "
                          "data.stage, or leave it empty, which reads the stores where they are"
                        : "choose another data.stage, or leave it empty, which reads the stores "
                          "where they are",
             "data.stage: {} has {} left, and {} to copy {} {}{}", shelf.string(), text(free),
             counted(std::ssize(missing), "store"), missing.size() == 1 ? "has" : "have",
             text(need), others > 0 ? "; the copies that are there have " + text(others) : "");
}

void rows(Rows& r, StageDeck& d) {
  r.text("stage", d.stage,
         "Folder on a disk of each node, such as $TMPDIR, to which weft train copies the stores of "
         "data.path and validation.path, once a node, before it reads them; the copies stay there. "
         "Empty: they are read where they are.")
      .decides = false;
}

}  // namespace

DeckTable stage_table() { return deck_table<StageDeck>("data", rows); }

bool is_store_path(const std::string& path) {
  return !is_synthetic(path) && !is_shapes(path) && !is_text_list(path);
}

Staged stage_stores(const std::vector<std::string>& paths, const std::string& stage) {
  Staged staged;
  const Shelf shelf(folder_of(stage));
  staged.folder = shelf.path().string();
  std::error_code none;
  for (const fs::path& entry : entries_of(shelf.path(), Exit::data))  // of jobs that were killed
    if (entry.filename().string().ends_with("-tmp")) fs::remove(entry, none);

  std::vector<Wanted> all;
  all.reserve(paths.size());
  std::vector<const Wanted*> missing;
  for (const std::string& path : paths) {
    all.push_back({path, StoreFile(path), ""});
    Wanted& w = all.back();
    w.name = fmt::format("{}-{}-", w.store.content_id(), w.store.bytes());
    staged.bytes += w.store.bytes();
    const fs::path copy = copy_on(shelf.path(), w);
    if (!copy.empty())
      staged.copies[path] = copy.string();
    else if (std::ranges::find(missing, w.name, &Wanted::name) == missing.end())
      missing.push_back(&w);
  }
  check_space(shelf.path(), missing);
  std::map<std::string, std::string> made;  // by name
  for (const Wanted* w : missing) {
    made[w->name] = make_copy(shelf.path(), *w).string();
    staged.copied += w->store.bytes();
  }
  // Two paths may name one store.
  for (const Wanted& w : all)
    if (!staged.copies.contains(w.path)) staged.copies[w.path] = made.at(w.name);
  return staged;
}

}  // namespace weft
