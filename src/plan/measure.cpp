#include "plan/measure.h"

#include <algorithm>
#include <array>

#include "core/clock.h"
#include "core/error.h"
#include "parallel/communicator.h"
#include "tensor/arena.h"
#include "train/memory_plan.h"
#include "train/optimizer.h"

namespace weft {
namespace {

constexpr int runs = 5;  // timed, after one that is not

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

double mean_over_ranks(double value, MPI_Comm world) {
  double sum = 0;
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, world);
  return sum / ranks;
}

double now_done() {
  if (on_cuda()) device_runtime().synchronize();
  return now_seconds();
}

// The update of all of a piece's parameters: seconds an element.
double time_update(const Deck& deck, ParameterTable& params, MPI_Comm world) {
  OptimizerState state(params, false, 0, 1);
  Tensor squares = Tensor::persistent({1}, DType::f64);
  std::vector<double> seconds;
  for (int run = 0; run <= runs; ++run) {
    MPI_Barrier(world);
    const double start = now_done();
    for (int b = 0; b < static_cast<int>(params.buckets().size()); ++b)
      optimizer_step(deck.train, run, squares, state, b);
    if (run > 0) seconds.push_back(now_done() - start);
  }
  return mean_over_ranks(median(seconds), world) / static_cast<double>(params.grads().numel());
}

// Bandwidths of collectives between the ranks.
void measure_collectives(const Deck& deck, Machine& machine, MPI_Comm world) {
  const auto comm = make_communicator(world);
  const int ranks = comm->size();
  if (ranks == 1) return;
  const auto elements =
      static_cast<std::int64_t>(std::clamp(deck.parallel.bucket_mib, 1.0, 64.0) * (1 << 20) / 4);
  Tensor t = Tensor::persistent({elements}, DType::f32);
  Tensor few = Tensor::persistent({part_unit * ranks}, DType::f32);
  const CommDtype comm_dtype = deck.parallel.wire == "bf16" ? CommDtype::bf16 : CommDtype::f32;
  std::array<std::vector<double>, 3> seconds;
  for (int run = 0; run <= 2 * runs; ++run) {
    const auto timed = [&](std::size_t which, Communicator::Ticket ticket, double start) {
      comm->wait(ticket);
      const double end = now_done();
      if (run > 0) seconds[which].push_back(end - start);
    };
    MPI_Barrier(world);
    double start = now_done();
    timed(0, comm->reduce_scatter_sum(t, comm_dtype), start);
    MPI_Barrier(world);
    start = now_done();
    timed(1, comm->all_gather(t), start);
    MPI_Barrier(world);
    start = now_done();
    timed(2, comm->all_gather(few), start);
  }
  std::array<double, 3> mean{};
  for (std::size_t i = 0; i < 3; ++i) mean[i] = mean_over_ranks(median(seconds[i]), world);
  const double sent = 4.0 * static_cast<double>(elements) * (ranks - 1) / ranks;
  machine.link_latency = mean[2] / (ranks - 1);
  const double reduce = std::max(mean[0] - mean[2], 1e-9),
               gather = std::max(mean[1] - mean[2], 1e-9);
  machine.link_bandwidth = (comm_dtype == CommDtype::bf16 ? 0.5 : 1.0) * sent / reduce;
  machine.gather_factor = sent / gather / machine.link_bandwidth;
}

}  // namespace

void allocate_for_measuring(TrainingTask& task, const Deck& deck) {
  task.params().allocate(static_cast<std::int64_t>(deck.parallel.bucket_mib * (1 << 20) / 4),
                         task.bf16(), true);
  task.params().initialise(1);
}

MeasuredTimes time_micro_batch(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                               MPI_Comm world) {
  LoadedBatch batch;
  for (std::int64_t i = 0; i < clips; ++i) {
    batch.what.clips.push_back(i);
    batch.what.samples.push_back(i);
  }
  batch.info.resize(static_cast<std::size_t>(clips));
  const Tensor bytes =
      Tensor::persistent({clips * static_cast<std::int64_t>(bucket.clip_bytes())}, DType::u8);
  const auto arena =
      Arena::reserve(plan_step_memory(task, bucket, clips, 0) + (std::size_t{256} << 20));
  const ArenaScope scope(*arena);
  std::vector<double> forward, backward;
  for (int run = 0; run <= runs; ++run) {
    batch.step = run;
    MPI_Barrier(world);  // all ranks at once: they share caches and memory
    task.params().begin_step([](int) {});
    const double start = now_done();
    const TrainingWork work = task.prepare(bucket, batch, bytes, 0);
    Tape tape;
    work.parts.front()(tape, 1.0f);
    const double half = now_done();
    tape.backward();
    const double end = now_done();
    if (run == 0) continue;
    forward.push_back(half - start);
    backward.push_back(end - half);
  }
  return {mean_over_ranks(median(forward), world), mean_over_ranks(median(backward), world)};
}

LocalMeasurement measure_local(const Deck& deck, ParameterTable& params,
                               std::vector<MicroBatchCost> costs, const std::string& how,
                               MPI_Comm world) {
  LocalMeasurement m;
  MPI_Comm_size(world, &m.machine.ranks_a_node);
  m.machine.name = "local";
  m.machine.device = this_device().kind;
  double flops = 0, seconds = 0;
  for (const MicroBatchCost& c : costs) {
    flops += c.flops;
    seconds += c.forward + c.backward;
  }
  m.costs = std::move(costs);
  m.optimizer_bandwidth = optimizer_bytes_an_element / time_update(deck, params, world);
  measure_collectives(deck, m.machine, world);
  m.machine.memory_bandwidth = m.optimizer_bandwidth;
  m.rates.products = flops / seconds;
  m.rates.bandwidth = m.optimizer_bandwidth;
  m.rates.origin = fmt::format("measured on {} ranks of this host: {}, medians of {} runs",
                               m.machine.ranks_a_node, how, runs);
  return m;
}

}  // namespace weft
