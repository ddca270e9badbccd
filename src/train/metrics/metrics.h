// RUN/metrics.jsonl: one JSON object a step, appended by rank 0, for machines and for weft report.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace weft {

// Where the seconds of a step went, on the rank that writes.
struct StepSplit {
  double data_wait = 0;     // waiting for clips
  double compute = 0;       // forward, backward
  double wait_slowest = 0;  // blocked because the slowest rank was not there yet
  double comm_exposed = 0;  // blocked for the rest of communication that no computation hid
  double optimizer = 0;
  double checkpoint = 0;  // stalled by a save
};

struct StepMetrics {
  std::int64_t step = 0;  // 0 is the first
  double loss = 0, grad_norm = 0, lr = 0;
  double seconds = 0;
  StepSplit split;
  std::size_t resident_bytes = 0, arena_peak_bytes = 0;
  std::vector<std::pair<std::string, double>> terms;  // what the loss is made of; may be empty
  std::vector<std::int64_t> samples;                  // of all ranks, in the order of the step plan

  // What rank 0 knows of all ranks, in seconds a rank; nothing of it is written while slowest_rank
  // is negative.
  int slowest_rank = -1;
  double spread = 0;             // (greatest - mean) / mean of rank_busy
  std::vector<float> rank_busy;  // until its own gradients were there: wait for clips and compute
  std::vector<float> rank_wait;  // blocked for the slowest rank
  std::vector<float>
      rank_data_wait;  // the part of rank_busy that was waiting for clips; may be empty
};

// (greatest - mean) / mean; 0 for no values or no time at all.
double spread_of(std::span<const float> busy);

class MetricsWriter {
 public:
  // Appends to RUN/metrics.jsonl. Lines of steps from `first_step` on, which a restart repeats, are
  // dropped first, as is a last line that a crash cut short.
  MetricsWriter(const std::filesystem::path& run_dir, std::int64_t first_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // Lines that a full disk refuses wait in memory, with one WARN, and follow once it takes them.
  void write(const StepMetrics& m);

 private:
  bool flush();

  std::filesystem::path path_;
  int file_ = -1;
  std::string pending_;
  bool failing_ = false;
  bool first_ = true;  // line of this start
};

}  // namespace weft
