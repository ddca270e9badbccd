#include "core/log.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string_view>
#include <thread>

#include "core/host.h"
#include "core/printable.h"

namespace weft::log {
namespace {

struct State {
  int rank = 0;
  int size = 1;
  std::mutex mutex;
  std::vector<std::string> warnings;
  std::mutex terminal;  // of the line below
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

// Open MPI gives ranks a pipe and passes on what they write as it comes: what counts is where
// mpirun's own messages go.
bool launcher_has_terminal() {
  namespace fs = std::filesystem;
  const fs::path parent = fs::path("/proc") / std::to_string(getppid());
  std::string name;
  std::getline(std::ifstream(parent / "comm"), name);
  if (name != "mpirun" && name != "mpiexec" && name != "orterun" && name != "prterun") return false;
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

void write_warn(const std::string& line) {
  const std::string text = printable(line, longest_line);
  std::lock_guard lock(state().mutex);
  state().warnings.push_back(text);
  put(prefix() + "WARN: " + text);
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
