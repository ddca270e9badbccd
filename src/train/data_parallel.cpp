#include "train/data_parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "core/error.h"
#include "core/faults.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"

namespace weft {

double bucket_mib(const ParallelDeck& deck, int ranks) {
  return deck.bucket_mib > 0 ? deck.bucket_mib : std::clamp(25.0 / 32 * ranks, 25.0, 200.0);
}

std::int64_t bucket_elements(const ParallelDeck& deck, int ranks) {
  return std::max<std::int64_t>(1,
                                static_cast<std::int64_t>(bucket_mib(deck, ranks) * (1 << 20) / 4));
}

TrainDeck optimizer_of(const TrainDeck& deck, const std::string& optimizer, double lr_power,
                       double weight_decay, double grad_clip) {
  TrainDeck d = deck;
  if (d.optimizer == "auto") d.optimizer = optimizer;
  if (d.lr_power < 0) d.lr_power = lr_power;
  if (d.weight_decay < 0) d.weight_decay = weight_decay;
  if (d.grad_clip < 0) d.grad_clip = grad_clip;
  return d;
}

namespace {

// The share of the steps from `begin` to the run's last that is done.
double progress(const TrainDeck& d, std::int64_t begin, std::int64_t steps_done) {
  if (steps_done <= begin) return 0;
  if (steps_done >= d.steps) return 1;
  return static_cast<double>(steps_done - begin) / static_cast<double>(d.steps - begin);
}

// What a schedule leaves of the rate after the warm-up, from 1 down to 0.
double decay_factor(const TrainDeck& d, std::int64_t steps_done) {
  const auto cosine = [](double x) { return 0.5 * (1 + std::cos(std::numbers::pi * x)); };
  if (d.lr_scheduler == "constant") return 1;
  if (d.lr_scheduler == "linear") return 1 - progress(d, d.warmup_steps, steps_done);
  if (d.lr_scheduler == "cosine") return cosine(progress(d, d.warmup_steps, steps_done));
  if (d.lr_scheduler == "warmup_stable_decay") {
    const std::int64_t falling =
        d.lr_decay_steps > 0 ? d.lr_decay_steps : std::max<std::int64_t>(1, d.steps / 10);
    const double x = progress(d, std::max(d.steps - falling, d.warmup_steps), steps_done);
    return d.lr_decay_type == "sqrt"     ? 1 - std::sqrt(x)
           : d.lr_decay_type == "cosine" ? cosine(x)
                                         : 1 - x;
  }
  if (d.lr_power <= 0) return 1;
  const double left =
      std::max(0.0, 1 - static_cast<double>(steps_done) / static_cast<double>(d.steps));
  return std::pow(left, d.lr_power);
}

// Flips a bit of a weight in the copy that this rank's forward reads: of the largest parameter that
// is trained and whole on every rank, for a place in the flat space may be padding.
void flip_a_bit(ParameterTable& table) {
  const auto size = [](const auto& p) {
    return p->trainable && !p->sharded ? p->shape.numel() : 0;
  };
  const Parameter& p = **std::ranges::max_element(table.all(), {}, size);
  const std::int64_t n = p.shape.numel();
  Tensor one = (p.working.defined() ? p.working : p.value).view({n}).slice(n / 3, n / 3 + 1);
  const Tensor host = one.to_host();
  auto* const bytes = static_cast<std::byte*>(host.raw());
  bytes[0] ^= std::byte{4};
  one.set(std::span<const std::byte>(bytes, host.bytes()));
}

}  // namespace

double learning_rate(const TrainDeck& d, std::int64_t steps_done) {
  if (steps_done < d.warmup_steps)
    return d.lr * static_cast<double>(steps_done + 1) / static_cast<double>(d.warmup_steps + 1);
  const double factor = decay_factor(d, steps_done);
  return factor == 1 ? d.lr : d.lr * (d.min_lr_factor + (1 - d.min_lr_factor) * factor);
}

namespace {

// The decay of the average that the optimizer's pass over the weights makes with them, the first;
// 0, for none, until averaging begins.
float fused_ema_decay(const TrainDeck& d, std::int64_t steps_done) {
  return steps_done < d.ema_start ? 0.0f : static_cast<float>(d.ema_decay.front());
}

// The averages that the optimizer's pass leaves: all until averaging begins, then those behind the
// first.
void finish_averages(const TrainDeck& d, std::int64_t steps_done, const Tensor& squares,
                     OptimizerState& state, int bucket) {
  const bool begun = steps_done >= d.ema_start;
  for (int i = begun ? 1 : 0; i < state.averages(); ++i) {
    Tensor average = state.ema(bucket, i);
    if (begun)
      ops::ema_step(static_cast<float>(d.ema_decay[static_cast<std::size_t>(i)]), squares,
                    state.master(bucket), average);
    else
      ops::convert(state.master(bucket), average);
  }
}

void sgd_step(const TrainDeck& d, std::int64_t steps_done, const Tensor& squares,
              OptimizerState& state, int bucket) {
  ops::Sgd s;
  s.lr = static_cast<float>(learning_rate(d, steps_done));
  s.momentum = static_cast<float>(d.momentum);
  s.weight_decay = static_cast<float>(d.weight_decay);
  s.grad_clip = static_cast<float>(d.grad_clip);
  s.ema_decay = fused_ema_decay(d, steps_done);
  s.first = steps_done == 0;
  Tensor master = state.master(bucket), v = state.exp_avg(bucket), ema = state.ema(bucket);
  Tensor working = state.working(bucket);
  ops::sgd_step(s, squares, state.gradient(bucket), master, v, ema, working);
  finish_averages(d, steps_done, squares, state, bucket);
}

}  // namespace

void optimizer_step(const TrainDeck& deck, std::int64_t steps_done, const Tensor& squares,
                    OptimizerState& state, int bucket) {
  const TrainDeck d = optimizer_of(deck, "adamw", 0, 0, 1);
  if (d.optimizer == "sgd") return sgd_step(d, steps_done, squares, state, bucket);
  const double t = static_cast<double>(steps_done + 1);
  ops::AdamW a;
  a.lr = static_cast<float>(learning_rate(d, steps_done));
  a.beta1 = static_cast<float>(d.adam_beta1);
  a.beta2 = static_cast<float>(d.adam_beta2);
  a.rest1 = static_cast<float>(1.0 - d.adam_beta1);
  a.rest2 = static_cast<float>(1.0 - d.adam_beta2);
  a.eps = static_cast<float>(d.adam_eps);
  a.weight_decay = static_cast<float>(d.weight_decay);
  // In double: rounding 1 - beta^t once keeps the digits that f32 would cancel.
  a.correction1 = static_cast<float>(1.0 - std::pow(d.adam_beta1, t));
  a.correction2 = static_cast<float>(1.0 - std::pow(d.adam_beta2, t));
  a.grad_clip = static_cast<float>(d.grad_clip);
  a.ema_decay = fused_ema_decay(d, steps_done);
  Tensor master = state.master(bucket), m = state.exp_avg(bucket), v = state.exp_avg_sq(bucket);
  Tensor ema = state.ema(bucket), working = state.working(bucket);
  ops::adamw_step(a, squares, state.gradient(bucket), master, m, v, ema, working);
  finish_averages(d, steps_done, squares, state, bucket);
}

bool can_shard(const ParameterTable& table, const std::vector<std::string>& blocks) {
  return !blocks.empty() && std::ranges::none_of(table.all(), [](const auto& p) {
    return p->role == Parameter::Role::adapter;
  });
}

std::optional<Sharding> sharding_of(const ParallelDeck& deck, const ParameterTable& table,
                                    std::vector<std::string> blocks, int rank, int ranks) {
  if (deck.zero != 3) return std::nullopt;
  WEFT_CHECK(
      !blocks.empty(), Exit::usage,
      "set parallel.zero = 1: weights and gradients are then whole on every rank",
      "parallel.zero = 3 shares out the weights of a model's blocks, and this model has none "
      "that are used one after the other");
  if (ranks == 1 || !can_shard(table, blocks)) return std::nullopt;
  return Sharding{rank, ranks, std::move(blocks)};
}

DataParallel::DataParallel(const ParallelDeck& deck, Communicator& comm, ParameterTable& table,
                           std::function<void(std::function<void()>)> aside, int joint_groups)
    : comm_(comm),
      table_(table),
      joint_groups_(joint_groups),
      sharded_(deck.zero >= 1 && comm.size() > 1),
      overlap_(deck.overlap),
      comm_dtype_(deck.wire == "bf16" ? CommDtype::bf16 : CommDtype::f32),
      aside_(std::move(aside)) {
  // aside_: graphs never record collectives, nor waits for them.
  table_.set_arrival([this](int bucket) { aside_([this, bucket] { arrive(bucket); }); });
}

void DataParallel::make_state(bool squares, std::vector<double> ema_decays) {
  state_ = std::make_unique<OptimizerState>(table_, sharded_, comm_.rank(), comm_.size(), squares,
                                            std::move(ema_decays));
  if (table_.sharded_buckets() > 0) {
    blocks_ = std::make_unique<ShardedBlocks>(comm_, table_, comm_dtype_, overlap_);
    table_.set_entry([this](int from, int to) {
      if (ops::planning()) return;  // a dry run sends nothing
      aside_([this, from, to] { blocks_->enter(from, to); });
    });
  }
  sums_.assign(table_.buckets().size(), 0);
  weights_.assign(table_.buckets().size(), 0);
}

void DataParallel::spread_weights() {
  for (int b = 0; b < static_cast<int>(weights_.size()); ++b) {
    Tensor working = state_->working(b);
    if (working.defined()) ops::convert(state_->master(b), working);
  }
  if (blocks_) blocks_->changed();
  if (sharded_)
    for (int b = table_.sharded_buckets(); b < static_cast<int>(weights_.size()); ++b) {
      if (table_.working().defined()) comm_.wait(comm_.all_gather(table_.working_of(b)));
      if (table_.working().defined() && table_.buckets()[b].bf16_only) continue;
      comm_.wait(comm_.all_gather(table_.values_of(b)));
    }
}

void DataParallel::begin_step(const Tensor& local) {
  if (fault::at(fault::Place::weights)) {
    settle();  // what arrives later would overwrite the flipped bit
    flip_a_bit(table_);
  }
  local_ = local;
  ops::fill_zero(local_);
  if (blocks_) blocks_->begin_step();
  table_.begin_step([this](int bucket) {
    // Before the sum over ranks: the squares of this rank's own gradients tell which rank a NaN
    // came from.
    if (fault::at(fault::Place::gradient)) spoil_gradient(table_, bucket);
    ops::sum_of_squares(table_.gradient_of(bucket), local_, true);
    aside_([this, bucket] { reduce(bucket); });
  });
}

void spoil_gradient(ParameterTable& table, int bucket) {
  if (bucket != static_cast<int>(table.buckets().size()) / 2) return;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  table.gradient_of(bucket).slice(0, 1).set(std::span<const float>(&nan, 1));
}

Tensor DataParallel::group_of(int bucket, const Tensor& squares) const {
  const int group = table_.buckets()[bucket].group;
  const int slot = group < joint_groups_ ? 0 : group;
  return squares.slice(slot, slot + 1);
}

void DataParallel::reduce(int bucket) {
  if (table_.buckets()[bucket].sharded) return blocks_->reduce(bucket);
  auto& ticket = sums_[bucket];
  ticket = sharded_ ? comm_.reduce_scatter_sum(table_.gradient_of(bucket), comm_dtype_)
                    : comm_.all_reduce_sum(table_.gradient_of(bucket), comm_dtype_);
  if (!overlap_) blocked_ += comm_.wait(ticket);
}

double DataParallel::join() {
  double blocked = 0;
  for (const auto ticket : sums_) blocked += comm_.wait(ticket);
  if (blocks_) {
    blocks_->collect();
    blocked += blocks_->take_blocked();
  }
  // Collectives complete in order, and the weights were issued before these sums: a rank without a
  // forward in this step has them now.
  for (int b = 0; b < static_cast<int>(weights_.size()); ++b) table_.arrived(b);
  return blocked;
}

double DataParallel::norm(const Tensor& reported, Tensor& squares) {
  // A NaN from an earlier step stays in `squares` and blocks all later updates: on a GPU steps may
  // already be issued before the host sees the fault.
  for (std::int64_t group = 0; group < squares.numel(); ++group) {
    Tensor of_group = squares.slice(group, group + 1);
    ops::carry_non_finite(reported, of_group);
  }
  for (int b = 0; b < static_cast<int>(sums_.size()); ++b) {
    Tensor of_group = group_of(b, squares);
    ops::sum_of_squares(state_->gradient(b), of_group, true);
  }
  // Sharded, each rank has squared its own part of the sum; otherwise every rank has squared all of
  // it.
  return sharded_ ? comm_.wait(comm_.all_reduce_sum(squares)) : 0;
}

double DataParallel::update(std::span<const TrainDeck> groups, std::int64_t steps_done,
                            const Tensor& squares) {
  double blocked = 0;
  if (blocks_) blocks_->changed();
  // Last bucket first: buckets are in the backward's order, so the next forward needs the last ones
  // first.
  for (int b = static_cast<int>(weights_.size()) - 1; b >= 0; --b) {
    const auto& bucket = table_.buckets()[b];
    optimizer_step(groups[bucket.group], steps_done, group_of(b, squares), *state_, b);
    if (!sharded_) continue;
    if (bucket.sharded) {
      // The first two of the next forward; the others take their turns in it.
      if (b + 2 >= table_.sharded_buckets()) blocks_->fetch(b);
      continue;
    }
    // The ranks read such a bucket as bf16 only: half the bytes on the wire.
    const bool bf16 = bucket.bf16_only && table_.working().defined();
    auto& ticket = weights_[b];
    ticket = comm_.all_gather(bf16 ? table_.working_of(b) : table_.values_of(b));
    if (overlap_)
      table_.on_its_way(b);
    else
      blocked += comm_.wait(ticket);
  }
  return blocked;
}

void DataParallel::arrive(int bucket) { blocked_ += comm_.wait(weights_[bucket]); }

void DataParallel::begin_passes(bool backward) {
  settle();
  if (blocks_) blocks_->begin_passes(backward);
}

void DataParallel::end_passes() {
  if (blocks_) blocks_->end_passes();
}

void DataParallel::settle() {
  for (int b = 0; b < static_cast<int>(weights_.size()); ++b) {
    comm_.wait(weights_[b]);
    table_.arrived(b);
  }
  if (blocks_) blocks_->settle();
}

double DataParallel::take_blocked() {
  return std::exchange(blocked_, 0.0) + (blocks_ ? blocks_->take_blocked() : 0.0);
}

}  // namespace weft
