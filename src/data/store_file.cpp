// The child is this very program by posix_spawn, not a fork: a fork copies the page tables of the
// rank, and with some networks the pages that MPI has pinned; a spawned program shares nothing with
// MPI or CUDA.
#include "data/store_file.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/file.h"
#include "core/file_kind.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/hdf5.h"
#include "data/images/image_store.h"

namespace weft {
namespace {

constexpr const char* child_argument = "--read-clip-store";
// CPU seconds allowed between two signs of life: a call that takes more never ends. Waiting for
// slow storage uses none.
constexpr rlim_t longest_call = 20;
// What is hashed is read in pieces that are still in the cache then. Smaller pieces cost more in
// system calls than they save; measured with `weft bench read`.
constexpr std::size_t piece = 256 << 10;

struct ReaderCommand {
  std::vector<std::string> words;
  double silence = 0, silence_at_stop = 0;  // seconds
};
ReaderCommand& reader_command() {
  static ReaderCommand command;
  return command;
}

// What the child writes: signs of life, the end of them, its answer.
constexpr char alive_mark = '.', answer_mark = '\n';

// Written once, before the trainer starts its threads; they only read it.
std::map<std::string, std::string>& copies_of_stores() {
  static std::map<std::string, std::string> copies;
  return copies;
}

// Numbers are packed as they lie in memory, lists and texts behind their length: both ends are the
// same program.
class Packer {
 public:
  template <class T>
  void operator()(const T& value) {
    if constexpr (std::is_same_v<T, ClipInfo>) {
      (*this)(value.fps), (*this)(value.source), (*this)(value.text);
    } else if constexpr (std::is_trivially_copyable_v<T>) {
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    } else {
      (*this)(static_cast<std::uint64_t>(value.size()));
      if constexpr (std::is_trivially_copyable_v<typename T::value_type>)
        bytes_.append(reinterpret_cast<const char*>(value.data()),
                      value.size() * sizeof(typename T::value_type));
      else
        for (const auto& item : value) (*this)(item);
    }
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Damaged input may have corrupted the child: no length is trusted that the bytes do not hold.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  void operator()(T& value) {
    if constexpr (std::is_same_v<T, ClipInfo>) {
      (*this)(value.fps), (*this)(value.source), (*this)(value.text);
    } else if constexpr (std::is_trivially_copyable_v<T>) {
      take(&value, sizeof value);
    } else {
      using Item = typename T::value_type;
      std::uint64_t n = 0;
      (*this)(n);
      if (n > bytes_.size()) n = 0, whole_ = false;
      if constexpr (std::is_trivially_copyable_v<Item>) {
        if (n > bytes_.size() / sizeof(Item)) n = 0, whole_ = false;
        value.resize(n);
        take(value.data(), n * sizeof(Item));
      } else {
        value.clear();
        for (std::uint64_t i = 0; i < n && whole_; ++i) (*this)(value.emplace_back());
      }
    }
  }
  bool whole() const { return whole_ && bytes_.empty(); }

 private:
  void take(void* to, std::size_t n) {
    if (n > bytes_.size()) {
      whole_ = false;
      return;
    }
    if (n > 0) std::memcpy(to, bytes_.data(), n);
    bytes_.remove_prefix(n);
  }
  std::string_view bytes_;
  bool whole_ = true;
};

struct Answer {
  std::string fault, hint;  // of an Error; without a fault the facts are there
  StoreFacts facts;
};

template <class F, class A>
void each_field(F& f, A& answer) {
  auto& facts = answer.facts;
  auto& images = facts.images;
  f(answer.fault), f(answer.hint), f(facts.bytes), f(facts.made_by), f(facts.warnings);
  f(facts.holds_images);
  f(images.num_classes), f(images.height), f(images.width), f(images.xxh3);
  f(images.labels_xxh3), f(images.sources), f(images.class_names), f(images.palette);
  f(images.label_images), f(images.label_pixels), f(images.label_image_pixels);
  f(images.tables_xxh3), f(images.pixels_begin), f(images.labels_begin);
  f(images.labels_bytes);
  std::uint64_t buckets = facts.buckets.size();
  f(buckets);
  if constexpr (!std::is_const_v<A>) {
    // `buckets` comes from the child: bounded before memory is allocated for it.
    facts.buckets.resize(std::min<std::uint64_t>(buckets, 1u << 16));
    facts.stored.resize(facts.buckets.size());
  }
  for (std::size_t i = 0; i < facts.buckets.size(); ++i) {
    auto& stored = facts.stored[i];
    each_hashed_field(f, facts.buckets[i], stored);
    f(stored.offset), f(stored.text_begin);
  }
}

bool write_all(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

// Tells the parent, and grants more CPU time for the next HDF5 call.
void sign_of_life() {
  static double told = -1;
  if (now_seconds() - told < 0.5) return;
  told = now_seconds();
  write_all({&alive_mark, 1});
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  rlimit limit{};
  getrlimit(RLIMIT_CPU, &limit);
  const auto spent = static_cast<rlim_t>(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
  // At the hard limit the kernel would send SIGKILL.
  limit.rlim_cur = std::min(limit.rlim_max - 1, spent + longest_call);
  setrlimit(RLIMIT_CPU, &limit);
}

int serve(const std::string& path) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody reads the answer once the rank has died
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // All tables together are smaller than the file; they are in memory a few times at most.
  struct stat status {};
  const rlim_t bytes = stat(path.c_str(), &status) == 0 ? status.st_size : 0;
  rlimit memory{};
  getrlimit(RLIMIT_DATA, &memory);
  memory.rlim_cur = std::min<rlim_t>(memory.rlim_max, 6 * bytes + (rlim_t{2} << 30));
  setrlimit(RLIMIT_DATA, &memory);
#endif
  Answer answer;
  try {
    sign_of_life();
    answer.facts = open_checked(path, sign_of_life);
  } catch (const Error& e) {
    answer = {e.what(), e.hint(), {}};
  } catch (const std::bad_alloc&) {
    answer = {fmt::format("clip store {}: its tables do not fit into memory", path),
              "raise the limit (ulimit -v, -d) if there is one; otherwise the store is damaged: "
              "copy it again, or make it again with `weft ingest` or `weft encode`",
              {}};
  }
  Packer packed;
  each_field(packed, std::as_const(answer));
  return write_all(std::string(1, answer_mark) + packed.bytes()) ? 0 : 1;
}

// Runs the command and reads its standard output until it ends. Returns the wait status and the
// output. Throws where it is silent for too long, for example because of a file system that does
// not answer: no signal ends the child then, so nobody waits for it.
std::pair<int, std::string> run(const std::vector<std::string>& command, const std::string& path) {
  int ends[2];
  WEFT_CHECK(pipe2(ends, O_CLOEXEC) == 0, Exit::data, "raise the limit of open files (ulimit -n)",
             "cannot make a pipe: {}", std::strerror(errno));
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
  // A stop signal goes to the whole process group. The rank handles it; the child must not die of
  // it and ends by itself anyway.
  posix_spawnattr_t how;
  posix_spawnattr_init(&how);
  sigset_t stops;
  sigemptyset(&stops);
  for (const int signal : stop_signals) sigaddset(&stops, signal);
  sigdelset(&stops, SIGXCPU);  // by which longest_call ends it
  posix_spawnattr_setsigmask(&how, &stops);
  posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSIGMASK);
  pid_t child = 0;
  const int failed =
      posix_spawn(&child, command[0].c_str(), &files, &how, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&how);
  // Close this side's write end, or the read below would never see the end.
  close(ends[1]);
  std::string said;
  std::vector<char> buffer(64 << 10);
  double heard = now_seconds();
  bool silent = false, stopped = false;
  while (failed == 0 && !silent) {
    pollfd output{ends[0], POLLIN, 0};
    if (poll(&output, 1, 100) > 0) {
      const ssize_t n = read(ends[0], buffer.data(), buffer.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      said.append(buffer.data(), static_cast<std::size_t>(n));
      heard = now_seconds();
    }
    stopped = stop_received != 0;
    silent = now_seconds() - heard >
             (stopped ? reader_command().silence_at_stop : reader_command().silence);
  }
  close(ends[0]);
  if (silent) {
    kill(child, SIGKILL);
    WEFT_CHECK(!stopped, Exit::stopped, "run the same command to resume",
               "stopped on request while clip store {} was opened, which takes long", path);
    throw Error(Exit::data,
                fmt::format("clip store {} cannot be read: no sign of life for {:g} s", path,
                            reader_command().silence),
                "does its file system answer (df)? Copy the store to another", __FILE__, __LINE__);
  }
  WEFT_CHECK(failed == 0, Exit::data, "a clip store is opened in a process of its own",
             "cannot start {}: {}", command[0], std::strerror(failed));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return {status, std::move(said)};
}

// How the child ended, in words.
std::string end_of(int status) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU)
    return fmt::format("kept the HDF5 library busy without end");
  if (WIFSIGNALED(status))
    return fmt::format("crashed the HDF5 library (signal {})", WTERMSIG(status));
  return fmt::format("ended the HDF5 library's process with exit code {}", WEXITSTATUS(status));
}

}  // namespace

StoreFacts open_checked(const std::string& path, const std::function<void()>& alive) {
  StoreFacts facts;
  try {
    facts.bytes = File::open(path, Exit::data).size();
  } catch (Error& e) {
    e.add_hint(
        "data.path is a store: `weft ingest` makes those of clips and, with ingest.images, of "
        "labelled images, `weft encode` those of latents; synthetic:... (docs/decks.md) makes "
        "clips in memory, for example for weft plan");
    throw;
  }
  if (!is_hdf5(path)) refuse_other_kind(path, Exit::data, "data.path must be a store");
  WEFT_CHECK(is_hdf5(path), Exit::data, "data.path must be a file that `weft ingest` made",
             "{} is not an HDF5 file and so not a clip store", path);
  const h5::QuietErrors quiet;
  StoreReader reader(path, facts.bytes, alive);
  facts.holds_images = reader.has_format(image_store_format);
  if (facts.holds_images)
    read_image_facts(reader, facts);
  else
    read_clip_facts(reader, facts);
  return facts;
}

void read_stores_with(std::vector<std::string> command, double silence, double silence_at_stop) {
  reader_command() = {std::move(command), silence, silence_at_stop};
}

StoreFacts read_store(const std::string& path) {
  std::vector<std::string> command = reader_command().words;
  if (command.empty()) return open_checked(path);
  command.push_back(path);
  const auto [status, said] = run(command, path);
  WEFT_CHECK(!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL, exit_killed,
             "most often for want of memory (oom_kill in the node's log): more memory for the job, "
             "or fewer ranks a host; the store need not be damaged",
             "the process that reads clip store {} was killed (SIGKILL)", path);
  Answer answer;
  const std::size_t marked = said.find(answer_mark);
  Unpacker unpacker(marked == said.npos ? std::string_view()
                                        : std::string_view(said).substr(marked + 1));
  if (status == 0) each_field(unpacker, answer);
  WEFT_CHECK(status == 0 && unpacker.whole(), Exit::data,
             "copy it again, or make it again with `weft ingest` or `weft encode`",
             "clip store {} is damaged: reading its structure {}", path,
             status == 0 ? "returned an invalid result" : end_of(status));
  if (!answer.fault.empty()) throw Error(Exit::data, answer.fault, answer.hint, __FILE__, __LINE__);
  return std::move(answer.facts);
}

std::optional<int> serve_as_store_reader(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], child_argument) == 0) return serve(argv[2]);
  read_stores_with({"/proc/self/exe", child_argument});
  return std::nullopt;
}

void read_copies_of_stores(std::map<std::string, std::string> copies) {
  copies_of_stores() = std::move(copies);
}

StoreFile::StoreFile(const std::string& path) : path_(path) {
  std::string opened = path;
  const auto copy = copies_of_stores().find(path);
  if (copy != copies_of_stores().end()) {
    opened = copy_ = copy->second;
    path_ = fmt::format("{} (this node's copy of {})", opened, path);
  }
  // The child opens it first: this process would wait for a file system that does not answer.
  facts_ = read_store(opened);
  bytes_ = facts_.bytes;
  fd_ = open(opened.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  WEFT_CHECK(fd_ >= 0, Exit::data, "was it replaced meanwhile?", "cannot open clip store {}: {}",
             path_, std::strerror(errno));
  for (const std::string& warning : facts_.warnings) log::warn("{}", warning);
}

StoreFile::StoreFile(StoreFile&& other) noexcept
    : path_(std::move(other.path_)),
      copy_(std::move(other.copy_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(other.bytes_),
      facts_(std::move(other.facts_)) {}

StoreFile::~StoreFile() {
  if (fd_ >= 0) close(fd_);
}

std::string StoreFile::content_id() const {
  return facts_.holds_images ? fmt::format("{:016x}", facts_.images.tables_xxh3)
                             : content_id_of(facts_.buckets, facts_.stored);
}

std::string StoreFile::damage_hint() const {
  return copy_.empty()
             ? "the file was damaged after it was made: copy it again, or make it again"
             : "remove this copy: " + copy_ + "; the next start makes it again (data.stage)";
}

std::uint64_t StoreFile::read(const std::string& what, std::uint64_t offset,
                              std::span<std::byte> out, bool hashed) const {
  ClipHash hash;
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t want = hashed ? std::min(piece, out.size() - done) : out.size() - done;
    const ssize_t got = pread(fd_, out.data() + done, want, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;  // interrupted by a signal: nothing was read
    WEFT_CHECK(
        got > 0, Exit::data, "check the file system; the store may have been replaced",
        "cannot read {} in {}: {}", what, path_,
        got < 0 ? std::strerror(errno)
                : fmt::format("the file ends before the {} does", what.substr(0, what.find(' '))));
    if (hashed) hash.update(out.data() + done, static_cast<std::size_t>(got));
    done += static_cast<std::size_t>(got);
  }
  return hashed ? hash.digest() : 0;
}

}  // namespace weft
