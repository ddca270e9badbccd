#include "train/metrics/run_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/trace.h"

namespace weft {

namespace {

constexpr const char* lane_names[trace::lanes] = {"step",          "compute", "wait",
                                                  "communication", "data",    "checkpoint"};
// Numbers of threads: unique among all ranks (Perfetto takes them for system-wide), and readable.
// Rows beyond the last share it; that takes more than a hundred threads in one lane.
constexpr int rows_a_lane = 100, threads_a_rank = 1000;
static_assert(trace::lanes * rows_a_lane <= threads_a_rank);

std::string quoted(const std::string& text) {
  return dump_json(nlohmann::json(text), -1, ' ', true, nlohmann::json::error_handler_t::replace);
}

// Microseconds with the nanoseconds as decimals: a double is too short for them in long runs.
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
  // The longer of two that begin together comes first: it encloses the other.
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
    : file_(path, Exit::usage, path.string() + ".tmp"), origin_(origin) {
  file_.add("{\"traceEvents\":[\n");
}

void TraceFile::add(const RankTrace& rank) {
  const auto event = [&](const std::string& e) {
    if (!first_) file_.add(",\n");
    first_ = false;
    file_.add(e);
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
    // Perfetto lists processes in the order of their first events, not of sort_index, so every rank
    // gets an event at the origin.
    if (first_lane)
      complete("\"trace\"", 0, 0, 0, argument("\"clock_error_ns\"", rank.clock_error));
    for (std::size_t i = 0; i < rows.spans.size(); ++i) {
      const TraceSpan& s = rows.spans[i];
      complete(names[s.name], std::max<std::int64_t>(0, s.begin - origin_), s.end - s.begin,
               rows.row[i], s.arg_name < 0 ? "" : argument(names[s.arg_name], s.arg));
    }
  }
}

void TraceFile::finish(std::span<const std::pair<std::string, std::string>> facts) {
  std::string text = "\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":{";
  for (std::size_t i = 0; i < facts.size(); ++i)
    text += (i > 0 ? "," : "") + quoted(facts[i].first) + ":" + quoted(facts[i].second);
  file_.add(text + "}}\n");
  file_.commit();
}

namespace {

constexpr int round_trips = 64;
// Over all ranks: about 250 MB of JSON, which browsers can still open.
constexpr std::size_t most_spans = 2'000'000;
constexpr std::size_t spans_a_piece = 1 << 15;
enum Tag { ping = 1, turn, sizes, names, spans };

static_assert(std::is_trivially_copyable_v<TraceSpan>);

int rank_of(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}
int size_of(MPI_Comm comm) {
  int size = 1;
  MPI_Comm_size(comm, &size);
  return size;
}

// This rank's latest `most` spans on rank 0's clock.
RankTrace own_trace(const ClockOffset& clock, int rank, std::size_t most) {
  RankTrace out{rank, host_name(), {}, {}, std::llround(clock.error() * 1e9)};
  std::vector<trace::Span> all = trace::spans();
  if (all.size() > most) all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(most));
  std::map<std::string, std::int32_t> numbers;
  const auto number_of = [&](const char* name) {
    const auto [it, is_new] = numbers.try_emplace(name, static_cast<std::int32_t>(numbers.size()));
    if (is_new) out.names.push_back(name);
    return it->second;
  };
  const auto nanoseconds = [&](double local) {
    return static_cast<std::int64_t>(std::llround(clock.on_rank_0(local) * 1e9));
  };
  out.spans.reserve(all.size());
  for (const trace::Span& s : all) {
    TraceSpan t;
    t.name = number_of(s.name);
    t.arg_name = s.arg_name != nullptr ? number_of(s.arg_name) : -1;
    t.lane = static_cast<std::int32_t>(s.lane);
    t.begin = nanoseconds(s.begin);
    t.end = std::max(t.begin, nanoseconds(s.end));
    t.arg = s.arg;
    out.spans.push_back(t);
  }
  return out;
}

// Waits for its turn from rank 0, then sends sizes and error, all texts with a zero after each, and
// the spans in pieces.
void send_trace(const RankTrace& mine, MPI_Comm comm) {
  MPI_Recv(nullptr, 0, MPI_BYTE, 0, turn, comm, MPI_STATUS_IGNORE);
  std::string texts = mine.host + '\0';
  for (const std::string& n : mine.names) texts += n + '\0';
  const std::int64_t counts[] = {static_cast<std::int64_t>(texts.size()),
                                 static_cast<std::int64_t>(mine.spans.size()), mine.clock_error};
  MPI_Send(counts, 3, MPI_INT64_T, 0, sizes, comm);
  MPI_Send(texts.data(), static_cast<int>(texts.size()), MPI_CHAR, 0, names, comm);
  for (std::size_t i = 0; i < mine.spans.size(); i += spans_a_piece) {
    const std::size_t n = std::min(spans_a_piece, mine.spans.size() - i);
    MPI_Send(mine.spans.data() + i, static_cast<int>(n * sizeof(TraceSpan)), MPI_BYTE, 0, spans,
             comm);
  }
}

RankTrace receive_trace(int rank, MPI_Comm comm) {
  MPI_Send(nullptr, 0, MPI_BYTE, rank, turn, comm);
  std::int64_t counts[3] = {};
  MPI_Recv(counts, 3, MPI_INT64_T, rank, sizes, comm, MPI_STATUS_IGNORE);
  std::string texts(counts[0], '\0');
  MPI_Recv(texts.data(), static_cast<int>(texts.size()), MPI_CHAR, rank, names, comm,
           MPI_STATUS_IGNORE);
  RankTrace out;
  out.rank = rank;
  out.host = texts.c_str();
  for (std::size_t at = out.host.size() + 1; at < texts.size(); at += out.names.back().size() + 1)
    out.names.emplace_back(texts.c_str() + at);
  out.clock_error = counts[2];
  out.spans.resize(counts[1]);
  for (std::size_t i = 0; i < out.spans.size(); i += spans_a_piece) {
    const std::size_t n = std::min(spans_a_piece, out.spans.size() - i);
    MPI_Recv(out.spans.data() + i, static_cast<int>(n * sizeof(TraceSpan)), MPI_BYTE, rank, spans,
             comm, MPI_STATUS_IGNORE);
  }
  return out;
}

// Runs `work` unless something failed before. Reports a failure once instead of throwing, so that
// the collective still runs to its end.
template <class Work>
void attempt(bool& failed, const Work& work) {
  if (failed) return;
  try {
    work();
  } catch (const Error& e) {
    failed = true;
    log::warn("the trace is not written: {} ({})", e.what(), e.hint());
  }
}

}  // namespace

ClockOffset::ClockOffset(MPI_Comm world, std::function<double()> clock) : clock_(std::move(clock)) {
  MPI_Comm_dup(world, &comm_);
  first_ = last_ = measure();
}

ClockOffset::~ClockOffset() {
  // Freeing is collective, and during stack unwinding the other ranks may not be here.
  if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

void ClockOffset::measure_again() { last_ = measure(); }

// Rank 0 answers with its clock; the asking rank assumes that it was read in the middle of the
// round trip. The fastest trip counts: nothing delayed it in either direction.
ClockOffset::Reading ClockOffset::measure() const {
  const int rank = rank_of(comm_), ranks = size_of(comm_);
  Reading best;
  if (rank == 0) {
    for (int other = 1; other < ranks; ++other) {
      MPI_Send(nullptr, 0, MPI_BYTE, other, turn, comm_);
      for (int i = 0; i < round_trips; ++i) {
        MPI_Recv(nullptr, 0, MPI_BYTE, other, ping, comm_, MPI_STATUS_IGNORE);
        const double now = clock_();
        MPI_Send(&now, 1, MPI_DOUBLE, other, ping, comm_);
      }
    }
    best.local = clock_();
    return best;
  }
  MPI_Recv(nullptr, 0, MPI_BYTE, 0, turn, comm_, MPI_STATUS_IGNORE);
  best.error = std::numeric_limits<double>::infinity();
  for (int i = 0; i < round_trips; ++i) {
    double theirs = 0;
    const double before = clock_();
    MPI_Send(nullptr, 0, MPI_BYTE, 0, ping, comm_);
    MPI_Recv(&theirs, 1, MPI_DOUBLE, 0, ping, comm_, MPI_STATUS_IGNORE);
    const double after = clock_(), half = (after - before) / 2;
    if (half < best.error) best = {before + half, theirs - (before + half), half};
  }
  return best;
}

double ClockOffset::on_rank_0(double local) const {
  const double between = last_.local - first_.local;
  const double share = between > 0 ? (local - first_.local) / between : 0;
  return local + first_.ahead + (last_.ahead - first_.ahead) * share;
}

double ClockOffset::error() const { return std::max(first_.error, last_.error); }

void write_trace(const std::filesystem::path& run_dir, MPI_Comm world, ClockOffset* clock) {
  std::optional<ClockOffset> now;
  if (clock != nullptr)
    clock->measure_again();
  else
    clock = &now.emplace(world);
  MPI_Comm comm = MPI_COMM_NULL;  // of its own, so that no other messages mix in
  MPI_Comm_dup(world, &comm);
  const int rank = rank_of(comm), ranks = size_of(comm);
  const std::size_t most =
      std::max<std::size_t>(1000, most_spans / static_cast<std::size_t>(ranks));
  const RankTrace mine = own_trace(*clock, rank, most);

  std::int64_t begin = std::numeric_limits<std::int64_t>::max(), origin = begin;
  for (const TraceSpan& s : mine.spans) begin = std::min(begin, s.begin);
  double error = clock->error(), worst = 0;
  std::int64_t count = static_cast<std::int64_t>(mine.spans.size()), total = 0;
  MPI_Allreduce(&begin, &origin, 1, MPI_INT64_T, MPI_MIN, comm);
  MPI_Reduce(&error, &worst, 1, MPI_DOUBLE, MPI_MAX, 0, comm);
  MPI_Reduce(&count, &total, 1, MPI_INT64_T, MPI_SUM, 0, comm);

  if (rank != 0) {
    send_trace(mine, comm);
  } else {
    bool failed = false;
    std::unique_ptr<TraceFile> file;
    const std::filesystem::path path = run_dir / "trace.json";
    attempt(failed, [&] {
      file = std::make_unique<TraceFile>(path, origin);
      file->add(mine);
    });
    for (int r = 1; r < ranks; ++r) {
      const RankTrace theirs = receive_trace(r, comm);
      attempt(failed, [&] { file->add(theirs); });
    }
    attempt(failed, [&] {
      const std::pair<std::string, std::string> facts[] = {
          {"program", version_line()},
          {"ranks", std::to_string(ranks)},
          {"clocks aligned within", fmt::format("{:.1f} us", worst * 1e6)}};
      file->finish(facts);
      log::info("trace     {} of {} in {}, clocks aligned within {:.1f} us", counted(total, "span"),
                counted(ranks, "rank"), path.string(), worst * 1e6);
    });
  }
  MPI_Comm_free(&comm);
}

}  // namespace weft
