#include "nn/parameters.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {
namespace {

// Parameters start on whole cache lines: 16 floats.
std::int64_t aligned(std::int64_t n) { return (n + 15) / 16 * 16; }

constexpr auto base_role = Parameter::Role::base;

// FNV-1a: the stream number of a parameter is a function of its name alone.
std::uint64_t stream_of(const std::string& name) {
  std::uint64_t h = 14695981039346656037ull;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return h;
}

}  // namespace

std::string block_of(const std::string& parameter, const std::vector<std::string>& beginnings) {
  for (const std::string& b : beginnings)
    if (parameter.starts_with(b)) return parameter.substr(0, parameter.find('.', b.size()));
  return {};
}

void Parameter::set(std::int64_t first, std::span<const float> values) {
  const std::int64_t end = first + static_cast<std::int64_t>(values.size());
  if (sharded) {
    const std::int64_t from = std::max(first, owned.begin), to = std::min(end, owned.end);
    if (from >= to) return;
    shard.slice(from - owned.begin, to - owned.begin)
        .set(values.subspan(static_cast<std::size_t>(from - first),
                            static_cast<std::size_t>(to - from)));
    return;
  }
  if (value.defined()) value.view({shape.numel()}).slice(first, end).set(values);
  if (!working.defined()) return;
  std::vector<bf16> low(values.size());
  std::transform(values.begin(), values.end(), low.begin(), [](float f) { return bf16(f); });
  working.view({shape.numel()}).slice(first, end).set(std::span<const bf16>(low));
}

Tensor& Parameter::grad_to_add() {
  if (!grad_written) ops::fill_zero(grad);
  grad_written = true;
  return grad;
}

Parameter& ParameterTable::add(const std::string& name, const Shape& shape, Init init,
                               bool trainable) {
  WEFT_ASSERT(find(name) == nullptr && !values_.defined());
  parameters_.push_back(std::make_unique<Parameter>());
  Parameter& p = *parameters_.back();
  p.name = name;
  p.shape = shape;
  p.init = init;
  p.trainable = trainable;
  return p;
}

Parameter* ParameterTable::find(const std::string& name) const {
  for (const auto& p : parameters_)
    if (p->name == name) return p.get();
  return nullptr;
}

std::int64_t ParameterTable::lay_out_fixed(
    const std::function<bool(const Parameter&)>& fixed,
    const std::function<void(Parameter&, std::int64_t)>& place) const {
  std::int64_t at = 0;
  for (const bool bf16_only : {true, false})
    for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
      Parameter& p = **it;
      if (p.bf16_only != bf16_only || !fixed(p)) continue;
      place(p, at);
      at += aligned(p.shape.numel());
    }
  return at;
}

void ParameterTable::lay_out(std::int64_t bucket_elements, bool bf16_working,
                             const std::optional<Sharding>& sharding, int ranks) {
  const std::int64_t pad = bucket_pad(ranks);
  std::int64_t at = 0;
  buckets_.clear();
  sharding_ = sharding;
  for (const auto& p : parameters_)
    p->sharded = sharding && p->trainable && (p->bf16_only || !bf16_working) &&
                 !block_of(p->name, sharding->blocks).empty();
  const auto close_bucket = [&] {
    Bucket& b = buckets_.back();
    b.end = at = b.begin + (at - b.begin + pad - 1) / pad * pad;
  };
  std::string block;  // of the last parameter; buckets of sharded ones end between blocks
  const auto place = [&](Parameter& p) {
    const bool low = p.sharded ? bf16_working : p.bf16_only;
    const std::string its_block = p.sharded ? block_of(p.name, sharding->blocks) : "";
    const bool full = !buckets_.empty() && at - buckets_.back().begin >= bucket_elements;
    const bool may_end = !p.sharded || its_block != block;
    if (buckets_.empty() || (full && may_end) || buckets_.back().bf16_only != low ||
        buckets_.back().sharded != p.sharded || buckets_.back().group != p.group) {
      if (!buckets_.empty()) close_bucket();
      buckets_.push_back(Bucket{at, at, low, p.sharded, p.group});
    }
    block = its_block;
    p.offset = at;
    p.bucket = static_cast<int>(buckets_.size()) - 1;
    at += aligned(p.shape.numel());
  };
  const auto place_all = [&](auto&& chosen) {
    for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it)
      if ((*it)->trainable && chosen(**it)) place(**it);
  };
  // Sharded buckets come first, which the flat tensors lack; then those that are bf16_only, so that
  // drop_bf16_only_values() can cut them off the front. Then by group, the last group first, for
  // groups may alternate from layer to layer.
  place_all([](const Parameter& p) { return p.sharded; });
  sharded_ = static_cast<int>(buckets_.size());
  if (sharded_ > 0) close_bucket();
  sharded_end_ = at;
  for (const bool bf16_only : {true, false})
    for (int group = groups() - 1; group >= 0; --group)
      place_all([&](const Parameter& p) {
        return !p.sharded && p.bf16_only == bf16_only && p.group == group;
      });
  // One bucket even with nothing to train: flat_arrays() takes the length from the last one.
  if (buckets_.empty()) buckets_.push_back(Bucket{});
  close_bucket();
  values_begin_ = sharded_end_;
}

void ParameterTable::allocate(std::int64_t bucket_elements, bool bf16_working, bool gradients,
                              const std::optional<Sharding>& sharding, int ranks) {
  lay_out(bucket_elements, bf16_working, sharding, ranks);
  const std::int64_t whole = buckets_.back().end - sharded_end_;
  values_ = memory_({whole}, DType::f32);
  if (gradients) grads_ = memory_({whole}, DType::f32);
  if (bf16_working) working_ = memory_({whole}, DType::bf16);
  const std::int64_t fixed =
      lay_out_fixed([](const Parameter& p) { return !p.trainable && p.role != base_role; },
                    [](Parameter& p, std::int64_t offset) { p.offset = offset; });
  fixed_ = Tensor::persistent({fixed}, DType::f32);
  allocate_to_run(bf16_working, [](const Parameter& p) { return p.role == base_role; });
  allocate_shards(bf16_working, gradients);
  for (const auto& owned : parameters_) {
    Parameter& p = *owned;
    if (p.role == base_role || p.sharded) continue;
    const std::int64_t begin = p.trainable ? p.offset - sharded_end_ : p.offset;
    const std::int64_t end = begin + p.shape.numel();
    p.value = (p.trainable ? values_ : fixed_).slice(begin, end).view(p.shape);
    if (!p.trainable) {
      if (bf16_working) p.working = Tensor::persistent(p.shape, DType::bf16);
      continue;
    }
    if (gradients) p.grad = grads_.slice(begin, end).view(p.shape);
    if (bf16_working) p.working = working_.slice(begin, end).view(p.shape);
  }
}

// Slots for the largest sharded bucket, this rank's parts, and the parameters' places in both.
void ParameterTable::allocate_shards(bool bf16_working, bool gradients) {
  shard_offsets_ = {0};
  gaps_.assign(static_cast<std::size_t>(sharded_), {});
  if (sharded_ == 0) return;
  std::int64_t largest = 0;
  for (int b = 0; b < sharded_; ++b) {
    largest = std::max(largest, buckets_[b].end - buckets_[b].begin);
    shard_offsets_.push_back(shard_offsets_.back() + owned(b).size());
  }
  shards_ = Tensor::persistent({shard_offsets_.back()}, DType::f32);
  if (gradients) shard_gradients_ = Tensor::persistent({shard_offsets_.back()}, DType::f32);
  for (int slot = 0; slot < std::min(2, sharded_); ++slot) {
    weight_slots_[slot] = memory_({largest}, bf16_working ? DType::bf16 : DType::f32);
    if (gradients) gradient_slots_[slot] = memory_({largest}, DType::f32);
  }
  std::vector<std::int64_t> filled(gaps_.size(), 0);
  // In the order of the flat space, for the gaps between parameters.
  for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
    Parameter& p = **it;
    if (!p.sharded) continue;
    const Bucket& b = buckets_[p.bucket];
    const std::int64_t begin = p.offset - b.begin, end = begin + p.shape.numel();
    const auto bucket = static_cast<std::size_t>(p.bucket);
    if (filled[bucket] < begin) gaps_[bucket].push_back({filled[bucket], begin});
    filled[bucket] = end;
    (bf16_working ? p.working : p.value) =
        weight_slots_[p.bucket % 2].slice(begin, end).view(p.shape);
    if (gradients) p.grad = gradient_slots_[p.bucket % 2].slice(begin, end).view(p.shape);
    const Part mine = owned(p.bucket);
    const std::int64_t from = std::max(p.offset, mine.begin),
                       to = std::min(p.offset + p.shape.numel(), mine.end);
    p.owned = from < to ? Part{from - p.offset, to - p.offset} : Part{};
    p.shard = from < to ? shard(p.bucket).slice(from - mine.begin, to - mine.begin) : Tensor();
  }
  for (int b = 0; b < sharded_; ++b)
    if (const std::int64_t size = buckets_[b].end - buckets_[b].begin; filled[b] < size)
      gaps_[b].push_back({filled[b], size});
}

Tensor ParameterTable::of_bucket(int bucket, const Tensor& flat, std::int64_t missing,
                                 const std::array<Tensor, 2>& slots) const {
  const Bucket& b = buckets_[bucket];
  if (b.sharded) return slots[bucket % 2].slice(0, b.end - b.begin);
  return flat.slice(b.begin - missing, b.end - missing);
}

Tensor ParameterTable::values_of(int bucket) const {
  return of_bucket(bucket, values_, values_begin_, weight_slots_);
}

Tensor ParameterTable::working_of(int bucket) const {
  return of_bucket(bucket, working_, sharded_end_, weight_slots_);
}

Tensor ParameterTable::gradient_of(int bucket) const {
  return of_bucket(bucket, grads_, sharded_end_, gradient_slots_);
}

Part ParameterTable::owned(int bucket) const {
  return part_of(buckets_[bucket].begin, buckets_[bucket].end, sharding_->rank, sharding_->ranks);
}

Tensor ParameterTable::shard(int bucket) const {
  return shards_.slice(shard_offsets_[bucket], shard_offsets_[bucket + 1]);
}

Tensor ParameterTable::shard_gradient(int bucket) const {
  return shard_gradients_.slice(shard_offsets_[bucket], shard_offsets_[bucket + 1]);
}

namespace {

std::size_t bytes_of(std::initializer_list<Tensor> tensors) {
  std::size_t bytes = 0;
  for (const Tensor& t : tensors)
    if (t.defined()) bytes += t.bytes();
  return bytes;
}

}  // namespace

std::size_t ParameterTable::weight_bytes() const {
  return bytes_of({values_, working_, weight_slots_[0], weight_slots_[1]});
}

std::size_t ParameterTable::gradient_bytes() const {
  return bytes_of({grads_, shard_gradients_, gradient_slots_[0], gradient_slots_[1]});
}

std::size_t ParameterTable::shard_bytes() const { return bytes_of({shards_}); }

namespace {

// A GPU may have no room for what a dry run plans: it gets addresses alone.
Tensor memory_to_run(const Shape& shape, DType dtype) {
  if (!on_cuda() || !Arena::has_current() || !Arena::current().is_planning())
    return Tensor::persistent(shape, dtype);
  return Tensor::borrow(std::bit_cast<void*>(std::uintptr_t{1} << 40), shape, dtype,
                        DeviceKind::cuda);
}

}  // namespace

void ParameterTable::allocate_for_inference(bool bf16_model) {
  allocate_to_run(bf16_model, [](const Parameter&) { return true; });
}

void ParameterTable::allocate_to_run(bool bf16_model,
                                     const std::function<bool(const Parameter&)>& chosen) {
  // Two passes over the parameters: the first finds their places, the second cuts the two flat
  // tensors into them.
  std::int64_t wide_at = 0, low_at = 0;
  Tensor wide, low;
  for (const bool placed : {false, true}) {
    if (placed) {
      wide = memory_to_run({wide_at}, DType::f32);
      low = memory_to_run({low_at}, DType::bf16);
    }
    wide_at = low_at = 0;
    for (const auto& owned : parameters_) {
      Parameter& p = *owned;
      if (!chosen(p) || p.memory_of != nullptr) continue;
      const std::int64_t n = p.shape.numel();
      const bool has_low = bf16_model, has_wide = !bf16_model || !p.bf16_only;
      if (placed && has_wide) p.value = wide.slice(wide_at, wide_at + n).view(p.shape);
      if (placed && has_low) p.working = low.slice(low_at, low_at + n).view(p.shape);
      if (has_wide) wide_at += aligned(n);
      if (has_low) low_at += aligned(n);
    }
  }
  for (const auto& p : parameters_)
    if (p->memory_of != nullptr) p->value = p->memory_of->value, p->working = p->memory_of->working;
}

void ParameterTable::share_memory(const std::string& owner, const std::string& user) {
  for (const auto& p : parameters_) {
    if (!p->name.starts_with(user)) continue;
    p->memory_of = find(owner + p->name.substr(user.size()));
    WEFT_ASSERT(p->memory_of != nullptr && p->memory_of->shape == p->shape);
  }
}

namespace {

// The bytes of a parameter in the formats of allocate_for_inference().
std::size_t bytes_to_run(const Parameter& p, bool bf16_model) {
  if (p.memory_of != nullptr) return 0;
  return static_cast<std::size_t>(p.shape.numel()) *
         ((bf16_model ? 2u : 0u) + (!bf16_model || !p.bf16_only ? 4u : 0u));
}

}  // namespace

std::size_t ParameterTable::inference_bytes(bool bf16_model) const {
  std::size_t bytes = 0;
  for (const auto& p : parameters_) bytes += bytes_to_run(*p, bf16_model);
  return bytes;
}

std::size_t ParameterTable::base_bytes(bool bf16_model) const {
  std::size_t bytes = 0;
  for (const auto& p : parameters_)
    if (p->role == base_role) bytes += bytes_to_run(*p, bf16_model);
  return bytes;
}

void ParameterTable::initialise(std::uint64_t seed, const std::string& prefix) {
  std::vector<float> values;  // of all parameters in turn: new memory for each would take as long
  for (const auto& p : parameters_) {
    if (!p->name.starts_with(prefix)) continue;
    const Philox random(seed, Purpose::init, 0, stream_of(p->name));
    // What this rank owns of a sharded parameter.
    const Part part = p->sharded ? p->owned : Part{0, p->shape.numel()};
    const auto n = static_cast<double>(p->shape.numel());
    values.resize(part.size());
    const auto value = [&](const std::array<std::uint32_t, 4>& words, std::int64_t e) {
      const int k = static_cast<int>(e % 4);
      switch (p->init.kind) {
        case Init::Kind::uniform:
          return p->init.a * (2.0f * Philox::to_unit(words[k]) - 1.0f);
        case Init::Kind::normal:
          return p->init.a * Philox::gauss(words[k / 2 * 2], words[k / 2 * 2 + 1], k % 2 != 0);
        case Init::Kind::rotary:
          return static_cast<float>(
              std::pow(static_cast<double>(p->init.a), -static_cast<double>(e) / n));
        case Init::Kind::constant:
          break;
      }
      return p->init.a;
    };
    const bool drawn = p->init.kind == Init::Kind::uniform || p->init.kind == Init::Kind::normal;
    // By Philox blocks of four elements, which are most of the work.
#pragma omp parallel for schedule(static)
    for (std::int64_t block = part.begin / 4; block < (part.end + 3) / 4; ++block) {
      const auto words =
          drawn ? random.block(static_cast<std::uint32_t>(block)) : std::array<std::uint32_t, 4>{};
      for (std::int64_t e = std::max(part.begin, 4 * block); e < std::min(part.end, 4 * block + 4);
           ++e)
        values[e - part.begin] = value(words, e);
    }
    p->set(part.begin, values);
  }
}

void ParameterTable::refresh_working() {
  if (!working_.defined()) return;
  Tensor rest = working_.slice(values_begin_ - sharded_end_, working_.numel());
  ops::convert(values_, rest);
  for (const auto& p : parameters_)
    if (!p->trainable && p->role != base_role) ops::convert(p->value, p->working);
}

int ParameterTable::groups() const {
  int most = 0;
  for (const auto& p : parameters_) most = std::max(most, p->group);
  return most + 1;
}

std::int64_t ParameterTable::trainable_elements() const {
  std::int64_t n = 0;
  for (const auto& p : parameters_)
    if (p->trainable) n += p->shape.numel();
  return n;
}

std::int64_t ParameterTable::total_elements() const {
  std::int64_t n = 0;
  for (const auto& p : parameters_) n += p->shape.numel();
  return n;
}

void ParameterTable::begin_step(std::function<void(int)> on_ready) {
  on_ready_ = std::move(on_ready);
  next_bucket_ = sharded_;
  counting_ = false;
  for (auto& b : buckets_) b.pending = 0, b.ready = false;
  for (const auto& p : parameters_) p->grad_written = false, p->pending = 0;
  begin_micro_batch();
}

void ParameterTable::begin_micro_batch() {
  entered_ = -1;
  next_sharded_ = 0;
  if (sharded_ == 0) return;
  for (int b = 0; b < sharded_; ++b) buckets_[b].pending = 0;
  for (const auto& p : parameters_)
    if (p->sharded) p->grad_written = false, p->pending = 0;
}

void ParameterTable::enter(int bucket) {
  if (bucket == entered_) return;
  const int from = std::exchange(entered_, bucket);
  if (entry_) entry_(from, bucket);
}

void ParameterTable::walk(bool backward, bool gradients) {
  begin_micro_batch();
  for (int b = sharded_; b-- > 0;) enter(b);
  for (int b = 0; backward && b < sharded_; ++b) {
    enter(b);
    if (!gradients) continue;
    Tensor zeros = gradient_of(b);
    ops::fill_zero(zeros);
    on_ready_(b);
  }
}

void ParameterTable::drop_bf16_only_values() {
  WEFT_ASSERT(working_.defined() && values_begin_ == sharded_end_);
  for (const Bucket& b : buckets_)
    if (b.bf16_only) values_begin_ = b.end;
  const std::int64_t dropped = values_begin_ - sharded_end_;
  Tensor rest = memory_({values_.numel() - dropped}, DType::f32);
  ops::convert(values_.slice(dropped, values_.numel()), rest);
  for (const auto& p : parameters_)
    if (p->trainable) p->value = Tensor();
  values_ = rest;
  for (const auto& p : parameters_)
    if (p->trainable && !p->bf16_only) {
      const std::int64_t at = p->offset - values_begin_;
      p->value = values_.slice(at, at + p->shape.numel()).view(p->shape);
    }
}

void ParameterTable::on_its_way(int bucket) {
  WEFT_ASSERT(arrive_ != nullptr);
  buckets_[bucket].on_its_way = true;
}

bool ParameterTable::any_on_its_way() const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const Bucket& b) { return b.on_its_way; });
}

void ParameterTable::await(const Parameter& p) {
  if (!p.trainable || p.bucket < 0) return;  // not laid out in buckets: a model that is only run
  Bucket& b = buckets_[p.bucket];
  if (b.on_its_way) {
    b.on_its_way = false;
    arrive_(p.bucket);
  }
  if (b.sharded) enter(p.bucket);
}

bool ParameterTable::counts(const Parameter& p) const {
  return p.trainable && (counting_ || p.sharded);
}

void ParameterTable::note_use(Parameter& p) {
  if (!counts(p)) return;
  ++p.pending;
  ++buckets_[p.bucket].pending;
}

void ParameterTable::note_done(Parameter& p) {
  if (!counts(p)) return;
  WEFT_ASSERT(p.pending > 0);
  --p.pending;
  auto& bucket = buckets_[p.bucket];
  if (--bucket.pending == 0) {
    // Parameters of the bucket that were not used in this step still hold the last step's gradient:
    // zero it.
    for (const auto& q : parameters_)
      if (q->trainable && q->bucket == p.bucket && !q->grad_written) q->grad_to_add();
    if (bucket.sharded) return complete(p.bucket);
    bucket.ready = true;
    announce();
  }
}

void ParameterTable::complete(int bucket) {
  // The ranks' collectives match only if all finish their buckets in this order.
  WEFT_ASSERT(bucket == next_sharded_);
  ++next_sharded_;
  // Another bucket's gradients may be there.
  for (const Part& gap : gaps_[bucket]) {
    Tensor rest = gradient_of(bucket).slice(gap.begin, gap.end);
    ops::fill_zero(rest);
  }
  on_ready_(bucket);
  announce();
}

void ParameterTable::announce() {
  // In order of buckets, so that collectives match on all ranks in whatever order each rank's
  // backward finished them: sharded ones come first, also those of a rank that walks.
  if (next_sharded_ < sharded_) return;
  while (next_bucket_ < static_cast<int>(buckets_.size()) && buckets_[next_bucket_].ready)
    on_ready_(next_bucket_++);
}

std::vector<bool> ParameterTable::written() const {
  std::vector<bool> written;
  for (const auto& p : parameters_) written.push_back(p->grad_written);
  return written;
}

ParameterTable::StepState ParameterTable::step_state() const {
  StepState s;
  s.grad_written = written();
  s.buckets = buckets_;
  s.next_bucket = next_bucket_;
  s.next_sharded = next_sharded_;
  return s;
}

void ParameterTable::set_step_state(const StepState& s) {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i]->grad_written = s.grad_written[i];
  buckets_ = s.buckets;
  next_bucket_ = s.next_bucket;
  next_sharded_ = s.next_sharded;
}

void ParameterTable::finish_step() {
  for (const auto& p : parameters_)
    if (p->trainable && !p->sharded && !p->grad_written) p->grad_to_add();
  for (auto& b : buckets_) b.ready = true;
  next_sharded_ = sharded_;
  announce();
}

OptimizerState::OptimizerState(ParameterTable& table, bool sharded, int rank, int ranks,
                               bool squares, std::vector<double> ema_decays)
    : table_(table), sharded_(sharded), ema_decays_(std::move(ema_decays)) {
  offsets_.push_back(0);
  std::int64_t low = 0;  // end of the elements of bf16_only buckets behind the sharded ones
  for (const ParameterTable::Bucket& b : table.buckets()) {
    parts_.push_back(sharded ? part_of(b.begin, b.end, rank, ranks) : Part{b.begin, b.end});
    offsets_.push_back(offsets_.back() + parts_.back().size());
    if (b.bf16_only && !b.sharded) low = offsets_.back();
  }
  const std::int64_t first_low = offsets_[static_cast<std::size_t>(table.sharded_buckets())];
  const Shape shape{offsets_.back()};
  exp_avg_ = Tensor::persistent(shape, DType::f32);
  if (squares) exp_avg_sq_ = Tensor::persistent(shape, DType::f32);
  for (std::size_t i = 0; i < ema_decays_.size(); ++i)
    ema_.push_back(Tensor::persistent(shape, DType::f32));
  for (int i = 0; i < averages(); ++i)
    for (int b = 0; b < static_cast<int>(parts_.size()); ++b) {
      Tensor to = ema(b, i);
      ops::convert(master(b), to);
    }
  if (!sharded || !table.working().defined() || low == 0) return;
  // The EMA still equals the masters and is already cut into this rank's parts: copy it.
  Tensor moved = Tensor::persistent({low - first_low}, DType::f32);
  ops::convert(ema_.front().slice(first_low, low), moved);
  master_ = moved;
  table.drop_bf16_only_values();
}

Tensor OptimizerState::own(const Tensor& array, int bucket) const {
  const auto b = static_cast<std::size_t>(bucket);
  return array.slice(offsets_[b], offsets_[b + 1]);
}

Tensor OptimizerState::master(int bucket) const {
  const ParameterTable::Bucket& b = table_.buckets()[bucket];
  if (b.sharded) return table_.shard(bucket);
  if (master_.defined() && b.bf16_only) {
    const auto at = static_cast<std::size_t>(bucket);
    const std::int64_t first = offsets_[static_cast<std::size_t>(table_.sharded_buckets())];
    return master_.slice(offsets_[at] - first, offsets_[at + 1] - first);
  }
  return owned(table_.values_of(bucket), bucket);
}

Tensor OptimizerState::gradient(int bucket) const {
  if (table_.buckets()[bucket].sharded) return table_.shard_gradient(bucket);
  return owned(table_.gradient_of(bucket), bucket);
}

Tensor OptimizerState::working(int bucket) const {
  if (!table_.working().defined() || table_.buckets()[bucket].sharded) return {};
  return owned(table_.working_of(bucket), bucket);
}

Tensor OptimizerState::owned(const Tensor& whole, int bucket) const {
  const std::int64_t begin = table_.buckets()[bucket].begin;
  return whole.slice(part(bucket).begin - begin, part(bucket).end - begin);
}

std::size_t OptimizerState::bytes() const {
  return exp_avg_.bytes() + (has_squares() ? exp_avg_sq_.bytes() : 0) +
         ema_.size() * ema_.front().bytes() + (master_.defined() ? master_.bytes() : 0) +
         table_.shard_bytes();
}

}  // namespace weft
