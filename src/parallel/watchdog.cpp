#include "parallel/watchdog.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/host.h"
#include "core/log.h"
#include "core/progress.h"
#include "tensor/device.h"

namespace weft {

namespace {

constexpr std::size_t table_rows = 16;  // with more ranks: only the late ones, and `others` more
constexpr std::size_t others = 4;
constexpr std::size_t named_in_cause = 8;

// Sent ahead of the records.
struct Head {
  std::int64_t step = 0;
  double phase_seconds = 0;
  std::uint64_t issued = 0, begun = 0, completed = 0;
  std::array<char, 32> phase{};
  bool stalled = false, on_storage = false;
};

std::optional<FlightRecord::Entry> entry(const RankState& s, std::uint64_t number) {
  const auto at = std::find_if(s.records.begin(), s.records.end(),
                               [&](const auto& e) { return e.number == number; });
  return at == s.records.end() ? std::nullopt : std::optional(*at);
}

// The operation that all ranks wait for: the first that some rank has begun and not completed. 0:
// none.
std::uint64_t pending_operation(std::span<const RankState> states) {
  std::uint64_t first = 0;
  for (const RankState& s : states)
    if (s.answers && s.begun > s.completed && (first == 0 || s.completed + 1 < first))
      first = s.completed + 1;
  return first;
}

// Why a rank is late, or "". If an operation is pending, the ranks that have not reached it hold up
// the others; if none is, the ranks whose step stands still are late.
std::string lateness(const RankState& s, std::uint64_t operation) {
  if (!s.answers) return "does not answer";
  std::string where;
  if (!s.phase.empty())
    where = fmt::format("in {} of step {} for {:.0f} s", s.phase, s.step + 1, s.phase_seconds);
  if (operation > 0 && s.issued < operation)
    return where.empty() ? "has not issued it" : "has not issued it: " + where;
  if (operation > 0 && s.begun < operation) return "has issued it, but its GPU has not come to it";
  if (operation == 0 && s.stalled) return where;
  return "";
}

// "rank 2" or "ranks 2, 3, 5"
std::string list(const std::vector<std::size_t>& which, std::span<const RankName> names) {
  std::string text = which.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(which.size(), named_in_cause); ++i)
    text += fmt::format("{}{}", i > 0 ? ", " : "", names[which[i]].rank);
  if (which.size() > named_in_cause)
    text += fmt::format(" and {} more", which.size() - named_in_cause);
  return text;
}

// A finding, and the ranks it holds for. Sorted, the rarest comes first: "rank 2 has A, the others
// B".
using Groups = std::vector<std::pair<std::string, std::vector<std::size_t>>>;

void add(Groups& groups, const std::string& what, std::size_t rank) {
  for (auto& [text, who] : groups)
    if (text == what) return who.push_back(rank);
  groups.push_back({what, {rank}});
}

bool has_majority(const Groups& sorted) {
  return sorted.back().second.size() > sorted[sorted.size() - 2].second.size();
}

void sort(Groups& groups) {
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
}

std::string contrast(Groups groups, std::span<const RankName> names) {
  sort(groups);
  const bool clear = has_majority(groups);
  std::string text;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& [what, who] = groups[g];
    if (g > 0) text += ", ";
    if (clear && g + 1 == groups.size())
      text += "the others " + what;
    else
      text += fmt::format("{} {} {}", list(who, names), who.size() > 1 ? "have" : "has", what);
  }
  return text;
}

// The first collective that differs among the ranks that have issued it.
struct Difference {
  std::string text;                // empty: none
  std::vector<std::size_t> ranks;  // whose collective differs from the majority's
};

Difference difference(std::span<const RankState> states, std::span<const RankName> names) {
  // Compare only numbers that every ring still holds: an overwritten entry is not a difference.
  std::uint64_t first = 1, last = 0;
  for (const RankState& s : states) {
    if (!s.answers) continue;
    if (!s.records.empty()) first = std::max(first, s.records.front().number);
    last = std::max(last, s.issued);
  }
  for (std::uint64_t n = first; n <= last; ++n) {
    Groups rounded, exact;
    for (std::size_t r = 0; r < states.size(); ++r)
      if (const auto e = entry(states[r], n)) {
        add(rounded, e->describe(), r);
        add(exact, fmt::format("{} ({}, {} bytes)", e->kind.data(), name_of(e->dtype), e->bytes),
            r);
      }
    if (exact.size() < 2) continue;
    // Report the first one only: later ones differ as a consequence. Give the size in bytes where
    // it looks alike in MiB.
    Difference d{fmt::format("collective {} differs: {}", n,
                             contrast(rounded.size() < exact.size() ? exact : rounded, names)),
                 {}};
    sort(exact);
    if (has_majority(exact))
      for (std::size_t g = 0; g + 1 < exact.size(); ++g)
        d.ranks.insert(d.ranks.end(), exact[g].second.begin(), exact[g].second.end());
    return d;
  }
  return {};
}

// "rank 2 has issued 56 collectives, the others 57", or "" where it says little.
std::string behind(std::span<const RankState> states, std::span<const RankName> names) {
  Groups groups;
  for (std::size_t r = 0; r < states.size(); ++r)
    if (states[r].answers) add(groups, fmt::format("{}", states[r].issued), r);
  return groups.size() == 2 ? "issued collectives: " + contrast(std::move(groups), names) : "";
}

std::string numbered(const RankState& s, std::uint64_t number) {
  if (number == 0) return "-";
  const auto e = entry(s, number);
  return e ? fmt::format("{} {}", number, e->describe()) : fmt::format("{}", number);
}

using Row = std::array<std::string, 7>;

Row row(const RankState& s, const RankName& name) {
  if (!s.answers)
    return {fmt::format("{}", name.rank), name.host, "-", "-", "-", "does not answer", ""};
  const bool in_step = !s.phase.empty();
  return {fmt::format("{}", name.rank),
          name.host,
          in_step ? fmt::format("{}", s.step + 1) : "-",
          in_step ? s.phase : "-",
          in_step ? fmt::format("{:.1f}", s.phase_seconds) : "-",
          numbered(s, s.completed),
          s.issued > s.completed ? numbered(s, s.completed + 1) : "-"};
}

std::string table(const std::vector<Row>& rows, const std::vector<std::string>& marks) {
  const Row head = {"rank", "host", "step", "phase", "seconds", "last done", "pending"};
  std::array<std::size_t, 7> width{};
  for (std::size_t c = 0; c < width.size(); ++c) {
    width[c] = head[c].size();
    for (const Row& r : rows) width[c] = std::max(width[c], r[c].size());
  }
  const auto line = [&](const Row& r, const std::string& mark) {
    std::string text = fmt::format("\n  {:<7}  ", mark);
    for (std::size_t c = 0; c < r.size(); ++c) {
      const bool number = c == 0 || c == 2 || c == 4;
      text += number ? fmt::format("{:>{}}  ", r[c], width[c])
                     : fmt::format("{:<{}}  ", r[c], width[c]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::string text = line(head, "");
  for (std::size_t i = 0; i < rows.size(); ++i) text += line(rows[i], marks[i]);
  return text;
}

}  // namespace

std::vector<char> RankState::to_bytes() const {
  Head head{step, phase_seconds, issued, begun, completed, {}, stalled, on_storage};
  std::copy_n(phase.begin(), std::min(phase.size(), head.phase.size() - 1), head.phase.begin());
  std::vector<char> bytes(sizeof head + records.size() * sizeof records[0]);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (!records.empty())
    std::memcpy(bytes.data() + sizeof head, records.data(), bytes.size() - sizeof head);
  return bytes;
}

RankState RankState::from_bytes(std::span<const char> bytes) {
  Head head;
  WEFT_ASSERT(bytes.size() >= sizeof head);
  std::memcpy(&head, bytes.data(), sizeof head);
  RankState s{
      true,       head.stalled,   head.step, head.phase.data(), head.phase_seconds, head.issued,
      head.begun, head.completed, {},        head.on_storage};
  s.records.resize((bytes.size() - sizeof head) / sizeof s.records[0]);
  if (!s.records.empty())
    std::memcpy(s.records.data(), bytes.data() + sizeof head,
                s.records.size() * sizeof s.records[0]);
  return s;
}

std::string hang_report(const std::string& complaint, std::span<const RankState> states,
                        std::span<const RankName> names) {
  const std::uint64_t operation = pending_operation(states);
  std::vector<std::string> mark(states.size());
  const Difference differs = difference(states, names);
  for (const std::size_t r : differs.ranks) mark[r] = "differs";
  std::string late;
  std::size_t count = 0;
  for (std::size_t r = 0; r < states.size(); ++r) {
    const std::string why = lateness(states[r], operation);
    if (why.empty()) continue;
    mark[r] = "late";
    if (++count > named_in_cause) continue;
    late += fmt::format("{}rank {} on {} ({})", count == 1 ? "late: " : ", ", names[r].rank,
                        names[r].host, why);
  }
  if (count > named_in_cause) late += fmt::format(" and {} more", count - named_in_cause);

  // Differing counts explain a hang only where nothing better does: ranks that run ahead differ
  // too.
  std::string text = complaint, counts;
  if (!differs.text.empty())
    text = differs.text + "; " + complaint;
  else if (count == 0 && operation > 0)
    late = "all ranks are in it: the network or a GPU has stalled";
  else
    counts = behind(states, names);
  if (!late.empty()) text += "; " + late;
  if (!counts.empty()) text += "; " + counts;

  std::vector<Row> rows;
  std::vector<std::string> marks;
  std::size_t more = states.size() <= table_rows ? states.size() : others;
  for (std::size_t r = 0; r < states.size(); ++r) {
    if (mark[r].empty() && (more == 0 || more-- == 0)) continue;
    rows.push_back(row(states[r], names[r]));
    marks.push_back(mark[r]);
  }
  text += table(rows, marks);
  if (rows.size() < states.size())
    text += fmt::format("\n           ... {} more ranks, none of them late",
                        states.size() - rows.size());
  return text;
}

std::string FlightRecord::Entry::describe() const {
  return fmt::format("{} ({}, {:.3f} MiB)", kind.data(), name_of(dtype),
                     static_cast<double>(bytes) / (1 << 20));
}

void FlightRecord::issued(std::uint64_t number, const Collective& what) {
  if (number > 0) {
    Slot& s = slots_[number % length];
    // 0 while the fields change: entries() reads the number before and after its copy, and drops
    // the entry if it is not the expected one.
    s.number = 0;
    s.bytes = what.bytes;
    s.kind = what.kind;
    s.dtype = what.dtype;
    s.number = number;
  }
  issued_ = number;
}

std::vector<FlightRecord::Entry> FlightRecord::entries() const {
  const std::uint64_t last = issued_;
  std::vector<Entry> found;
  found.reserve(length);
  for (std::uint64_t n = last > length ? last - length + 1 : 1; n <= last; ++n) {
    const Slot& s = slots_[n % length];
    if (s.number != n) continue;
    Entry e{n, s.bytes, {}, s.dtype};
    const std::string_view kind = s.kind.load();
    std::copy_n(kind.begin(), std::min(kind.size(), e.kind.size() - 1), e.kind.begin());
    if (s.number == n) found.push_back(e);
  }
  return found;
}

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

// Busy storage is not a hang: what reads or writes may take this many times the limit.
double patience_with(const char* phase) {
  const std::string_view name = phase != nullptr ? phase : "";
  return name == "data" || name == "measuring" || name == "save" || name == "validation" ||
                 name == "samples"
             ? 10
             : 1;
}

// How long a collector waits for answers, a stuck rank waits for its collector, and every watchdog
// waits between two looks.
double grace(double timeout) { return std::clamp(timeout / 4, 0.5, 1.5); }
double patience(double timeout) { return 1.5 * grace(timeout) + 0.3; }
std::chrono::duration<double> period(double timeout) {
  return std::chrono::duration<double>(std::clamp(timeout / 50, 0.002, 0.05));
}

// Ends the job with this exit code, and this rank even if MPI cannot end the others.
[[noreturn]] void end_job(MPI_Comm comm, Exit code) {
  crash::end_within(2, code);  // MPI_Abort may wait for a daemon that is gone
  std::fflush(nullptr);
  MPI_Abort(comm, static_cast<int>(code));
  _exit(static_cast<int>(code));
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
  std::vector<Name> all(size_);
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
  double last = now_seconds();
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
        quiet_until_ = now_seconds() + limit;
      std::string suspicion;
      {
        const std::lock_guard lock(mutex_);
        suspicion = suspicion_;
      }
      if (!suspicion.empty())
        report(suspicion);
      else if (now_seconds() < quiet_until_)
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
    std::vector<char> text(bytes);
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
        answers_[source] = RankState::from_bytes(bytes);
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
  s.on_storage = !s.stalled && patience_with(phase_) > 1;
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

// Whether all ranks answered, and one of them reads or writes and has time left: the others, which
// wait for it, are patient as well. Says so once.
bool Watchdog::waits_for_storage() {
  if (!std::ranges::all_of(answers_, &RankState::answers) ||
      !difference(answers_, names_).text.empty())
    return false;
  const auto busy = std::ranges::find_if(answers_, &RankState::on_storage);
  if (busy == answers_.end()) return false;
  const RankName& name = names_[busy - answers_.begin()];
  if (rank_ == 0 && !std::exchange(storage_told_, true))
    log::write_warn(fmt::format(
        "rank {} on {} is in {} for {:.0f} s, and the other ranks wait; after {:g} s of it the job "
        "ends",
        name.rank, name.host, busy->phase, busy->phase_seconds,
        timeout_ * patience_with(busy->phase.c_str())));
  return true;
}

// Asks all ranks, reports the cause for all of them, then sends the verdict: in this order, since
// the first rank to receive it ends the job.
void Watchdog::collect(const std::string& complaint) {
  answers_.assign(names_.size(), {});
  answers_[rank_] = state();
  for (int r = 0; r < size_; ++r)
    if (r != rank_) send(r, tag_question, {});
  serve_until(
      [&] {
        return failed_ || std::all_of(answers_.begin(), answers_.end(),
                                      [](const RankState& a) { return a.answers; });
      },
      fixed_grace_.value_or(grace(timeout_)));
  if (failed_) return;  // another collector was faster
  if (waits_for_storage()) {
    alarm_.reset();
    quiet_until_ = now_seconds() + timeout_ / 4;
    return;
  }
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
