#include "train/metrics/trace_gather.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <type_traits>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "core/trace.h"
#include "core/version.h"
#include "train/metrics/trace_file.h"

namespace weft {
namespace {

constexpr int round_trips = 64;
// Of all ranks together: about 250 MB of JSON, which browsers still open.
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

std::string host_name() {
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  MPI_Get_processor_name(name, &length);
  return {name, static_cast<std::size_t>(length)};
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

// Answers rank 0's turn: sizes and error, all texts with a zero after each, the spans in pieces.
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
  std::string texts(static_cast<std::size_t>(counts[0]), '\0');
  MPI_Recv(texts.data(), static_cast<int>(texts.size()), MPI_CHAR, rank, names, comm,
           MPI_STATUS_IGNORE);
  RankTrace out;
  out.rank = rank;
  out.host = texts.c_str();
  for (std::size_t at = out.host.size() + 1; at < texts.size(); at += out.names.back().size() + 1)
    out.names.emplace_back(texts.c_str() + at);
  out.clock_error = counts[2];
  out.spans.resize(static_cast<std::size_t>(counts[1]));
  for (std::size_t i = 0; i < out.spans.size(); i += spans_a_piece) {
    const std::size_t n = std::min(spans_a_piece, out.spans.size() - i);
    MPI_Recv(out.spans.data() + i, static_cast<int>(n * sizeof(TraceSpan)), MPI_BYTE, rank, spans,
             comm, MPI_STATUS_IGNORE);
  }
  return out;
}

// Runs `work` unless something failed before. What fails is told once, and the collective goes on to its end.
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
  // Freeing is collective: not while this rank alone may be unwinding.
  if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

void ClockOffset::measure_again() { last_ = measure(); }

// Rank 0 answers with its clock; the asking rank takes that for the middle of its round trip. The fastest trip is the
// one that nothing else held up, on either way.
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
  MPI_Comm comm = MPI_COMM_NULL;  // nobody else's messages come between
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
      log::info("trace     {} spans of {} ranks in {}, clocks aligned within {:.1f} us", total,
                ranks, path.string(), worst * 1e6);
    });
  }
  MPI_Comm_free(&comm);
}

}  // namespace weft
