#include "plan/step_model.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace weft {
namespace {

// A number with nothing behind it; 0 if the text is anything else.
double number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : 0;
}

// What parallel.zero = 3 gathers and sums in every micro-batch, one operation at a time. The first
// gather of a step runs under the update, the last sum under nothing, and each of the others under
// the forward or backward in which it is issued.
void add_blocks(std::span<const MicroBatchCost> work, std::span<const BucketSchedule> blocks,
                const CommModel& comm, const ParallelDeck& parallel, bool bf16_model, StepTime& t) {
  const std::size_t n = blocks.size();
  double forward = 0, backward = 0, sums = 0;  // gathers of a forward and a backward; its sums
  double first = 0, second = 0, last = 0;      // the step's first two gathers, its last sum
  for (std::size_t b = 0; b < n; ++b) {
    const auto elements = static_cast<double>(blocks[b].elements);
    const double gather = comm.all_gather((bf16_model && blocks[b].bf16_only ? 2 : 4) * elements);
    const double sum = comm.sum_gradients(elements, parallel.wire == "bf16", false);
    sums += sum;
    if (b + 2 < n) forward += gather;
    if (b >= 2) backward += gather;
    if (b + 2 == n) second = gather;
    if (b + 1 == n) first = gather, last = sum;
  }
  const auto count = static_cast<double>(work.size());
  t.gather += first + second + count * (forward + backward);
  t.reduce += count * sums;
  if (!parallel.overlap) {
    t.exposed_gather += first + second + count * (forward + backward);
    t.exposed_reduce += count * sums;
    return;
  }
  t.exposed_gather += std::max(0.0, first - t.optimizer);
  double before = second;  // issued before the forward, and hidden in it
  for (const MicroBatchCost& m : work) {
    t.exposed_gather += std::max(0.0, before + forward - (m.forward + m.exchange / 2));
    t.exposed_reduce +=
        std::max(0.0, backward + sums - last - (m.backward + m.again + m.exchange / 2));
    before = last;
  }
  t.exposed_reduce += last;
}

}  // namespace

Machine described_machine(const std::string& fabric, double memory_gb, int ranks_a_node) {
  Machine m;
  m.name = fabric;
  m.ranks_a_node = ranks_a_node;
  m.memory_bytes = memory_gb * 1e9;
  const auto cross = fabric.find('x');
  const double cards = number(fabric.substr(0, cross));
  const double gbits = cross == std::string::npos ? 0 : number(fabric.substr(cross + 1));
  // This form of the comparison refuses nan too.
  if (!(cards >= 1 && cards <= 128 && cards == std::trunc(cards) && gbits > 0 && gbits <= 1e5)) {
    const std::string near = nearest_name(fabric, {"8x400", "1x200", "local"});
    throw Error(
        Exit::usage, fmt::format("--fabric {}: unknown fabric", fabric),
        near.empty() || near == fabric
            ? "write 8x400 (eight cards of 400 Gb/s a node), 1x200, any other CARDSxGBITS, or local"
            : fmt::format("did you mean {}?", near),
        __FILE__, __LINE__);
  }
  m.cards_a_node = static_cast<int>(cards);
  m.card_bandwidth = gbits * 1e9 / 8;
  return m;
}

int CommModel::nodes() const { return (ranks + machine.ranks_a_node - 1) / machine.ranks_a_node; }

double CommModel::small_all_reduce(double bytes) const {
  const auto levels = [](int n) { return std::ceil(std::log2(static_cast<double>(n))); };
  const int inside = std::min(ranks, machine.ranks_a_node);
  return 2 * (levels(inside) * (machine.link_latency + bytes / machine.link_bandwidth) +
              levels(nodes()) * (machine.card_latency + bytes / machine.card_bandwidth));
}

double CommModel::reduce_scatter(double bytes) const {
  if (ranks <= 1) return 0;
  const double all = ranks, inside = std::min(ranks, machine.ranks_a_node), outside = nodes();
  const double link_part = (inside - 1) / inside * bytes / machine.link_bandwidth;
  const double links = (inside - 1) * machine.link_latency;
  if (nodes() == 1) return links + link_part;
  if (!hierarchical) {
    // The ring's slowest stretch is the one between nodes, or the links where cards are faster than
    // those.
    const double bandwidth = std::min(machine.node_bandwidth(), machine.link_bandwidth * inside);
    return (all - 1) / all * bytes / bandwidth + (all - outside) * machine.link_latency +
           outside * machine.card_latency;
  }
  const double card_part = (outside - 1) / outside * bytes / machine.node_bandwidth();
  return std::max(link_part, card_part) + links + (outside - 1) * machine.card_latency;
}

double CommModel::all_gather(double bytes) const {
  return reduce_scatter(bytes) / machine.gather_factor;
}

double CommModel::sum_gradients(double elements, bool bf16_wire, bool for_all) const {
  const double bytes = (bf16_wire ? 2 : 4) * elements;
  double seconds = reduce_scatter(bytes);
  if (bf16_wire && nodes() > 1) {
    const double inside = std::min(ranks, machine.ranks_a_node), outside = nodes();
    seconds =
        (inside - 1) * (machine.link_latency + 4 * elements / inside / machine.link_bandwidth) +
        (outside - 1) * (machine.card_latency + bytes / outside / machine.node_bandwidth());
  }
  return seconds + (for_all ? all_gather(bytes) : 0);
}

StepTime step_time(std::span<const MicroBatchCost> work, std::span<const BucketSchedule> buckets,
                   const CommModel& comm, const ParallelDeck& parallel, bool bf16_model,
                   double optimizer_bandwidth) {
  StepTime t;
  for (const MicroBatchCost& m : work) t.compute += m.seconds();

  // 1. Gradients, one bucket after the other as the last backward completes them.
  const double backward =
      work.empty() ? 0 : work.back().backward + work.back().again + work.back().exchange / 2;
  double end = 0, elements = 0;
  std::size_t sharded = 0;  // the first buckets
  for (const BucketSchedule& b : buckets) {
    elements += static_cast<double>(b.elements);
    if (b.sharded && ++sharded > 0) continue;
    const double takes = comm.sum_gradients(static_cast<double>(b.elements),
                                            parallel.wire == "bf16", parallel.zero == 0);
    end = std::max(end, b.ready * backward) + takes;
    t.reduce += takes;
  }
  t.exposed_reduce = parallel.overlap ? std::max(0.0, end - backward) : t.reduce;

  // 2. The update of this rank's share.
  t.optimizer = elements / (parallel.zero >= 1 ? comm.ranks : 1) * optimizer_bytes_an_element /
                optimizer_bandwidth;
  if (parallel.zero == 0) return t;

  // 3. New weights, last bucket first: roughly the order in which the next forward needs them.
  const double forward = work.empty() ? 0 : work.front().forward + work.front().exchange / 2;
  std::vector<std::pair<double, double>>
      weights;  // needed at this share of the forward, here at this time
  for (auto b = buckets.rbegin(); b != buckets.rend(); ++b) {
    if (b->sharded) continue;
    t.gather += comm.all_gather((bf16_model && b->bf16_only ? 2.0 : 4.0) *
                                static_cast<double>(b->elements));
    weights.emplace_back(b->needed, t.gather);
  }
  std::sort(weights.begin(), weights.end());
  double now = 0, at = 0;  // since the update; `at`: share of the forward that is done
  for (const auto& [needed, arrived] : weights) {
    now += (needed - at) * forward;
    at = needed;
    // A wait for one bucket delays the rest of the forward, so later buckets wait less.
    t.exposed_gather += std::max(0.0, arrived - now);
    now = std::max(now, arrived);
  }
  if (!parallel.overlap) t.exposed_gather = t.gather;

  // 4. What is gathered and summed within the micro-batches.
  if (sharded > 0) add_blocks(work, buckets.first(sharded), comm, parallel, bf16_model, t);
  return t;
}

double block_gathers(std::size_t b, std::size_t blocks, double micro_batches) {
  return (b + 2 < blocks ? micro_batches : 1) + (b >= 2 ? micro_batches : 0);
}

double expected_maximum(int n) {
  // E[max] = integral of x d(Phi(x)^n), over [-9, 9]: Phi(-9) is 1e-19, and Phi(9) is 1 in double
  // precision.
  const auto normal = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  double sum = 0, before = 0;
  constexpr double from = -9, step = 1e-3;
  for (int i = 1; i <= 18000; ++i) {
    const double after = std::pow(normal(from + i * step), n);
    sum += (from + (i - 0.5) * step) * (after - before);
    before = after;
  }
  return sum;
}

double all_reduce_seconds(const MicroBatchCost& cost, const CommModel& comm) {
  if (comm.ranks == 1 || cost.all_reduces == 0) return 0;
  return cost.all_reduces * comm.small_all_reduce(cost.all_reduce_bytes / cost.all_reduces);
}

}  // namespace weft
