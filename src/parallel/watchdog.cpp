// Ranks ask who is late only when one of them is stuck, so a healthy run sends nothing. A stuck
// rank alarms a collector; the collector asks every rank how far it is, and sends all of them the
// verdict. The watchdogs' threads answer, so a rank whose main thread is stuck still answers, and
// one whose process is stopped does not. Rank 0 collects; if it does not answer, the first rank on
// another host (or rank 1) does.
//
// From the moment a rank is stuck for longer than the limit, the job ends within ten seconds:
//   collector 0 does not answer     2.6 s   patience()
//   late ranks do not answer        1.5 s   grace(), unless tests ask for more (WEFT_COMM_GRACE)
//   the verdict finds no listener   2.5 s   last_resort_seconds
// plus the second or so that mpirun or srun takes to end the ranks.
#include "parallel/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "core/progress/progress.h"
#include "parallel/end_job.h"
#include "tensor/device.h"

namespace weft {
namespace {

constexpr int tag_alarm = 1, tag_question = 2, tag_answer = 3, tag_verdict = 4;
// After a hang: how long a main thread may take to notice it, and then to end the job.
constexpr double last_resort_seconds = 2.5, last_resort_when_seen_seconds = 6;
// After any other failure: how long until this thread reports it and ends the job.
constexpr double patience_with_busy_rank_seconds = 60;

std::optional<double> seconds_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  WEFT_CHECK(end != text && *end == '\0' && seconds > 0, Exit::usage,
             fmt::format("give seconds, such as {}=600", variable), "{} = \"{}\"", variable, text);
  return seconds;
}

double choose_timeout(double wanted) {
  return seconds_in("WEFT_COMM_TIMEOUT").value_or(wanted > 0 ? wanted : (on_cuda() ? 600 : 3600));
}

// Busy storage is not a hang: a save may take this many times the limit.
double patience_with(const char* phase) {
  return phase != nullptr && std::string_view(phase) == "save" ? 10 : 1;
}

// How long a collector waits for answers, a stuck rank waits for its collector, and every watchdog
// waits between two looks.
double grace(double timeout) { return std::clamp(timeout / 4, 0.5, 1.5); }
double patience(double timeout) { return 1.5 * grace(timeout) + 0.3; }
std::chrono::duration<double> period(double timeout) {
  return std::chrono::duration<double>(std::clamp(timeout / 50, 0.002, 0.05));
}

std::vector<char> text_bytes(const std::string& s) { return {s.begin(), s.end()}; }

// The collector reports the error for all ranks. Below the report's first line is a table.
Error hang_error(const std::string& report, const std::string& hint) {
  const std::size_t end = std::min(report.find('\n'), report.size());
  Error e(Exit::hang, report.substr(0, end), hint, __FILE__, __LINE__);
  if (end < report.size()) e.with_below(report.substr(end + 1));
  e.set_reported();
  return e;
}

void report_error(const Error& e) {
  log::write_error(fmt::format("ERROR: {}", e.what()), e.below());
  if (!e.hint().empty()) log::error("HINT: {}", e.hint());
}

}  // namespace

Watchdog::Watchdog(MPI_Comm world, double timeout_seconds, Look look, Stop stop)
    : fixed_timeout_(std::getenv("WEFT_COMM_TIMEOUT") != nullptr),
      timeout_(choose_timeout(timeout_seconds)),
      fixed_grace_(seconds_in("WEFT_COMM_GRACE")),
      look_(std::move(look)),
      stop_(std::move(stop)) {
  MPI_Comm_dup(world, &comm_);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  // Reports name the ranks of a group by their number in MPI_COMM_WORLD, which users know.
  struct Name {
    int rank = 0;
    std::array<char, 60> host{};
  } own;
  MPI_Comm_rank(MPI_COMM_WORLD, &own.rank);
  host_name().copy(own.host.data(), own.host.size() - 1);
  std::vector<Name> all(static_cast<std::size_t>(size_));
  MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, comm_);
  for (const Name& n : all) names_.push_back({n.rank, n.host.data()});
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
  // After a failure the other ranks may never join MPI_Comm_free, and main ends all ranks. Unsent
  // messages are leaked, since MPI may still read them.
  if (!failed_ && std::uncaught_exceptions() == 0)
    MPI_Comm_free(&comm_);
  else
    new std::list<Message>(std::move(sent_));
}

void Watchdog::issued(std::uint64_t number, const Collective& what) {
  record_.issued(number, what);
}

void Watchdog::begun(std::uint64_t number) {
  moved_at_ = now_seconds();
  record_.begun(number);
}

void Watchdog::completed(std::uint64_t number) {
  moved_at_ = now_seconds();
  record_.completed(number);
}

void Watchdog::progress(std::int64_t step, const char* phase) {
  // Write the time first: the thread must not see a new phase with the time of an old one.
  phase_since_ = now_seconds();
  step_ = step;
  phase_ = phase == nullptr || std::string_view(phase) == "idle" ? nullptr : phase;
}

void Watchdog::set_timeout(double seconds) {
  WEFT_ASSERT(seconds > 0);
  if (!fixed_timeout_) timeout_ = seconds;
}

void Watchdog::suspect(const std::string& what) {
  const std::lock_guard lock(mutex_);
  suspicion_ = what;
}

void Watchdog::fail(std::exception_ptr failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    failure_ = std::move(failure);
    failed_at_ = now_seconds();
    failed_ = true;
  }
  stop_();
}

void Watchdog::check() {
  if (!failed_) return;
  seen_ = true;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(failure_);
}

void Watchdog::run() {
  double quiet_until = 0, last = now_seconds();
  for (;;) {
    serve();
    if (!failed_) {
      std::optional<Operation> o;
      try {
        o = look_();
      } catch (...) {
        fail(std::current_exception());
      }
      const double limit = timeout_, allowed = stalled_beyond(1);
      // A process that was itself stopped for a while must not blame the others, which may have
      // left because of it.
      if (now_seconds() - last > period(timeout_).count() + std::max(0.5, limit / 4))
        quiet_until = now_seconds() + limit;
      std::string suspicion;
      {
        const std::lock_guard lock(mutex_);
        suspicion = suspicion_;
      }
      if (!suspicion.empty())
        report(suspicion);
      else if (now_seconds() < quiet_until)
        alarm_.reset();
      else if (o && o->seconds > limit)
        report(fmt::format("{} did not end within {:g} s", o->name, limit));
      else if (!o && allowed > 0)
        report(fmt::format("no progress for {:g} s", allowed));
      else if (alarm_)
        collect(*alarm_);
    } else {
      end_if_unheard();
    }
    last = now_seconds();
    std::unique_lock lock(mutex_);
    if (wake_.wait_for(lock, period(timeout_), [&] { return ending_; })) return;
  }
}

// This rank's next call of its communicator throws the failure, and main reports it. If that call
// never comes, this thread reports the failure and ends the job.
void Watchdog::end_if_unheard() {
  const double since = now_seconds() - failed_at_;
  if (since < last_resort_seconds) return;
  try {
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  } catch (const Error& e) {
    if (since < (e.code() != Exit::hang ? patience_with_busy_rank_seconds
                 : seen_                ? last_resort_when_seen_seconds
                                        : last_resort_seconds))
      return;
    if (seen_ && e.code() != Exit::hang) return;
    if (!e.reported() && !seen_) report_error(e);
    crash::end_within(5, e.code());  // the status file may lie on what hangs
    note_failure(e);
    end_job(comm_, e.code());
  } catch (const std::exception& e) {
    if (seen_ || since < patience_with_busy_rank_seconds) return;
    log::error("ERROR: {}", e.what());
    end_job(comm_, Exit::internal);
  }
}

// Receives the waiting messages and answers them. Never blocks.
void Watchdog::serve() {
  for (;;) {
    int there = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &there, &status);
    if (!there) break;
    int bytes = 0;
    MPI_Get_count(&status, MPI_CHAR, &bytes);
    std::vector<char> text(static_cast<std::size_t>(bytes));
    MPI_Recv(text.data(), bytes, MPI_CHAR, status.MPI_SOURCE, status.MPI_TAG, comm_,
             MPI_STATUS_IGNORE);
    receive(status.MPI_SOURCE, status.MPI_TAG, std::move(text));
  }
  std::erase_if(sent_, [](Message& m) {
    int done = 0;
    MPI_Test(&m.request, &done, MPI_STATUS_IGNORE);
    return done != 0;
  });
}

void Watchdog::receive(int source, int tag, std::vector<char> bytes) {
  switch (tag) {
    case tag_alarm:
      alarm_ = std::string(bytes.begin(), bytes.end());
      break;
    case tag_question:
      send(source, tag_answer, state().to_bytes());
      break;
    case tag_answer:
      if (!answers_.empty())  // an answer to an earlier question is as good
        answers_[static_cast<std::size_t>(source)] = RankState::from_bytes(bytes);
      break;
    case tag_verdict: {
      const auto cut = std::find(bytes.begin(), bytes.end(), '\0');
      fail(std::make_exception_ptr(hang_error({bytes.begin(), cut}, {cut + 1, bytes.end()})));
      break;
    }
    default:
      break;
  }
}

void Watchdog::send(int target, int tag, std::vector<char> bytes) {
  Message& m = sent_.emplace_back(Message{std::move(bytes)});
  MPI_Isend(m.bytes.data(), static_cast<int>(m.bytes.size()), MPI_CHAR, target, tag, comm_,
            &m.request);
}

// Serves the other ranks until `done` or for `seconds`; returns whether it was done.
bool Watchdog::serve_until(const std::function<bool()>& done, double seconds) {
  for (const double start = now_seconds(); !done();) {
    if (now_seconds() - start > seconds) return false;
    std::this_thread::sleep_for(period(timeout_));
    serve();
  }
  return true;
}

// The seconds that this rank's step may stand still, if it has stood still for more than `share` of
// them; otherwise 0. An operation that begins or ends counts as a move: a main thread may wait for
// many, one after the other.
double Watchdog::stalled_beyond(double share) const {
  // Read the phase before its time, against the order in which progress() writes them: a time that
  // is too new does no harm.
  const char* phase = phase_;
  if (phase == nullptr) return 0;
  const double allowed = timeout_ * patience_with(phase);
  const double unmoved = now_seconds() - std::max(phase_since_.load(), moved_at_.load());
  return unmoved > share * allowed ? allowed : 0;
}

RankState Watchdog::state() const {
  RankState s;
  s.answers = true;
  if (const char* phase = phase_; phase != nullptr) {
    s.phase = phase;
    s.step = step_;
    s.phase_seconds = now_seconds() - phase_since_;
  }
  // The first rank to notice asks the others slightly before their own limit: hence 0.9.
  s.stalled = stalled_beyond(0.9) > 0;
  s.completed = record_.last_completed();
  s.begun = record_.last_begun();
  s.issued = record_.last_issued();
  s.records = record_.entries();
  return s;
}

// Tells every rank that this one is stuck.
void Watchdog::report(const std::string& complaint) {
  const auto elsewhere = std::find_if(names_.begin(), names_.end(), [&](const RankName& n) {
    return n.host != names_.front().host;
  });
  const int second = elsewhere == names_.end() ? 1 : static_cast<int>(elsewhere - names_.begin());
  for (const int collector : {0, second}) {
    if (collector == rank_) return collect(complaint);
    if (collector >= size_) continue;
    send(collector, tag_alarm, text_bytes(complaint));
    if (serve_until([&] { return failed_.load(); }, patience(timeout_))) return;
  }
  // Two hosts are gone: the remaining ranks try one after the other, so that one of them reports
  // it.
  if (!serve_until([&] { return failed_.load(); }, 0.1 * std::min(rank_, 10))) collect(complaint);
}

// Asks all ranks, reports the cause for all of them, then sends the verdict: in this order, since
// the first rank to receive it ends the job.
void Watchdog::collect(const std::string& complaint) {
  answers_.assign(names_.size(), {});
  answers_[static_cast<std::size_t>(rank_)] = state();
  for (int r = 0; r < size_; ++r)
    if (r != rank_) send(r, tag_question, {});
  serve_until(
      [&] {
        return failed_ || std::all_of(answers_.begin(), answers_.end(),
                                      [](const RankState& a) { return a.answers; });
      },
      fixed_grace_.value_or(grace(timeout_)));
  if (failed_) return;  // another collector was faster
  const std::string what = hang_report(complaint, answers_, names_);
  const std::string hint =
      what.starts_with("collective ")
          ? "ranks must issue the same collectives: look for another deck, binary or environment "
            "on "
            "the ranks that differ; otherwise this is a bug in weft, please report it with the log"
          : "see what the late ranks and their nodes do (weft doctor on them); if ranks really "
            "differ by so much, raise parallel.hang_timeout or the environment's WEFT_COMM_TIMEOUT";
  report_error(hang_error(what, hint));
  for (int r = 0; r < size_; ++r)
    if (r != rank_) send(r, tag_verdict, text_bytes(what + '\0' + hint));
  // Long messages need this side's help until they have arrived; stopped processes never take
  // theirs.
  serve_until([&] { return sent_.empty(); }, 0.3);
  fail(std::make_exception_ptr(hang_error(what, hint)));
}

}  // namespace weft
