#include "plan/plan.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/generate/samples.h"
#include "models/registry.h"
#include "parallel/rank_device.h"
#include "plan/step_model.h"
#include "tensor/tensor.h"
#include "train/data_parallel.h"
#include "train/step_work.h"
#include "train/validation.h"

namespace weft {

void AbsentRanks::refuse() {
  throw Error(Exit::internal, "a dry run communicates",
              "this is a bug in weft, please report it with the log", __FILE__, __LINE__);
}

namespace {

const Model& model_of(const Deck& deck) {
  const Model* model = find_model(deck.model.name);
  WEFT_CHECK(model != nullptr, Exit::usage,
             fmt::format("set model.name to one of: {}", trained_models()),
             "weft plan knows no training of model.name = \"{}\"", deck.model.name);
  return *model;
}

}  // namespace

PlannedTraining::PlannedTraining(const Deck& deck, int ranks, bool here)
    : source(open_training_data(deck.data, deck.media, held_out_choice(deck)).training),
      batch_sizes(weft::batch_sizes(deck.train, source->buckets())),
      seed(static_cast<std::uint64_t>(deck.run.seed)),
      sharing(static_cast<int>(deck.parallel.sp) - 1, static_cast<int>(deck.parallel.sp)),
      task(model_of(deck).make_task(deck)) {
  task->share_clips(deck.parallel.sp > 1 ? &sharing : nullptr);
  // A micro-batch is timed on one rank alone: the cost of sharing its tokens is not.
  WEFT_CHECK(!here || deck.parallel.sp == 1, Exit::usage,
             "describe the machine (--fabric), or plan without parallel.sp",
             "--fabric local with parallel.sp = {}", deck.parallel.sp);
  if (here)
    task->open(buckets());
  else
    task->check(buckets());
  // A micro-batch is timed on one rank alone, which has all weights.
  WEFT_CHECK(!here || deck.parallel.zero != 3, Exit::usage,
             "describe the machine (--fabric), or plan with parallel.zero = 1",
             "--fabric local with parallel.zero = 3");
  // Only the layout matters here: pages that are never touched cost nothing. Besides the size of
  // buckets, how many ranks there are decides no more than what one of them owns (state_bytes).
  constexpr int any_ranks = 4096;
  const auto planning = Arena::planning();
  std::optional<ArenaScope> untouched;
  if (!here) untouched.emplace(*planning);
  task->params().allocate(
      bucket_elements(deck.parallel, ranks), task->bf16(), true,
      sharding_of(deck.parallel, task->params(), task->blocks_named(), 0, any_ranks), ranks);
}

Rates rates_of(const PlanRequest& request, bool f32, const std::string& dtype) {
  Rates rates = !request.rates.empty() ? read_rates(request.rates)
                : request.gpu.empty()  ? h200_targets()
                                       : rates_of(find_gpu(request.gpu), f32);
  if (dtype == "fp8" && rates.fp8_products == 0)
    rates.origin += "; products in fp8 count at the rate of bf16, because none was measured";
  return rates;
}

void PlanRequest::add_options(Command& c) {
  c.path("--rates", rates, "rates of the device to predict from (JSON)");
  c.option("--gpu", gpu, "h100, h200 or a100: memory, links and rates of that GPU");
  c.number("--memory", memory_gb, 0.001, 1e6, "GB of a rank's device");
  c.number("--per-node", per_node, 1, 128, "GPUs of a node (default: 8)");
}

void PlanRequest::complete() {
  WEFT_CHECK(gpu.empty() || rates.empty(), Exit::usage, "leave one of them out",
             "--gpu {} and --rates {} both say how fast the GPU is", gpu, rates);
  WEFT_CHECK(fabric != "local" || (gpu.empty() && per_node == 0), Exit::usage,
             "leave one of them out",
             "--fabric local measures this host, --gpu and --per-node describe another");
  if (!gpu.empty() && memory_gb == 0) memory_gb = find_gpu(gpu).memory_gb;
}

Machine machine_of(const PlanRequest& request) {
  Machine machine = described_machine(request.fabric, request.memory_gb, request.ranks_a_node());
  if (!request.gpu.empty()) set_gpu(machine, find_gpu(request.gpu));
  return machine;
}

const std::vector<BucketSchedule>& SchedulesByRanks::on(int ranks) {
  auto& schedule = by_size_[bucket_elements(deck_.parallel, ranks)];
  if (schedule.empty()) {
    const PlannedTraining training(deck_, ranks, false);
    schedule = dry_run_schedule(*training.task, training.buckets(), device_, rates_);
  }
  return schedule;
}

void SchedulesByRanks::add(int ranks, std::vector<BucketSchedule> schedule) {
  by_size_[bucket_elements(deck_.parallel, ranks)] = std::move(schedule);
}

namespace {

// 1. Memory.

// What to do where weights, gradients and optimizer alone are more than a rank's memory.
// `state_on`: their bytes on so many ranks, if sharded; `shards_blocks`: parallel.zero = 3 could.
template <class StateOn>
std::string make_room(const Deck& deck, bool shards_blocks, double memory, int ranks,
                      StateOn&& state_on) {
  std::string hint;
  if (deck.train.ema_decay.size() > 1) hint = "keep fewer averages (train.ema_decay), or ";
  if (deck.parallel.zero == 0)
    return hint + fmt::format(
                      "set parallel.zero = 1 (ZeRO-1), which shards the optimizer state: "
                      "{:.1f} GiB a rank",
                      gib(state_on(ranks)));
  for (int more = 2 * ranks; more <= 4096; more *= 2)
    if (state_on(more) < memory)
      return hint + fmt::format(
                        "use more ranks, over which parallel.zero = {} shards {}: {} hold it, with "
                        "{:.1f} GiB each",
                        deck.parallel.zero,
                        deck.parallel.zero == 3 ? "weights, gradients and optimizer state"
                                                : "the optimizer state",
                        more, gib(state_on(more)));
  if (deck.parallel.zero == 1 && shards_blocks)
    return hint + "set parallel.zero = 3, which shards the blocks' weights and gradients too";
  return hint +
         "use a smaller model: weights and gradients alone do not fit, on any number of ranks";
}

// The rest of a rank's memory, for the arena.
template <class StateOn>
std::size_t arena_bytes(const Deck& deck, bool shards_blocks, const PlanRequest& request,
                        const MemoryKinds& memory, int ranks, StateOn&& state_on) {
  const double taken = static_cast<double>(memory.state() + memory.staging);
  const double left = request.memory_gb * 1e9 - taken;
  WEFT_CHECK(left > 0, Exit::usage,
             make_room(deck, shards_blocks, request.memory_gb * 1e9, ranks, state_on),
             "weights, gradients and optimizer need {:.1f} GiB on each of {} ranks, which have "
             "{:.1f} GiB",
             gib(taken), ranks, gib(request.memory_gb * 1e9));
  const auto arena = static_cast<double>(arena_share(static_cast<std::size_t>(left), ranks));
  const std::size_t capacity = deck.memory.arena_gib > 0 ? bytes_of_gib(deck.memory.arena_gib)
                                                         : static_cast<std::size_t>(arena);
  WEFT_CHECK(static_cast<double>(capacity) <= left, Exit::usage,
             fmt::format("set memory.arena_gib to {:.1f} or less", gib(arena)),
             "memory.arena_gib = {:.1f} and {:.1f} GiB of state are more than {:.1f} GiB",
             deck.memory.arena_gib, gib(taken), gib(request.memory_gb * 1e9));
  return capacity;
}

// A clip's frames on the GPU are staged twice: one micro-batch computes while the next one is
// copied.
std::size_t staging_bytes(const PlannedTraining& training) {
  std::size_t most = 0;
  for (std::size_t i = 0; i < training.buckets().size(); ++i) {
    const Bucket& b = training.buckets()[i];
    most = std::max(most, b.clip_bytes() * static_cast<std::size_t>(
                                               samples_in_batch(b, training.batch_sizes[i])));
  }
  return 2 * most;
}

// [bucket] What is recomputed, and the activations' peak.
std::vector<StepMemory> recomputation(const Deck& deck, PlannedTraining& training, int ranks,
                                      std::size_t capacity, DeviceKind device) {
  TrainingTask& task = *training.task;
  std::vector<StepMemory> memory = plan_memory(task, training.buckets(), training.batch_sizes,
                                               capacity, device, keeps_activations(deck));
  if (task.lockstep_ranks(ranks) == 1) return memory;
  WEFT_CHECK(deck.train.micro_batches % ranks == 0, Exit::usage,
             fmt::format("set train.micro_batches to a multiple of {}", ranks),
             "{} micro-batches a step do not share out evenly over {} ranks that share the "
             "statistics of batch norm",
             deck.train.micro_batches, ranks);
  recompute_alike(task, training.buckets(), training.batch_sizes, memory, device);
  return memory;
}

// 2. Costs of micro-batches, timed on this host's ranks: all at once, as they would in a step.

constexpr int measured_runs = 5;  // after one to warm up
constexpr double long_run = 60;   // seconds: whatever takes longer is timed once

double mean_over_ranks(double value, MPI_Comm world) {
  double sum = 0;
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, world);
  return sum / ranks;
}

// The time, once the device is idle.
double now_done() {
  if (on_cuda()) device_runtime().synchronize();
  return now_seconds();
}

// Seconds of one micro-batch as the trainer runs it, from the clips' bytes to gradients: the median
// of several runs, the mean over the ranks. `steps`: of the deck's run.
double time_micro_batch(const PlannedTraining& training, std::size_t b, std::int64_t clips,
                        std::int64_t steps, MPI_Comm world) {
  TrainingTask& task = *training.task;
  const Bucket& bucket = training.buckets()[b];
  LoadedBatch batch;
  batch.what.bucket = static_cast<int>(b);
  for (std::int64_t i = 0; i < clips; ++i) {
    batch.what.clips.push_back(i);
    batch.what.samples.push_back(i);
  }
  batch.info.resize(clips);
  // The step is one of the last, in which every part of the loss works: the one that shortens its
  // clips least, for the plan counts whole clips.
  double share = 0;
  for (std::int64_t s = steps - 1; s >= std::max<std::int64_t>(0, steps - 32); --s) {
    const double there = task.share(bucket, batch.what, s);
    if (there <= share) continue;
    share = there;
    batch.step = s;
  }
  const std::vector<std::byte> bytes(static_cast<std::size_t>(clips) * bucket.clip_bytes());
  batch.bytes = bytes;
  StepGraphs graphs(false);
  const std::vector<StepMemory> memory(training.buckets().size());
  std::vector<std::int64_t> batch_sizes(memory.size());
  batch_sizes[b] = clips;
  MicroBatchRunner runner(task, *training.source, graphs, memory, batch_sizes);
  const auto arena =
      Arena::reserve(plan_step_memory(task, bucket, clips, 0).bytes + (std::size_t{256} << 20));
  const ArenaScope scope(*arena);
  std::vector<double> seconds;
  for (int run = 0; run <= measured_runs; ++run) {
    MPI_Barrier(world);  // all ranks at once: they compete for caches and memory
    task.params().begin_step([](int) {});
    const double before = now_done();
    runner.run(batch, true, 1, [](const TrainingLoss&) {});
    double took = now_done() - before;
    task.params().finish_step();
    if (run == 0) continue;
    seconds.push_back(took / share);
    MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, world);
    if (took > long_run) break;
  }
  return mean_over_ranks(upper_median(seconds), world);
}

// [bucket] Some clips of a micro-batch of many are run, and a dry run says what all would take.
std::vector<MicroBatchCost> measured_costs(const PlannedTraining& training,
                                           std::span<const std::int64_t> clips,
                                           std::span<const StepMemory> memory, std::int64_t steps,
                                           MPI_Comm world) {
  TrainingTask& task = *training.task;
  const double enough = on_cuda() ? 2e13 : 1e11;  // operations
  const Rates nominal = h200_targets();           // of which only ratios count here
  const auto dry = [&](const Bucket& b, std::int64_t n, double recompute) {
    return dry_run_cost(task, b, n, recompute, this_device().kind, nominal, 1);
  };
  std::vector<MicroBatchCost> costs;
  for (std::size_t i = 0; i < clips.size(); ++i) {
    const Bucket& b = training.buckets()[i];
    MicroBatchCost& cost = costs.emplace_back(dry(b, clips[i], memory[i].recompute));
    if (clips[i] == 0) continue;
    const double one = std::max(1.0, dry(b, 1, 0).flops);
    const std::int64_t some =
        std::min(clips[i], static_cast<std::int64_t>(std::ceil(enough / one)));
    const MicroBatchCost part = dry(b, some, 0);
    const double scale =
        time_micro_batch(training, i, some, steps, world) / (part.forward + part.backward);
    cost.forward *= scale;
    cost.backward *= scale;
    cost.again *= scale;
    // The times have the exchanges of ranks that share statistics.
    cost.exchange = cost.all_reduces = 0;
  }
  return costs;
}

// The bandwidth of the update of all parameters, in units of optimizer_bytes_an_element.
double optimizer_bandwidth(const TrainDeck& how, ParameterTable& params, MPI_Comm world) {
  OptimizerState state(params, false, 0, 1, true, how.ema_decay);
  Tensor squares = Tensor::persistent({1}, DType::f64);
  std::vector<double> seconds;
  for (int run = 0; run <= measured_runs; ++run) {
    MPI_Barrier(world);
    const double start = now_done();
    for (int b = 0; b < static_cast<int>(params.buckets().size()); ++b)
      optimizer_step(how, run, squares, state, b);
    if (run > 0) seconds.push_back(now_done() - start);
  }
  return optimizer_bytes_an_element * static_cast<double>(params.grads().numel()) /
         mean_over_ranks(upper_median(seconds), world);
}

// Bandwidths of collectives between the ranks.
void measure_collectives(const Deck& deck, Machine& machine, MPI_Comm world) {
  const auto comm = make_communicator(world);
  const int ranks = comm->size();
  if (ranks == 1) return;
  const auto elements = static_cast<std::int64_t>(
      std::clamp(bucket_mib(deck.parallel, ranks), 1.0, 64.0) * (1 << 20) / 4);
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

// 3. Steps.

constexpr std::int64_t sampled_steps = 20;  // of the step plan, for placements

// Time of steps of `micro_batches` micro-batches on `ranks` ranks: every step waits for its slowest
// rank.
struct Placed {
  StepTime slowest;              // means over the steps
  double seconds = 0, busy = 0;  // of the slowest rank; of all ranks, divided by their number
  double work = 0;               // as busy, without all-reduces within micro-batches
  double share = 0;  // of a micro-batch's full cost that it takes on average (TrainingTask::share)
};

// The costliest of the ranks' first micro-batches, of their second, and so on.
std::vector<MicroBatchCost> slowest_of_each(
    const std::vector<std::vector<MicroBatchCost>>& of_group) {
  std::vector<MicroBatchCost> slowest = of_group.front();
  for (const auto& mine : of_group)
    for (std::size_t k = 0; k < mine.size(); ++k)
      if (k == slowest.size())
        slowest.push_back(mine[k]);
      else if (mine[k].seconds() > slowest[k].seconds())
        slowest[k] = mine[k];
  return slowest;
}

// Steps of `micro_batches` on the ranks of `comm`, with gradients in the buckets of `schedule`.
// `costs`: planned_costs().
Placed place(const Deck& deck, const PlannedTraining& training, const Plan& plan,
             const std::vector<CostTable::Planned>& costs, std::span<const BucketSchedule> schedule,
             std::int64_t micro_batches, const CommModel& comm) {
  TrainingTask& task = *training.task;
  const WorkPlan::Groups groups = WorkPlan::groups_of(
      task, task.params().sharded_buckets() > 0, 0, comm.ranks, static_cast<int>(deck.parallel.sp));
  Deck as_many = deck;
  as_many.train.micro_batches = micro_batches;
  const WorkPlan work_plan(*training.source, task, as_many, training.batch_sizes, costs, groups,
                           "");
  const CommModel together{task.lockstep_ranks(comm.ranks), comm.machine};
  const auto time_of = [&](std::span<const MicroBatchCost> work) {
    return step_time(work, schedule, comm, deck.parallel, task.bf16(), plan.optimizer_bandwidth);
  };
  Placed placed;
  for (std::int64_t s = 0; s < sampled_steps; ++s) {
    const WorkPlan::Shares shared = work_plan.shares(s);
    std::vector<MicroBatchCost> work;
    for (const MicroBatch& m : shared.plan) {
      const auto b = static_cast<std::size_t>(m.bucket);
      const double share = task.share(training.buckets()[b], m, s);
      placed.share += share / static_cast<double>(micro_batches) / sampled_steps;
      MicroBatchCost& cost = work.emplace_back(plan.buckets[b].cost.part(share));
      placed.work += cost.seconds() / groups.count;
      cost.exchange += all_reduce_seconds(cost, together);
    }
    std::vector<std::vector<MicroBatchCost>> of_group(groups.count);
    for (const std::size_t i : shared.order) of_group[shared.owner[i]].push_back(work[i]);

    StepTime worst;
    for (const auto& mine : of_group) {
      const StepTime t = time_of(mine);
      if (t.seconds() > worst.seconds()) worst = t;
      placed.busy += t.compute / groups.count;
    }
    // Micro-batch by micro-batch all wait for the slowest; those of another group, in the end. So
    // they do where a micro-batch gathers the weights.
    if (groups.sync != SyncMode::per_step) worst = time_of(slowest_of_each(of_group));
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

// The deck's step on all ranks; then as many micro-batches a rank on fewer, for the efficiency.
void plan_steps(const Deck& deck, const PlannedTraining& training, const Rates& rates, Plan& plan) {
  const auto sp = static_cast<int>(deck.parallel.sp);
  const auto micro_batches = static_cast<double>(deck.train.micro_batches);
  std::vector<StepMemory> memory;
  for (const BucketPlan& b : plan.buckets) memory.push_back(b.memory);
  const std::vector<CostTable::Planned> costs =
      planned_costs(training.buckets(), *training.task, training.batch_sizes, memory,
                    plan.machine.device == DeviceKind::cuda && sp == 1);
  const Placed full = place(deck, training, plan, costs, plan.schedule, deck.train.micro_batches,
                            {plan.ranks, plan.machine});
  plan.step = full.slowest;
  plan.seconds = full.seconds;
  plan.imbalance =
      full.slowest.compute > 0 ? std::max(0.0, 1 - full.busy / full.slowest.compute) : 0;
  double stored = 0;  // bytes of the mean micro-batch
  for (std::size_t i = 0; i < plan.buckets.size(); ++i) {
    const BucketPlan& b = plan.buckets[i];
    const Bucket& source = training.buckets()[i];
    plan.tokens_a_step += full.share * micro_batches * b.share * static_cast<double>(b.tokens);
    plan.flops_a_step += full.share * micro_batches * b.share * b.cost.flops * sp;
    stored +=
        b.share * static_cast<double>(b.batch) *
        (static_cast<double>(source.clip_bytes()) + training.task->facts(source).bytes_beside);
  }
  plan.data_bandwidth = stored * micro_batches / plan.seconds;

  // Weak scaling: each group keeps its micro-batches, and throughput is work a second and rank.
  SchedulesByRanks schedules(deck, plan.machine.device, rates);
  schedules.add(plan.ranks, plan.schedule);
  const double a_group = micro_batches * sp / plan.ranks;
  double alone = 0;
  for (int ranks = sp; ranks <= plan.ranks;
       ranks = ranks == plan.ranks ? ranks + 1 : std::min(2 * ranks, plan.ranks)) {
    const auto count = std::max<std::int64_t>(1, std::llround(a_group * ranks / sp));
    const Placed p =
        place(deck, training, plan, costs, schedules.on(ranks), count, {ranks, plan.machine});
    const double throughput = p.work / p.seconds;
    if (ranks == sp) alone = throughput;
    plan.efficiency.emplace_back(ranks, throughput / alone);
  }
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

// 4. Communication and checkpoints.

void plan_communication(const Deck& deck, bool bf16, Plan& plan) {
  const double wire = deck.parallel.wire == "bf16" ? 2 : 4;
  const std::int64_t groups = plan.ranks / deck.parallel.sp;
  const auto most = static_cast<double>((deck.train.micro_batches + groups - 1) / groups);
  const auto blocks =
      static_cast<std::size_t>(std::ranges::count(plan.schedule, true, &BucketSchedule::sharded));
  for (const bool hierarchical : {false, true}) {
    const CommModel comm{plan.ranks, plan.machine, hierarchical};
    double seconds = 0, sent = 0;
    for (std::size_t i = 0; i < plan.schedule.size(); ++i) {
      const BucketSchedule& b = plan.schedule[i];
      const auto elements = static_cast<double>(b.elements);
      const double there = wire * elements;
      const double back = deck.parallel.zero == 0 ? there
                          : bf16 && b.bf16_only   ? 2 * elements
                                                  : 4 * elements;
      // Once in a step, or as often as the micro-batches of the rank with the most ask for.
      const double gathers = b.sharded ? block_gathers(i, blocks, most) : 1;
      const double sums = b.sharded ? most : 1;
      seconds += sums * comm.sum_gradients(elements, deck.parallel.wire == "bf16", false) +
                 gathers * comm.all_gather(back);
      sent += sums * comm.bytes_sent(there) + gathers * comm.bytes_sent(back);
    }
    (hierarchical ? plan.hierarchical_seconds : plan.flat_seconds) = seconds;
    plan.bytes_sent = sent;
  }
}

void plan_checkpoints(double mtbf_hours, bool squares, std::size_t averages,
                      const ParameterTable& table, Plan& plan) {
  // f32 masters, two moments (of SGD one) and the EMAs of all that is trained, padded as in the
  // buckets, and what is fixed, but not the base of adapters.
  double elements = 0;
  for (const BucketSchedule& b : plan.schedule) elements += static_cast<double>(b.elements);
  plan.checkpoint_bytes = ((squares ? 12 : 8) + 4 * static_cast<double>(averages)) * elements +
                          4.0 * static_cast<double>(plan.parameters - plan.trained) -
                          static_cast<double>(table.base_bytes(false));
  plan.checkpoint_stall = plan.checkpoint_bytes / plan.ranks / plan.machine.host_copy_bandwidth;
  plan.checkpoint_write = plan.checkpoint_bytes / plan.machine.storage_bandwidth;
  // Young and Daly: sqrt(2 x stall x mean time between failures), which of all ranks is 1 / ranks
  // of a device's.
  plan.young_daly = std::sqrt(2 * plan.checkpoint_stall * mtbf_hours * 3600 / plan.ranks);
  // They count what a save makes the ranks wait, but not what it makes the file system write.
  plan.checkpoint_interval = std::max({plan.young_daly, 600.0, 10 * plan.checkpoint_write});
}

}  // namespace

Plan make_plan(const Deck& deck, const PlanRequest& request, MPI_Comm world) {
  // The machine, described or this one.
  Plan plan;
  const bool local = request.fabric == "local";
  int world_ranks = 1;
  MPI_Comm_size(world, &world_ranks);
  plan.ranks = request.gpus == 0 ? world_ranks : request.gpus;
  WEFT_CHECK(!local || world_ranks == plan.ranks, Exit::usage,
             fmt::format("start it on them: mpirun -n {} weft plan ...", plan.ranks),
             "--fabric local measures the ranks it runs on: {} here, --gpus {}", world_ranks,
             plan.ranks);
  if (!local) plan.machine = machine_of(request);
  WEFT_CHECK(local || request.memory_gb > 0, Exit::usage, "say --memory 141 for an H200, or --gpu",
             "a described machine needs --memory GB");
  WEFT_CHECK(plan.ranks >= 1 && plan.ranks % deck.parallel.sp == 0, Exit::usage,
             "choose parallel.sp so that it divides the ranks",
             "parallel.sp = {} does not divide {} ranks", deck.parallel.sp, plan.ranks);
  RankDevice place_here;
  if (local) {
    place_here = choose_device(deck.device.kind, deck.device.share, world);
    set_threads(static_cast<int>(deck.run.threads), place_here.core_sharers);
    plan.machine.name = "local";
    plan.machine.ranks_a_node = plan.ranks;
    plan.machine.device = this_device().kind;
  }
  const DeviceKind device = plan.machine.device;

  // The model and its state.
  PlannedTraining training(deck, plan.ranks, local);
  TrainingTask& task = *training.task;
  if (local) task.join_ranks(world, nullptr);
  const std::vector<Bucket>& buckets = training.buckets();
  const bool squares = task.optimizers().front().optimizer != "sgd";
  plan.model = task.describe();
  plan.unit = task.facts(buckets.front()).unit;
  plan.parameters = task.params().total_elements();
  plan.trained = task.params().trainable_elements();
  const std::size_t averages = deck.train.ema_decay.size();
  plan.memory = state_bytes(task.params(), task.bf16(), deck.parallel.zero >= 1, plan.ranks,
                            squares, averages);
  std::size_t others = 0;
  for (const Bucket& b : buckets) others = std::max(others, task.facts(b).other_weights);
  plan.memory.fixed += others;
  if (device == DeviceKind::cuda) plan.memory.staging = staging_bytes(training);
  std::optional<SamplesPlan> samples;
  if (deck.get<SamplesDeck>().every > 0) {
    samples.emplace(deck);
    plan.memory.samples = samples->weights();
  }

  const auto state_on = [&](int ranks) {
    MemoryKinds m = state_bytes(task.params(), task.bf16(), true, ranks, squares, averages);
    m.fixed += others;
    m.samples = plan.memory.samples;
    return static_cast<double>(m.state() + plan.memory.staging);
  };

  // What is left of the memory, and each bucket's recomputation in it.
  plan.capacity = local && request.memory_gb <= 0
                      ? arena_capacity(deck.memory, place_here.host_ranks)
                      : arena_bytes(deck, can_shard(task.params(), task.blocks_named()), request,
                                    plan.memory, plan.ranks, state_on);
  const std::vector<StepMemory> memory =
      recomputation(deck, training, plan.ranks, plan.capacity, device);
  for (const StepMemory& m : memory)
    plan.memory.activations = std::max(plan.memory.activations, m.bytes);
  if (samples)
    plan.memory.activations = std::max(plan.memory.activations, samples->arena(plan.capacity));
  if (device == DeviceKind::cuda)
    plan.memory.reserve =
        std::min(plan.capacity - plan.memory.activations, arena_scratch(plan.memory.activations));

  // What a micro-batch of each bucket takes: by dry runs, or measured.
  std::vector<std::int64_t> clips;
  for (std::size_t i = 0; i < buckets.size(); ++i)
    clips.push_back(samples_in_batch(buckets[i], training.batch_sizes[i]));
  std::vector<MicroBatchCost> costs;
  const Rates rates = rates_of(request, !task.bf16(), deck.model.dtype);
  if (local) {
    task.params().initialise(1);
    costs = measured_costs(training, clips, memory, deck.train.steps, world);
    plan.optimizer_bandwidth = optimizer_bandwidth(task.optimizers().front(), task.params(), world);
    measure_collectives(deck, plan.machine, world);
    plan.machine.memory_bandwidth = plan.optimizer_bandwidth;
    plan.rates_origin =
        fmt::format("measured on {} of this host: micro-batches of each bucket, medians of {} runs",
                    counted(plan.ranks, "rank"), measured_runs);
  } else {
    for (std::size_t i = 0; i < buckets.size(); ++i)
      costs.push_back(dry_run_cost(task, buckets[i], clips[i], memory[i].recompute, device, rates,
                                   plan.machine.link_bandwidth));
    plan.optimizer_bandwidth =
        rates.bandwidth * optimizer_bytes_an_element /
        (optimizer_bytes_an_element + bytes_a_further_average * static_cast<double>(averages - 1));
    plan.rates_origin = rates.origin;
  }
  plan.schedule = dry_run_schedule(task, buckets, device, rates);
  plan.machine.memory_bytes = request.memory_gb * 1e9;
  double micro_batches = 0;  // of an epoch
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    BucketPlan& b = plan.buckets.emplace_back();
    b.name = buckets[i].name;
    b.batch = clips[i];
    b.tokens = clips[i] * task.facts(buckets[i]).units;
    b.memory = memory[i];
    b.cost = costs[i];
    b.share = micro_batches_of(buckets[i], b.batch);
    micro_batches += b.share;
  }
  for (BucketPlan& b : plan.buckets) b.share /= micro_batches;
  // Images have one batch size, and steps of equal costs anyway.
  if (buckets.front().label_rate == 0)
    suggest_equal_costs(task, buckets, plan.capacity, device, plan.buckets);

  plan_steps(deck, training, rates, plan);
  plan_communication(deck, task.bf16(), plan);
  plan_checkpoints(request.mtbf_hours, squares, averages, task.params(), plan);
  return plan;
}

}  // namespace weft
