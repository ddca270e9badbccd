#include "core/faults.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
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
#include <string_view>

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

using Hook = bool (*)(Place place, int rank, std::int64_t number);
const Hook hook = reinterpret_cast<Hook>(dlsym(RTLD_DEFAULT, "weft_fault"));

}  // namespace

bool is_possible() { return hook != nullptr; }

bool at(Place place, std::int64_t number) {
  return is_possible() && hook(place, log::rank(), number);
}

}  // namespace weft::fault
