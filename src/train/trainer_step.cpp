// One step, and the evaluation of its results.
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "core/trace.h"
#include "ops/optimizer.h"
#include "tensor/device.h"
#include "train/trainer.h"

namespace weft {
namespace {

constexpr double least_timeout = 60, timeout_in_steps = 10;
constexpr std::size_t remembered_steps = 50;

DeviceEvent mark() { return on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent(); }

// A checksum of the list of samples, below 2^52 to be exact in a double.
double checksum_of(const std::vector<std::pair<int, MicroBatch>>& work) {
  std::uint64_t sum = 1;
  for (const auto& [index, batch] : work)
    for (const SampleId id : batch.samples)
      sum = (sum * 6364136223846793005ull + static_cast<std::uint64_t>(id) + 1) >> 1;
  return static_cast<double>(sum >> 12);
}

}  // namespace

void Trainer::step() {
  const ArenaScope scope(*arena_);
  const trace::Scope traced("step", trace::Lane::step, done_, "step");
  const double start = now_seconds();
  comm_->progress(done_, "data");
  prefetcher_->begin_step(done_);
  const std::vector<MicroBatch> plan = planner_->plan(done_);
  const std::vector<int> owner = owners(plan, done_);
  const Work mine = my_work(plan, owner);
  Issued step;
  StepMetrics& m = step.metrics;
  m.step = done_;
  m.lr = learning_rate(optimizers_.front(), done_);
  step.expected.assign(static_cast<std::size_t>(comm_->size()), 0.0);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    m.samples.insert(m.samples.end(), plan[i].samples.begin(), plan[i].samples.end());
    for (int r = 0; r < comm_->size(); ++r)
      if (r / static_cast<int>(deck_.parallel.sp) == owner[i])
        step.expected[static_cast<std::size_t>(r)] +=
            costs_.table->expected(plan[i].bucket) * share_of(plan[i], done_);
  }
  // On a GPU a step reports the busy times of an earlier one, the last whose times the host knows.
  step.expected_of_busy = on_cuda() ? pace_.expected : step.expected;
  begin_faults();

  // 1. Forward and backward of this rank's micro-batches; a bucket's sum starts when its last
  // gradient is in.
  step.begin = mark();
  report_->clear();
  data_parallel_->begin_step(report_->slot(StepReport::squares));
  const float weight = 1.0f / static_cast<float>(m.samples.size());
  double blocked_in_compute = 0;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    comm_->progress(done_, "data");
    const LoadedBatch& clips = prefetcher_->next();
    m.split.data_wait += clips.waited_seconds;
    if (clips.waited_seconds > 0 && trace::enabled)
      trace::add({"wait for clips", trace::Lane::data, now_seconds() - clips.waited_seconds,
                  now_seconds(), clips.index, "micro-batch"});
    comm_->progress(done_, "compute");
    Timed timed{clips.what.bucket, share_of(clips.what, done_), now_seconds(), mark(), {}};
    run_micro_batch(clips, i == 0, i + 1 == mine.size(), weight);
    timed.end = mark();
    const double blocked = take_blocked();
    blocked_in_compute += blocked;
    timed.seconds = now_seconds() - timed.seconds - blocked;
    step.micro_batches.push_back(std::move(timed));
  }
  end_faults(now_seconds() - start);
  // Also on a rank without micro-batches: it announces all buckets, as the sums are collective.
  params().finish_step();
  blocked_in_compute += take_blocked();
  step.compare_weights =
      deck_.parallel.check_every > 0 && (done_ + 1) % deck_.parallel.check_every == 0;
  if (step.compare_weights) {
    // A rank that had no forward has not awaited its new weights yet.
    data_parallel_->settle();
    checksum_weights();
  }
  m.split.compute = now_seconds() - start - m.split.data_wait - blocked_in_compute;
  const double busy = on_cuda() ? pace_.busy : m.split.compute + m.split.data_wait;
  const auto reported = report_->send(
      look_at_requests(), busy, on_cuda() ? pace_.data_wait : m.split.data_wait, checksum_of(mine));
  const bool agrees = costs_.table->due(m.step);
  const auto costs_reported = agrees ? agree_on_costs() : 0;
  step.computed = mark();

  // 2. The rest of the sums.
  comm_->progress(done_, "sums");
  step.blocked = data_parallel_->join() + comm_->wait(reported) + comm_->wait(costs_reported);
  step.reduced = mark();

  // 3. Clip and update; the gathers of the new weights are issued.
  comm_->progress(done_, "optimizer");
  const double before_update = now_seconds();
  const double blocked_for_norm = data_parallel_->norm(report_->rows(), report_->norm()) +
                                  data_parallel_->update(optimizers_, done_, report_->norm());
  task_->end_step(*report_, done_, static_cast<std::int64_t>(m.samples.size()));
  step.rows = report_->fetch();
  if (agrees) step.cost_sums = costs_.host_sums->fetch(costs_.sums);
  step.updated = mark();
  step.blocked_in_compute = blocked_in_compute;
  step.blocked_for_norm = blocked_for_norm;
  m.split.optimizer = now_seconds() - before_update - blocked_for_norm;
  m.seconds = now_seconds() - start;
  m.resident_bytes = resident_bytes();
  m.arena_peak_bytes = arena_->peak();
  ++done_;

  // 4. On a GPU the host evaluates a step after issuing the next one, so that the GPU never waits
  // for the host.
  if (!on_cuda()) {
    complete(std::move(step));
    return;
  }
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  under_way_ = std::move(step);
}

// Forward and backward of one micro-batch; gradients are overwritten by the first of a step and
// added to by the others.
void Trainer::run_micro_batch(const LoadedBatch& clips, bool first, bool last, float weight) {
  const auto b = static_cast<std::size_t>(clips.what.bucket);
  const TrainingWork work = task_->prepare(
      source_->buckets()[b], clips, staging_->stage(clips.bytes), memory_[b].recompute, weight);
  staging_->consumed();
  const auto run = [&] {
    run_parts(work, params(), last, [&](const TrainingLoss& loss) { count_loss(loss); });
  };
  const trace::Scope traced("micro-batch", trace::Lane::compute, clips.index, "micro-batch");
  if (work.key.empty()) {
    run();
    return;
  }
  graphs_->run(
      fmt::format("bucket {} clips {} first {} last {} arriving {} {}", clips.what.bucket,
                  clips.what.clips.size(), first, last, params().any_on_its_way(), work.key),
      params(), run);
}

void Trainer::count_loss(const TrainingLoss& loss) {
  if (sequence_ && sequence_->rank() != 0) return;  // its first rank counts for the group
  Tensor total = report_->slot(StepReport::loss);
  ops::add_sum(loss.clips, total);
  for (std::int64_t i = 0; loss.terms.defined() && i < loss.terms.numel(); ++i) {
    Tensor term = report_->slot(static_cast<StepReport::Slot>(StepReport::terms + i));
    ops::add_sum(loss.terms.slice(i, i + 1), term);
  }
}

// Seconds since the last call that the host waited during compute: for weights, and for tokens of
// the group.
double Trainer::take_blocked() {
  const double in_exchanges = task_->blocked_seconds();
  return data_parallel_->take_blocked() + in_exchanges - std::exchange(pace_.blocked, in_exchanges);
}

unsigned Trainer::look_at_requests() {
  const double longest =
      pace_.recent_seconds.empty()
          ? 0.0
          : *std::max_element(pace_.recent_seconds.begin(), pace_.recent_seconds.end());
  return requests_.look(longest, saves_.stall + checkpoints_->longest_save()) |
         (checkpoints_->writing_for() ? request::saving : 0);
}

// After some steps the ranks exchange the times of their micro-batches.
Communicator::Ticket Trainer::agree_on_costs() {
  costs_.sums.set(std::span<const double>(costs_.table->take()));
  return comm_->all_reduce_sum(costs_.sums);
}

// Waits for the end of a step and evaluates its results.
void Trainer::complete(Issued step) {
  StepMetrics& m = step.metrics;
  if (on_cuda()) {
    comm_->progress(m.step, "wait for the GPU");
    DeviceRuntime& gpu = device_runtime();
    gpu.synchronize(step.updated);
    comm_->check();  // after an abort the GPU runs on, with invalid sums
    if (sequence_) sequence_->check();
    if (Communicator* inner = task_->inner_ranks()) inner->check();
    m.split.compute = gpu.seconds(step.begin, step.computed) - step.blocked_in_compute;
    step.blocked = gpu.seconds(step.computed, step.reduced);
    m.split.optimizer = gpu.seconds(step.reduced, step.updated) - step.blocked_for_norm;
    m.seconds = gpu.seconds(last_update_ ? last_update_ : step.begin, step.updated);
    last_update_ = step.updated;
    pace_.busy = m.split.compute;
    pace_.data_wait = m.split.data_wait;
    pace_.expected = step.expected;
    for (Timed& t : step.micro_batches) t.seconds = gpu.seconds(t.begin, t.end);
  }
  // Scaled to the bucket's full cost: shortened clips take only a share of it.
  for (const Timed& t : step.micro_batches) costs_.table->measured(t.bucket, t.seconds / t.share);
  if (!step.cost_sums.empty()) costs_.table->agree({step.cost_sums.begin(), step.cost_sums.end()});
  m.loss = step.rows.sum(StepReport::loss) / static_cast<double>(m.samples.size());
  const std::vector<std::string> names = task_->terms();
  for (std::size_t i = 0; i < names.size(); ++i)
    m.terms.emplace_back(names[i],
                         step.rows.sum(static_cast<StepReport::Slot>(StepReport::terms + i)) /
                             static_cast<double>(m.samples.size()));
  // The model's norm, or that of another group which is not finite.
  m.grad_norm = std::sqrt(*step.rows.squared_norm);
  for (int g = task_->model_groups(); g < params().groups(); ++g)
    if (!std::isfinite(step.rows.squared_norm[g])) m.grad_norm = step.rows.squared_norm[g];
  bool saving = false;
  for (int r = 0; r < step.rows.ranks(); ++r) {
    const auto reported = static_cast<unsigned>(step.rows.at(r, StepReport::requests));
    saving = saving || (reported & request::saving) != 0;
    requested_ |= reported & ~request::saving;
    requests_.heard(r, reported);
  }
  if (m.step >= saves_.newest)
    saves_.writing = saving;  // reports of earlier steps are from before the save
  if (!std::isfinite(m.grad_norm) || !std::isfinite(m.loss)) explain_non_finite(step);
  if (step.compare_weights) compare_weights(step);
  look_for_spikes(m);
  look_at_ranks(step);
  watch_time(m.seconds);
  comm_->progress(m.step, "log");
  finished_.push_back(m);
}

// Every rank sees the same figures and decides alike. The step has already changed the weights, but
// no checkpoint contains it yet.
void Trainer::look_for_spikes(const StepMetrics& m) {
  const std::pair<const char*, std::optional<SpikeWatch::Spike>> found[] = {
      {"loss", watches_.loss.step(m.loss)},
      {"gradient norm", watches_.grad_norm.step(m.grad_norm)}};
  if (deck_.train.loss_spike == "ignore") return;
  for (const auto& [name, spike] : found) {
    if (!spike) continue;
    const std::string what = fmt::format(
        "step {}: the {} leaps to {:.5g}, {:.0f} deviations above the median {:.5g} of the last "
        "steps (loss {:.5g}, gradient norm {:.5g}; samples {})",
        m.step + 1, name, std::string_view(name) == "loss" ? m.loss : m.grad_norm,
        spike->deviations, spike->median, m.loss, m.grad_norm, fmt::join(m.samples, " "));
    WEFT_CHECK(deck_.train.loss_spike != "stop", Exit::non_finite,
               "the newest checkpoint is from before it. Look at these samples (weft inspect), "
               "lower the learning rate or train.grad_clip, or set train.loss_spike = \"warn\"",
               "{}", what);
    if (first_rank()) log::warn("{}", what);
  }
}

// Finds who was slow and who waited, and checks that the ranks of a group had the same clips.
void Trainer::look_at_ranks(Issued& step) {
  StepMetrics& m = step.metrics;
  const int ranks = step.rows.ranks(), sp = static_cast<int>(deck_.parallel.sp);
  std::vector<double> busy;
  for (int r = 0; r < ranks; ++r) {
    busy.push_back(step.rows.at(r, StepReport::busy));
    const int first = r / sp * sp;
    WEFT_CHECK(step.rows.at(r, StepReport::samples) == step.rows.at(first, StepReport::samples),
               Exit::internal, "this is a bug in weft, please report it with the log",
               "step {}: {} and rank {} share clips, but trained on different ones", m.step,
               name_of_rank(r), first);
  }
  const auto slowest = std::max_element(busy.begin(), busy.end());
  m.slowest_rank = static_cast<int>(slowest - busy.begin());
  for (int r = 0; r < ranks; ++r) {
    m.rank_busy.push_back(static_cast<float>(busy[static_cast<std::size_t>(r)]));
    m.rank_wait.push_back(static_cast<float>(*slowest - busy[static_cast<std::size_t>(r)]));
    m.rank_data_wait.push_back(static_cast<float>(step.rows.at(r, StepReport::data_wait)));
  }
  m.spread = spread_of(m.rank_busy);
  const double behind = *slowest - busy[static_cast<std::size_t>(comm_->rank())];
  // All of this rank's blocked time, also without overlap: the first part of it, up to `behind`,
  // was spent waiting for the slowest rank.
  const double blocked = step.blocked + step.blocked_in_compute + step.blocked_for_norm;
  m.split.wait_slowest = std::clamp(behind, 0.0, blocked);
  m.split.comm_exposed = blocked - m.split.wait_slowest;
  if (*slowest == 0 || step.expected_of_busy.empty()) return;  // nothing is known yet
  for (const StragglerWatch::Verdict& v : watches_.stragglers->step(busy, step.expected_of_busy)) {
    if (!first_rank()) continue;
    if (v.recovered)
      log::info("step {}: {} is as fast as the others again", m.step + 1, name_of_rank(v.rank));
    else
      log::warn(
          "step {}: {} is slow: its work takes {:.2f} times as long as on the others ({:.0f} % of "
          "it waiting for clips)",
          m.step + 1, name_of_rank(v.rank), v.slower,
          100 * step.rows.at(v.rank, StepReport::data_wait) /
              busy[static_cast<std::size_t>(v.rank)]);
  }
}

// A hang is ten median steps without progress, but at least a minute.
void Trainer::watch_time(double seconds) {
  if (pace_.recent_seconds.size() == remembered_steps)
    pace_.recent_seconds.erase(pace_.recent_seconds.begin());
  pace_.recent_seconds.push_back(seconds);
  if (deck_.parallel.hang_timeout > 0 || pace_.recent_seconds.size() < 5) return;
  set_timeout(std::max(least_timeout, timeout_in_steps * upper_median(pace_.recent_seconds)));
}

}  // namespace weft
