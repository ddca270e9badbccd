// The trace of all ranks as one file in Chrome's JSON format, their clocks aligned, which
// ui.perfetto.dev and chrome://tracing open: a process is a rank, a thread of it one lane of
// core/trace.h. Format: "Trace Event Format" (Google, 2016), complete events ("X").
#pragma once

#include <mpi.h>

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/file.h"
#include "core/trace.h"

namespace weft {

// A span as it travels between ranks: names by number.
struct TraceSpan {
  std::int32_t name = 0, arg_name = -1;  // into RankTrace::names; -1: no argument
  std::int32_t lane = 0;                 // trace::Lane
  std::int64_t begin = 0, end = 0;       // nanoseconds on rank 0's clock
  std::int64_t arg = 0;
};

struct RankTrace {
  int rank = 0;
  std::string host;
  std::vector<std::string> names;
  std::vector<TraceSpan> spans;  // in any order
  std::int64_t clock_error = 0;  // nanoseconds by which all of them may be early or late
};

// Spans of one lane, in order of their begins, and the row of the picture each is drawn in: viewers
// want spans of a row to nest or to stand apart, but several threads may share a lane (readers of
// clips, say), and then take further rows.
struct LaneRows {
  std::vector<TraceSpan> spans;
  std::vector<int> row;
  int rows = 0;
};
LaneRows rows_of(std::span<const TraceSpan> spans, trace::Lane lane);

// Writes rank after rank, so that only one rank's spans are in memory.
class TraceFile {
 public:
  // Writes to PATH.tmp until finish(). Times in the file count from `origin`, nanoseconds on rank
  // 0's clock. Exit::usage if it cannot be written.
  TraceFile(const std::filesystem::path& path, std::int64_t origin);

  void add(const RankTrace& rank);
  // Closes the file and gives it its name; `facts` are strings kept beside the events ("build",
  // "run").
  void finish(std::span<const std::pair<std::string, std::string>> facts);

 private:
  WholeFile file_;
  std::int64_t origin_;
  bool first_ = true;
};

// This rank's clock (now_seconds()) against rank 0's, from the fastest of many round trips. Two
// measurements, at the start and at the end of what is traced, also correct the drift between the
// clocks, as a straight line.
class ClockOffset {
 public:
  // Collective: rank 0 plays ping-pong with one rank after another, well under a millisecond each.
  explicit ClockOffset(MPI_Comm world, std::function<double()> clock = now_seconds);
  ~ClockOffset();
  ClockOffset(const ClockOffset&) = delete;
  ClockOffset& operator=(const ClockOffset&) = delete;

  // Collective: the second point of the line, or a newer one instead of it.
  void measure_again();

  // A moment of this rank on rank 0's clock, both in seconds.
  double on_rank_0(double local) const;
  // Seconds by which on_rank_0() may be wrong at the moments of the measurements: half the worse
  // round trip.
  double error() const;

  // Two clocks read at one moment, as well as that can be known: rank 0's is ahead by `ahead`, give
  // or take `error`.
  struct Reading {
    double local = 0, ahead = 0, error = 0;  // seconds
  };

 private:
  Reading measure() const;

  std::function<double()> clock_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  Reading first_, last_;
};

// Collective: writes RUN/trace.json with the spans of core/trace.h of all ranks, whole or not at
// all. Rank 0 holds one rank's spans at a time; many ranks give only their latest spans, so that
// viewers can open the file. A file that cannot be written is one WARN: no run ends for its trace.
// Without `clock` the offsets are measured only now.
void write_trace(const std::filesystem::path& run_dir, MPI_Comm world,
                 ClockOffset* clock = nullptr);

}  // namespace weft
