#include "core/log.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unicode/utf8.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "core/host.h"

namespace weft {
namespace {

bool is_control(std::int32_t c) {
  return c < 0x20 || (c >= 0x7f && c <= 0x9f) || c == 0x2028 || c == 0x2029;
}

// Unicode's Bidi_Control: what a reader sees is not what stands there.
bool turns_text(std::int32_t c) {
  return c == 0x61c || c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) ||
         (c >= 0x2066 && c <= 0x2069);
}

std::string escaped(std::int32_t c) {
  switch (c) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return c < 0x80 ? fmt::format("\\x{:02x}", c) : fmt::format("\\u{:04x}", c);
  }
}

// A place near `at` where no character is cut.
std::size_t boundary(std::string_view text, std::size_t at) {
  for (int i = 0; i < 3 && at < text.size() && U8_IS_TRAIL(text[at]); ++i) ++at;
  return at;
}

}  // namespace

std::string printable(std::string_view text, std::size_t longest, std::string_view kept) {
  if (text.size() > longest) {
    const std::size_t begin = boundary(text, longest - longest / 4);
    const std::size_t end = boundary(text, text.size() - longest / 4);
    return printable(text.substr(0, begin), begin, kept) + "..." +
           printable(text.substr(end), text.size(), kept);
  }
  std::string out;
  out.reserve(text.size());
  const auto length = static_cast<std::int32_t>(text.size());
  for (std::int32_t i = 0; i < length;) {
    const std::int32_t at = i;
    std::int32_t c = 0;
    U8_NEXT(text.data(), i, length, c);
    const std::string_view bytes = text.substr(at, i - at);
    if (c < 0)
      for (const char byte : bytes)
        out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    else if ((is_control(c) || turns_text(c)) && kept.find(bytes) == kept.npos)
      out += escaped(c);
    else
      out += bytes;
  }
  return out;
}

}  // namespace weft

namespace weft::log {
namespace {

struct State {
  int rank = 0;
  int size = 1;
  std::mutex mutex;
  std::vector<std::string> warnings;
  struct Kind {
    std::uint64_t count = 0, hidden = 0;
    std::string last;  // that was shown
  };
  std::map<std::string, Kind> kinds;
  void show(const std::string& warning);  // with the mutex held
  std::mutex terminal;                    // of the line below
  std::string live;
};

State& state() {
  static State s;
  return s;
}

constexpr std::size_t longest_line = 4000;
constexpr const char* clear_line = "\r\x1b[K";

void write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

// The parent of a process, as /proc/PID/stat has it behind the command's name in parentheses.
std::string parent_of(const std::string& pid) {
  std::string stat, state, parent;
  std::getline(std::ifstream("/proc/" + pid + "/stat"), stat);
  std::istringstream(stat.substr(stat.rfind(')') + 1)) >> state >> parent;
  return parent;
}

// Launchers give ranks a pipe and pass on what they write as it comes: what counts is where
// mpirun's own messages go. MPICH's mpiexec starts ranks by a daemon of the node.
bool launcher_has_terminal() {
  namespace fs = std::filesystem;
  const auto name_of = [](const std::string& pid) {
    std::string name;
    std::getline(std::ifstream("/proc/" + pid + "/comm"), name);
    return name;
  };
  std::string launcher = std::to_string(getppid()), name = name_of(launcher);
  if (name == "hydra_pmi_proxy") name = name_of(launcher = parent_of(launcher));
  // MPICH's has names such as mpiexec.hydra and mpirun.mpich.
  if (!name.starts_with("mpirun") && !name.starts_with("mpiexec") && name != "orterun" &&
      name != "prterun")
    return false;
  const fs::path parent = fs::path("/proc") / launcher;
  std::error_code none;
  const std::string target = fs::read_symlink(parent / "fd/2", none).string();
  return target.starts_with("/dev/pts/") || target.starts_with("/dev/tty");
}

// Whether this process' messages reach a terminal that can redraw a line.
bool has_terminal() {
  static const bool terminal = [] {
    const char* kind = std::getenv("TERM");
    if (kind == nullptr || std::string_view(kind) == "dumb") return false;
    return isatty(STDERR_FILENO) != 0 || launcher_has_terminal();
  }();
  return terminal;
}

// One write per line, so that lines of several ranks do not mix. On a terminal rank 0's line may be
// in the way: it comes back with its next change.
void put(const std::string& line) {
  const std::lock_guard lock(state().terminal);
  const std::string& live = state().live;
  const bool clear = !live.empty() || (state().rank != 0 && has_terminal());
  write((clear ? clear_line : "") + line + "\n" + live);
}

std::size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

std::string prefix() {
  if (state().size == 1) return "";
  return fmt::format("[rank {} on {}] ", state().rank, host_name());
}

void State::show(const std::string& warning) {
  warnings.push_back(warning);
  put(prefix() + "WARN: " + warning);
}

}  // namespace

void set_rank(int rank, int size) {
  state().rank = rank;
  state().size = size;
}

int rank() { return state().rank; }

bool is_live() { return rank() == 0 && has_terminal(); }

void live(const std::string& line) {
  const std::lock_guard lock(state().terminal);
  std::string& shown = state().live;
  if (line.empty() && shown.empty()) return;
  shown = printable(line, longest_line).substr(0, terminal_width() - 1);
  write(clear_line + shown);
}

void write_info(const std::string& line) { put(printable(line, longest_line)); }

std::string kind_of_warning(std::string_view text) {
  std::string kind;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    // A name or a number; several stand for one.
    if (word.find_first_of("0123456789/_\"") != word.npos || word.find('.') < word.size() - 1)
      word = "*";
    if (word != "*" || !kind.ends_with("* ")) kind += word + " ";
  }
  return kind;
}

void write_warn(const std::string& line) {
  constexpr std::uint64_t most_alike = 10;
  std::string text = printable(line, longest_line);
  std::lock_guard lock(state().mutex);
  State::Kind& kind = state().kinds[kind_of_warning(text)];
  const std::uint64_t n = ++kind.count;
  if (n > most_alike && !std::has_single_bit(n)) {
    ++kind.hidden;
    return;
  }
  kind.last = text;
  if (n == most_alike) text += " (more of this kind are counted)";
  if (n > most_alike) text += fmt::format(" (number {} of this kind)", n);
  state().show(text);
}

void sum_up_warnings() {
  std::lock_guard lock(state().mutex);
  for (const auto& [name, kind] : std::exchange(state().kinds, {}))
    if (kind.hidden > 0)
      state().show(
          fmt::format("{} more like this: {}", counted(kind.hidden, "warning"), kind.last));
}

void write_error(const std::string& line, const std::string& below) {
  put(prefix() + printable(line, longest_line) +
      (below.empty() ? "" : "\n" + printable(below, below.size(), "\n")));
}

std::vector<std::string> warnings() {
  std::lock_guard lock(state().mutex);
  return state().warnings;
}

void report(Error& e) {
  if (e.reported()) return;
  if (rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
  write_error(fmt::format("ERROR: {}", e.what()), e.below());
  if (!e.hint().empty()) error("HINT: {}", e.hint());
  if (e.code() == Exit::internal) error("at {}:{}", e.file(), e.line());
  e.set_reported();
}

}  // namespace weft::log
