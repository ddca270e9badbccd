#include "train/metrics/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace weft {
namespace {

constexpr const char* lane_names[trace::lanes] = {"step",          "compute", "wait",
                                                  "communication", "data",    "checkpoint"};
// Numbers of threads: unique among all ranks (Perfetto takes them for system-wide), and readable. Rows beyond the last
// share it, which some hundred threads in one lane would take.
constexpr int rows_a_lane = 100, threads_a_rank = 1000;
static_assert(trace::lanes * rows_a_lane <= threads_a_rank);

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

// Microseconds with the nanoseconds as decimals: a double could not hold them for long runs.
std::string microseconds(std::int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

std::string metadata(const char* what, int pid, int tid, const std::string& args) {
  return fmt::format(R"({{"name":"{}","ph":"M","ts":0,"pid":{},"tid":{},"args":{{{}}}}})", what,
                     pid, tid, args);
}

}  // namespace

LaneRows rows_of(std::span<const TraceSpan> spans, trace::Lane lane) {
  LaneRows out;
  std::copy_if(spans.begin(), spans.end(), std::back_inserter(out.spans),
               [&](const TraceSpan& s) { return s.lane == static_cast<std::int32_t>(lane); });
  // Of two that begin together the longer one holds the other.
  std::stable_sort(out.spans.begin(), out.spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  std::vector<std::vector<std::int64_t>> open;  // ends of the spans around, innermost last
  for (const TraceSpan& s : out.spans) {
    std::size_t row = 0;
    for (; row < open.size(); ++row) {
      while (!open[row].empty() && open[row].back() <= s.begin) open[row].pop_back();
      if (open[row].empty() || s.end <= open[row].back()) break;
    }
    if (row == open.size()) open.emplace_back();
    open[row].push_back(s.end);
    out.row.push_back(static_cast<int>(row));
  }
  out.rows = static_cast<int>(open.size());
  return out;
}

TraceFile::TraceFile(const std::filesystem::path& path, std::int64_t origin)
    : path_(path), draft_(path.string() + ".tmp"), origin_(origin) {
  file_ = std::fopen(draft_.c_str(), "wb");
  WEFT_CHECK(file_ != nullptr, Exit::usage, "check that run.dir can be written",
             "cannot open {}: {}", draft_.string(), std::strerror(errno));
  put("{\"traceEvents\":[\n");
}

TraceFile::~TraceFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::error_code ignored;
  std::filesystem::remove(draft_, ignored);
}

void TraceFile::put(const std::string& text) {
  WEFT_CHECK(std::fwrite(text.data(), 1, text.size(), file_) == text.size(), Exit::usage,
             "free space under run.dir", "cannot write {}: {}", draft_.string(),
             std::strerror(errno));
}

void TraceFile::add(const RankTrace& rank) {
  std::string text;
  const auto event = [&](const std::string& e) {
    if (!first_) text += ",\n";
    first_ = false;
    text += e;
    if (text.size() > (1 << 20)) {
      put(text);
      text.clear();
    }
  };
  const int pid = rank.rank;
  event(metadata("process_name", pid, 0,
                 "\"name\":" + quoted(fmt::format("rank {} on {}", rank.rank, rank.host))));
  event(metadata("process_sort_index", pid, 0, fmt::format("\"sort_index\":{}", rank.rank)));
  std::vector<std::string> names;
  for (const std::string& n : rank.names) names.push_back(quoted(n));
  for (int lane = 0; lane < trace::lanes; ++lane) {
    const LaneRows rows = rows_of(rank.spans, static_cast<trace::Lane>(lane));
    const auto tid = [&](int row) {
      return 1 + pid * threads_a_rank + lane * rows_a_lane + std::min(row, rows_a_lane - 1);
    };
    const bool first_lane = lane == 0;
    for (int row = 0; row < std::max(rows.rows, first_lane ? 1 : 0); ++row) {
      const std::string name =
          row == 0 ? lane_names[lane] : fmt::format("{} {}", lane_names[lane], row + 1);
      event(metadata("thread_name", pid, tid(row), "\"name\":" + quoted(name)));
      event(metadata("thread_sort_index", pid, tid(row),
                     fmt::format("\"sort_index\":{}", lane * rows_a_lane + row)));
    }
    const auto complete = [&](const std::string& name, std::int64_t begin, std::int64_t duration,
                              int row, const std::string& args) {
      event(fmt::format(R"({{"name":{},"cat":"{}","ph":"X","ts":{},"dur":{},"pid":{},"tid":{}{}}})",
                        name, lane_names[lane], microseconds(begin), microseconds(duration), pid,
                        tid(row), args));
    };
    const auto argument = [](const std::string& name, std::int64_t value) {
      return fmt::format(",\"args\":{{{}:{}}}", name, value);
    };
    // Perfetto lists processes in the order of their first events, not of sort_index: every rank has one at the origin.
    if (first_lane)
      complete("\"trace\"", 0, 0, 0, argument("\"clock_error_ns\"", rank.clock_error));
    for (std::size_t i = 0; i < rows.spans.size(); ++i) {
      const TraceSpan& s = rows.spans[i];
      complete(names[static_cast<std::size_t>(s.name)],
               std::max<std::int64_t>(0, s.begin - origin_), s.end - s.begin, rows.row[i],
               s.arg_name < 0 ? "" : argument(names[static_cast<std::size_t>(s.arg_name)], s.arg));
    }
  }
  put(text);
}

void TraceFile::finish(std::span<const std::pair<std::string, std::string>> facts) {
  std::string text = "\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":{";
  for (std::size_t i = 0; i < facts.size(); ++i)
    text += (i > 0 ? "," : "") + quoted(facts[i].first) + ":" + quoted(facts[i].second);
  put(text + "}}\n");
  std::FILE* file = std::exchange(file_, nullptr);
  const bool closed = std::fclose(file) == 0;
  std::error_code failed;
  if (closed)
    std::filesystem::rename(draft_, path_, failed);
  else
    failed = std::error_code(errno, std::generic_category());
  if (failed) {
    std::error_code ignored;
    std::filesystem::remove(draft_, ignored);
  }
  WEFT_CHECK(!failed, Exit::usage, "free space under run.dir", "cannot write {}: {}",
             path_.string(), failed.message());
}

}  // namespace weft
