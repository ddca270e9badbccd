#include "train/trainer.h"

#include <algorithm>
#include <cmath>

#include "core/clock.h"
#include "core/device.h"
#include "core/error.h"
#include "core/log.h"
#include "models/weights.h"
#include "train/batch.h"
#include "train/memory_plan.h"
#include "train/state.h"
#include "train/stop.h"

namespace weft {
namespace {

int ranks_on_host(MPI_Comm world) {
  MPI_Comm host;
  int ranks = 1;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_size(host, &ranks);
  MPI_Comm_free(&host);
  return ranks;
}

// What all ranks agree on at the end of a step, in one small reduction.
struct Agreement {
  double values[2] = {0, 0};
  double& loss_sum() { return values[0]; }
  double& stop() { return values[1]; }
};

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

}  // namespace

Trainer::Trainer(const Deck& deck, MPI_Comm world)
    : deck_(deck),
      world_(world),
      comm_(make_mpi_communicator(world)),
      host_ranks_(ranks_on_host(world)),
      threads_(set_threads(static_cast<int>(deck.run.threads), host_ranks_)),
      source_(open_clip_source(deck.data.path, deck.data.verify)),
      model_(deck.model) {
  choose_device(deck.device.kind);
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
  const std::size_t capacity = arena_capacity(deck_.memory, host_ranks_);
  WEFT_CHECK(planned_bytes_ <= capacity, Exit::usage,
             "lower train.batch_size, raise model.recompute (up to 1), or use fewer ranks a host",
             "a step needs {:.1f} MiB of activations, a rank here has {:.1f} MiB",
             static_cast<double>(planned_bytes_) / (1 << 20),
             static_cast<double>(capacity) / (1 << 20));
  arena_ = Arena::reserve(capacity);

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

double Trainer::save() {
  const CheckpointInfo info = describe_state(deck_, model_.params(), done_);
  saved_ = done_;
  return checkpoints_->save(info, flat_arrays(model_.params(), *optimizer_));
}

bool Trainer::wait_for_save() { return checkpoints_->wait(); }

StepMetrics Trainer::step() {
  const ArenaScope scope(*arena_);
  const double start = now_seconds();
  ParameterTable& params = model_.params();
  const std::vector<MicroBatch> plan = planner_->plan(done_);
  const auto mine = my_work(plan);
  StepMetrics m;
  m.step = done_;
  m.lr = learning_rate(deck_.train, done_);
  for (const MicroBatch& mb : plan)
    m.samples.insert(m.samples.end(), mb.samples.begin(), mb.samples.end());

  // 1. Forward and backward of this rank's micro-batches; a bucket's reduction starts when its last gradient is in.
  std::vector<Communicator::Ticket> tickets;
  params.begin_step([&](int bucket) {
    const auto& b = params.buckets()[static_cast<std::size_t>(bucket)];
    tickets.push_back(comm_->all_reduce_sum(params.grads().slice(b.begin, b.end)));
  });
  Agreement agreed;
  const float weight = 1.0f / static_cast<float>(m.samples.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const LoadedBatch& clips = prefetcher_->next();
    m.split.data_wait += clips.waited_seconds;
    const Bucket& bucket = source_->buckets()[static_cast<std::size_t>(clips.what.bucket)];
    TrainingBatch batch = make_batch(deck_, bucket, clips, features_.get());
    params.set_counting(i + 1 == mine.size());
    Tape tape;
    const Tensor loss = flow_loss(tape, model_, batch.x0, batch.eps, std::move(batch.in), weight);
    for (const float l : loss.span<float>()) agreed.loss_sum() += static_cast<double>(l);
    tape.backward();
  }
  params.finish_step();
  agreed.stop() = stop_signal() != 0;
  tickets.push_back(comm_->all_reduce_sum(std::span<double>(agreed.values)));
  m.split.compute = now_seconds() - start - m.split.data_wait;

  // 2. What is left of the reductions.
  for (const auto ticket : tickets) m.split.comm_exposed += comm_->wait(ticket);
  m.loss = agreed.loss_sum() / static_cast<double>(m.samples.size());
  stop_ = agreed.stop() > 0;

  // 3. Clip and update. Gradients are the same on every rank by now, so all decide alike.
  const double before_update = now_seconds();
  m.grad_norm = gradient_norm(params);
  WEFT_CHECK(std::isfinite(m.grad_norm) && std::isfinite(m.loss), Exit::non_finite,
             "look at these samples (weft inspect), lower train.lr or raise train.warmup_steps; "
             "the weights were not changed by this step",
             "step {}: loss {} and gradient norm {} on samples [{}]", done_, m.loss, m.grad_norm,
             fmt::join(m.samples, ", "));
  optimizer_step(deck_.train, done_, m.grad_norm, params, *optimizer_);
  m.split.optimizer = now_seconds() - before_update;
  ++done_;
  m.seconds = now_seconds() - start;
  m.resident_bytes = resident_bytes();
  m.arena_peak_bytes = arena_->peak();
  return m;
}

}  // namespace weft
