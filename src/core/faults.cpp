#include "core/faults.h"

#include <execinfo.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/log.h"

namespace weft::crash {
namespace {

struct Signal {
  int number;
  const char* name;
  const char* meaning;
};
constexpr std::array<Signal, 5> signals{{{SIGSEGV, "SIGSEGV", "invalid memory access"},
                                         {SIGBUS, "SIGBUS", "memory whose file or page is gone"},
                                         {SIGFPE, "SIGFPE", "arithmetic"},
                                         {SIGILL, "SIGILL", "illegal instruction"},
                                         {SIGABRT, "SIGABRT", "abort()"}}};

std::atomic<const char*> what_at = nullptr, name_at = nullptr;
std::atomic<std::int64_t> number_at = 0;
static_assert(std::atomic<const char*>::is_always_lock_free);

std::array<char, 256> name_text{};

std::atomic<long> teller = 0;       // the first thread to crash: it reports
std::array<char, 512> uncaught{};   // the exception that ended this process, written before abort()
std::array<char, 2048> reported{};  // the message without calls
std::size_t message = 0;
int end_code = 0;                      // of a rank that ends by its own decision
constexpr unsigned most_seconds = 10;  // for the backtrace: the crashed thread may hold a lock

// Text built without the heap, so that a signal handler may use it.
class Line {
 public:
  void add(std::string_view s) {
    const std::size_t n = std::min(s.size(), text_.size() - size_);
    std::memcpy(text_.data() + size_, s.data(), n);
    size_ += n;
  }
  void add(std::int64_t n) {
    std::array<char, 24> digits;
    add({digits.data(), std::to_chars(digits.begin(), digits.end(), n).ptr});
  }
  void add_place() {
    const char* what = what_at;
    if (what == nullptr) return;
    add(" in ");
    add(what);
    add(" ");
    if (const char* name = name_at; name != nullptr)
      add(name);
    else
      add(number_at);
  }
  std::string_view text() const { return {text_.data(), size_}; }
  // Appends the contents of `file`, as far as they fit.
  void add_file(int file) {
    const ssize_t n = pread(file, text_.data() + size_, text_.size() - size_, 0);
    if (n > 0) size_ += static_cast<std::size_t>(n);
  }
  // Written in one piece, so that lines of other ranks do not come between.
  void put() const {
    std::string_view rest = text();
    while (!rest.empty()) {
      const ssize_t n = write(STDERR_FILENO, rest.data(), rest.size());
      if (n <= 0) return;
      rest.remove_prefix(static_cast<std::size_t>(n));
    }
  }

 private:
  std::array<char, 8192> text_;
  std::size_t size_ = 0;
};

// Appends the call stack to `line`. backtrace_symbols_fd() writes to a file descriptor only, hence
// the memfd.
void add_calls(Line& line) {
  std::array<void*, 64> calls;
  const int count = backtrace(calls.data(), calls.size());
  const int file = memfd_create("calls", MFD_CLOEXEC);
  if (file < 0) return;
  backtrace_symbols_fd(calls.data(), count, file);
  line.add_file(file);
}

void say(int number) {
  Line line;
  const auto rank_prefix = [&] {
    std::array<char, 64> host{};
    gethostname(host.data(), host.size() - 1);
    line.add("[rank ");
    line.add(log::rank());
    line.add(" on ");
    line.add(host.data());
    line.add("] ");
  };
  rank_prefix();
  line.add("ERROR: ended by ");
  for (const Signal& s : signals)
    if (s.number == number) {
      line.add(s.name);
      line.add(" (");
      line.add(uncaught[0] != '\0' ? "uncaught exception" : s.meaning);
      line.add(")");
    }
  line.add_place();
  if (uncaught[0] != '\0') {
    line.add(": ");
    line.add(uncaught.data());
  }
  line.add("\n");
  rank_prefix();
  line.add(
      "HINT: a bug of weft or a library, or a broken node (weft doctor); report it with these "
      "calls, addr2line -Cfe BINARY +0xADDRESS names them\n");
  // Kept for the alarm handler, in case the backtrace never returns.
  message = line.text().size() < reported.size() ? line.text().size() : reported.size();
  std::memcpy(reported.data(), line.text().data(), message);
  add_calls(line);
  alarm(0);
  line.put();
}

void on_signal(int number) {
  const long self = syscall(SYS_gettid);
  long none = 0;
  if (teller.compare_exchange_strong(none, self)) {
    // An alarm ends the process if the backtrace cannot be had.
    std::signal(SIGALRM, [](int) {
      [[maybe_unused]] const auto written = write(STDERR_FILENO, reported.data(), message);
      _exit(static_cast<int>(Exit::internal));
    });
    alarm(most_seconds);
    say(number);
  } else if (none != self) {
    for (;;) pause();  // another thread reports, and ends the process
  }
  // Reached also when this thread crashes again while it reports.
  std::signal(number, SIG_DFL);
  raise(number);  // delivered when the handler returns
}

[[noreturn]] void on_terminate() {
  const auto keep = [](const char* text) {
    std::strncpy(uncaught.data(), text, uncaught.size() - 1);
  };
  if (const std::exception_ptr e = std::current_exception()) {
    try {
      std::rethrow_exception(e);
    } catch (const std::exception& known) {
      keep(known.what());
    } catch (...) {
      keep("of an unknown type");
    }
  }
  std::abort();
}

}  // namespace

void watch() {
  // The first backtrace() loads a library and allocates memory: do it here, not in a handler.
  std::array<void*, 2> calls;
  backtrace(calls.data(), calls.size());
  static std::array<char, 1 << 16> stack;
  stack_t alternate{};
  alternate.ss_sp = stack.data();
  alternate.ss_size = stack.size();
  sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_ONSTACK;
  for (const Signal& s : signals) sigaction(s.number, &action, nullptr);
  std::set_terminate(on_terminate);
}

void at(const char* what, std::int64_t number) {
  name_at = nullptr;
  number_at = number;
  what_at = what;
}

void at(const char* what, const char* name) {
  // Clear the place while the name changes, so that a handler never reads half of it.
  what_at = nullptr;
  std::strncpy(name_text.data(), printable(name).c_str(), name_text.size() - 1);
  name_at = name_text.data();
  what_at = what;
}

std::string place() {
  Line line;
  line.add_place();
  return std::string(line.text());
}

void end_within(unsigned seconds, Exit code) {
  end_code = static_cast<int>(code);
  std::signal(SIGALRM, [](int) { _exit(end_code); });
  alarm(seconds);
}

void end_on_stop_signal(Exit code) {
  end_code = static_cast<int>(code);
  for (const int signal : stop_signals) std::signal(signal, [](int) { _exit(end_code); });
  unblock_stop_signals();
}

}  // namespace weft::crash

namespace weft::fault {
namespace {

struct Fault {
  Kind kind = Kind::slow;
  int rank = 0;
  std::int64_t at = 0;
  double value = 0;
};

struct Shape {
  std::string_view name;
  Kind kind;
  bool has_value;
  double value_max;
};
constexpr std::array<Shape, 6> shapes{{{"slow", Kind::slow, true, 1000},
                                       {"stop", Kind::stop, false, 0},
                                       {"skip", Kind::skip, false, 0},
                                       {"flip", Kind::flip, false, 0},
                                       {"nan", Kind::nan, true, 1},
                                       {"crash", Kind::crash, true, 5}}};

template <class T>
bool read(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(by);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

Fault fault_of(std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  for (const Shape& s : shapes) {
    if (parts[0] != s.name) continue;
    Fault f{s.kind, 0, 0, 0};
    if (parts.size() == (s.has_value ? 4U : 3U) && read(parts[1], f.rank) && f.rank >= 0 &&
        read(parts[2], f.at) && f.at >= 0 &&
        (!s.has_value || (read(parts[3], f.value) && f.value >= 0 && f.value <= s.value_max)))
      return f;
  }
  throw Error(Exit::usage, fmt::format("WEFT_FAULT holds \"{}\"", text),
              "give slow:RANK:STEP:FRACTION, stop:RANK:STEP, skip:RANK:NUMBER, flip:RANK:STEP, "
              "nan:RANK:STEP:ONCE or crash:RANK:STEP:HOW, several with commas between them; unset "
              "it outside of tests",
              __FILE__, __LINE__);
}

// Parsed anew at each call: without faults that costs one look at the environment, and with them
// time does not matter.
std::vector<Fault> faults_from_environment() {
  std::vector<Fault> faults;
  const char* text = std::getenv("WEFT_FAULT");
  if (text == nullptr || *text == '\0') return faults;
  for (const std::string_view part : split(text, ',')) faults.push_back(fault_of(part));
  return faults;
}

// Neither inlined nor turned into a loop, so that each call uses some of the stack.
__attribute__((noinline)) int overflow(volatile int* above) {
  volatile int page[1024] = {above[0] + 1};
  if (page[0] == std::numeric_limits<int>::max())
    return 0;  // never reached: avoids a compiler warning
  return overflow(page) + page[0];
}

// Meets the same limit as a job under `ulimit -v`.
void run_out_of_memory() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = 1;
  setrlimit(RLIMIT_AS, &limit);
  std::vector<std::vector<char>> taken;
  for (;;) taken.emplace_back(std::size_t{1} << 26);
}

}  // namespace

std::optional<double> ordered(Kind kind, std::int64_t at) {
  for (const Fault& f : faults_from_environment())
    if (f.kind == kind && f.rank == log::rank() && (kind == Kind::slow ? at >= f.at : at == f.at))
      return f.value;
  return std::nullopt;
}

void crash_if_ordered(std::int64_t at) {
  const auto how = ordered(Kind::crash, at);
  if (!how) return;
  switch (static_cast<int>(*how)) {
    case 0:
      raise(SIGSEGV);
      break;
    case 1:
      std::abort();
    case 2:
      std::thread([] { throw std::runtime_error("ordered by WEFT_FAULT"); }).join();
      break;
    case 3:
      run_out_of_memory();
      break;
    case 4:
      raise(SIGKILL);
      break;
    default: {
      volatile int bottom = 0;
      overflow(&bottom);
    }
  }
}

}  // namespace weft::fault
