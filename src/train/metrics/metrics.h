// What a step measures: the report of every rank to every other, the lines of RUN/metrics.jsonl,
// and watches over figures that all ranks know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace weft {

// ---- RUN/metrics.jsonl: one JSON object a step, appended by rank 0, for machines and for weft
// report ----

// Where the seconds of a step went, on the rank that writes.
struct StepSplit {
  double data_wait = 0;     // waiting for clips
  double compute = 0;       // forward, backward
  double wait_slowest = 0;  // blocked because the slowest rank was not there yet
  double comm_exposed = 0;  // blocked for the rest of communication that no computation hid
  double optimizer = 0;
  double checkpoint = 0;  // stalled by a save
};

// Metrics of the clips of one of several stores in a step.
struct StoreMetrics {
  std::string name;
  std::int64_t samples = 0;
  double loss = 0;  // the mean over them; 0 where there are none
};

struct StepMetrics {
  std::int64_t step = 0;  // 0 is the first
  double loss = 0, grad_norm = 0, lr = 0;
  double seconds = 0;
  StepSplit split;
  double flops = 0;  // operations of the model, on this rank; not written
  std::size_t resident_bytes = 0, arena_peak_bytes = 0;
  std::vector<std::pair<std::string, double>> terms;  // what the loss is made of; may be empty
  std::vector<std::int64_t> samples;                  // of all ranks, in the order of the step plan
  std::vector<StoreMetrics> stores;                   // empty where there are not several
  // The gradient's norm in each layer, in a step of train.layer_norms_every.
  std::vector<std::pair<std::string, double>> layer_norms;

  // What rank 0 knows of all ranks, in seconds a rank; nothing of it is written while slowest_rank
  // is negative.
  int slowest_rank = -1;
  double spread = 0;             // (greatest - mean) / mean of rank_busy
  std::vector<float> rank_busy;  // until its own gradients were there: wait for clips and compute
  std::vector<float> rank_wait;  // blocked for the slowest rank
  std::vector<float>
      rank_data_wait;  // the part of rank_busy that was waiting for clips; may be empty
};

// A line of metrics.jsonl, validation.jsonl or layer_norms.jsonl, which is an object with a whole
// "step". is_discarded() for another, and for one whose hash does not match.
nlohmann::json parse_step_line(const std::string& line);

// A step, of metrics.jsonl, as a line of the log and of weft status --follow: "step    120/600 loss
// 0.41207  grad 0.853  lr 2.00e-03  0.031 s  (data 0.1 %, ...)", of `steps` in total. The wait for
// the slowest rank is the mean of the ranks'.
std::string step_text(const nlohmann::json& line, std::int64_t steps);
std::string step_text(const StepMetrics& m, std::int64_t steps);

double mean_of(std::span<const float> v);  // one value at least
// (greatest - mean) / mean; 0 for no values or no time at all.
double spread_of(std::span<const float> busy);

// A file of JSON objects, one a line, each with the member "step" and a hash.
class StepLines {
 public:
  // Appends to `path`. Lines of steps from `first_step` on, which a restart repeats, are dropped
  // first, as is a last line that a crash cut short. `each`: every step before has a line; those
  // without are a WARN.
  StepLines(std::filesystem::path path, std::int64_t first_step, bool each = false);
  ~StepLines();
  StepLines(const StepLines&) = delete;
  StepLines& operator=(const StepLines&) = delete;

  // An object with a number "step"; it gets a seal (core/hash.h). Lines that a full disk refuses
  // wait in memory, with one WARN, and follow once it takes them.
  void write(const std::string& object);

 private:
  bool flush();

  std::filesystem::path path_;
  int file_ = -1;
  std::string pending_;
  bool failing_ = false;
};

// RUN/metrics.jsonl, and RUN/layer_norms.jsonl for steps that have such norms.
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& run_dir, std::int64_t first_step);

  void write(const StepMetrics& m);

 private:
  std::filesystem::path run_dir_;
  std::int64_t first_step_;
  StepLines metrics_;
  std::optional<StepLines> layer_norms_;  // once there is a line for it, or one to drop
  bool first_ = true;                     // line of this start
};

// ---- Watches over figures that are the same on every rank ----

// So all reach the same verdict without communication: losses and gradient norms that leap, and
// ranks that are constantly slower than the others. Pure arithmetic.
class SpikeWatch {
 public:
  static constexpr std::size_t window = 64;  // values that a new one is compared with
  static constexpr std::size_t least = 32;   // values before the first judgement

  // A spike lies more than `deviations` above the median. A deviation is that of a normal
  // distribution with the window's median absolute deviation, and at least a twentieth of the
  // median: where losses hardly vary, a small change must not count as a spike.
  explicit SpikeWatch(double deviations) : deviations_(deviations) {}

  struct Spike {
    double median, deviations;  // of the values before; how far above it
  };
  // Adds the next value. Reports only the first of several spikes in a row. All values enter the
  // window, so that a lasting change of level soon counts as normal.
  std::optional<Spike> step(double value);

 private:
  double deviations_;
  std::vector<double> recent_;  // a ring of `window`
  std::size_t next_ = 0;
  bool within_ = false;  // the last value was a spike
};

// A rank's pace in a step is its busy time over what the plan expected of it. Each rank is compared
// with the median of all others' paces (not of all: of two ranks the median would be half the slow
// one itself), the middle of its last `window` comparisons is averaged, and a rank is slow when
// that exceeds `threshold` and stands clear of its own scatter.
class StragglerWatch {
 public:
  static constexpr int window = 16;             // steps with work
  static constexpr double threshold = 0.105;    // slower than the others by this share: reported
  static constexpr double recovered_at = 0.05;  // a reported rank has recovered below this
  static constexpr std::int64_t quiet = 1000;   // steps from a report of a rank to its next

  struct Verdict {
    int rank;
    double slower;           // against the median of the others: 1.2 is 20 % slower
    bool recovered = false;  // it was reported before, and is slow no longer
  };

  explicit StragglerWatch(int ranks);

  // Each step: busy seconds of every rank and what the plan expected of each, in any unit; 0 for a
  // rank without work, which is then not judged. Expectations should be measured: a cost table that
  // is wrong by a tenth for a bucket that always falls to the same rank looks like a slow rank.
  // Returns news only: each straggler once, and again only after a recovery and `quiet` steps,
  // since on a shared machine ranks are slow and recover all day; and the recoveries of what it
  // reported.
  std::vector<Verdict> step(std::span<const double> busy, std::span<const double> expected);

  bool slow(int rank) const { return ranks_[rank].slow; }

 private:
  struct Rank {
    std::vector<double> recent;  // logarithms of the pace against the others', a ring of `window`
    std::size_t next = 0;
    bool slow = false, reported = false;
    std::int64_t silent_until = 0;
  };
  std::vector<Rank> ranks_;
  std::int64_t steps_ = 0;
};

}  // namespace weft
