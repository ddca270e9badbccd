#include "plan/measure.h"

#include <algorithm>
#include <array>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "parallel/communicator.h"
#include "tensor/tensor.h"
#include "train/data_parallel.h"
#include "train/measure.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

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
  for (int run = 0; run <= 2 * measured_runs; ++run) {
    const auto timed = [&](std::size_t which, Communicator::Ticket ticket, double start) {
      comm->wait(ticket);
      const double end = now_done();
      // Run 0 only warms up.
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
  for (std::size_t i = 0; i < 3; ++i) mean[i] = mean_over_ranks(upper_median(seconds[i]), world);
  const double sent = 4.0 * static_cast<double>(elements) * (ranks - 1) / ranks;
  // The smallest all-gather carries almost nothing: its time is the latency of ranks - 1 hops.
  machine.link_latency = mean[2] / (ranks - 1);
  const double reduce = std::max(mean[0] - mean[2], 1e-9),
               gather = std::max(mean[1] - mean[2], 1e-9);
  // A bf16 wire carries half the bytes of the reduction; the gather here moves f32.
  machine.link_bandwidth = (comm_dtype == CommDtype::bf16 ? 0.5 : 1.0) * sent / reduce;
  machine.gather_factor = sent / gather / machine.link_bandwidth;
}

}  // namespace

LocalMeasurement measure_local(const Deck& deck, MeasuredWork work, MPI_Comm world) {
  LocalMeasurement m;
  MPI_Comm_size(world, &m.machine.ranks_a_node);
  m.machine.name = "local";
  m.machine.device = this_device().kind;
  double flops = 0, seconds = 0;
  for (const MicroBatchCost& c : work.costs) {
    flops += c.flops;
    seconds += c.forward + c.backward;
  }
  m.costs = std::move(work.costs);
  m.optimizer_bandwidth = optimizer_bytes_an_element / work.update_seconds_an_element;
  measure_collectives(deck, m.machine, world);
  m.machine.memory_bandwidth = m.optimizer_bandwidth;
  m.rates.products = flops / seconds;
  m.rates.bandwidth = m.optimizer_bandwidth;
  m.rates.origin = fmt::format("measured on {} of this host: {}, medians of {} runs",
                               counted(m.machine.ranks_a_node, "rank"), work.how, measured_runs);
  return m;
}

}  // namespace weft
