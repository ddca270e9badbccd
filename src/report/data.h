// Loads the data of a run for weft report: its metrics, start table, deck and samples, tolerating
// what a run that is still going or was killed leaves behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/gallery.h"

namespace weft::report_page {

// The parts of a step's time, in the order they are stacked. `other` is what the parts leave over.
enum Part { compute, wait_slowest, comm_exposed, optimizer, data_wait, checkpoint, other, parts };
inline constexpr const char* part_names[parts] = {"compute",
                                                  "wait for the slowest",
                                                  "exposed communication",
                                                  "optimizer",
                                                  "data wait",
                                                  "checkpoint",
                                                  "other"};

inline constexpr const char* part_colors[parts] = {"var(--part0)", "var(--part1)", "var(--part2)",
                                                   "var(--part3)", "var(--part4)", "var(--part5)",
                                                   "var(--part6)"};

// One value a step; NaN where a line did not have it.
struct Steps {
  std::vector<double> step;  // steps done after it: 1 is the first
  std::vector<double> loss, grad_norm, lr, seconds, resident, arena;
  // What the loss is made of, by name; as long as `step`, or shorter where the last have none.
  std::map<std::string, std::vector<double>> terms;
  struct Store {
    std::vector<double> samples, loss;
  };
  std::map<std::string, Store> stores;  // of several, by name; as long as `step`, or shorter
  std::vector<double> part[parts];      // seconds
  std::vector<double> slowest,
      spread;  // the slowest rank's number; (greatest - mean) / mean of busy time
  std::vector<std::int64_t> samples;
  std::size_t size() const { return step.size(); }
};

// Means over the steps that say what every rank did, of those with as many ranks as the last one.
struct RankTimes {
  // Seconds: a value a rank; or, of more ranks than the metrics list one by one, of the fastest,
  // the median and the slowest.
  std::vector<double> busy, wait, data_wait;  // data_wait, part of busy, may be empty
  bool each = true;
  std::vector<std::size_t> steps;          // into Steps: those that were averaged
  std::map<int, std::size_t> was_slowest;  // in how many of them
};

// A result of `weft bench scaling --json`.
struct Scaling {
  std::string mode, mix;
  struct Point {
    double ranks = 0, seconds = 0, efficiency = 0, exposed = 0, wait = 0;  // NaN: not there
  };
  std::vector<Point> points;
};

// RUN/validation.jsonl: one value a measurement on held-out samples; NaN where a line lacks it.
struct HeldOutSteps {
  std::vector<double> step;  // steps done before it
  std::vector<double> loss;
  std::map<std::string, std::vector<double>> buckets, terms;  // by name
  std::vector<std::ptrdiff_t> sets;  // where losses of each set of samples begin; 0 is the first
};

struct Run {
  std::filesystem::path dir;
  std::string name;  // for titles and legends
  Steps steps;
  HeldOutSteps held_out;
  RankTimes ranks;
  // The gradient's norm in each layer, by steps done: of some steps only.
  std::map<double, std::vector<std::pair<std::string, double>>> layer_norms;
  double ranks_number = 0;       // how many ranks; 0: unknown
  double ended = 0;              // time of its last line: seconds since 1970
  std::vector<Scaling> scaling;  // of RUN/scaling.json
  std::vector<std::pair<std::string, double>> memory_plan;  // bytes of a rank by kind
  std::vector<std::pair<std::string, std::string>> facts;   // run.json, in its order
  std::string deck;                                         // deck.toml as it is
  Gallery samples;                                          // RUN/generated
  std::vector<Gallery> through_time;  // RUN/samples/*, by the number in their names
  std::size_t broken_lines = 0;       // of metrics.jsonl, but for a torn last one
  std::size_t repeated_steps = 0;     // done again after a restart
  std::vector<double> restarts;       // steps done when the run went on
  JobStatus status;                   // of the last start
  std::size_t distinct_samples = 0;
};

// Reads RUN/metrics.jsonl, layer_norms.jsonl, deck.toml, run.json, generated/ and samples/. Throws
// Exit::data when there is no such directory or no complete line of metrics.
Run load_run(const std::filesystem::path& dir);

// Reads a scaling result. Throws Exit::data when it is none.
Scaling load_scaling(const std::filesystem::path& file);

// ---- TensorBoard: event files, made by hand so that neither TensorFlow nor protobuf is needed
// ----

// CRC-32C (Castagnoli) of the bytes.
std::uint32_t crc32c(std::string_view bytes);
// A file's content: loss, terms, stores, gradient norm (of some steps also by layer), rate, seconds
// and their parts, memory, spread of the ranks, and what was measured on held-out samples; each at
// the number of steps done.
// Samples are pictures, the middle frame of each clip; `scratch` is a file for them, written and
// removed.
std::string event_file(const Run& run, const std::filesystem::path& scratch = {});
// Writes DIR/NAME/events.out.tfevents.weft for each run, in place of an earlier one. Runs of the
// same name get numbers. Returns the paths; throws Exit::data when one cannot be written.
std::vector<std::filesystem::path> write_event_files(const std::filesystem::path& dir,
                                                     std::span<const Run> runs);

}  // namespace weft::report_page
