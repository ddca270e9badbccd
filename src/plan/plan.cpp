#include "plan/plan.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/host.h"
#include "data/step_plan.h"
#include "models/registry.h"
#include "parallel/rank_device.h"
#include "plan/measure.h"

namespace weft {
namespace {

constexpr std::int64_t sampled_steps = 20;  // of the step plan, for placements
// A clip's frames on the GPU are staged twice: one micro-batch computes while the next one is
// copied.
constexpr std::size_t staging_buffers = 2;

// Time of steps of `micro_batches` micro-batches on `ranks` ranks: every step waits for its slowest
// rank.
struct Placed {
  StepTime slowest;              // means over the steps
  double seconds = 0, busy = 0;  // of the slowest rank; of all ranks, divided by their number
  double work = 0;               // as busy, without exchanges within micro-batches
  double share = 0;  // of a micro-batch's full cost that it takes on average (TrainingTask::share)
};
// The costliest of the ranks' first micro-batches, of their second, and so on.
std::vector<MicroBatchCost> slowest_of_each(
    const std::vector<std::vector<MicroBatchCost>>& of_group) {
  std::vector<MicroBatchCost> slowest = of_group.front();
  for (const auto& mine : of_group)
    for (std::size_t k = 0; k < mine.size(); ++k)
      if (mine[k].seconds() > slowest[k].seconds()) slowest[k] = mine[k];
  return slowest;
}

// `source`: the buckets as the data has them.
Placed place(const Deck& deck, TrainingTask& task, std::span<const Bucket> source,
             const StepPlan& planner, const std::vector<BucketPlan>& buckets,
             const std::vector<BucketSchedule>& schedule, const CommModel& comm,
             double optimizer_bandwidth) {
  const int groups = comm.ranks / static_cast<int>(deck.parallel.sp);
  const int together = task.lockstep_ranks(comm.ranks);
  const bool lockstep = together > 1;
  const double inner_seconds = inner_exchange_seconds(task, {together, comm.machine});
  Placed placed;
  for (std::int64_t s = 0; s < sampled_steps; ++s) {
    std::vector<MicroBatchCost> work;
    std::vector<double> costs;
    const std::vector<MicroBatch> micro_batches = planner.plan(s);
    for (const MicroBatch& m : micro_batches) {
      const auto b = static_cast<std::size_t>(m.bucket);
      const double share = task.share(source[b], m, s);
      placed.share += share / static_cast<double>(micro_batches.size()) / sampled_steps;
      work.push_back(buckets[b].cost.part(share));
      work.back().exchange += inner_seconds;
      costs.push_back(work.back().seconds());
      placed.work += (costs.back() - inner_seconds) / groups;
    }
    const std::vector<int> owner = owners(costs, groups, lockstep);
    std::vector<std::vector<MicroBatchCost>> of_group(static_cast<std::size_t>(groups));
    for (std::size_t i = 0; i < work.size(); ++i)
      of_group[static_cast<std::size_t>(owner[i])].push_back(work[i]);
    StepTime worst;
    for (const auto& mine : of_group) {
      const StepTime t =
          step_time(mine, schedule, comm, deck.parallel, task.bf16(), optimizer_bandwidth);
      if (t.seconds() > worst.seconds()) worst = t;
      placed.busy += t.compute / groups;
    }
    if (lockstep)
      // Micro-batch by micro-batch all wait for the slowest; those of another group, in the end.
      worst = step_time(slowest_of_each(of_group), schedule, comm, deck.parallel, task.bf16(),
                        optimizer_bandwidth);
    placed.seconds += worst.seconds();
    const auto add = [](double& to, double from) { to += from / sampled_steps; };
    add(placed.slowest.compute, worst.compute);
    add(placed.slowest.exposed_reduce, worst.exposed_reduce);
    add(placed.slowest.optimizer, worst.optimizer);
    add(placed.slowest.exposed_gather, worst.exposed_gather);
    add(placed.slowest.reduce, worst.reduce);
    add(placed.slowest.gather, worst.gather);
  }
  placed.seconds /= sampled_steps;
  placed.busy /= sampled_steps;
  placed.work /= sampled_steps;
  return placed;
}

// Clips a bucket with which every micro-batch costs about as much as the dearest single clip, and
// no more of the model is recomputed than that clip needs.
void suggest_equal_costs(TrainingTask& task, std::span<const Bucket> buckets, std::size_t capacity,
                         DeviceKind device, std::vector<BucketPlan>& plans) {
  const auto one = [&](std::size_t i) {
    return plans[i].cost.seconds() / static_cast<double>(plans[i].batch);
  };
  double target = 0;
  for (std::size_t i = 0; i < plans.size(); ++i)
    if (plans[i].batch > 0) target = std::max(target, one(i));
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (plans[i].batch == 0) continue;
    std::int64_t clips =
        std::clamp<std::int64_t>(std::llround(target / one(i)), 1, buckets[i].clips);
    // Never more than fits with the recomputation that a single clip needs.
    const double recompute =
        plan_memory(task, buckets.subspan(i, 1), std::vector<std::int64_t>{1}, capacity, device)[0]
            .recompute;
    while (clips > 1 &&
           plan_step_memory(task, buckets[i], clips, recompute, device).bytes > capacity)
      // Steps of a sixteenth, because every attempt is a dry run of a whole step.
      clips -= std::max<std::int64_t>(1, clips / 16);
    plans[i].equal_cost_batch = clips;
  }
}

}  // namespace

MemoryKinds state_bytes(const ParameterTable& table, bool bf16, bool sharded, int ranks,
                        bool squares) {
  std::size_t all = 0, bf16_only = 0, own = 0, own_bf16_only = 0, fixed = 0;
  for (const ParameterTable::Bucket& b : table.buckets()) {
    const auto elements = static_cast<std::size_t>(b.end - b.begin);
    // The last part takes the remainder: it is the largest.
    const auto part = static_cast<std::size_t>(
        sharded ? part_of(b.begin, b.end, ranks - 1, ranks).size() : b.end - b.begin);
    all += elements;
    own += part;
    if (b.bf16_only) bf16_only += elements, own_bf16_only += part;
  }
  for (const auto& p : table.all())
    if (!p->trainable) fixed += static_cast<std::size_t>(p->shape.numel());
  MemoryKinds m;
  // A sharded bf16 model keeps the f32 values of bf16_only weights in shards; everything else has
  // them whole.
  const bool moved = sharded && bf16;
  m.weights = bf16 ? 2 * all : 4 * all;
  if (bf16) m.masters = moved ? 4 * (all - bf16_only) + 4 * own_bf16_only : 4 * all;
  m.fixed = (bf16 ? 6 : 4) * fixed;
  m.gradients = 4 * all;
  m.moments = (squares ? 8 : 4) * own;
  m.ema = 4 * own;
  return m;
}

Plan make_plan(const Deck& deck, const PlanRequest& request, MPI_Comm world) {
  Plan plan;
  const bool local = request.fabric == "local";
  int world_ranks = 1;
  MPI_Comm_size(world, &world_ranks);
  plan.ranks = request.gpus == 0 ? world_ranks : request.gpus;
  if (local)
    WEFT_CHECK(world_ranks == plan.ranks, Exit::usage,
               fmt::format("start it on them: mpirun -n {} weft plan ...", plan.ranks),
               "--fabric local measures the ranks it runs on: {} here, --gpus {}", world_ranks,
               plan.ranks);
  else
    plan.machine = described_machine(request.fabric, request.memory_gb);
  WEFT_CHECK(local || request.memory_gb > 0, Exit::usage, "say --memory 141 for an H200",
             "a described machine needs --memory GB");
  const auto sp = static_cast<int>(deck.parallel.sp);
  WEFT_CHECK(plan.ranks >= 1 && plan.ranks % sp == 0, Exit::usage,
             "choose parallel.sp so that it divides the ranks",
             "parallel.sp = {} does not divide {} ranks", sp, plan.ranks);
  RankDevice place_here;
  if (local) {
    place_here = choose_device(deck.device.kind, deck.device.share, world);
    set_threads(static_cast<int>(deck.run.threads), place_here.host_ranks);
    plan.machine.device = this_device().kind;
  }
  const DeviceKind device = plan.machine.device;

  // 1. What there is: buckets, parameters, state.
  const auto source = open_clip_source(deck.data, deck.media);
  const std::vector<Bucket>& buckets = source->buckets();
  const std::vector<std::int64_t> sizes = batch_sizes(deck.train, buckets);
  const Model* model = find_model(deck.model.name);
  WEFT_CHECK(model != nullptr, Exit::usage,
             "set model.name to \"stdit3\", \"vae\", \"segmentation\" or \"dbnet\"",
             "weft plan knows no training of model.name = \"{}\"", deck.model.name);
  const std::unique_ptr<TrainingTask> made = model->make_task(deck);
  TrainingTask& task = *made;
  task.check_plan(buckets, local);
  plan.model = task.describe();
  plan.unit = task.unit();
  // Only the layout matters here: pages that are never touched cost nothing.
  task.params().allocate(static_cast<std::int64_t>(deck.parallel.bucket_mib * (1 << 20) / 4),
                         task.bf16(), true);
  plan.parameters = task.params().total_elements();
  plan.trained = task.params().trainable_elements();
  plan.schedule = task.schedule(buckets);
  plan.memory = state_bytes(task.params(), task.bf16(), deck.parallel.zero == 1, plan.ranks,
                            task.optimizers().front().optimizer != "sgd");
  plan.memory.fixed += task.other_weights();
  std::size_t clip_bytes = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i)
    clip_bytes =
        std::max(clip_bytes, buckets[i].clip_bytes() *
                                 static_cast<std::size_t>(samples_in_batch(buckets[i], sizes[i])));
  if (device == DeviceKind::cuda) plan.memory.staging = staging_buffers * clip_bytes;

  // 2. What is left of the memory, and each bucket's recomputation in it.
  if (local && request.memory_gb <= 0) {
    plan.capacity = arena_capacity(deck.memory, place_here.host_ranks);
  } else {
    const double taken = static_cast<double>(plan.memory.state() + plan.memory.staging);
    const double left = request.memory_gb * 1e9 - taken;
    WEFT_CHECK(left > 0, Exit::usage,
               deck.parallel.zero == 0
                   ? "set parallel.zero = 1: the optimizer's state is then shared out"
                   : "use more ranks, or a smaller model",
               "weights, gradients and optimizer need {:.1f} GiB on each of {} ranks, which have "
               "{:.1f} GiB",
               gib(taken), plan.ranks, gib(request.memory_gb * 1e9));
    // As the trainer does it: a sixteenth for libraries, and of the plan an eighth for what
    // operations need inside.
    const double arena = left - left / 16;
    plan.capacity = deck.memory.arena_gib > 0 ? bytes_of_gib(deck.memory.arena_gib)
                                              : static_cast<std::size_t>(arena);
    WEFT_CHECK(static_cast<double>(plan.capacity) <= left, Exit::usage,
               fmt::format("set memory.arena_gib to {:.1f} or less", gib(arena)),
               "memory.arena_gib = {:.1f} and {:.1f} GiB of state are more than {:.1f} GiB",
               deck.memory.arena_gib, gib(taken), gib(request.memory_gb * 1e9));
  }
  std::vector<StepMemory> memory = plan_memory(task, buckets, sizes, plan.capacity, device);
  if (task.lockstep_ranks(plan.ranks) > 1) {
    WEFT_CHECK(deck.train.micro_batches % plan.ranks == 0, Exit::usage,
               fmt::format("set train.micro_batches to a multiple of {}", plan.ranks),
               "{} micro-batches a step do not share out evenly over {} ranks that share the "
               "statistics of batch norm",
               deck.train.micro_batches, plan.ranks);
    recompute_alike(task, buckets, sizes, memory, device);
  }
  PlannedWork work{buckets, {}, {}};
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    work.clips.push_back(samples_in_batch(buckets[i], sizes[i]));
    work.recompute.push_back(memory[i].recompute);
    plan.memory.activations = std::max(plan.memory.activations, memory[i].bytes);
  }
  if (device == DeviceKind::cuda)
    plan.memory.reserve = static_cast<std::size_t>(
        std::min(static_cast<double>(plan.capacity - plan.memory.activations),
                 static_cast<double>(plan.memory.activations) / 8 + (64 << 20)));

  // 3. What a micro-batch of each bucket takes.
  std::vector<MicroBatchCost> costs;
  double optimizer_bandwidth = 0;
  if (local) {
    LocalMeasurement m = measure_local(deck, task.measure(work, world), world);
    plan.machine = m.machine;
    costs = m.costs;
    optimizer_bandwidth = m.optimizer_bandwidth;
    plan.rates_origin = m.rates.origin;
  } else {
    const Rates rates = request.rates.empty() ? h200_targets() : read_rates(request.rates);
    optimizer_bandwidth = rates.bandwidth;
    plan.rates_origin = rates.origin;
    costs = task.costs(work, rates, plan.machine.link_bandwidth);
  }
  plan.machine.memory_bytes = request.memory_gb * 1e9;
  double micro_batches = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    BucketPlan b;
    b.name = buckets[i].name;
    b.batch = work.clips[i];
    b.tokens = task.units(buckets[i], b.batch);
    b.memory = memory[i];
    b.cost = costs[i];
    b.share = b.batch == 0 ? 0 : static_cast<double>(buckets[i].clips / b.batch);
    micro_batches += b.share;
    plan.buckets.push_back(b);
  }
  double tokens = 0, flops = 0, bytes = 0;  // of the mean micro-batch
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    BucketPlan& b = plan.buckets[i];
    b.share /= micro_batches;
    tokens += b.share * static_cast<double>(b.tokens);
    flops += b.share * b.cost.flops * sp;
    bytes += b.share * static_cast<double>(b.batch) *
             (static_cast<double>(buckets[i].clip_bytes()) + task.bytes_beside_clip());
  }
  // Images have one batch size, and steps of equal costs anyway (data.size_policy).
  if (buckets.front().label_rate == 0)
    suggest_equal_costs(task, buckets, plan.capacity, device, plan.buckets);

  // 4. Steps: the deck's micro-batches on all ranks, then as many a rank on fewer, for the
  // efficiency.
  const auto planner = [&](std::int64_t count) {
    return source->plan_steps(sizes, count, static_cast<std::uint64_t>(deck.run.seed));
  };
  CommModel comm{plan.ranks, plan.machine};
  const Placed full = place(deck, task, buckets, *planner(deck.train.micro_batches), plan.buckets,
                            plan.schedule, comm, optimizer_bandwidth);
  plan.step = full.slowest;
  plan.seconds = full.seconds;
  plan.imbalance = full.slowest.compute > 0 ? 1 - full.busy / full.slowest.compute : 0;
  plan.tokens_a_step = full.share * tokens * static_cast<double>(deck.train.micro_batches);
  plan.flops_a_step = full.share * flops * static_cast<double>(deck.train.micro_batches);
  // Weak scaling: each group keeps its micro-batches, and throughput is work a second and rank.
  const double a_group = static_cast<double>(deck.train.micro_batches) * sp / plan.ranks;
  double alone = 0;
  for (int ranks = sp; ranks <= plan.ranks;
       ranks = ranks == plan.ranks ? ranks + 1 : std::min(2 * ranks, plan.ranks)) {
    CommModel fewer{ranks, plan.machine};
    const auto count = std::max<std::int64_t>(1, std::llround(a_group * ranks / sp));
    const Placed p = place(deck, task, buckets, *planner(count), plan.buckets, plan.schedule, fewer,
                           optimizer_bandwidth);
    const double throughput = p.work / p.seconds;
    if (ranks == sp) alone = throughput;
    plan.efficiency.emplace_back(ranks, throughput / alone);
  }

  // 5. Communication, data, checkpoints.
  const double wire = deck.parallel.wire == "bf16" ? 2 : 4;
  for (const bool hierarchical : {false, true}) {
    comm.hierarchical = hierarchical;
    double seconds = 0, sent = 0;
    for (const BucketSchedule& b : plan.schedule) {
      const auto elements = static_cast<double>(b.elements);
      const double there = wire * elements;
      const double back = deck.parallel.zero == 0      ? there
                          : task.bf16() && b.bf16_only ? 2 * elements
                                                       : 4 * elements;
      seconds += comm.reduce_scatter(there) + comm.all_gather(back);
      sent += comm.bytes_sent(there) + comm.bytes_sent(back);
    }
    (hierarchical ? plan.hierarchical_seconds : plan.flat_seconds) = seconds;
    plan.bytes_sent = sent;
  }
  plan.data_bandwidth = bytes * static_cast<double>(deck.train.micro_batches) / plan.seconds;
  // f32 masters, two moments (of SGD one) and the EMA of all that is trained, padded as in the
  // buckets, and what is fixed.
  double elements = 0;
  for (const BucketSchedule& b : plan.schedule) elements += static_cast<double>(b.elements);
  const double kept = task.optimizers().front().optimizer == "sgd" ? 12 : 16;
  plan.checkpoint_bytes =
      kept * elements + 4.0 * static_cast<double>(plan.parameters - plan.trained);
  plan.checkpoint_stall = plan.checkpoint_bytes / plan.ranks / plan.machine.host_copy_bandwidth;
  plan.checkpoint_write = plan.checkpoint_bytes / plan.machine.storage_bandwidth;
  // Young and Daly: sqrt(2 x stall x mean time between failures), which of all ranks is 1 / ranks
  // of a device's.
  plan.checkpoint_interval =
      std::sqrt(2 * plan.checkpoint_stall * request.mtbf_hours * 3600 / plan.ranks);
  return plan;
}

}  // namespace weft
