#include "train/metrics/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

constexpr std::size_t most_ranks = 64;

void drop_lines_from(const std::filesystem::path& path, std::int64_t first_step) {
  std::ifstream in(path);
  if (!in) return;
  std::string kept;
  std::int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const auto j = try_parse_json(line);
    const bool whole =
        j.is_object() && j.contains("step") && j["step"].is_number_integer() && seal_holds(line);
    if (!whole && !is_cut_off(line, in.eof()))
      log::warn("{}, line {} is damaged: it is left out", path.string(), number);
    if (whole && j["step"].get<std::int64_t>() < first_step) kept += line + '\n';
  }
  // A kill meanwhile leaves the old lines whole.
  replace_file(path, kept, Exit::checkpoint, Durable::no);
}

// Keeps lines short at any number of ranks: each rank's value up to `most_ranks`, beyond that only
// the range. Rounded to microseconds, which are enough.
nlohmann::ordered_json of_ranks(std::span<const float> seconds) {
  const auto rounded = [](float s) { return std::round(double{s} * 1e6) / 1e6; };
  auto j = nlohmann::ordered_json::array();
  if (seconds.size() <= most_ranks) {
    for (const float s : seconds) j.push_back(rounded(s));
    return j;
  }
  std::vector<float> sorted(seconds.begin(), seconds.end());
  std::sort(sorted.begin(), sorted.end());
  return {{"min", rounded(sorted.front())},
          {"median", rounded(sorted[sorted.size() / 2])},
          {"max", rounded(sorted.back())}};
}

}  // namespace

double spread_of(std::span<const float> busy) {
  if (busy.empty()) return 0;
  const double mean =
      std::accumulate(busy.begin(), busy.end(), 0.0) / static_cast<double>(busy.size());
  return mean > 0 ? (*std::max_element(busy.begin(), busy.end()) - mean) / mean : 0;
}

MetricsWriter::MetricsWriter(const std::filesystem::path& run_dir, std::int64_t first_step)
    : path_(run_dir / "metrics.jsonl") {
  drop_lines_from(path_, first_step);
  file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
  WEFT_CHECK(file_ >= 0, Exit::checkpoint, "check that run.dir can be written",
             "cannot open {}: {}", path_.string(), std::strerror(errno));
}

MetricsWriter::~MetricsWriter() {
  if (!flush())
    log::error("ERROR: the last lines of {} could not be written: {} bytes are missing",
               path_.string(), pending_.size());
  close(file_);
}

// Writes whole lines or nothing: if a full disk cuts a line off, truncates the file again and
// retries with the next line.
bool MetricsWriter::flush() {
  const off_t before = lseek(file_, 0, SEEK_END);
  std::size_t written = 0;
  while (written < pending_.size()) {
    const ssize_t n = ::write(file_, pending_.data() + written, pending_.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (!failing_)
        log::warn("cannot write {}: {}; its lines are kept in memory until it works again",
                  path_.string(), std::strerror(errno));
      failing_ = true;
      // If even truncating fails, the retry goes on after the bytes that are in the file.
      if (written > 0 && ftruncate(file_, before) != 0) pending_.erase(0, written);
      return false;
    }
    written += static_cast<std::size_t>(n);
  }
  pending_.clear();
  failing_ = false;
  return true;
}

void MetricsWriter::write(const StepMetrics& m) {
  nlohmann::ordered_json j{
      {"step", m.step},
      {"loss", m.loss},
      {"grad_norm", m.grad_norm},
      {"lr", m.lr},
      {"seconds", m.seconds},
      {"split",
       {{"data_wait", m.split.data_wait},
        {"compute", m.split.compute},
        {"wait_slowest", m.split.wait_slowest},
        {"comm_exposed", m.split.comm_exposed},
        {"optimizer", m.split.optimizer},
        {"checkpoint", m.split.checkpoint}}},
      {"memory", {{"resident_bytes", m.resident_bytes}, {"arena_peak_bytes", m.arena_peak_bytes}}},
      {"samples", m.samples},
  };
  // Marks where the run was started, or went on.
  if (std::exchange(first_, false)) j["start"] = true;
  for (const auto& [name, value] : m.terms) j["terms"][name] = value;
  if (m.slowest_rank >= 0) {
    j["slowest_rank"] = m.slowest_rank;
    j["spread"] = m.spread;
    j["rank_busy"] = of_ranks(m.rank_busy);
    j["rank_wait"] = of_ranks(m.rank_wait);
    if (!m.rank_data_wait.empty()) j["rank_data_wait"] = of_ranks(m.rank_data_wait);
  }
  pending_ += seal_json(j.dump()) + '\n';
  flush();
}

}  // namespace weft
