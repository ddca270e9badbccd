// One trace of all ranks in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open: a process is a rank,
// a thread of it one lane of core/trace.h. Format: "Trace Event Format" (Google, 2016), complete events ("X").
#pragma once

#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

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

// Spans of one lane, in order of their begins, and the row of the picture each is drawn in: viewers want spans of a row
// to nest or to stand apart, but several threads may share a lane (readers of clips, say), and then take further rows.
struct LaneRows {
  std::vector<TraceSpan> spans;
  std::vector<int> row;
  int rows = 0;
};
LaneRows rows_of(std::span<const TraceSpan> spans, trace::Lane lane);

// Writes rank after rank, so that no more than one rank's spans have to be in memory.
class TraceFile {
 public:
  // Writes to PATH.tmp until finish(). Times in the file count from `origin`, nanoseconds on rank 0's clock.
  // Exit::usage if it cannot be written.
  TraceFile(const std::filesystem::path& path, std::int64_t origin);
  // Without a finish the draft is removed.
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  void add(const RankTrace& rank);
  // Closes the file and gives it its name; `facts` are strings kept beside the events ("build", "run").
  void finish(std::span<const std::pair<std::string, std::string>> facts);

 private:
  void put(const std::string& text);

  std::filesystem::path path_, draft_;
  std::FILE* file_ = nullptr;
  std::int64_t origin_;
  bool first_ = true;
};

}  // namespace weft
