#include "train/step_work.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "core/trace.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "train/step_cost.h"

namespace weft {
namespace {

// [bucket] Clips and cost of a micro-batch, the same on every rank and in every run: its
// operations, or, where `by_seconds`, what a dry run takes at fixed rates. On a GPU attention and
// what memory bounds take longer for each operation. Ranks that share a clip share it unevenly:
// their dry runs would differ.
std::vector<CostTable::Planned> planned_costs(std::span<const Bucket> buckets, TrainingTask& task,
                                              std::span<const std::int64_t> batch_sizes,
                                              std::span<const StepMemory> memory, bool by_seconds) {
  const Rates rates = h200_targets();
  std::vector<CostTable::Planned> planned(buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const std::int64_t clips = samples_in_batch(buckets[b], batch_sizes[b]);
    if (clips == 0) continue;
    planned[b].clips = clips;
    if (by_seconds) {
      const MicroBatchCost cost =
          dry_run_cost(task, buckets[b], clips, memory[b].recompute, DeviceKind::cuda, rates, 1);
      planned[b].cost = cost.forward + cost.backward + cost.again;
    } else {
      planned[b].cost = static_cast<double>(clips) * task.cost(buckets[b], memory[b].recompute) +
                        task.cost_of_micro_batch();
    }
  }
  return planned;
}

// Bytes of the largest micro-batch.
std::size_t most_clip_bytes(std::span<const Bucket> buckets,
                            std::span<const std::int64_t> batch_sizes) {
  std::size_t most = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b)
    most = std::max(most, buckets[b].clip_bytes() * static_cast<std::size_t>(samples_in_batch(
                                                        buckets[b], batch_sizes[b])));
  return most;
}

}  // namespace

WorkPlan::WorkPlan(const ClipSource& source, TrainingTask& task, const Deck& deck,
                   std::vector<std::int64_t> batch_sizes, std::span<const StepMemory> memory,
                   DeviceKind device, Groups groups, const std::string& saved_costs)
    : source_(source),
      task_(task),
      groups_(groups),
      costs_(planned_costs(source.buckets(), task, batch_sizes, memory,
                           device == DeviceKind::cuda && groups.ranks == 1)),
      sums_(Tensor::persistent({2 * static_cast<std::int64_t>(memory.size())}, DType::f64)),
      host_sums_(sums_.numel()) {
  if (!saved_costs.empty()) costs_.from_text(saved_costs);
  planner_ = source.plan_steps(std::move(batch_sizes), deck.train.micro_batches,
                               static_cast<std::uint64_t>(deck.run.seed));
}

double WorkPlan::share_of(const MicroBatch& clips, std::int64_t step) const {
  return task_.share(source_.buckets()[clips.bucket], clips, step);
}

WorkPlan::Groups WorkPlan::groups_of(const TrainingTask& task, bool blocks, int rank, int ranks,
                                     int sp) {
  return {rank / sp, ranks / sp, sp,
          task.lockstep_ranks(ranks) > 1 ? SyncMode::lockstep
          : blocks && ranks > 1          ? SyncMode::per_micro_batch
                                         : SyncMode::per_step};
}

WorkPlan::Shares WorkPlan::shares(std::int64_t step) const {
  Shares s{planner_->plan(step), {}, {}};
  std::vector<double> costs;
  for (const MicroBatch& m : s.plan) costs.push_back(costs_.cost(m.bucket) * share_of(m, step));
  s.owner = owners(costs, groups_.count, groups_.sync);
  s.order = order_of(costs, groups_.sync);
  return s;
}

WorkPlan::Work WorkPlan::mine(std::int64_t step) const {
  const auto [plan, owner, order] = shares(step);
  Work mine;
  for (const std::size_t i : order)
    if (owner[i] == groups_.own) mine.emplace_back(static_cast<int>(i), plan[i]);
  return mine;
}

WorkPlan::Step WorkPlan::step(std::int64_t number) const {
  const auto [plan, owner, order] = shares(number);
  Step step;
  step.expected.assign(groups_.count * groups_.ranks, 0.0);
  for (int g = 0; g < groups_.count; ++g)
    step.most = std::max(step.most, static_cast<std::size_t>(std::ranges::count(owner, g)));
  for (const std::string& name : source_.store_names()) step.stores.push_back({name});
  for (const std::size_t i : order)
    if (owner[i] == groups_.own) step.mine.emplace_back(static_cast<int>(i), plan[i]);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const MicroBatch& m = plan[i];
    step.samples.insert(step.samples.end(), m.samples.begin(), m.samples.end());
    if (!step.stores.empty())
      for (const std::int64_t clip : m.clips)
        ++step.stores[source_.buckets()[m.bucket].part_of(clip).store].samples;
    const double expected = costs_.expected(m.bucket) * share_of(m, number);
    for (int r = 0; r < groups_.ranks; ++r) step.expected[owner[i] * groups_.ranks + r] += expected;
  }
  return step;
}

Communicator::Ticket WorkPlan::send(Communicator& comm) {
  sums_.set(std::span<const double>(costs_.take()));
  return comm.all_reduce_sum(sums_);
}

void StepGraphs::run(const std::string& key, ParameterTable& table,
                     const std::function<void()>& work) {
  ++runs_;
  if (!enabled_) return work();
  Entry& entry = entries_[{key, table.written()}];
  // The replayed host work: what was set aside runs behind the graph it followed.
  if (entry.recorded) {
    for (const Part& part : entry.parts) {
      device_runtime().launch(part.graph);
      if (part.then) part.then();
    }
    table.set_step_state(entry.after);
    ++replays_;
    return;
  }
  // The first run of a key is never recorded: matrix products choose their algorithms in it.
  if (!entry.seen || recorded_ == most_graphs) {
    entry.seen = true;
    return work();
  }
  recording_ = &entry;
  try {
    device_runtime().begin_capture();
    capturing_ = true;
    work();
    cut({});
  } catch (...) {
    // The stream must leave capture mode before any further use, even to report the error.
    try {
      if (std::exchange(capturing_, false)) device_runtime().end_capture({});
    } catch (const std::exception&) {
    }
    recording_ = nullptr;
    entry.parts.clear();
    throw;
  }
  recording_ = nullptr;
  if (!enabled_) {
    drop();
    return;
  }
  entry.after = table.step_state();
  entry.recorded = true;
  ++recorded_;
}

void StepGraphs::drop() {
  device_runtime().synchronize();  // they may be running
  for (auto& [key, entry] : entries_) {
    entry.parts.clear();
    entry.recorded = false;
  }
  recorded_ = 0;
  if (std::exchange(enabled_, false))
    log::warn(
        "no memory is left for a graph of a micro-batch: kernels are launched one by one from "
        "now on, which is slower where they are short (lower memory.arena_gib or "
        "train.batch_size)");
}

void StepGraphs::aside(const std::function<void()>& act) {
  if (recording_ == nullptr) return act();
  // Recorded work has not run yet: cut() launches it, so `act` comes behind it now as in replays.
  cut(act);
  act();
  device_runtime().begin_capture();
  capturing_ = true;
}

void StepGraphs::cut(std::function<void()> then) {
  capturing_ = false;
  DeviceGraph graph = device_runtime().end_capture([this] { drop(); });
  device_runtime().launch(graph);
  recording_->parts.push_back({std::move(graph), std::move(then)});
}

ClipStaging::ClipStaging(std::size_t bytes) {
  if (!on_cuda()) return;
  for (Tensor& b : buffers_) b = Tensor::persistent({static_cast<std::int64_t>(bytes)}, DType::u8);
  // The compute stream zeroes the buffers: the first copies must wait for that.
  for (DeviceEvent& e : free_) e = device_runtime().record(Stream::compute);
}

Tensor ClipStaging::stage(std::span<const std::byte> clips) {
  const auto size = static_cast<std::int64_t>(clips.size());
  if (!on_cuda()) return Tensor::borrow(const_cast<std::byte*>(clips.data()), {size}, DType::u8);
  // The copy waits until the compute stream is done with the buffer's last micro-batch; the compute
  // stream then waits for the copy. The host waits for neither.
  turn_ = 1 - turn_;
  DeviceRuntime& gpu = device_runtime();
  gpu.wait(Stream::copy, free_[turn_]);
  Tensor to = buffers_[turn_].slice(0, size);
  gpu.upload(to.raw(), clips.data(), clips.size(), Stream::copy);
  gpu.wait(Stream::compute, gpu.record(Stream::copy));
  return to;
}

void ClipStaging::consumed() {
  if (on_cuda()) free_[turn_] = device_runtime().record(Stream::compute);
}

MicroBatchRunner::MicroBatchRunner(TrainingTask& task, const ClipSource& source, StepGraphs& graphs,
                                   std::span<const StepMemory> memory,
                                   std::span<const std::int64_t> batch_sizes)
    : task_(task),
      source_(source),
      graphs_(graphs),
      memory_(memory),
      staging_(most_clip_bytes(source.buckets(), batch_sizes)) {}

TrainingWork MicroBatchRunner::prepare(const LoadedBatch& clips, float weight) {
  const auto b = static_cast<std::size_t>(clips.what.bucket);
  TrainingWork work = task_.prepare(source_.buckets()[b], clips, staging_.stage(clips.bytes),
                                    memory_[b].recompute, weight);
  work.kept = memory_[b].kept;
  staging_.consumed();
  return work;
}

void MicroBatchRunner::run(const LoadedBatch& clips, bool last, float weight,
                           const OnLoss& on_loss) {
  const TrainingWork work = prepare(clips, weight);
  ParameterTable& params = task_.params();
  const auto run_now = [&] { run_parts(work, params, last, on_loss); };
  const trace::Scope traced("micro-batch", trace::Lane::compute, clips.index, "micro-batch");
  if (work.key.empty()) return run_now();
  graphs_.run(fmt::format("bucket {} clips {} last {} arriving {} {}", clips.what.bucket,
                          clips.what.clips.size(), last, params.any_on_its_way(), work.key),
              params, run_now);
}

void MicroBatchRunner::run_again(int index, const MicroBatch& what, std::int64_t step, float weight,
                                 const OnLoss& on_loss, const std::function<void(int)>& on_ready) {
  const Bucket& bucket = source_.buckets()[what.bucket];
  const std::size_t each = source_.clip_bytes(what);
  std::vector<std::byte> bytes(what.clips.size() * each);
  LoadedBatch clips;
  clips.bytes = bytes;
  clips.step = step;
  clips.index = index;
  clips.what = what;
  for (std::size_t i = 0; i < what.clips.size(); ++i) {
    clips.info.push_back(source_.info(what.bucket, what.clips[i]));
    if (bucket.text_channels > 0)
      clips.text.push_back(source_.read_text(what.bucket, what.clips[i]));
    source_.read_sample(what, i, std::span(bytes).subspan(i * each, each));
  }
  const TrainingWork work = prepare(clips, weight);
  ParameterTable& params = task_.params();
  params.begin_step(on_ready);
  run_parts(work, params, false, on_loss);
  params.finish_step();
  params.begin_step([](int) {});  // on_ready belongs to the caller
}

void MicroBatchRunner::try_out(const LoadedBatch& clips) {
  ParameterTable& params = task_.params();
  params.begin_step([](int) {});
  for (int i = 0; i < 2; ++i) {
    params.begin_micro_batch();
    const TrainingWork work = prepare(clips, 1);
    run_parts(work, params, false, [](const TrainingLoss&) {});
  }
  params.finish_step();
}

NonZeroWeights::NonZeroWeights(ParameterTable& table) {
  Tensor squares = Tensor::empty({1}, DType::f64);
  for (const auto& p : table.all()) {
    const Tensor& held = p->sharded ? p->shard : p->value.defined() ? p->value : p->working;
    if (!p->trainable || p->shape.rank() < 2 || !held.defined()) continue;
    Tensor wide = held;
    if (held.dtype() != DType::f32) {
      wide = Tensor::empty(held.shape(), DType::f32);
      ops::convert(held, wide);
    }
    ops::sum_of_squares(wide, squares, false);
    if (squares.to_host().data<double>()[0] == 0) zero_.push_back(p.get());
  }
  std::vector<float> values;
  for (Parameter* p : zero_) {
    values.resize(static_cast<std::size_t>(p->shape.numel()));
    std::uint32_t state = 1;
    for (float& v : values) {
      state = state * 1664525u + 1013904223u;
      v = (static_cast<float>(state >> 8) / (1 << 23) - 1) / 32;
    }
    p->set(0, values);
  }
}

void NonZeroWeights::restore() {
  for (Parameter* p : zero_)
    p->set(0, std::vector<float>(static_cast<std::size_t>(p->shape.numel())));
}

}  // namespace weft
