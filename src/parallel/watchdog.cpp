#include "parallel/watchdog.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"
#include "core/progress.h"
#include "tensor/device.h"

namespace weft {

namespace {

constexpr std::size_t table_rows = 16;  // with more ranks: the late ones first
constexpr std::size_t named_in_cause = 8;

constexpr std::array<const char*, 6> kind_names = {"all-reduce", "reduce-scatter", "all-gather",
                                                   "all-to-all", "split",          "start of NCCL"};

// Why a rank is late, or "". If an operation is pending, the ranks that have not reached it hold up
// the others; if none is, the ranks whose step stands still are late.
std::string lateness(const RankState& s, std::uint64_t operation) {
  if (!s.answers) return "does not answer";
  std::string where;
  if (s.phase != Phase::none)
    where = fmt::format("in {} of step {} for {:.0f} s", traits_of(s.phase).name, s.step + 1,
                        s.phase_seconds);
  if (operation > 0 && s.issued < operation)
    return where.empty() ? "has not issued it" : "has not issued it: " + where;
  if (operation > 0 && s.begun < operation) return "has issued it, but its GPU has not come to it";
  if (operation == 0 && s.stalled) return where;
  return "";
}

// "rank 2 has WHAT, the others WHICH": what is found of each rank, the rarest first; "" is nothing.
// "" where all ranks agree.
std::string contrast(std::span<const RankState> states,
                     const std::function<std::string(const RankState&)>& find) {
  struct Group {
    std::string finding, ranks;
    std::size_t count = 0;
  };
  std::vector<Group> groups;
  for (const RankState& s : states) {
    const std::string finding = find(s);
    if (finding.empty()) continue;
    auto group = std::ranges::find(groups, finding, &Group::finding);
    if (group == groups.end()) group = groups.insert(group, Group{finding, "", 0});
    if (group->count < named_in_cause)
      group->ranks += fmt::format("{}{}", group->count > 0 ? ", " : "", s.rank);
    ++group->count;
  }
  if (groups.size() < 2) return "";
  std::ranges::stable_sort(groups, {}, &Group::count);
  const bool majority = groups.back().count > groups[groups.size() - 2].count;
  std::string text;
  for (const Group& g : groups) {
    if (!text.empty()) text += ", ";
    if (majority && &g == &groups.back())
      text += "the others " + g.finding;
    else if (g.count == 1)
      text += fmt::format("rank {} has {}", g.ranks, g.finding);
    else
      text += fmt::format("ranks {}{} have {}", g.ranks,
                          g.count > named_in_cause ? " and others" : "", g.finding);
  }
  return text;
}

// The collective that all ranks wait for: the first that some rank has begun and not completed. 0:
// none.
std::uint64_t pending_operation(std::span<const RankState> states) {
  std::uint64_t first = 0;
  for (const RankState& s : states)
    if (s.answers && s.begun > s.completed && (first == 0 || s.completed + 1 < first))
      first = s.completed + 1;
  return first;
}

bool has_pending(const RankState& s, std::uint64_t operation) {
  return s.answers && s.issued >= operation && s.completed + 1 == operation;
}

// "collective 57 differs: rank 2 has ..., the others ...", or "".
std::string difference(std::span<const RankState> states, std::uint64_t operation) {
  const auto ranks_have = [&](bool in_bytes) {
    return contrast(states, [&](const RankState& s) {
      if (!has_pending(s, operation)) return std::string();
      return in_bytes ? fmt::format("{} ({}, {} bytes)", s.pending.name(), name_of(s.pending.dtype),
                                    s.pending.bytes)
                      : s.pending.describe();
    });
  };
  // In bytes where the sizes look alike in MiB.
  const std::string exact = ranks_have(true), rounded = ranks_have(false);
  if (exact.empty()) return "";
  return fmt::format("collective {} differs: {}", operation, rounded.empty() ? exact : rounded);
}

// Whether the rank's pending collective is another one than that of most.
bool is_odd(const RankState& s, std::span<const RankState> states, std::uint64_t operation) {
  const auto is_in = [&](const RankState& o) { return has_pending(o, operation); };
  const auto agrees = [&](const RankState& o) { return is_in(o) && o.pending == s.pending; };
  return is_in(s) &&
         2 * std::ranges::count_if(states, agrees) < std::ranges::count_if(states, is_in);
}

// `marks`: "late", "differs" or "".
std::string table(std::span<const RankState> states, const std::vector<std::string>& marks) {
  std::vector<std::array<std::string, 8>> rows = {
      {"", "rank", "host", "step", "phase", "seconds", "last done", "pending"}};
  for (const bool marked : {true, false})
    for (std::size_t r = 0; r < states.size() && rows.size() <= table_rows; ++r) {
      const RankState& s = states[r];
      // With few ranks in their order, and with many the marked ones first.
      if (states.size() > table_rows ? marks[r].empty() == marked : !marked) continue;
      const bool in_step = s.answers && s.phase != Phase::none;
      rows.push_back(
          {marks[r], fmt::format("{}", s.rank), std::string(s.host.view()),
           in_step ? fmt::format("{}", s.step + 1) : "-", in_step ? traits_of(s.phase).name : "-",
           in_step ? fmt::format("{:.1f}", s.phase_seconds) : "-",
           s.answers ? fmt::format("{}", s.completed) : "does not answer",
           s.answers && s.issued > s.completed ? s.pending.describe(s.completed + 1) : "-"});
    }
  std::array<std::size_t, 8> width{};
  for (const auto& row : rows)
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  std::string text;
  for (const auto& row : rows) {
    text += "\n ";
    for (std::size_t c = 0; c < row.size(); ++c) text += fmt::format(" {:<{}} ", row[c], width[c]);
    text.erase(text.find_last_not_of(' ') + 1);
  }
  if (rows.size() <= states.size())
    text += fmt::format("\n  ... {} more ranks", states.size() + 1 - rows.size());
  return text;
}

}  // namespace

const char* Collective::name() const { return kind_names.at(static_cast<std::size_t>(kind)); }

std::string Collective::describe() const {
  if (kind > CollectiveKind::all_to_all) return name();
  if (kind == CollectiveKind::all_to_all) return fmt::format("{} ({})", name(), name_of(dtype));
  return fmt::format("{} ({}, {:.3f} MiB)", name(), name_of(dtype),
                     static_cast<double>(bytes) / (1 << 20));
}

std::string Collective::describe(std::uint64_t number) const {
  return fmt::format("{} {}{}", name(), number, describe().substr(std::string_view(name()).size()));
}

std::string hang_report(const std::string& complaint, std::span<const RankState> states) {
  const std::uint64_t operation = pending_operation(states);
  std::vector<std::string> marks;
  std::string late;
  std::size_t count = 0;
  for (const RankState& s : states) {
    const std::string why = lateness(s, operation);
    marks.push_back(is_odd(s, states, operation) ? "differs" : why.empty() ? "" : "late");
    if (why.empty() || ++count > named_in_cause) continue;
    late += fmt::format("{}rank {} on {} ({})", count == 1 ? "; late: " : ", ", s.rank,
                        s.host.view(), why);
  }
  if (count > named_in_cause) late += fmt::format(" and {} more", count - named_in_cause);

  const std::string differs = difference(states, operation);
  std::string text = differs.empty() ? complaint : differs + "; " + complaint;
  if (differs.empty() && count == 0 && operation > 0)
    late = "; all ranks are in it: the network or a GPU has stalled";
  text += late;
  // Differing counts explain a hang only where nothing better does: ranks that run ahead differ
  // too.
  const std::string counts = contrast(states, [](const RankState& s) {
    return s.answers ? fmt::format("{}", s.issued) : std::string();
  });
  if (differs.empty() && count > 0 && !counts.empty()) text += "; issued collectives: " + counts;
  return text + table(states, marks);
}

// Every rank sends its state to two ranks that judge, at least once a second: to rank 0, and to the
// first rank on another host (or rank 1), which judges if rank 0 does not. A rank whose main thread
// is stuck goes on sending, and one whose process is stopped does not. Once a rank complains, the
// judge waits for a newer state of every rank, reports, and sends the verdict to all of them.
//
// From the moment a rank is stuck for longer than the limit, the job ends within ten seconds:
//   rank 0 does not judge           2.6 s   patience()
//   late ranks are not heard of     1.5 s   default_grace(), unless tests ask for more
//   (WEFT_COMM_GRACE) the verdict finds no listener   2.5 s   last_resort_seconds
// plus the second or so that mpirun or srun takes to end the ranks.
namespace {

constexpr int tag_state = 1, tag_verdict = 2, tag_patience = 3;
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
double patience_with(Phase phase) { return traits_of(phase).on_storage ? 10 : 1; }

// How long a judge waits for newer states, how long the second one waits for the first, and how
// often a watchdog looks and sends.
double default_grace(double timeout) { return std::clamp(timeout / 4, 0.5, 1.5); }
double patience(double grace) { return 1.5 * grace + 0.3; }
double period(double timeout) { return std::clamp(timeout / 50, 0.002, 0.05); }
double sending_period(double timeout) { return std::clamp(timeout / 10, 0.1, 1.0); }

// Ends the job with this exit code, and this rank even if MPI cannot end the others.
[[noreturn]] void end_job(MPI_Comm comm, Exit code) {
  crash::end_within(2, code);  // MPI_Abort may wait for a daemon that is gone
  std::fflush(nullptr);
  MPI_Abort(comm, static_cast<int>(code));
  _exit(static_cast<int>(code));
}

// The judge reports the error for all ranks. Below the report's first line is a table.
Error hang_error(const std::string& report) {
  const std::size_t end = std::min(report.find('\n'), report.size());
  const char* hint =
      report.starts_with("collective ")
          ? "ranks must issue the same collectives: look for another deck, binary or environment "
            "on "
            "the ranks that differ; otherwise this is a bug in weft, please report it with the log"
          : "see what the late ranks and their nodes do (weft doctor on them); if ranks really "
            "differ by so much, raise parallel.hang_timeout or the environment's WEFT_COMM_TIMEOUT";
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
  MPI_Comm_rank(MPI_COMM_WORLD, &own_.rank);
  own_.host = ShortText<60>(host_name());
  states_.resize(size_);
  heard_at_.resize(size_);
  MPI_Allgather(&own_, sizeof own_, MPI_BYTE, states_.data(), sizeof own_, MPI_BYTE, comm_);
  const auto elsewhere = std::ranges::find_if(
      states_, [&](const RankState& s) { return s.host.view() != states_.front().host.view(); });
  const int second = elsewhere == states_.end() ? 1 : static_cast<int>(elsewhere - states_.begin());
  for (const int judge : {0, second})
    if (judge < size_) messages_.emplace_back().target = judge;
  looked_at_ = now_seconds();
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
  // The communicator stays until MPI ends, and so does what MPI may still read: a rank that ends
  // its watchdog earlier leaves states behind that nobody receives.
  new std::vector<Message>(std::move(messages_));
}

void Watchdog::issued(std::uint64_t number, const Collective& what) {
  const std::lock_guard lock(mutex_);
  own_.issued = number;
  pending_.push_back(what);
}

void Watchdog::begun(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  moved_at_ = now_seconds();
  own_.begun = number;
}

// By two threads: the one that issues ends some operations itself.
void Watchdog::completed(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  moved_at_ = now_seconds();
  for (; own_.completed < number; ++own_.completed) pending_.pop_front();
}

void Watchdog::count_from_one() {
  const std::lock_guard lock(mutex_);
  own_.issued = own_.begun = own_.completed = 0;
  pending_.clear();
}

void Watchdog::progress(std::int64_t step, Phase phase) {
  const std::lock_guard lock(mutex_);
  phase_since_ = now_seconds();
  own_.step = step;
  own_.phase = phase;
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
  for (;;) {
    if (failed_)
      end_if_unheard();
    else
      watch();
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> pause(period(timeout_));
    if (wake_.wait_for(lock, pause, [&] { return ending_; })) return;
  }
}

void Watchdog::watch() {
  receive();
  std::optional<Operation> o;
  try {
    o = look_();
  } catch (...) {
    fail(std::current_exception());
  }
  if (failed_) return;
  // A process that was itself stopped for a while must not blame the others, which may have left
  // because of it.
  const double now = now_seconds(), limit = timeout_;
  if (now - std::exchange(looked_at_, now) > period(limit) + std::max(0.5, limit / 4))
    quiet_until_ = now + limit;
  describe_state(o);
  send_state();
  judge();
}

// The seconds that this rank's step may stand still, if it has stood still for more than `share` of
// them; otherwise 0. An operation that begins or ends counts as a move: a main thread may wait for
// many, one after the other.
double Watchdog::stalled_beyond(double share) const {
  if (own_.phase == Phase::none) return 0;
  const double allowed = timeout_ * patience_with(own_.phase);
  const double unmoved = now_seconds() - std::max(phase_since_, moved_at_);
  return unmoved > share * allowed ? allowed : 0;
}

void Watchdog::describe_state(const std::optional<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  const double limit = timeout_, allowed = stalled_beyond(1);
  own_.answers = true;
  own_.phase_seconds = now_seconds() - phase_since_;
  // The first rank to notice does so slightly before the others' own limit: hence 0.9.
  own_.stalled = stalled_beyond(0.9) > 0;
  own_.on_storage = !own_.stalled && traits_of(own_.phase).on_storage;
  if (!pending_.empty()) own_.pending = pending_.front();
  std::string complaint = suspicion_;
  if (complaint.empty() && now_seconds() > quiet_until_) {
    if (operation && operation->seconds > limit && !pending_.empty())
      complaint = fmt::format("{} did not end within {:g} s",
                              own_.pending.describe(operation->number), limit);
    else if (!operation && allowed > 0)
      complaint = fmt::format("no progress for {:g} s", allowed);
  }
  // A new complaint goes out at once.
  if (complaint.empty() != own_.complaint.empty()) sent_at_ = 0;
  own_.complaint = ShortText<200>(complaint);
}

RankState Watchdog::own_state() {
  const std::lock_guard lock(mutex_);
  return own_;
}

void Watchdog::send_state() {
  const double now = now_seconds();
  if (now - sent_at_ < sending_period(timeout_)) return;
  sent_at_ = now;
  const RankState own = own_state();
  for (Message& m : messages_) {
    if (m.target == rank_) {
      states_[rank_] = own;
      heard_at_[rank_] = now;
      continue;
    }
    int done = 0;
    MPI_Test(&m.request, &done, MPI_STATUS_IGNORE);
    if (done == 0) continue;
    m.state = own;
    MPI_Isend(&m.state, sizeof m.state, MPI_BYTE, m.target, tag_state, comm_, &m.request);
  }
}

// Takes the messages that have come. Never blocks.
void Watchdog::receive() {
  for (;;) {
    int there = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &there, &status);
    if (there == 0) return;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    std::string text(bytes, '\0');
    MPI_Recv(text.data(), bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm_,
             MPI_STATUS_IGNORE);
    if (status.MPI_TAG == tag_verdict) return fail(std::make_exception_ptr(hang_error(text)));
    if (status.MPI_TAG == tag_patience) {
      be_patient();
      continue;
    }
    std::memcpy(&states_[status.MPI_SOURCE], text.data(), sizeof(RankState));
    heard_at_[status.MPI_SOURCE] = now_seconds();
  }
}

// Reports once some rank complains and a newer state of every rank is there, or does not come.
void Watchdog::judge() {
  const double now = now_seconds(), waited = fixed_grace_.value_or(default_grace(timeout_));
  if (now < quiet_until_) return;
  // This rank may be none of the two that judge: then it knows its own state alone, and speaks up
  // when both of them must be gone; one rank after the other, so that one of them reports it.
  const bool judges = rank_ == messages_.front().target || rank_ == messages_.back().target;
  states_[rank_] = own_state();
  heard_at_[rank_] = now;
  const auto complaint =
      std::ranges::find_if(states_, [](const RankState& s) { return !s.complaint.empty(); });
  if (complaint == states_.end()) {
    complained_at_ = 0;
    return;
  }
  if (complained_at_ == 0) complained_at_ = now;
  const double before = rank_ == 0 ? 0
                        : judges   ? patience(waited)
                                   : 2 * patience(waited) + 0.1 * std::min(rank_, 10);
  if (now - complained_at_ < before) return;
  const auto newer = [&](double heard) { return heard > complained_at_; };
  if (!std::ranges::all_of(heard_at_, newer) && now - complained_at_ < before + waited) return;
  const std::string what(complaint->complaint.view());
  for (int r = 0; r < size_; ++r) states_[r].answers = newer(heard_at_[r]);
  if (!judges || !waits_for_storage()) return report(what);
  // The others do not know whom all wait for.
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    MPI_Request sent;
    MPI_Isend(nullptr, 0, MPI_BYTE, r, tag_patience, comm_, &sent);
    MPI_Request_free(&sent);
  }
  be_patient();
}

void Watchdog::be_patient() {
  complained_at_ = 0;
  quiet_until_ = now_seconds() + timeout_ / 4;
}

// Whether all ranks were heard of, and one of them reads or writes and has time left: the others,
// which wait for it, are patient as well. Says so once.
bool Watchdog::waits_for_storage() {
  if (!std::ranges::all_of(states_, &RankState::answers) ||
      !difference(states_, pending_operation(states_)).empty())
    return false;
  const auto busy = std::ranges::find_if(states_, &RankState::on_storage);
  if (busy == states_.end()) return false;
  if (rank_ == 0 && !std::exchange(storage_told_, true))
    log::write_warn(fmt::format(
        "rank {} on {} is in {} for {:.0f} s, and the other ranks wait; after {:g} s of it the job "
        "ends",
        busy->rank, busy->host.view(), traits_of(busy->phase).name, busy->phase_seconds,
        timeout_ * patience_with(busy->phase)));
  return true;
}

// Reports the hang for all ranks, then sends the verdict: in this order, since the first rank to
// receive it ends the job.
void Watchdog::report(const std::string& complaint) {
  const std::string text = hang_report(complaint, states_);
  report_error(hang_error(text));
  auto* const kept = new std::string(text);  // for a stopped process, which never takes it
  std::vector<MPI_Request> sent;
  for (int r = 0; r < size_; ++r)
    if (r != rank_)
      MPI_Isend(kept->data(), static_cast<int>(kept->size()), MPI_BYTE, r, tag_verdict, comm_,
                &sent.emplace_back());
  // Long messages need this side's help until they have arrived.
  const double start = now_seconds();
  wait_asleep(
      [&] {
        int done = 0;
        MPI_Testall(static_cast<int>(sent.size()), sent.data(), &done, MPI_STATUSES_IGNORE);
        return done != 0 || now_seconds() - start > 0.3;
      },
      0.01);
  fail(std::make_exception_ptr(hang_error(text)));
}

// This rank's next call of its communicator throws the failure, and main reports it. If that call
// never comes, this thread reports the failure and ends the job.
void Watchdog::end_if_unheard() {
  const double since = now_seconds() - failed_at_;
  const double unheard = std::max(last_resort_seconds, fixed_grace_.value_or(0));
  if (since < unheard) return;
  try {
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  } catch (const Error& e) {
    if (since < (e.code() != Exit::hang ? patience_with_busy_rank_seconds
                 : seen_                ? last_resort_when_seen_seconds
                                        : unheard))
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

}  // namespace weft
