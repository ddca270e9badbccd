#include "nn/parameters.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "ops/pointwise.h"

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

void Parameter::set(std::int64_t first, std::span<const float> values) {
  const std::int64_t end = first + static_cast<std::int64_t>(values.size());
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

void ParameterTable::allocate(std::int64_t bucket_elements, bool bf16_working, bool gradients) {
  std::int64_t at = 0;
  buckets_.clear();
  const auto close_bucket = [&] {
    at = (at + bucket_pad - 1) / bucket_pad * bucket_pad;
    buckets_.back().end = at;
  };
  const auto place = [&](Parameter& p) {
    const bool full = !buckets_.empty() && at - buckets_.back().begin >= bucket_elements;
    if (buckets_.empty() || full || buckets_.back().bf16_only != p.bf16_only ||
        buckets_.back().group != p.group) {
      if (!buckets_.empty()) close_bucket();
      buckets_.push_back(Bucket{at, at, p.bf16_only, p.group});
    }
    p.offset = at;
    p.bucket = static_cast<int>(buckets_.size()) - 1;
    at += aligned(p.shape.numel());
  };
  // bf16_only buckets come first, so that drop_bf16_only_values() can cut them off the front. Then
  // by group, the last group first, for groups may alternate from layer to layer.
  for (const bool bf16_only : {true, false})
    for (int group = groups() - 1; group >= 0; --group)
      for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it)
        if ((*it)->bf16_only == bf16_only && (*it)->group == group && (*it)->trainable) place(**it);
  // One bucket even with nothing to train: flat_arrays() takes the length from the last one.
  if (buckets_.empty()) buckets_.push_back(Bucket{});
  close_bucket();
  values_begin_ = 0;

  values_ = Tensor::persistent({at}, DType::f32);
  if (gradients) grads_ = Tensor::persistent({at}, DType::f32);
  if (bf16_working) working_ = Tensor::persistent({at}, DType::bf16);
  const std::int64_t fixed =
      lay_out_fixed([](const Parameter& p) { return !p.trainable && p.role != base_role; },
                    [](Parameter& p, std::int64_t offset) { p.offset = offset; });
  fixed_ = Tensor::persistent({fixed}, DType::f32);
  allocate_to_run(bf16_working, [](const Parameter& p) { return p.role == base_role; });
  for (const auto& owned : parameters_) {
    Parameter& p = *owned;
    if (p.role == base_role) continue;
    const std::int64_t end = p.offset + p.shape.numel();
    p.value = (p.trainable ? values_ : fixed_).slice(p.offset, end).view(p.shape);
    if (!p.trainable) {
      if (bf16_working) p.working = Tensor::persistent(p.shape, DType::bf16);
      continue;
    }
    if (gradients) p.grad = grads_.slice(p.offset, end).view(p.shape);
    if (bf16_working) p.working = working_.slice(p.offset, end).view(p.shape);
  }
}

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
      wide = Tensor::persistent({wide_at}, DType::f32);
      low = Tensor::persistent({low_at}, DType::bf16);
    }
    wide_at = low_at = 0;
    for (const auto& owned : parameters_) {
      Parameter& p = *owned;
      if (!chosen(p)) continue;
      const std::int64_t n = p.shape.numel();
      const bool has_low = bf16_model, has_wide = !bf16_model || !p.bf16_only;
      if (placed && has_wide) p.value = wide.slice(wide_at, wide_at + n).view(p.shape);
      if (placed && has_low) p.working = low.slice(low_at, low_at + n).view(p.shape);
      if (has_wide) wide_at += aligned(n);
      if (has_low) low_at += aligned(n);
    }
  }
}

namespace {

// Of a parameter in the formats of allocate_for_inference().
std::size_t bytes_to_run(const Parameter& p, bool bf16_model) {
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

void ParameterTable::initialise(std::uint64_t seed) {
  for (const auto& p : parameters_) {
    const Philox random(seed, Purpose::init, 0, stream_of(p->name));
    std::vector<float> values(p->shape.numel());
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto e = static_cast<std::uint32_t>(i);
      switch (p->init.kind) {
        case Init::Kind::uniform:
          values[i] = p->init.a * (2.0f * random.uniform(e) - 1.0f);
          break;
        case Init::Kind::normal:
          values[i] = p->init.a * random.normal(e);
          break;
        case Init::Kind::constant:
          values[i] = p->init.a;
          break;
        case Init::Kind::rotary:
          values[i] = static_cast<float>(
              std::pow(static_cast<double>(p->init.a),
                       -static_cast<double>(i) / static_cast<double>(values.size())));
          break;
      }
    }
    p->set(0, values);
  }
}

void ParameterTable::refresh_working() {
  if (!working_.defined()) return;
  Tensor rest = working_.slice(values_begin_, working_.numel());
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
  next_bucket_ = 0;
  counting_ = false;
  for (auto& b : buckets_) b.pending = 0, b.ready = false;
  for (const auto& p : parameters_) p->grad_written = false, p->pending = 0;
}

void ParameterTable::drop_bf16_only_values() {
  WEFT_ASSERT(working_.defined() && values_begin_ == 0);
  for (const Bucket& b : buckets_)
    if (b.bf16_only) values_begin_ = b.end;
  Tensor rest = Tensor::persistent({values_.numel() - values_begin_}, DType::f32);
  ops::convert(values_.slice(values_begin_, values_.numel()), rest);
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
  if (!b.on_its_way) return;
  b.on_its_way = false;
  arrive_(p.bucket);
}

void ParameterTable::note_use(Parameter& p) {
  if (!counting_ || !p.trainable) return;
  ++p.pending;
  ++buckets_[p.bucket].pending;
}

void ParameterTable::note_done(Parameter& p) {
  if (!counting_ || !p.trainable) return;
  WEFT_ASSERT(p.pending > 0);
  --p.pending;
  auto& bucket = buckets_[p.bucket];
  if (--bucket.pending == 0) {
    // Parameters of the bucket that were not used in this step still hold the last step's gradient:
    // zero it.
    for (const auto& q : parameters_)
      if (q->trainable && q->bucket == p.bucket && !q->grad_written) q->grad_to_add();
    bucket.ready = true;
    announce();
  }
}

void ParameterTable::announce() {
  // In order of buckets, so that collectives match on all ranks in whatever order each rank's
  // backward finished them.
  while (next_bucket_ < static_cast<int>(buckets_.size()) && buckets_[next_bucket_].ready)
    on_ready_(next_bucket_++);
}

ParameterTable::StepState ParameterTable::step_state() const {
  StepState s;
  for (const auto& p : parameters_) s.grad_written.push_back(p->grad_written);
  s.buckets = buckets_;
  s.next_bucket = next_bucket_;
  return s;
}

void ParameterTable::set_step_state(const StepState& s) {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i]->grad_written = s.grad_written[i];
  buckets_ = s.buckets;
  next_bucket_ = s.next_bucket;
}

void ParameterTable::finish_step() {
  for (const auto& p : parameters_)
    if (p->trainable && !p->grad_written) p->grad_to_add();
  for (auto& b : buckets_) b.ready = true;
  announce();
}

OptimizerState::OptimizerState(ParameterTable& table, bool sharded, int rank, int ranks,
                               bool squares, std::vector<double> ema_decays)
    : table_(table), sharded_(sharded), ema_decays_(std::move(ema_decays)) {
  offsets_.push_back(0);
  std::int64_t low = 0;  // elements of bf16_only buckets
  for (const ParameterTable::Bucket& b : table.buckets()) {
    parts_.push_back(sharded ? part_of(b.begin, b.end, rank, ranks) : Part{b.begin, b.end});
    offsets_.push_back(offsets_.back() + parts_.back().size());
    if (b.bf16_only) low = offsets_.back();
  }
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
  Tensor moved = Tensor::persistent({low}, DType::f32);
  ops::convert(ema_.front().slice(0, low), moved);
  master_ = moved;
  table.drop_bf16_only_values();
}

Tensor OptimizerState::own(const Tensor& array, int bucket) const {
  const auto b = static_cast<std::size_t>(bucket);
  return array.slice(offsets_[b], offsets_[b + 1]);
}

Tensor OptimizerState::master(int bucket) const {
  const Part& p = part(bucket);
  if (master_.defined() && table_.buckets()[bucket].bf16_only) return own(master_, bucket);
  const std::int64_t first = table_.values_begin();
  return table_.values().slice(p.begin - first, p.end - first);
}

Tensor OptimizerState::gradient(int bucket) const {
  return table_.grads().slice(part(bucket).begin, part(bucket).end);
}

Tensor OptimizerState::working(int bucket) const {
  if (!table_.working().defined()) return {};
  return table_.working().slice(part(bucket).begin, part(bucket).end);
}

std::size_t OptimizerState::bytes() const {
  return exp_avg_.bytes() + (has_squares() ? exp_avg_sq_.bytes() : 0) +
         ema_.size() * ema_.front().bytes() + (master_.defined() ? master_.bytes() : 0);
}

}  // namespace weft
