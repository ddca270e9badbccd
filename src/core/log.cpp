#include "core/log.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>

#include "core/host.h"

namespace weft::log {
namespace {

struct State {
  int rank = 0;
  int size = 1;
  std::mutex mutex;
  std::vector<std::string> warnings;
};

State& state() {
  static State s;
  return s;
}

// One write per line, so that lines of several ranks do not mix.
void put(const std::string& line) {
  const std::string text = line + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
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

void write_info(const std::string& line) { put(line); }

void write_warn(const std::string& line) {
  std::lock_guard lock(state().mutex);
  state().warnings.push_back(line);
  put(prefix() + "WARN: " + line);
}

void write_error(const std::string& line) { put(prefix() + line); }

std::vector<std::string> warnings() {
  std::lock_guard lock(state().mutex);
  return state().warnings;
}

void report(Error& e) {
  if (e.reported()) return;
  if (rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
  error("ERROR: {}", e.what());
  if (!e.hint().empty()) error("HINT: {}", e.hint());
  if (e.code() == Exit::internal) error("at {}:{}", e.file(), e.line());
  e.set_reported();
}

}  // namespace weft::log
