// Making a trainer: data, model, state, memory plan, readers. The step itself: trainer_step.cpp.
#include "train/trainer.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <unistd.h>

#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "ops/matmul.h"
#include "tensor/device.h"
#include "train/metrics/run_facts.h"

namespace weft {
namespace {

// A run may go on under another deck, but the log must show it. Keys that do not affect the
// computation may differ.
void warn_of_changes(const Checkpoint& checkpoint, const Deck& deck) {
  if (log::rank() != 0) return;
  Deck before = parse_deck(checkpoint.info().deck, checkpoint.dir().string(), {}), now = deck;
  // Older decks name the values that "the model's own" stands for now.
  for (Deck* d : {&before, &now}) d->train = optimizer_of(d->train, "adamw", 0, 0, 1);
  const std::vector<std::string> keys = changed_keys(before, now, true);
  if (!keys.empty())
    log::warn("the run goes on under a changed deck: {} differ from those of {}",
              fmt::join(keys, ", "), checkpoint.dir().string());
}

std::vector<std::string> host_names(MPI_Comm world) {
  using Name = std::array<char, 64>;
  Name mine{};
  host_name().copy(mine.data(), mine.size() - 1);
  int size = 1;
  MPI_Comm_size(world, &size);
  std::vector<Name> all(static_cast<std::size_t>(size));
  MPI_Allgather(mine.data(), static_cast<int>(mine.size()), MPI_CHAR, all.data(),
                static_cast<int>(mine.size()), MPI_CHAR, world);
  std::vector<std::string> names;
  for (const Name& n : all) names.emplace_back(n.data());
  return names;
}

// The least of all ranks' values, on every rank.
std::size_t least(std::size_t value, MPI_Comm world) {
  unsigned long long mine = value, all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_UNSIGNED_LONG_LONG, MPI_MIN, world);
  return static_cast<std::size_t>(all);
}

// Bytes of weights, gradients and optimizer on a rank that holds a `ranks`th of what is sharded:
// without padding, so never more than there will be.
std::size_t least_state_bytes(const ParameterTable& table, bool bf16, bool squares, int ranks) {
  std::size_t bytes = 0;
  for (const auto& p : table.all()) {
    const auto n = static_cast<std::size_t>(p->shape.numel());
    const std::size_t share = n / static_cast<std::size_t>(ranks);
    const std::size_t masters = bf16 && p->bf16_only ? share : n;
    bytes += 4 * masters + (bf16 ? 2 * n : 0);
    if (p->trainable) bytes += 4 * n + (squares ? 12 : 8) * share;
  }
  return bytes;
}

}  // namespace

Trainer::Trainer(const Deck& deck, const TaskFactory& make_task, MPI_Comm world)
    : deck_(deck),
      world_(world),
      device_(choose_device(deck.device.kind, deck.device.share, world)),
      comm_(make_communicator(world)),
      hosts_(host_names(world)),
      threads_(set_threads(static_cast<int>(deck.run.threads), device_.host_ranks)),
      task_(make_task(deck_)),
      watches_{nullptr, SpikeWatch(deck.train.spike_deviations),
               SpikeWatch(deck.train.spike_deviations)},
      requests_(deck.run.dir, deck.run.stop_margin) {
  choose_groups();
  open_data();
  checkpoints_ =
      std::make_unique<CheckpointWriter>(deck_.run.dir, world_, static_cast<int>(deck_.train.keep));
}

// Consecutive ranks share clips: they are most likely on one node.
void Trainer::choose_groups() {
  const int sp = static_cast<int>(deck_.parallel.sp);
  sequence_ = nn::make_sequence_group(world_, sp);
  group_ = comm_->rank() / sp;
  groups_ = comm_->size() / sp;
  task_->share_clips(sequence_.get());
  task_->join_ranks(world_);
  lockstep_ = task_->lockstep_ranks(comm_->size()) > 1;
  if (first_rank() && deck_.train.micro_batches < groups_)
    log::warn("train.micro_batches = {} gives work to {} of {} {}: the others wait in every step",
              deck_.train.micro_batches, deck_.train.micro_batches, groups_,
              sp > 1 ? "groups of parallel.sp ranks" : "ranks");
  WEFT_CHECK(
      !lockstep_ || deck_.train.micro_batches % groups_ == 0, Exit::usage,
      fmt::format("set train.micro_batches to a multiple of {}, or train.sync_bn = false", groups_),
      "{} micro-batches a step do not share out evenly over {} ranks that share the "
      "statistics of batch norm",
      deck_.train.micro_batches, groups_);
}

void Trainer::open_data() {
  source_ = open_clip_source(deck_.data, deck_.media);
  data_id_ = source_->content_id();
  task_->open(source_->buckets());
  batch_sizes_ = batch_sizes(deck_.train, source_->buckets());
}

void Trainer::start() {
  // On a GPU the algorithms of matrix products are measured once a run and stored, so that a
  // restart repeats the choice. Another run may choose differently, with other last bits: with
  // parallel.deterministic nothing is measured. The symbol is weak: null in a build without CUDA.
  if (on_cuda() && !deck_.parallel.deterministic && &kernels::set_matmul_tuning != nullptr)
    kernels::set_matmul_tuning((std::filesystem::path(deck_.run.dir) / "matmul.txt").string());
  // No graph may hold the exchanges of tokens in the forward, nor an injected fault.
  const bool recordable = !sequence_ && std::getenv("WEFT_FAULT") == nullptr;
  graphs_ = std::make_unique<StepGraphs>(on_cuda() && deck_.device.graphs && recordable);
  data_parallel_ = std::make_unique<DataParallel>(
      deck_.parallel, *comm_, params(), [this](std::function<void()> act) { graphs_->aside(act); },
      task_->model_groups());
  optimizers_ = task_->optimizers();
  check_state_fits();
  load_state();
  plan_step();
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
// step, by the kernel. A WARN, for swap and what others give back may still carry it.
void Trainer::check_state_fits() {
  if (on_cuda()) return;
  const bool squares = std::any_of(optimizers_.begin(), optimizers_.end(),
                                   [](const auto& o) { return o.optimizer != "sgd"; });
  const std::size_t state = least_state_bytes(params(), task_->bf16(), squares,
                                              deck_.parallel.zero == 1 ? comm_->size() : 1);
  // Before any rank allocates: least() waits for all.
  const std::size_t room =
      least(host_memory().available / static_cast<std::size_t>(device_.host_ranks), world_);
  if (first_rank() && room > 0 && state > room)
    log::warn(
        "weights, gradients and optimizer need {} a rank, which has {} of its host's available "
        "memory: the kernel may end the job. {}",
        size_text(static_cast<double>(state)), size_text(static_cast<double>(room)),
        deck_.parallel.zero == 0 && comm_->size() > 1
            ? "Set parallel.zero = 1: the optimizer's state is then shared out"
            : "Take more hosts, or a smaller model");
}

void Trainer::load_state() {
  ParameterTable& table = params();
  table.allocate(static_cast<std::int64_t>(deck_.parallel.bucket_mib * (1 << 20) / 4),
                 task_->bf16(), true);
  std::optional<Checkpoint> checkpoint;
  if (first_rank()) run_id_ = stored_run_id(deck_.run.dir);
  if (deck_.run.resume) checkpoint = Checkpoint::newest(deck_.run.dir, world_, run_id_);
  // Before make_state(): the EMA starts as a copy of the weights.
  if (!checkpoint) started_from_ = task_->start_weights();
  if (started_from_.empty())
    started_from_ = fmt::format("drawn from run.seed = {}", deck_.run.seed);
  data_parallel_->make_state(std::any_of(optimizers_.begin(), optimizers_.end(),
                                         [](const auto& o) { return o.optimizer != "sgd"; }));
  checkpoints_->check_room(
      flat_arrays(params(), data_parallel_->state(), comm_->rank(), comm_->size()));
  // Without a usable run.json, the newest checkpoint names the run.
  if (checkpoint && run_id_.empty()) {
    const auto id = checkpoint->info().notes.find("run");
    if (id != checkpoint->info().notes.end()) run_id_ = id->second;
  }
  if (run_id_.empty()) run_id_ = new_run_id();
  if (!checkpoint) return;
  restore_state(*checkpoint, table, data_parallel_->state());
  data_parallel_->spread_weights();
  done_ = saves_.newest = checkpoint->info().step;
  const auto costs = checkpoint->info().notes.find("costs");
  if (costs != checkpoint->info().notes.end()) costs_.saved = costs->second;
  const auto of_task = checkpoint->info().notes.find("task");
  if (of_task != checkpoint->info().notes.end()) task_->set_state(of_task->second);
  warn_of_changes(*checkpoint, deck_);
  if (first_rank()) warn_of_other_data(*checkpoint);
  started_from_ = checkpoint->dir().string();
  log::info("going on from {} ({} of {} steps done)", started_from_, done_, deck_.train.steps);
}

void Trainer::warn_of_other_data(const Checkpoint& checkpoint) const {
  const auto& notes = checkpoint.info().notes;
  const auto data = notes.find("data"), id = notes.find("data_id");  // old checkpoints have no id
  if (data != notes.end() && data->second != data_text())
    log::warn(
        "data.path = {} is not what {} was trained on: clips of its buckets {}, now {}. Samples "
        "come in another order",
        deck_.data.path, checkpoint.dir().string(), data->second, data_text());
  else if (id != notes.end() && id->second != data_id_ && !data_id_.empty())
    log::warn("data.path = {} is not what {} was trained on: as many clips, but others",
              deck_.data.path, checkpoint.dir().string());
}

// Plans the memory of a step and reserves the arena for it.
void Trainer::plan_step() {
  // The least of all ranks: recomputation, and so placements, must be the same everywhere.
  const std::size_t capacity = least(arena_capacity(deck_.memory, device_.host_ranks), world_);
  memory_ = plan_memory(*task_, source_->buckets(), batch_sizes_, capacity);
  // Placements follow the costs, and the costs follow recomputation, which may differ between ranks
  // that share clips unevenly: all take the largest.
  for (StepMemory& m : memory_) {
    const double mine = m.recompute;
    MPI_Allreduce(&mine, &m.recompute, 1, MPI_DOUBLE, MPI_MAX, world_);
  }
  if (lockstep_) recompute_alike(*task_, source_->buckets(), batch_sizes_, memory_);
  // A GPU's memory stays taken until the end, so the arena gets no more than the plan, an eighth
  // for scratch memory of operations, and 64 MiB.
  const std::size_t with_scratch = planned_bytes() + planned_bytes() / 8 + (std::size_t{64} << 20);
  arena_ = Arena::reserve(
      on_cuda() && deck_.memory.arena_gib <= 0 ? std::min(capacity, with_scratch) : capacity);
  report_ = std::make_unique<StepReport>(*comm_, params().groups());
  std::size_t clip_bytes = 0;
  for (std::size_t b = 0; b < memory_.size(); ++b)
    clip_bytes = std::max(clip_bytes, source_->buckets()[b].clip_bytes() *
                                          static_cast<std::size_t>(samples_in_batch(
                                              source_->buckets()[b], batch_sizes_[b])));
  staging_ = std::make_unique<ClipStaging>(clip_bytes);
}

// Compared when a run goes on, with the source's content_id().
std::string Trainer::data_text() const {
  std::string text;
  for (const Bucket& b : source_->buckets())
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", b.name, b.clips);
  return text;
}

std::size_t Trainer::planned_bytes() const {
  std::size_t most = 0;
  for (const StepMemory& m : memory_) most = std::max(most, m.bytes);
  return most;
}

// The order of the samples, their placement on ranks, and the readers that prefetch them.
void Trainer::open_readers() {
  const auto buckets = static_cast<int>(source_->buckets().size());
  std::vector<CostTable::Planned> planned;
  for (int b = 0; b < buckets; ++b) planned.push_back(planned_cost(b));
  costs_.table = std::make_unique<CostTable>(std::move(planned));
  if (!costs_.saved.empty()) costs_.table->from_text(costs_.saved);
  costs_.sums = Tensor::persistent({2 * buckets}, DType::f64);
  costs_.host_sums = std::make_unique<HostCopy>(2 * buckets);
  watches_.stragglers = std::make_unique<StragglerWatch>(comm_->size());
  planner_ = source_->plan_steps(batch_sizes_, deck_.train.micro_batches,
                                 static_cast<std::uint64_t>(deck_.run.seed));
  const int readers = deck_.data.readers > 0 ? static_cast<int>(deck_.data.readers)
                                             : Prefetcher::default_readers(threads_);
  prefetcher_ = std::make_unique<Prefetcher>(
      *source_,
      [this](std::int64_t s) {
        const std::vector<MicroBatch> plan = planner_->plan(s);
        return my_work(plan, owners(plan, s));
      },
      done_, deck_.train.steps, static_cast<int>(deck_.data.prefetch), readers, deck_.data.prefetch,
      deck_.data.max_damaged);
}

// Operations of a micro-batch.
CostTable::Planned Trainer::planned_cost(int bucket) const {
  const auto i = static_cast<std::size_t>(bucket);
  const Bucket& b = source_->buckets()[i];
  const std::int64_t clips = samples_in_batch(b, batch_sizes_[i]);
  if (clips == 0) return {};
  return {clips, static_cast<double>(clips) * task_->cost(b, memory_[i].recompute) +
                     task_->cost_of_micro_batch()};
}

double Trainer::share_of(const MicroBatch& clips, std::int64_t step) const {
  return task_->share(source_->buckets()[static_cast<std::size_t>(clips.bucket)], clips, step);
}

// The group of ranks that takes each micro-batch.
std::vector<int> Trainer::owners(const std::vector<MicroBatch>& plan, std::int64_t step) const {
  std::vector<double> costs;
  for (const MicroBatch& m : plan)
    costs.push_back(costs_.table->cost(m.bucket) * share_of(m, step));
  return weft::owners(costs, groups_, lockstep_);
}

Trainer::Work Trainer::my_work(const std::vector<MicroBatch>& plan,
                               const std::vector<int>& owner) const {
  Work mine;
  for (std::size_t i = 0; i < plan.size(); ++i)
    if (owner[i] == group_) mine.emplace_back(static_cast<int>(i), plan[i]);
  return mine;
}

void Trainer::save() {
  // Checks the step under way first: complete() throws for a step that is not finite, so no such
  // state is saved.
  if (under_way_) complete(*std::exchange(under_way_, std::nullopt));
  last_update_.reset();  // the next step's time starts after the save
  comm_->progress(done_, "save");
  CheckpointInfo info = describe_state(deck_, params(), done_);
  info.notes["run"] = run_id_;
  info.notes["costs"] = costs_.table->to_text();
  info.notes["data"] = data_text();
  if (!data_id_.empty()) info.notes["data_id"] = data_id_;
  if (const std::string text = task_->state(); !text.empty()) info.notes["task"] = text;
  saves_.newest = done_;
  saves_.writing = true;  // until all ranks have reported that they are done
  saves_.stall = checkpoints_->save(
      info, flat_arrays(params(), data_parallel_->state(), comm_->rank(), comm_->size()));
  comm_->progress(done_, nullptr);
  if (finished_.empty()) return;
  finished_.back().split.checkpoint += saves_.stall;
  finished_.back().seconds += saves_.stall;
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
  comm_->progress(done_, "save");
  data_parallel_->settle();
  const bool good = checkpoints_->wait();
  comm_->progress(done_, nullptr);
  return good;
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

std::vector<double> Trainer::weights_checksum() {
  const ArenaScope scope(*arena_);
  data_parallel_->settle();
  checksum_weights();
  const Tensor halves = report_->checksum(StepReport::working_low).to_host();
  const Tensor rest = report_->checksum(StepReport::values_low).to_host();
  std::vector<double> sum(halves.span<double>().begin(), halves.span<double>().end());
  sum.insert(sum.end(), rest.span<double>().begin(), rest.span<double>().end());
  return sum;
}

std::string Trainer::name_of_rank(int rank) const {
  return fmt::format("rank {} on {}", rank, hosts_[static_cast<std::size_t>(rank)]);
}

}  // namespace weft
