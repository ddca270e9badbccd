// Loads the data of a run for weft report: its metrics, start table, deck and samples, tolerating
// what a run that is still going or was killed leaves behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "report/gallery.h"

namespace weft::report_page {

// The parts of a step's time, in the order they are stacked. `other` is what the parts leave over.
enum Part { compute, wait_slowest, comm_exposed, optimizer, data_wait, checkpoint, other, parts };
struct StepPart {
  const char *column, *name, *color;
};
inline constexpr StepPart step_parts[parts] = {
    {"split/compute", "compute", "var(--part0)"},
    {"split/wait_slowest", "wait for the slowest", "var(--part1)"},
    {"split/comm_exposed", "exposed communication", "var(--part2)"},
    {"split/optimizer", "optimizer", "var(--part3)"},
    {"split/data_wait", "data wait", "var(--part4)"},
    {"split/checkpoint", "checkpoint", "var(--part5)"},
    {"split/other", "other", "var(--part6)"}};

// The numbers of lines such as those of metrics.jsonl. A column is a member of the lines: "loss",
// "split/compute", "stores/NAME/samples".
class Series {
 public:
  std::vector<double> step;  // steps done: 1 is after the first
  // Each as long as `step`; NaN where a line did not have it, or has null, as of a loss that is not
  // finite. No more of them than any run has: an untrusted file could ask for all memory.
  std::map<std::string, std::vector<double>> columns;

  std::size_t size() const { return step.size(); }
  // A column; NaN throughout where no line has it.
  std::span<const double> operator[](const std::string& column) const;
  // NAME of each column that is called `before`NAME`after`.
  std::vector<std::string> names(std::string_view before, std::string_view after) const;
  // Adds the numbers of a line, or one number more of the last line.
  void add(double at, const nlohmann::json& line);
  void add(const std::string& column, double value);

 private:
  std::vector<double> absent_;
};

// Calls take("split/compute", seconds) and so on for all numbers below `object`; NaN for null.
void each_number(const nlohmann::json& object, const std::string& prefix,
                 const std::function<void(const std::string&, double)>& take);

// Means over the steps that say what every rank did, of those with as many ranks as the last one.
struct RankTimes {
  // Seconds: a value a rank; or, of more ranks than the metrics list one by one, of the fastest,
  // the median and the slowest.
  std::vector<double> busy, wait, data_wait;  // data_wait, part of busy, may be empty
  bool each = true;
  std::vector<std::size_t> steps;          // into Run::steps: those that were averaged
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

struct Run {
  std::filesystem::path dir;
  std::string name;  // for titles and legends
  Series steps;      // metrics.jsonl
  Series held_out;   // validation.jsonl
  // Where the losses of each set of held-out samples begin; 0 is the first.
  std::vector<std::ptrdiff_t> held_out_sets;
  RankTimes ranks;
  // The gradient's norm in each layer, by steps done: of some steps only.
  std::map<double, nlohmann::json> layer_norms;
  double ranks_number = 0;       // how many ranks; 0: unknown
  double ended = 0;              // time of its last line: seconds since 1970
  std::vector<Scaling> scaling;  // of RUN/scaling.json
  std::vector<std::pair<std::string, double>> memory_plan;  // bytes of a rank by kind
  std::vector<std::pair<std::string, std::string>> facts;   // run.json, in its order
  std::string deck;                                         // deck.toml as it is
  Gallery samples;                                          // RUN/generated
  std::vector<Gallery> through_time;  // RUN/samples/*, by the number in their names
  std::size_t broken_lines = 0;       // of the files by step, but for a torn last one
  std::size_t repeated_steps = 0;     // done again after a restart
  std::vector<double> restarts;       // steps done when the run went on
  JobStatus status;                   // of the last start
  std::size_t samples_seen = 0, distinct_samples = 0;
};

// Reads RUN/metrics.jsonl, layer_norms.jsonl, deck.toml, run.json, generated/ and samples/. Throws
// Exit::data when there is no such directory or no complete line of metrics.
Run load_run(const std::filesystem::path& dir);

// Reads a scaling result. Throws Exit::data when it is none.
Scaling load_scaling(const std::filesystem::path& file);

// ---- TensorBoard (tensorboard.cpp) ----

// CRC-32C (Castagnoli) of the bytes.
std::uint32_t crc32c(std::string_view bytes);
// An event file's content: loss, terms, stores, gradient norm (of some steps also by layer), rate,
// seconds and their parts, memory, spread of the ranks, and what was measured on held-out samples;
// each at the number of steps done. Samples are pictures, the middle frame of each clip.
std::string event_file(const Run& run);
// Writes DIR/NAME/events.out.tfevents.weft for each run, in place of an earlier one. Runs of the
// same name get numbers. Returns the paths; throws Exit::data when one cannot be written.
std::vector<std::filesystem::path> write_event_files(const std::filesystem::path& dir,
                                                     std::span<const Run> runs);

}  // namespace weft::report_page
