// Who is late is asked only when somebody is stuck, so that a healthy run sends nothing: a stuck rank tells rank 0, rank 0
// asks every rank for the number of its last operation, and sends all of them the verdict. The answers come from the
// watchdogs' threads, so a rank whose main thread is stuck still answers, and one whose process is stopped does not.
#include "parallel/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/clock.h"
#include "core/device.h"
#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

constexpr int tag_alarm = 1, tag_question = 2, tag_answer = 3, tag_verdict = 4;
// A rank that has not looked at its failure for so long is busy, or stuck where no error reaches it.
constexpr double speak_after_seconds = 5, last_resort_seconds = 60;

double choose_timeout(double wanted) {
  const char* text = std::getenv("WEFT_COMM_TIMEOUT");
  if (text == nullptr) return wanted > 0 ? wanted : (on_cuda() ? 600 : 3600);
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  WEFT_CHECK(end != text && *end == '\0' && seconds > 0, Exit::usage,
             "give seconds, such as WEFT_COMM_TIMEOUT=600", "WEFT_COMM_TIMEOUT = \"{}\"", text);
  return seconds;
}

// How long rank 0 waits for answers, and everybody between two looks.
double grace(double timeout) { return std::clamp(timeout / 4, 0.2, 5.0); }
std::chrono::duration<double> period(double timeout) {
  return std::chrono::duration<double>(std::clamp(timeout / 50, 0.002, 0.05));
}

std::vector<char> text_bytes(const std::string& s) { return {s.begin(), s.end()}; }

std::vector<char> number_bytes(std::uint64_t number) {
  std::vector<char> bytes(sizeof number);
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::uint64_t number_at(const std::vector<char>& bytes, std::size_t index) {
  std::uint64_t number = 0;
  WEFT_ASSERT(bytes.size() >= (index + 1) * sizeof number);
  std::memcpy(&number, bytes.data() + index * sizeof number, sizeof number);
  return number;
}

std::vector<char> operator+(std::vector<char> a, const std::vector<char>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

Watchdog::Watchdog(MPI_Comm world, double timeout_seconds, Look look, Stop stop)
    : timeout_(choose_timeout(timeout_seconds)), look_(std::move(look)), stop_(std::move(stop)) {
  MPI_Comm_dup(world, &comm_);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  std::array<char, 64> host{};
  gethostname(host.data(), host.size() - 1);
  std::vector<char> all(rank_ == 0 ? host.size() * static_cast<std::size_t>(size_) : 0);
  MPI_Gather(host.data(), static_cast<int>(host.size()), MPI_CHAR, all.data(),
             static_cast<int>(host.size()), MPI_CHAR, 0, comm_);
  for (std::size_t at = 0; at < all.size(); at += host.size()) hosts_.emplace_back(&all[at]);
  answers_.resize(hosts_.size());
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
  // After a failure the others may never come to free it with us, and main ends all ranks.
  if (!failed_ && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
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
  double quiet_until = 0;
  for (;;) {
    serve();
    if (!failed_) {
      std::optional<Operation> o;
      try {
        o = look_();
      } catch (...) {
        fail(std::current_exception());
      }
      if (now_seconds() < quiet_until)
        alarm_.reset();
      else if (o && o->seconds > timeout_)
        report(*o);
      else if (alarm_)
        report(*alarm_);
    } else if (!seen_) {
      speak_up();
    }
    const double before = now_seconds();
    {
      std::unique_lock lock(mutex_);
      if (wake_.wait_for(lock, period(timeout_), [&] { return ending_; })) return;
    }
    // A process that was itself stopped for a while must not blame the others, who may have left over it.
    if (now_seconds() - before > period(timeout_).count() + std::max(0.5, timeout_ / 4))
      quiet_until = now_seconds() + timeout_;
  }
}

// The failure is thrown at this rank's next call of its communicator, and told by main. Where that call does not come, this
// thread tells it, and at last ends the job.
void Watchdog::speak_up() {
  const double unseen = now_seconds() - failed_at_;
  if (unseen > speak_after_seconds && !spoken_) {
    spoken_ = true;
    try {
      std::rethrow_exception(failure_);
    } catch (const Error& e) {
      log::error("ERROR: {}", e.what());
      if (!e.hint().empty()) log::error("HINT: {}", e.hint());
    } catch (const std::exception& e) {
      log::error("ERROR: {}", e.what());
    }
  }
  if (unseen > last_resort_seconds) {
    log::error("ERROR: this rank is stuck outside its collectives and ends the job");
    std::fflush(nullptr);
    MPI_Abort(comm_, static_cast<int>(Exit::hang));
  }
}

// Takes what has come and answers it. Blocks for nobody.
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
      alarm_ =
          Operation{number_at(bytes, 0), std::string(bytes.begin() + 8, bytes.end()), timeout_};
      break;
    case tag_question:
      send(source, tag_answer, number_bytes(issued_) + number_bytes(begun_));
      break;
    case tag_answer:
      answers_[static_cast<std::size_t>(source)] = {true, number_at(bytes, 0), number_at(bytes, 1)};
      break;
    case tag_verdict:
      hang(std::string(bytes.begin(), bytes.end()));
      break;
    default:
      break;
  }
}

void Watchdog::send(int target, int tag, std::vector<char> bytes) {
  Message& m = sent_.emplace_back(Message{std::move(bytes)});
  MPI_Isend(m.bytes.data(), static_cast<int>(m.bytes.size()), MPI_CHAR, target, tag, comm_,
            &m.request);
}

// Makes a hang of `o` known to every rank.
void Watchdog::report(const Operation& o) {
  const std::string what = fmt::format("{} did not end within {:g} s", o.name, timeout_);
  if (rank_ == 0) {
    const std::string verdict = what + "; " + late_ranks(o.number);
    for (int r = 1; r < size_; ++r) send(r, tag_verdict, text_bytes(verdict));
    hang(verdict);
    return;
  }
  send(0, tag_alarm, number_bytes(o.number) + text_bytes(o.name));
  const double start = now_seconds();
  while (!failed_ && now_seconds() - start < 3 * grace(timeout_)) {
    std::this_thread::sleep_for(period(timeout_));
    serve();
  }
  if (failed_) return;
  hang(what + "; rank 0 does not answer");
}

// "late: rank 3 on n14 (has not issued it)", from the answers of all ranks.
std::string Watchdog::late_ranks(std::uint64_t operation) {
  answers_.assign(answers_.size(), {});
  answers_[0] = {true, issued_, begun_};
  for (int r = 1; r < size_; ++r) send(r, tag_question, {});
  const double start = now_seconds();
  while (now_seconds() - start < grace(timeout_) &&
         !std::all_of(answers_.begin(), answers_.end(), [](const Answer& a) { return a.given; })) {
    std::this_thread::sleep_for(period(timeout_));
    serve();
  }
  std::string late;
  int count = 0;
  constexpr int named = 8;
  for (std::size_t r = 0; r < answers_.size(); ++r) {
    const Answer& a = answers_[r];
    if (a.given && a.issued >= operation && a.begun >= operation) continue;
    if (++count > named) continue;
    late += fmt::format("{}rank {} on {} ({})", count == 1 ? "late: " : ", ", r, hosts_[r],
                        !a.given               ? "does not answer"
                        : a.issued < operation ? "has not issued it"
                                               : "has issued it, but its GPU has not come to it");
  }
  if (count == 0) return "every rank is in it: the network between them, or a GPU, stands still";
  if (count > named) late += fmt::format(" and {} more", count - named);
  return late;
}

void Watchdog::hang(const std::string& what) {
  fail(std::make_exception_ptr(Error(
      Exit::hang, what,
      "see what the late ranks and their nodes do (weft doctor on them); if ranks really differ "
      "by so much, raise the environment's WEFT_COMM_TIMEOUT",
      __FILE__, __LINE__)));
}

}  // namespace weft
