// Runs the checks of `weft selftest` on all ranks: who failed, who hangs, what is told.
#include <fcntl.h>
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cli/selftest.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "train/stop.h"

namespace weft {
namespace selftest {
namespace {

namespace fs = std::filesystem;

// Messages of the jobs go to a file of each rank; what is told here goes where they went before.
class RedirectedOutput {
 public:
  explicit RedirectedOutput(const fs::path& file) {
    std::fflush(nullptr);
    out_ = dup(STDOUT_FILENO);
    err_ = dup(STDERR_FILENO);
    const int log = open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    WEFT_CHECK(log >= 0 && out_ >= 0 && err_ >= 0, Exit::usage,
               "choose a folder that all nodes share and all ranks may write to, such as one of "
               "your home or scratch: --dir",
               "cannot write {}: {}", file.string(), std::strerror(errno));
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    close(log);
  }
  ~RedirectedOutput() { restore(); }
  RedirectedOutput(const RedirectedOutput&) = delete;
  RedirectedOutput& operator=(const RedirectedOutput&) = delete;

  void restore() {
    if (out_ < 0) return;
    std::fflush(nullptr);
    restore_descriptors();
    close(out_);
    close(err_);
    out_ = err_ = -1;
  }
  // The same where the process ends next, from any thread: another one may hang in a write, which
  // holds the lock that fflush() waits for.
  void restore_descriptors() const {
    dup2(out_, STDOUT_FILENO);
    dup2(err_, STDERR_FILENO);
  }
  void print(const std::string& text) const {
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t n = write(out_, rest.data(), rest.size());
      if (n <= 0) return;
      rest.remove_prefix(static_cast<std::size_t>(n));
    }
  }

 private:
  int out_ = -1, err_ = -1;
};

// What is known of all checks so far: the same on every rank.
struct Summary {
  std::size_t all = 0;
  int ranks = 1;
  std::size_t done = 0;
  std::vector<std::string> failed;
  int first_code = 0;
  bool wrong_on_gpu = false, stopped = false;

  void add(const std::string& name, int code) {
    failed.push_back(name);
    if (first_code == 0) first_code = code;
    wrong_on_gpu = wrong_on_gpu || (code == static_cast<int>(Exit::hardware) && on_cuda());
  }
  int code() const { return wrong_on_gpu ? static_cast<int>(Exit::hardware) : first_code; }
  std::string line(double seconds) const {
    if (!failed.empty())
      return fmt::format("selftest: failed {} of {} checks on {} ranks: {}\n", failed.size(),
                         stopped ? done : all, ranks, fmt::join(failed, ", "));
    if (stopped)
      return fmt::format("selftest: stopped after {} of {} checks on {} ranks\n", done, all, ranks);
    return fmt::format("selftest: passed {} checks on {} ranks in {:.0f} s\n", all, ranks, seconds);
  }
};

// Ends all ranks where they can no longer go on together. From any thread.
[[noreturn]] void abort_all_ranks(const RedirectedOutput& output, Summary summary,
                                  const std::string& name, const std::string& why, int code,
                                  const Context& context) {
  summary.add(name, code);
  output.print(fmt::format("  FAILED\n  {}\nfiles and messages of each rank are in {}\n{}", why,
                           context.folder.string(), summary.line(0)));
  // What follows may wait too: a file that is closed, for a file system that does not answer.
  crash::end_within(5, static_cast<Exit>(summary.code()));
  output.restore_descriptors();
  MPI_Abort(MPI_COMM_WORLD, summary.code());
  std::abort();  // not reached
}

// Calls `act` if what it returns lives longer than so many seconds: for checks that hang where no
// communicator notices it.
std::jthread watch_for_hang(double seconds, std::function<void()> act) {
  return std::jthread([seconds, act = std::move(act)](const std::stop_token& ended) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any wake;
    if (!wake.wait_for(lock, ended, std::chrono::duration<double>(seconds),
                       [&] { return ended.stop_requested(); }))
      act();
  });
}

// How this rank's check ended.
struct Outcome {
  int code = 0;
  std::string why;
};

Outcome attempt(const Check& c, const Context& context) {
  const auto failed = [&](Exit code, std::string why) {
    return Outcome{static_cast<int>(code),
                   fmt::format("rank {} on {}: {}", context.rank, host_name(), why)};
  };
  try {
    c.run(context);
    if (on_cuda()) device_runtime().synchronize();
    return {};
  } catch (const Error& e) {
    return failed(e.code(), e.what() + (e.hint().empty() ? "" : ". HINT: " + e.hint()));
  } catch (const std::bad_alloc&) {
    return failed(Exit::memory, "out of memory");
  } catch (const std::exception& e) {
    return failed(Exit::internal, e.what());
  }
}

// The codes of all ranks once all have ended the check; nothing where this rank's failed and others
// still wait, perhaps for this one.
std::vector<int> codes_of_all(int mine, const Context& context, MPI_Comm comm) {
  std::vector<int> codes(static_cast<std::size_t>(context.ranks));
  MPI_Request request;
  MPI_Iallgather(&mine, 1, MPI_INT, codes.data(), 1, MPI_INT, comm, &request);
  const double start = now_seconds();
  // The others may be slower: they get a fifth of the check's time. A rank that hangs never ends,
  // and its watchdog ends it soon. One of several ranks that wait tells.
  const double seconds_to_wait = (mine == static_cast<int>(Exit::hang) ? 0 : context.timeout / 5) +
                                 (context.rank == 0 ? 0 : 2);
  for (int done = 0;;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done != 0) return codes;
    if (mine != 0 && now_seconds() - start > seconds_to_wait) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Summary run_checks(const std::vector<const Check*>& wanted, const Context& context,
                   const RedirectedOutput& output) {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(context.world, &comm);
  Summary summary;
  summary.all = wanted.size();
  summary.ranks = context.ranks;
  for (const Check* c : wanted) {
    if (context.rank == 0) output.print(fmt::format("{:<13} {:<56}", c->name, c->what));
    const double start = now_seconds();
    Outcome mine;
    std::vector<int> codes;
    {
      const std::jthread watch = watch_for_hang(context.timeout, [&] {
        // One of them tells.
        std::this_thread::sleep_for(std::chrono::seconds(context.rank == 0 ? 0 : 5));
        abort_all_ranks(output, summary, c->name,
                        fmt::format("timed out after {:g} s; raise --timeout", context.timeout),
                        static_cast<int>(Exit::hang), context);
      });
      mine = attempt(*c, context);
      if (mine.code != 0) log::error("selftest {}: {}", c->name, mine.why);
      codes = codes_of_all(mine.code, context, comm);
    }
    if (codes.empty()) abort_all_ranks(output, summary, c->name, mine.why, mine.code, context);
    constexpr int on_request = static_cast<int>(Exit::stopped);
    summary.stopped = std::ranges::find(codes, on_request) != codes.end();
    const auto first =
        std::ranges::find_if(codes, [](int code) { return code != 0 && code != on_request; });
    const double seconds = now_seconds() - start;
    if (first == codes.end() && summary.stopped) {
      if (context.rank == 0) output.print(fmt::format(" {:5.1f} s  stopped\n", seconds));
      if (summary.failed.empty()) summary.first_code = on_request;
      break;
    }
    ++summary.done;
    if (first == codes.end()) {
      if (context.rank == 0) output.print(fmt::format(" {:5.1f} s  ok\n", seconds));
      continue;
    }
    std::string why = mine.why;
    broadcast_sized(why, comm, static_cast<int>(first - codes.begin()));
    summary.add(c->name, *first);
    if (context.rank == 0)
      output.print(fmt::format(" {:5.1f} s  FAILED (exit code {})\n  {}\n", seconds, *first,
                               printable(why, 2000)));
    if (summary.stopped) break;
  }
  MPI_Comm_free(&comm);
  return summary;
}

// Rank 0 makes a folder in `parent`, which its ranks must share: each opens its log there.
fs::path make_folder(const std::string& parent, MPI_Comm world) {
  std::string folder;
  if (log::rank() == 0) {
    std::error_code none;
    folder = (fs::absolute(parent, none) / "weft-selftest-XXXXXX").lexically_normal().string();
    WEFT_CHECK(mkdtemp(folder.data()) != nullptr, Exit::usage,
               "choose a folder that exists and that all ranks may write to: --dir",
               "cannot make a folder in {}: {}", parent, std::strerror(errno));
  }
  broadcast_sized(folder, world);
  return folder;
}

// Keys of what runs would change results, and with them every check.
void check_keys(const Deck& given) {
  for (const auto& [key, was, is] : changed_keys(given, Deck{}))
    WEFT_CHECK(key.starts_with("device.") || key.starts_with("memory.") || key == "run.threads",
               Exit::usage, "leave it out: the decks are weft selftest's own",
               "weft selftest takes keys of [device] and [memory], and run.threads; not {}", key);
}

int run_selftest(const Deck& given, const std::string& parent,
                 const std::vector<std::string>& names, double timeout, MPI_Comm world) {
  // 1. What was asked for, and where.
  std::vector<const Check*> wanted;
  for (const Check& c : all_checks())
    if (names.empty() || std::ranges::find(names, c.name) != names.end()) wanted.push_back(&c);
  check_keys(given);
  watch_stop_signals();
  Context context;
  context.world = world;
  context.given = given;
  context.timeout = timeout;
  MPI_Comm_rank(world, &context.rank);
  MPI_Comm_size(world, &context.ranks);
  const RankDevice device = choose_device(given.device.kind, given.device.share, world);
  const int threads = set_threads(static_cast<int>(given.run.threads), device.core_sharers);
  context.folder = make_folder(parent, world);
  if (context.rank == 0)
    fmt::print("{}\n{} on {}, {}; files in {}\n", version_line(), counted(context.ranks, "rank"),
               on_cuda() ? device_runtime().describe() : "CPU",
               counted(threads, "thread") + " each", context.folder.string());

  // 2. The checks. A collective that hangs is an error before its check is, not after an hour, and
  // no line of progress is drawn.
  setenv("WEFT_COMM_TIMEOUT", fmt::format("{:g}", 0.4 * timeout).c_str(), 0);
  setenv("TERM", "dumb", 1);
  const double start = now_seconds();
  RedirectedOutput output(context.folder / fmt::format("rank_{}.log", context.rank));
  const Summary summary = run_checks(wanted, context, output);
  output.restore();

  // 3. The summary. No rank writes into the folder any more.
  MPI_Barrier(world);
  if (context.rank != 0) return summary.code();
  if (summary.failed.empty()) {
    std::error_code failed;
    fs::remove_all(context.folder, failed);
    if (failed) log::warn("cannot remove {}: {}", context.folder.string(), failed.message());
  } else {
    fmt::print("files and messages of each rank are in {}\n", context.folder.string());
  }
  fmt::print("{}", summary.line(now_seconds() - start));
  return summary.code();
}

}  // namespace
}  // namespace selftest

Command selftest_command() {
  struct Options {
    std::string parent = ".";
    std::vector<std::string> names;
    double timeout = 300;
  };
  const auto o = std::make_shared<Options>();
  Command c{"selftest", "run small jobs of every kind on all ranks and check their results",
            [o](const Deck& deck, MPI_Comm world) {
              return selftest::run_selftest(deck, o->parent, o->names, o->timeout, world);
            }};
  c.handles_stop_signals = true;
  c.overrides("keys of [device] and [memory], and run.threads: section.key=value");
  c.path("--dir", o->parent, "folder, shared by all nodes, for its files (default: this one)");
  Argument& checks = c.option("--checks", o->names, "only these, separated by commas");
  checks.commas = true;
  for (const selftest::Check& check : selftest::all_checks()) checks.choices.push_back(check.name);
  c.number("--timeout", o->timeout, 1, 1e6, "seconds that a check may take (default: 300)");
  return c;
}

}  // namespace weft
