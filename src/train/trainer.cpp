// First the making of a trainer (data, model, state, memory plan, readers), then its step, then
// saves.
#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"
#include "core/progress.h"
#include "core/trace.h"
#include "data/clip_store.h"
#include "data/images/labelled_images.h"
#include "ops/optimizer.h"
#include "tensor/device.h"
#include "train/gpu_ways.h"
#include "train/metrics/run_facts.h"
#include "train/step_cost.h"
#include "train/validation.h"

namespace weft {
namespace {

// A run may go on under another deck, but the log must show it. Keys that do not affect the
// computation may differ.
void warn_of_changes(const Checkpoint& checkpoint, const Deck& deck) {
  if (log::rank() != 0) return;
  Deck before = parse_deck(checkpoint.info().deck, checkpoint.dir().string(), {}), now = deck;
  // Older decks name the values that "the model's own" stands for now.
  for (Deck* d : {&before, &now}) d->train = optimizer_of(d->train, "adamw", 0, 0, 1);
  std::vector<std::string> keys;
  for (const ChangedKey& k : changed_keys(before, now, true))
    keys.push_back(fmt::format("{} {} -> {}", k.key, printable(k.was, 80), printable(k.is, 80)));
  if (!keys.empty())
    log::warn("resuming from {} with a changed deck: {}", checkpoint.dir().string(),
              fmt::join(keys, ", "));
}

// The least of all ranks' values, on every rank.
std::size_t least(std::size_t value, MPI_Comm world) {
  unsigned long long mine = value, all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_UNSIGNED_LONG_LONG, MPI_MIN, world);
  return static_cast<std::size_t>(all);
}

// Whether some optimizer keeps squares of gradients.
bool keeps_squares(const std::vector<TrainDeck>& optimizers) {
  return std::ranges::any_of(optimizers, [](const auto& o) { return o.optimizer != "sgd"; });
}

DeviceEvent mark() { return on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent(); }

// A checksum of the list of samples, below 2^52 to be exact in a double.
double checksum_of(const std::vector<std::pair<int, MicroBatch>>& work) {
  std::uint64_t sum = 1;
  for (const auto& [index, batch] : work)
    for (const SampleId id : batch.samples)
      sum = (sum * 6364136223846793005ull + static_cast<std::uint64_t>(id) + 1) >> 1;
  return static_cast<double>(sum >> 12);
}

std::unique_ptr<Communicator> communicator_for(const Deck& deck, MPI_Comm world) {
  if (deck.parallel.deterministic) use_repeatable_sums();
  return make_communicator(world);
}

}  // namespace

Trainer::Trainer(const Deck& deck, const TaskFactory& make_task, MPI_Comm world)
    : deck_(deck),
      world_(world),
      device_(choose_device(deck.device.kind, deck.device.share, world)),
      comm_(communicator_for(deck, world)),
      threads_(set_threads(static_cast<int>(deck.run.threads), device_.core_sharers)),
      task_(make_task(deck_)),
      review_(deck_, *task_, comm_->rank(), texts_of_ranks(host_name(), world)),
      requests_(deck.run.dir, deck.run.stop_margin, deck.run.max_hours) {
  choose_groups();
  open_data();
  checkpoints_ =
      std::make_unique<CheckpointWriter>(deck_.run.dir, world_, static_cast<int>(deck_.train.keep));
}

void Trainer::choose_groups() {
  const int sp = static_cast<int>(deck_.parallel.sp);
  sequence_ = nn::make_sequence_group(world_, sp, default_comm_timeout, comm_.get());
  task_->share_clips(sequence_.get());
  task_->join_ranks(world_, comm_.get());
  groups_ = WorkPlan::groups_of(*task_, sharding().has_value(), comm_->rank(), comm_->size(), sp);
  const int groups = groups_.count;
  if (first_rank() && deck_.train.micro_batches < groups)
    log::warn("train.micro_batches = {} gives work to {} of {} {}: the others wait in every step",
              deck_.train.micro_batches, deck_.train.micro_batches, groups,
              sp > 1 ? "groups of parallel.sp ranks" : "ranks");
  WEFT_CHECK(
      groups_.sync != SyncMode::lockstep || deck_.train.micro_batches % groups == 0, Exit::usage,
      fmt::format("set train.micro_batches to a multiple of {}, or train.sync_bn = false", groups),
      "{} micro-batches a step do not share out evenly over {} ranks that share the "
      "statistics of batch norm",
      deck_.train.micro_batches, groups);
}

void Trainer::open_data() {
  TrainingData data = open_training_data(deck_.data, deck_.media, held_out_choice(deck_));
  source_ = std::move(data.training);
  held_out_ = std::move(data.held_out);
  data_id_ = source_->content_id();
  class_names_ = source_->buckets().front().class_names;
  if (first_rank()) text_encoder_ = encoder_of_captions(deck_.data);
  if (first_rank() &&
      std::ranges::any_of(deck_.data.prompt_prefixes, [](const auto& p) { return !p.empty(); }))
    log::warn(
        "data.prompt_prefixes has no effect: training reads captions only as text features; set it "
        "for weft encode, which makes them");
  // Clips of validation.path may need what the training's do not, such as a VAE.
  std::vector<Bucket> buckets = source_->buckets();
  if (held_out_.clips)
    buckets.insert(buckets.end(), held_out_.clips->buckets().begin(),
                   held_out_.clips->buckets().end());
  task_->open(buckets);
  batch_sizes_ = batch_sizes(deck_.train, source_->buckets());
  std::vector<std::string> small;
  for (std::size_t b = 0; b < batch_sizes_.size(); ++b)
    if (const auto clips = samples_in_batch(source_->buckets()[b], batch_sizes_[b]);
        clips > 0 && clips < batch_sizes_[b])
      small.push_back(
          fmt::format("{} ({} of {})", source_->buckets()[b].name, clips, batch_sizes_[b]));
  if (first_rank() && !small.empty())
    log::warn("micro-batches have all clips of their bucket, fewer than train.batch_size(s): {}",
              fmt::join(small, ", "));
}

void Trainer::start() {
  WEFT_CHECK(!deck_.parallel.deterministic || !std::ranges::count(deck_.device.tried, "five"),
             Exit::usage, "leave one of them out",
             "device.try = [\"five\"] adds in no fixed order, parallel.deterministic = true wants "
             "one");
  // No graph may hold a fault that a test orders.
  graphs_ = std::make_unique<StepGraphs>(on_cuda() && deck_.device.graphs && !fault::is_possible());
  params().set_aside([this](std::function<void()> act) { graphs_->aside(act); });
  data_parallel_ = std::make_unique<DataParallel>(
      deck_.parallel, *comm_, params(), [this](std::function<void()> act) { graphs_->aside(act); },
      task_->model_groups());
  optimizers_ = task_->optimizers();
  check_state_fits();
  load_state();
  plan_step();
  if (on_cuda())
    ways_ =
        choose_ways(deck_, *source_, batch_sizes_, memory_, world_, [this] { try_each_bucket(); });
  open_readers();
  // Not before: reading a checkpoint may take longer than a step.
  if (deck_.parallel.hang_timeout > 0) set_timeout(deck_.parallel.hang_timeout);
}

void Trainer::set_timeout(double seconds) {
  comm_->set_timeout(seconds);
  if (sequence_) sequence_->set_timeout(seconds);
  if (Communicator* inner = task_->inner_ranks()) inner->set_timeout(seconds);
}

// On the CPU pages become resident when they are written: what does not fit would end in the first
// step, by the kernel. Only a warning: swap, or memory that
// others free, may be enough.
void Trainer::check_state_fits() {
  if (on_cuda()) return;
  params().lay_out(bucket_elements(deck_.parallel, comm_->size()), task_->bf16(), sharding(),
                   comm_->size());
  const std::size_t state =
      state_bytes(params(), task_->bf16(), deck_.parallel.zero >= 1, comm_->size(),
                  keeps_squares(optimizers_), deck_.train.ema_decay.size())
          .state();
  // Before any rank allocates: least() waits for all.
  const std::size_t room =
      least(host_memory().available / static_cast<std::size_t>(device_.host_ranks), world_);
  if (first_rank() && room > 0 && state > room)
    log::warn(
        "weights, gradients and optimizer need {} a rank, which has {} of its host's available "
        "memory: the kernel may end the job. {}",
        size_text(static_cast<double>(state)), size_text(static_cast<double>(room)),
        deck_.parallel.zero == 0 && comm_->size() > 1
            ? "Set parallel.zero = 1 (ZeRO-1), which shards the optimizer state"
        : deck_.parallel.zero == 1 && comm_->size() > 1 &&
                can_shard(params(), task_->blocks_named())
            ? "Set parallel.zero = 3, which shards weights and gradients too"
            : "Take more hosts, or a smaller model");
}

std::optional<Sharding> Trainer::sharding() {
  return sharding_of(deck_.parallel, params(), task_->blocks_named(), comm_->rank(), comm_->size());
}

void Trainer::load_state() {
  ParameterTable& table = params();
  table.set_memory(
      [this](const Shape& shape, DType dtype) { return comm_->persistent(shape, dtype); });
  table.allocate(bucket_elements(deck_.parallel, comm_->size()), task_->bf16(), true, sharding(),
                 comm_->size());
  if (first_rank() && deck_.parallel.zero == 3 && comm_->size() > 1) {
    if (params().sharded_buckets() == 0)
      log::info("zero = 3  shards as zero = 1 here: no block of the model is trained as a whole");
    else
      log::info("zero = 3  {} of blocks, of which a rank has two at a time",
                counted(params().sharded_buckets(), "bucket"));
  }
  std::optional<Checkpoint> checkpoint;
  if (first_rank()) run_id_ = stored_run_id(deck_.run.dir);
  if (deck_.run.resume) checkpoint = Checkpoint::newest(deck_.run.dir, world_, run_id_);
  // Before make_state(): the EMA starts as a copy of the weights.
  if (!checkpoint) started_from_ = task_->start_weights();
  if (started_from_.empty())
    started_from_ = fmt::format("drawn from run.seed = {}", deck_.run.seed);
  data_parallel_->make_state(keeps_squares(optimizers_), deck_.train.ema_decay);
  if (!repeats_)
    checkpoints_->check_room(
        flat_arrays(params(), data_parallel_->state(), comm_->rank(), comm_->size()));
  // Without a usable run.json, the newest checkpoint names the run.
  if (checkpoint && run_id_.empty()) run_id_ = checkpoint->info().notes.run;
  if (run_id_.empty()) run_id_ = new_run_id();
  if (!checkpoint) return;
  warn_of_changes(*checkpoint, deck_);  // first: what differs may be why it does not fit
  restore_state(*checkpoint, table, data_parallel_->state());
  data_parallel_->spread_weights();
  done_ = saves_.newest = checkpoint->info().step;
  saved_ = checkpoint->info().notes;
  if (!saved_.task.empty()) task_->set_state(saved_.task);
  validation_note_ = saved_.validation;
  if (first_rank()) check_data(checkpoint->dir().string());
  // Carries over the notes that the data of this start do not give.
  if (text_encoder_.empty()) text_encoder_ = saved_.text_encoder;
  if (class_names_.empty()) class_names_ = saved_.classes;
  started_from_ = checkpoint->dir().string();
  log::info("resuming from {} ({} of {} steps done)", started_from_, done_, deck_.train.steps);
}

void Trainer::check_data(const std::string& checkpoint) const {
  check_class_names(saved_.classes, checkpoint, class_names_, deck_.data.path);
  WEFT_CHECK(
      saved_.text_encoder.empty() || text_encoder_.empty() || saved_.text_encoder == text_encoder_,
      Exit::data,
      "encode the captions as before, or start from it in a new run.dir (model.weights)",
      "the captions of data.path = {} were encoded by another text encoder than those of {}",
      deck_.data.path, checkpoint);
  if (!saved_.data.empty() && saved_.data != data_text())
    log::warn(
        "data.path = {} is not the data that {} was trained on: clips per bucket {}, now {}. The "
        "order of samples changes",
        deck_.data.path, checkpoint, saved_.data, data_text());
  else if (!saved_.data_id.empty() && !data_id_.empty() && saved_.data_id != data_id_)
    log::warn(
        "data.path = {} is not the data that {} was trained on: the same number of clips, but "
        "different ones",
        deck_.data.path, checkpoint);
}

// Plans the memory of a step and reserves the arena for it.
void Trainer::plan_step() {
  // The least of all ranks: recomputation, and so placements, must be the same everywhere.
  const std::size_t capacity =
      least(arena_capacity(deck_.memory, device_.host_ranks, comm_->size()), world_);
  memory_ = plan_memory(*task_, source_->buckets(), batch_sizes_, capacity, this_device().kind,
                        keeps_activations(deck_));
  for (const auto& plan : also_) also_bytes_ = std::max(also_bytes_, plan(capacity));
  // Placements follow the costs, and the costs follow recomputation, which may differ between ranks
  // that share clips unevenly: all take the largest.
  for (StepMemory& m : memory_) {
    const double mine = m.recompute;
    MPI_Allreduce(&mine, &m.recompute, 1, MPI_DOUBLE, MPI_MAX, world_);
    const std::uint64_t kept = m.recompute > mine ? 0 : m.kept;
    MPI_Allreduce(&kept, &m.kept, 1, MPI_UINT64_T, MPI_MIN, world_);
  }
  if (groups_.sync == SyncMode::lockstep)
    recompute_alike(*task_, source_->buckets(), batch_sizes_, memory_);
  if (on_cuda() && keeps_activations(deck_))
    keep_as_before(memory_, source_->buckets(), saved_.kept);
  // Operations alone are asked for, which no rate changes.
  const Rates any{1, 1, 1, 1, 0, "", 1};
  for (std::size_t b = 0; b < batch_sizes_.size(); ++b) {
    const Bucket& bucket = source_->buckets()[b];
    flops_.push_back(dry_run_cost(*task_, bucket, samples_in_batch(bucket, batch_sizes_[b]), 0,
                                  this_device().kind, any, 1)
                         .flops);
  }
  // A GPU's memory stays taken until the end, so the arena gets no more than the plan and scratch.
  arena_ = Arena::reserve(on_cuda() && deck_.memory.arena_gib <= 0
                              ? std::min(capacity, planned_bytes() + arena_scratch(planned_bytes()))
                              : capacity);
  report_ = std::make_unique<StepReport>(*comm_, params().groups(),
                                         static_cast<int>(source_->store_names().size()));
  store_losses_ = std::make_unique<StoreLosses>(*source_, batch_sizes_);
  if (deck_.train.layer_norms_every > 0)
    layer_norms_ = std::make_unique<LayerNorms>(params(), data_parallel_->state(), *comm_);
  runner_ = std::make_unique<MicroBatchRunner>(*task_, *source_, *graphs_, memory_, batch_sizes_);
}

std::string encoder_of_captions(const DataDeck& data) {
  std::string found;
  if (!data.text_features.empty()) {
    const auto metadata = SafetensorsFile::open(data.text_features).metadata();
    if (const auto of = metadata.find("encoder"); of != metadata.end())
      found = encoder_in(of->second);
  }
  for (const std::string& store : data.all_paths())
    if (found.empty()) found = encoder_in(stored_made_by(store));
  return found;
}

// Compared when a run goes on, with the source's content_id().
std::string Trainer::data_text() const {
  std::string text;
  for (const Bucket& b : source_->buckets())
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", b.name, b.clips);
  return text;
}

std::size_t Trainer::planned_bytes() const {
  std::size_t most = also_bytes_;
  for (const StepMemory& m : memory_) most = std::max(most, m.bytes);
  return most;
}

// Forward and backward of a micro-batch of each bucket, of which nothing is left: all ranks run the
// same.
void Trainer::try_each_bucket() {
  const std::vector<Bucket>& buckets = source_->buckets();
  const auto plan =
      source_->plan_steps(batch_sizes_, 1, static_cast<std::uint64_t>(deck_.run.seed));
  const auto with_clips =
      std::ranges::count_if(buckets, [](const Bucket& b) { return samples_in_batch(b, 1) > 0; });
  std::map<int, MicroBatch> first;
  for (std::int64_t step = 0;
       std::ssize(first) < with_clips && step < plan->micro_batches_per_epoch(); ++step) {
    MicroBatch batch = plan->plan(step).front();
    first.try_emplace(batch.bucket, std::move(batch));
  }
  std::vector<MicroBatch> all;
  for (auto& [bucket, batch] : first) all.push_back(std::move(batch));
  Prefetcher clips(
      *source_,
      [&](std::int64_t step) {
        return Prefetcher::Work{{0, all[step]}};
      },
      0, std::ssize(all), 1, 1, 1, deck_.data.max_damaged);
  const ArenaScope scope(*arena_);
  // Statistics of batch norm go with a forward.
  Tensor fixed = params().fixed();
  const Tensor fixed_before = fixed.to_host();
  data_parallel_->begin_passes(true);
  NonZeroWeights weights(params());
  for (std::int64_t step = 0; step < std::ssize(all); ++step) {
    comm_->progress(done_, Phase::measuring);
    clips.begin_step(step);
    runner_->try_out(clips.next());
  }
  data_parallel_->end_passes();
  weights.restore();
  data_parallel_->spread_weights();  // whole blocks that ranks still hold have the other values
  if (fixed.numel() > 0) fixed.set(std::span<const float>(fixed_before.span<float>()));
  take_blocked();  // no step's
  comm_->progress(done_, Phase::none);
}

// The order of the samples, their placement on ranks, and the readers that prefetch them.
void Trainer::open_readers() {
  work_ = std::make_unique<WorkPlan>(*source_, *task_, deck_, batch_sizes_,
                                     planned_costs(source_->buckets(), *task_, batch_sizes_,
                                                   memory_, on_cuda() && groups_.ranks == 1),
                                     groups_, saved_.costs);
  if (repeats_) return load_costliest();
  const int readers = deck_.data.readers > 0 ? static_cast<int>(deck_.data.readers)
                                             : Prefetcher::default_readers(threads_);
  prefetcher_ = std::make_unique<Prefetcher>(
      *source_, [this](std::int64_t s) { return work_->mine(s); }, done_, deck_.train.steps,
      static_cast<int>(deck_.data.prefetch), readers, deck_.data.prefetch, deck_.data.max_damaged);
}

void Trainer::load_costliest() {
  const std::vector<Bucket>& buckets = source_->buckets();
  const auto cost = [&](std::size_t b) {
    const std::int64_t clips = samples_in_batch(buckets[b], batch_sizes_[b]);
    return clips == 0 ? -1 : static_cast<double>(clips) * task_->cost(buckets[b], 0);
  };
  std::size_t costliest = 0;
  for (std::size_t b = 1; b < buckets.size(); ++b)
    if (cost(b) > cost(costliest)) costliest = b;
  std::int64_t step = 0;
  while (static_cast<std::size_t>(work_->mine(step).front().second.bucket) != costliest) ++step;
  const WorkPlan::Work work = work_->mine(step);
  prefetcher_ = std::make_unique<Prefetcher>(
      *source_, [work](std::int64_t) { return work; }, 0, 1, 1, 1, 0, deck_.data.max_damaged);
  repeated_ = prefetcher_->next();
  repeated_->waited_seconds = 0;  // no step's
}

// One step. On a GPU it is issued, and the one before is evaluated.
void Trainer::step() {
  const ArenaScope scope(*arena_);
  const trace::Scope traced("step", trace::Lane::step, done_, "step");
  const double start = now_seconds();
  comm_->progress(done_, Phase::plan);
  WorkPlan::Step work;
  if (repeated_) {
    work = {{{0, repeated_->what}}, repeated_->what.samples, {}, {0}, 1};
  } else {
    prefetcher_->begin_step(done_);
    work = work_->step(done_);
  }
  IssuedStep step;
  StepMetrics& m = step.metrics;
  m.step = done_;
  m.lr = learning_rate(optimizers_.front(), done_);
  m.samples = std::move(work.samples);
  m.stores = std::move(work.stores);
  step.expected = std::move(work.expected);
  // On a GPU a step reports the busy times of an earlier one, the last whose times the host knows.
  step.expected_of_busy = on_cuda() ? ended_.expected : step.expected;
  crash::at("step", done_ + 1);
  fault::at(fault::Place::step, done_);

  // 1. Forward and backward of this rank's micro-batches; a bucket's sum over ranks starts when its
  // last gradient is in.
  step.begin = mark();
  report_->clear();
  data_parallel_->begin_step(report_->slot(StepReport::squares));
  compute(work.mine, work.most, step);
  fault::at(fault::Place::computed);
  // Also on a rank without micro-batches: it announces all buckets, as the sums are collective.
  params().finish_step();
  step.blocked_in_compute += take_blocked();

  // 2. This rank's report to all others.
  const std::int64_t check_every = deck_.parallel.check_every;
  step.compare_weights = check_every > 0 && (done_ + 1) % check_every == 0;
  if (step.compare_weights) {
    // A rank that had no forward has not awaited its new weights yet.
    data_parallel_->settle();
    checksum_weights(params(), *report_);
  }
  m.split.compute = now_seconds() - start - m.split.data_wait - step.blocked_in_compute;
  const double busy = on_cuda() ? ended_.busy : m.split.compute + m.split.data_wait;
  const double data_wait = on_cuda() ? ended_.data_wait : m.split.data_wait;
  const auto reported = report_->send(look_at_requests(now_seconds() - start), busy, data_wait,
                                      checksum_of(work.mine));
  const bool exchanges_costs = work_->exchanges_after(done_);
  const auto costs_sent = exchanges_costs ? work_->send(*comm_) : 0;
  step.computed = mark();

  // 3. The rest of the sums.
  comm_->progress(done_, Phase::sums);
  step.blocked = data_parallel_->join() + comm_->wait(reported) + comm_->wait(costs_sent);
  step.reduced = mark();

  // 4. Clip and update; the gathers of the new weights are issued.
  comm_->progress(done_, Phase::optimizer);
  const double before_update = now_seconds();
  step.blocked_for_norm = data_parallel_->norm(report_->rows(), report_->norm());
  const bool by_layer = layer_norms_ && (done_ + 1) % deck_.train.layer_norms_every == 0;
  const auto by_layer_sent = by_layer ? layer_norms_->send() : 0;
  step.blocked_for_norm += data_parallel_->update(optimizers_, done_, report_->norm());
  if (by_layer) {
    step.blocked_for_norm += comm_->wait(by_layer_sent);
    step.layer_squares = layer_norms_->fetch();
  }
  task_->end_step(*report_, done_, static_cast<std::int64_t>(m.samples.size()));
  step.rows = report_->fetch();
  if (exchanges_costs) step.cost_sums = work_->fetch();
  step.updated = mark();
  m.split.optimizer = now_seconds() - before_update - step.blocked_for_norm;
  m.seconds = now_seconds() - start;
  m.resident_bytes = resident_bytes();
  m.arena_peak_bytes = arena_->peak();
  ++done_;

  // 5. On a GPU the host evaluates a step after issuing the next one, so that the GPU never waits
  // for the host.
  if (!on_cuda()) return complete(std::move(step));
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  under_way_ = std::move(step);
}

// Forward and backward of this rank's micro-batches, as their clips come in. In lockstep it passes
// through as many as the rank with the `most`.
void Trainer::compute(const WorkPlan::Work& work, std::size_t most, IssuedStep& step) {
  StepMetrics& m = step.metrics;
  const float weight = 1.0f / static_cast<float>(m.samples.size());
  const std::size_t all = data_parallel_->in_lockstep() ? most : work.size();
  for (std::size_t i = 0; i < all; ++i) {
    if (i >= work.size()) {
      comm_->progress(done_, Phase::compute);
      data_parallel_->pass_without_clips();
      step.blocked_in_compute += take_blocked();
      continue;
    }
    comm_->progress(done_, Phase::data);
    const LoadedBatch& clips = repeated_ ? *repeated_ : prefetcher_->next();
    m.split.data_wait += clips.waited_seconds;
    if (clips.waited_seconds > 0 && trace::enabled)
      trace::add({"wait for clips", trace::Lane::data, now_seconds() - clips.waited_seconds,
                  now_seconds(), clips.index, "micro-batch"});
    comm_->progress(done_, Phase::compute);
    const double share = work_->share_of(clips.what, done_), start = now_seconds();
    const DeviceEvent begin = mark();
    store_losses_->begin(clips.what);
    data_parallel_->begin_micro_batch();
    runner_->run(clips, i + 1 == all, weight,
                 [this](const TrainingLoss& loss) { count_loss(loss); });
    const DeviceEvent end = mark();
    const double blocked = take_blocked();
    step.blocked_in_compute += blocked;
    m.flops += share * flops_[clips.what.bucket];
    step.micro_batches.push_back(
        {clips.what.bucket, share, now_seconds() - start - blocked, begin, end});
  }
}

void Trainer::count_loss(const TrainingLoss& loss) {
  if (sequence_ && sequence_->rank() != 0) return;  // its first rank counts for the group
  Tensor total = report_->slot(StepReport::loss);
  ops::add_sum(loss.clips, total);
  store_losses_->add(loss.clips, *report_);
  for (std::int64_t i = 0; loss.terms.defined() && i < loss.terms.numel(); ++i) {
    Tensor term = report_->slot(static_cast<StepReport::Slot>(StepReport::terms + i));
    ops::add_sum(loss.terms.slice(i, i + 1), term);
  }
}

// Seconds since the last call that the host waited during compute: for weights, and for tokens of
// the group.
double Trainer::take_blocked() {
  const double in_exchanges = task_->blocked_seconds();
  return data_parallel_->take_blocked() + in_exchanges - std::exchange(blocked_, in_exchanges);
}

unsigned Trainer::look_at_requests(double this_step) {
  return requests_.look(std::max(review_.longest_step(), this_step) + longest_aside_,
                        saves_.stall + checkpoints_->longest_save()) |
         (checkpoints_->writing_for() ? request::saving : 0);
}

// Waits for the end of a step and evaluates its results.
void Trainer::complete(IssuedStep step) {
  StepMetrics& m = step.metrics;
  if (on_cuda()) read_device_times(step);
  // Scaled to the bucket's full cost: shortened clips take only a share of it.
  for (const auto& t : step.micro_batches) work_->measured(t.bucket, t.seconds / t.share);
  if (!step.cost_sums.empty()) work_->agree(step.cost_sums);
  review_.sum_up(step);
  for (std::size_t l = 0; l < step.layer_squares.size() && l < layer_norms_->layers().size(); ++l)
    m.layer_norms.emplace_back(layer_norms_->layers()[l], std::sqrt(step.layer_squares[l]));
  hear_requests(step);
  if (!std::isfinite(m.grad_norm) || !std::isfinite(m.loss)) explain_non_finite(step);
  review_.judge(step);
  const std::optional<double> timeout = review_.hang_timeout(m.seconds);
  if (timeout && deck_.parallel.hang_timeout <= 0) set_timeout(*timeout);
  comm_->progress(m.step, Phase::log);
  m.split.checkpoint = std::exchange(saves_.uncounted, 0);
  m.seconds += m.split.checkpoint;
  finished_.push_back(m);
}

// Waits for the GPU, and takes the step's times from the marks in its stream.
void Trainer::read_device_times(IssuedStep& step) {
  StepMetrics& m = step.metrics;
  comm_->progress(m.step, Phase::wait_for_gpu);
  DeviceRuntime& gpu = device_runtime();
  gpu.synchronize(step.updated);
  comm_->check();  // after an abort the GPU runs on, with invalid sums
  if (sequence_) sequence_->check();
  if (Communicator* inner = task_->inner_ranks()) inner->check();
  m.split.compute = gpu.seconds(step.begin, step.computed) - step.blocked_in_compute;
  step.blocked = gpu.seconds(step.computed, step.reduced);
  m.split.optimizer = gpu.seconds(step.reduced, step.updated) - step.blocked_for_norm;
  m.seconds = gpu.seconds(ended_.update ? ended_.update : step.begin, step.updated);
  for (auto& t : step.micro_batches) t.seconds = gpu.seconds(t.begin, t.end);
  ended_ = {m.split.compute, m.split.data_wait, step.expected, step.updated};
}

void Trainer::hear_requests(const IssuedStep& step) {
  bool saving = false;
  for (int r = 0; r < step.rows.ranks(); ++r) {
    const auto reported = static_cast<unsigned>(step.rows.at(r, StepReport::requests));
    saving = saving || (reported & request::saving) != 0;
    requested_ |= reported & ~request::saving;
    requests_.heard(r, reported);
  }
  // Reports of earlier steps are from before the save.
  if (step.metrics.step >= saves_.newest) saves_.writing = saving;
}

// Runs the step again, on every rank, from the same weights, and throws what that shows.
void Trainer::explain_non_finite(const IssuedStep& step) {
  const std::int64_t number = step.metrics.step;
  // The next step may be issued already; it changes no weights, since its norm is NaN too
  // (DataParallel::norm).
  if (on_cuda()) device_runtime().synchronize(device_runtime().record(Stream::compute));
  comm_->progress(number, Phase::step_again);
  under_way_.reset();
  std::string mine;
  {
    const ArenaScope scope(*arena_);
    const WorkPlan::Work work =
        repeated_ ? WorkPlan::Work{{0, repeated_->what}} : work_->mine(number);
    mine = find_non_finite(work, repeated_ ? repeated_->step : number,
                           1.0f / static_cast<float>(step.metrics.samples.size()), params(),
                           *data_parallel_, *runner_, review_.rank_name(comm_->rank()));
  }
  review_.throw_non_finite(step, fmt::format("{}", fmt::join(texts_of_ranks(mine, world_), "")));
}

std::vector<StepMetrics> Trainer::finished(bool all) {
  if (all && under_way_) complete(*std::exchange(under_way_, std::nullopt));
  return std::exchange(finished_, {});
}

unsigned Trainer::take_requests() {
  const unsigned asked = requested_;
  requested_ &= request::stop;  // the others are reported once
  return asked;
}

void Trainer::forward_only(Phase phase, const std::function<void()>& work) {
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  ended_.update.reset();  // the next step's time starts after this
  const double start = now_seconds();
  comm_->progress(done_, phase);
  data_parallel_->begin_passes(false);
  {
    const ArenaScope scope(*arena_);
    work();
    data_parallel_->end_passes();
  }
  take_blocked();  // no step's
  longest_aside_ = std::max(longest_aside_, now_seconds() - start);
  comm_->progress(done_, Phase::none);
}

void Trainer::save(bool best) {
  const WallPart part("saves");
  // Checks the step under way first: complete() throws for a step that is not finite, so no such
  // state is saved.
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  ended_.update.reset();  // the next step's time starts after the save
  comm_->progress(done_, Phase::save);
  CheckpointInfo info = describe_state(deck_, params(), done_);
  info.notes = {.classes = class_names_,
                .costs = work_->costs_text(),
                .data = data_text(),
                .data_id = data_id_,
                .kept = on_cuda() ? kept_text(memory_, source_->buckets()) : "",
                .run = run_id_,
                .task = task_->state(),
                .text_encoder = text_encoder_,
                .validation = validation_note_};
  if (before_saves_) before_saves_();
  saves_.newest = done_;
  saves_.writing = true;  // until all ranks have reported that they are done
  saves_.stall = checkpoints_->save(
      info, flat_arrays(params(), data_parallel_->state(), comm_->rank(), comm_->size()), best);
  saves_.uncounted += saves_.stall;
  comm_->progress(done_, Phase::none);
}

void Trainer::save_if_free() {
  if (!saves_.writing || !deck_.train.skip_saves) return save();
  ++saves_.skipped;
  if (first_rank())
    log::warn(
        "step {}: not saved, the save of step {} is still being written ({:.1f} s so far); raise "
        "train.checkpoint_every",
        done_, saves_.newest, checkpoints_->writing_for().value_or(0));
}

bool Trainer::wait_for_save() {
  const WallPart part("saves");
  comm_->progress(done_, Phase::save);
  data_parallel_->settle();
  const bool good = checkpoints_->wait();
  comm_->progress(done_, Phase::none);
  return good;
}

std::vector<double> Trainer::weights_checksum() {
  const ArenaScope scope(*arena_);
  data_parallel_->settle();
  checksum_weights(params(), *report_);
  const Tensor halves = report_->checksum(StepReport::working_low).to_host();
  const Tensor rest = report_->checksum(StepReport::values_low).to_host();
  std::vector<double> sum(halves.span<double>().begin(), halves.span<double>().end());
  sum.insert(sum.end(), rest.span<double>().begin(), rest.span<double>().end());
  return sum;
}

}  // namespace weft
