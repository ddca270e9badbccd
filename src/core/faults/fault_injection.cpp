#include "core/faults/fault_injection.h"

#include <sys/resource.h>

#include <array>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/log.h"

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
