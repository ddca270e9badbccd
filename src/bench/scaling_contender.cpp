#include "bench/scaling_contender.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "models/registry.h"

namespace weft {

namespace fs = std::filesystem;

void meet(MPI_Comm world) {
  using namespace std::chrono_literals;
  // Two rounds: the first may be a long wait with long sleeps, which leaves the ranks up to 50 ms
  // apart; the second is short, with short sleeps, and brings them together.
  for (const auto longest : {50ms, 0ms}) {
    MPI_Request request;
    MPI_Ibarrier(world, &request);
    auto sleep = std::chrono::microseconds(200us);
    for (int done = 0; done == 0;) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done != 0) break;
      std::this_thread::sleep_for(sleep);
      sleep = std::min<std::chrono::microseconds>(
          sleep * 5 / 4, std::max<std::chrono::microseconds>(longest, 200us));
    }
  }
}

Scratch::Scratch() {
  std::string name = (fs::temp_directory_path() / "weft_scaling_XXXXXX").string();
  WEFT_CHECK(mkdtemp(name.data()) != nullptr, Exit::usage,
             "set TMPDIR to a directory that can be written", "cannot create {}", name);
  path_ = name;
}

void Scratch::clear() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

Contender::Contender(Deck deck, const ContenderSetup& setup, std::int64_t micro_batches,
                     std::int64_t steps, const Scratch& scratch, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  const bool in = rank < setup.ranks;
  MPI_Comm_split(world, !in ? MPI_UNDEFINED : setup.alone ? rank : 0, rank, &comm_);
  static int number = 0;
  deck.run.dir = (scratch.path() / std::to_string(number++)).string();
  deck.train.micro_batches = micro_batches;
  deck.train.steps = steps;
  deck.parallel.overlap = setup.overlap;
  meet(world);
  if (in) {
    trainer_ = std::make_unique<Trainer>(deck, make_task, comm_);
    trainer_->start();
  }
  meet(world);
}

Contender::~Contender() {
  trainer_.reset();
  // Freeing is collective: not while this rank alone may be unwinding.
  if (comm_ != MPI_COMM_NULL && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

std::vector<StepMetrics> Contender::run(std::int64_t steps) {
  std::vector<StepMetrics> all;
  for (std::int64_t i = 0; trainer_ && i < steps; ++i) {
    trainer_->step();
    for (StepMetrics& m : trainer_->finished(i + 1 == steps)) all.push_back(std::move(m));
  }
  const double start = now_seconds();
  settle();
  // The last step's weights would have travelled under the next forward, and taken processor time
  // from it. The first step here had none to share with, so their time is added to the last.
  if (!all.empty() && !on_cuda()) all.back().seconds += now_seconds() - start;
  return all;
}

void Contender::settle() {
  if (!trainer_) return;
  ParameterTable& params = trainer_->params();
  for (const auto& p : params.all()) params.await(*p);
}

std::vector<float> Contender::weights() {
  std::vector<float> all;
  if (!trainer_) return all;
  ParameterTable& params = trainer_->params();
  for (const auto& p : params.all()) {
    const Tensor on_host = (p->working.defined() ? p->working : p->value).to_host();
    for (std::int64_t i = 0; i < on_host.numel(); ++i)
      all.push_back(on_host.dtype() == DType::bf16 ? static_cast<float>(on_host.data<bf16>()[i])
                                                   : on_host.data<float>()[i]);
  }
  return all;
}

bool Contender::same_on_all(const std::vector<float>& values) const {
  if (comm_ == MPI_COMM_NULL) return true;
  const Hash128 hash = hash128(std::as_bytes(std::span(values)));
  Hash128 first = hash;
  MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, comm_);
  int same = hash == first ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, comm_);
  return same == 1;
}

ScalingRound time_round(Contender& contender, std::int64_t steps, bool by_median, MPI_Comm world) {
  meet(world);
  const std::vector<StepMetrics> metrics = contender.run(steps);
  double sums[3] = {};
  int in = metrics.empty() ? 0 : 1, ranks = 0;
  if (in == 1) {
    std::vector<double> seconds;
    for (const StepMetrics& m : metrics) {
      seconds.push_back(m.seconds);
      sums[1] += m.split.comm_exposed / static_cast<double>(metrics.size());
      sums[2] += m.split.wait_slowest / static_cast<double>(metrics.size());
    }
    // Steps of one kind: the median leaves out those that the machine disturbed. Of several kinds:
    // the mean counts all.
    sums[0] = by_median ? upper_median(seconds)
                        : std::accumulate(seconds.begin(), seconds.end(), 0.0) /
                              static_cast<double>(seconds.size());
  }
  meet(world);
  double all[3] = {};
  MPI_Reduce(sums, all, 3, MPI_DOUBLE, MPI_SUM, 0, world);
  MPI_Reduce(&in, &ranks, 1, MPI_INT, MPI_SUM, 0, world);
  ranks = std::max(ranks, 1);
  return {all[0] / ranks, all[1] / ranks, all[2] / ranks};
}

}  // namespace weft
