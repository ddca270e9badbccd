#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "core/clock.h"
#include "core/device.h"
#include "core/error.h"
#include "core/log.h"
#include "models/weights.h"
#include "ops/loss.h"
#include "ops/matmul.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "train/batch.h"
#include "train/memory_plan.h"
#include "train/state.h"
#include "train/stop.h"

namespace weft {
namespace {

// A run that goes on under another deck is the user's right, but not to be missed. Keys that change nothing of what is
// computed may differ.
void warn_of_changes(const Checkpoint& checkpoint, const Deck& deck) {
  if (log::rank() != 0) return;
  const Deck before = parse_deck(checkpoint.info().deck, checkpoint.dir().string(), {});
  std::vector<std::string> keys;
  for (const std::string& key : changed_keys(before, deck)) {
    const std::string section = key.substr(0, key.find('.'));
    const bool counts = section == "model" || section == "diffusion" || section == "mask" ||
                        section == "train" || key == "run.seed" || key == "data.path" ||
                        key == "data.text_features";
    const bool harmless = key == "train.steps" || key == "train.checkpoint_every" ||
                          key == "train.keep" || key == "train.log_every" ||
                          key == "model.recompute";
    if (counts && !harmless) keys.push_back(key);
  }
  if (!keys.empty())
    log::warn("the run goes on under a changed deck: {} differ from those of {}",
              fmt::join(keys, ", "), checkpoint.dir().string());
}

// What all ranks agree on in a step's small reduction, and the gradient's squared norm, as in Issued::results.
enum Result { loss_sum, stop_wishes, squares, result_count };

void free_results(double* p) {
  if (on_cuda())
    device_runtime().free_pinned(p);
  else
    delete[] p;
}

DeviceEvent mark() { return on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent(); }

}  // namespace

Trainer::Trainer(const Deck& deck, MPI_Comm world)
    : deck_(deck),
      world_(world),
      device_(choose_device(deck.device.kind, deck.device.share, world)),
      comm_(make_communicator(world)),
      threads_(set_threads(static_cast<int>(deck.run.threads), device_.host_ranks)),
      source_(open_clip_source(deck.data.path, deck.data.verify)),
      model_(deck.model),
      results_on_host_(on_cuda() ? static_cast<double*>(device_runtime().allocate_pinned(
                                       2 * result_count * sizeof(double)))
                                 : new double[2 * result_count],
                       free_results) {
  WEFT_CHECK(!masks_wanted(deck.mask) || deck.model.patch_size[0] == 1, Exit::usage,
             "use a patch_size of one frame, or no [mask]",
             "frame masks choose single frames, model.patch_size takes {} together",
             deck.model.patch_size[0]);
  WEFT_CHECK(!deck.model.skip_y_embedder, Exit::usage, "set model.skip_y_embedder = false",
             "model.skip_y_embedder = true wants captions that are projected already; training has "
             "none (weft probe takes them)");
  std::int64_t clips = 0;
  for (const Bucket& b : source_->buckets()) {
    check_bucket_fits(b, deck_.model);
    clips += b.clips;
  }
  if (!deck_.data.text_features.empty())
    features_ =
        std::make_unique<TextFeatures>(deck_.data.text_features, clips,
                                       deck_.model.caption_channels, deck_.model.model_max_length);
  checkpoints_ =
      std::make_unique<CheckpointWriter>(deck_.run.dir, world_, static_cast<int>(deck_.train.keep));
}

// Operations of a micro-batch: what its ranks' times are proportional to.
double Trainer::cost(const MicroBatch& m) const {
  const Bucket& b = source_->buckets()[static_cast<std::size_t>(m.bucket)];
  const auto& p = deck_.model.patch_size;
  const auto ceil_div = [](std::int64_t a, std::int64_t c) { return (a + c - 1) / c; };
  return static_cast<double>(m.clips.size()) *
         model_.forward_flops(ceil_div(b.frames, p[0]),
                              ceil_div(b.height, p[1]) * ceil_div(b.width, p[2]),
                              deck_.model.model_max_length);
}

std::vector<std::pair<int, MicroBatch>> Trainer::my_work(
    const std::vector<MicroBatch>& plan) const {
  std::vector<double> costs;
  for (const MicroBatch& m : plan) costs.push_back(cost(m));
  const std::vector<int> owner = share_out(costs, comm_->size());
  std::vector<std::pair<int, MicroBatch>> mine;
  for (std::size_t i = 0; i < plan.size(); ++i)
    if (owner[i] == comm_->rank()) mine.emplace_back(static_cast<int>(i), plan[i]);
  return mine;
}

void Trainer::start() {
  // 0. On a GPU the algorithms of matrix products are measured once a run: a restart must repeat their choice.
  if (on_cuda() && &kernels::set_matmul_tuning != nullptr)
    kernels::set_matmul_tuning((std::filesystem::path(deck_.run.dir) / "matmul.txt").string());

  // 1. Weights and optimizer.
  model_.params().allocate(static_cast<std::int64_t>(deck_.parallel.bucket_mib * (1 << 20) / 4),
                           deck_.model.dtype == "bf16", true);
  std::optional<Checkpoint> checkpoint;
  if (deck_.run.resume) checkpoint = Checkpoint::newest(deck_.run.dir, world_);
  if (!checkpoint) {
    model_.params().initialise(static_cast<std::uint64_t>(deck_.run.seed));
    if (!deck_.model.weights.empty()) load_weights(deck_.model.weights, model_.params());
  }
  optimizer_ = std::make_unique<OptimizerState>(model_.params());
  if (checkpoint) {
    restore_state(*checkpoint, model_.params(), optimizer_.get());
    done_ = saved_ = checkpoint->info().step;
    warn_of_changes(*checkpoint, deck_);
    log::info("going on from {} ({} of {} steps done)", checkpoint->dir().string(), done_,
              deck_.train.steps);
  }

  // 2. The memory of a step, and the region that it will live in.
  for (const Bucket& b : source_->buckets())
    planned_bytes_ =
        std::max(planned_bytes_,
                 plan_step_memory(deck_, model_, b, std::min(deck_.train.batch_size, b.clips)));
  const std::size_t capacity = arena_capacity(deck_.memory, device_.host_ranks);
  WEFT_CHECK(planned_bytes_ <= capacity, Exit::usage,
             "lower train.batch_size, raise model.recompute (up to 1), or use fewer ranks a host",
             "a step needs {:.1f} MiB of activations, a rank here has {:.1f} MiB",
             static_cast<double>(planned_bytes_) / (1 << 20),
             static_cast<double>(capacity) / (1 << 20));
  // A GPU's memory is taken for good: the plan, and an eighth for what operations need inside themselves.
  const std::size_t with_scratch = planned_bytes_ + planned_bytes_ / 8 + (std::size_t{64} << 20);
  arena_ = Arena::reserve(
      on_cuda() && deck_.memory.arena_gib <= 0 ? std::min(capacity, with_scratch) : capacity);
  results_ = Tensor::persistent({result_count}, DType::f64);
  std::size_t clip_bytes = 0;
  for (const Bucket& b : source_->buckets())
    clip_bytes = std::max(clip_bytes, b.clip_bytes() * static_cast<std::size_t>(std::min(
                                                           deck_.train.batch_size, b.clips)));
  staging_ = std::make_unique<ClipStaging>(clip_bytes);
  graphs_ = std::make_unique<StepGraphs>(on_cuda() && deck_.device.graphs);

  // 3. The order of the samples, and the readers that run ahead of it.
  planner_ = std::make_unique<StepPlanner>(source_->buckets(), deck_.train.batch_size,
                                           deck_.train.micro_batches,
                                           static_cast<std::uint64_t>(deck_.run.seed));
  const int readers = deck_.data.readers > 0 ? static_cast<int>(deck_.data.readers)
                                             : Prefetcher::default_readers(threads_);
  prefetcher_ = std::make_unique<Prefetcher>(
      *source_, [this](std::int64_t s) { return my_work(planner_->plan(s)); }, done_,
      deck_.train.steps, static_cast<int>(deck_.data.prefetch), readers);
}

void Trainer::save() {
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  last_update_.reset();  // the next step's time starts after the save
  const CheckpointInfo info = describe_state(deck_, model_.params(), done_);
  saved_ = done_;
  const double stall = checkpoints_->save(info, flat_arrays(model_.params(), *optimizer_));
  if (finished_.empty()) return;
  finished_.back().split.checkpoint += stall;
  finished_.back().seconds += stall;
}

bool Trainer::wait_for_save() { return checkpoints_->wait(); }

std::vector<StepMetrics> Trainer::finished(bool all) {
  if (all && under_way_) complete(*std::exchange(under_way_, std::nullopt));
  return std::exchange(finished_, {});
}

// Forward and backward of one micro-batch; gradients are overwritten by the first of a step and added to by the others.
void Trainer::run_micro_batch(const LoadedBatch& clips, bool first, bool last, float weight) {
  ParameterTable& params = model_.params();
  const Bucket& bucket = source_->buckets()[static_cast<std::size_t>(clips.what.bucket)];
  const TrainingBatch batch =
      make_batch(deck_, bucket, clips, staging_->stage(clips.bytes), features_.get());
  staging_->consumed();
  params.set_counting(last);
  const auto work = [&] {
    Tape tape;
    const Tensor loss = flow_loss(tape, model_, batch.x0, batch.eps, batch.in, weight);
    Tensor total = results_.slice(loss_sum, loss_sum + 1);
    ops::add_sum(loss, total);
    tape.backward();
  };
  graphs_->run(fmt::format("bucket {} clips {} captions {} first {} last {} weight {} at {}",
                           clips.what.bucket, clips.what.clips.size(),
                           batch.in.captions.index.numel(), first, last, weight, batch.x0.raw()),
               params, work);
}

void Trainer::reduce(int bucket) {
  const auto& b = model_.params().buckets()[static_cast<std::size_t>(bucket)];
  tickets_.push_back(comm_->all_reduce_sum(model_.params().grads().slice(b.begin, b.end)));
}

double Trainer::join_reductions() {
  double blocked = 0;
  for (const auto ticket : tickets_) blocked += comm_->wait(ticket);
  tickets_.clear();
  return blocked;
}

void Trainer::step() {
  const ArenaScope scope(*arena_);
  const double start = now_seconds();
  ParameterTable& params = model_.params();
  const std::vector<MicroBatch> plan = planner_->plan(done_);
  const auto mine = my_work(plan);
  Issued step;
  StepMetrics& m = step.metrics;
  m.step = done_;
  m.lr = learning_rate(deck_.train, done_);
  for (const MicroBatch& mb : plan)
    m.samples.insert(m.samples.end(), mb.samples.begin(), mb.samples.end());

  // 1. Forward and backward of this rank's micro-batches; a bucket's reduction starts when its last gradient is in.
  step.begin = mark();
  ops::fill_zero(results_);
  params.begin_step([this](int bucket) { graphs_->aside([this, bucket] { reduce(bucket); }); });
  const float weight = 1.0f / static_cast<float>(m.samples.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const LoadedBatch& clips = prefetcher_->next();
    m.split.data_wait += clips.waited_seconds;
    run_micro_batch(clips, i == 0, i + 1 == mine.size(), weight);
  }
  params.finish_step();
  if (on_cuda())
    comm_->replayed();  // on every rank, with work or without: they count their operations alike
  const double wish = stop_signal() != 0 ? 1 : 0;
  results_.slice(stop_wishes, stop_wishes + 1).set(std::span<const double>(&wish, 1));
  tickets_.push_back(comm_->all_reduce_sum(results_.slice(loss_sum, stop_wishes + 1)));
  m.split.compute = now_seconds() - start - m.split.data_wait;
  step.computed = mark();

  // 2. What is left of the reductions.
  m.split.comm_exposed = join_reductions();
  step.reduced = mark();

  // 3. Clip and update. Gradients are the same on every rank by now, so all decide alike.
  const double before_update = now_seconds();
  Tensor sum = results_.slice(squares, squares + 1);
  ops::sum_of_squares(params.grads(), sum);
  optimizer_step(deck_.train, done_, sum, params, *optimizer_);
  double* results = results_on_host_.get() + done_ % 2 * result_count;
  if (on_cuda())
    device_runtime().copy(results, results_.raw(), results_.bytes(), Stream::compute);
  else
    std::copy_n(results_.data<double>(), static_cast<int>(result_count), results);
  step.results = results;
  step.updated = mark();
  m.split.optimizer = now_seconds() - before_update;
  m.seconds = now_seconds() - start;
  m.resident_bytes = resident_bytes();
  m.arena_peak_bytes = arena_->peak();
  ++done_;

  // 4. On a GPU the host looks at a step's results when the next one has been issued: the GPU never waits for it.
  if (!on_cuda()) {
    complete(std::move(step));
    return;
  }
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  under_way_ = std::move(step);
}

// Waits for the end of a step, and tells what came of it.
void Trainer::complete(Issued step) {
  StepMetrics& m = step.metrics;
  if (on_cuda()) {
    DeviceRuntime& gpu = device_runtime();
    gpu.synchronize(step.updated);
    comm_->check();  // after an abort the GPU runs on, with sums that are worth nothing
    m.split.compute = gpu.seconds(step.begin, step.computed);
    m.split.comm_exposed = gpu.seconds(step.computed, step.reduced);
    m.split.optimizer = gpu.seconds(step.reduced, step.updated);
    m.seconds = gpu.seconds(last_update_ ? last_update_ : step.begin, step.updated);
    last_update_ = step.updated;
  }
  m.loss = step.results[loss_sum] / static_cast<double>(m.samples.size());
  m.grad_norm = std::sqrt(step.results[squares]);
  stop_ = stop_ || step.results[stop_wishes] > 0;
  WEFT_CHECK(std::isfinite(m.grad_norm) && std::isfinite(m.loss), Exit::non_finite,
             "look at these samples (weft inspect), lower train.lr or raise train.warmup_steps; "
             "the weights were not changed by this step",
             "step {}: loss {} and gradient norm {} on samples [{}]", m.step, m.loss, m.grad_norm,
             fmt::join(m.samples, ", "));
  finished_.push_back(m);
}

}  // namespace weft
