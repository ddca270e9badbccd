#include "nn/parameters.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/philox.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

// Parameters start on whole cache lines.
std::int64_t aligned(std::int64_t n) { return (n + 15) / 16 * 16; }

// FNV-1a: the stream number of a parameter is a function of its name alone.
std::uint64_t stream_of(const std::string& name) {
  std::uint64_t h = 14695981039346656037ull;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return h;
}

}  // namespace

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

void ParameterTable::allocate(std::int64_t bucket_elements, bool bf16_working, bool gradients) {
  std::int64_t at = 0, fixed_at = 0;
  buckets_.clear();
  const auto close_bucket = [&] {
    at = (at + bucket_pad - 1) / bucket_pad * bucket_pad;
    buckets_.back().end = at;
  };
  for (const bool bf16_only : {true, false})
    for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
      Parameter& p = **it;
      if (p.bf16_only != bf16_only) continue;
      if (!p.trainable) {
        p.offset = fixed_at;
        fixed_at += aligned(p.shape.numel());
        continue;
      }
      const bool full = !buckets_.empty() && at - buckets_.back().begin >= bucket_elements;
      if (buckets_.empty() || full || buckets_.back().bf16_only != bf16_only) {
        if (!buckets_.empty()) close_bucket();
        buckets_.push_back(Bucket{at, at, bf16_only});
      }
      p.offset = at;
      p.bucket = static_cast<int>(buckets_.size()) - 1;
      at += aligned(p.shape.numel());
    }
  if (buckets_.empty()) buckets_.push_back(Bucket{});
  close_bucket();
  values_begin_ = 0;

  values_ = Tensor::persistent({at}, DType::f32);
  if (gradients) grads_ = Tensor::persistent({at}, DType::f32);
  if (bf16_working) working_ = Tensor::persistent({at}, DType::bf16);
  fixed_ = Tensor::persistent({fixed_at}, DType::f32);
  for (const auto& owned : parameters_) {
    Parameter& p = *owned;
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

void ParameterTable::initialise(std::uint64_t seed) {
  for (const auto& p : parameters_) {
    const Philox random(seed, Purpose::init, 0, stream_of(p->name));
    std::vector<float> values(static_cast<std::size_t>(p->value.numel()));
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
    p->value.set(std::span<const float>(values));
  }
  refresh_working();
}

void ParameterTable::refresh_working() {
  if (!working_.defined()) return;
  Tensor rest = working_.slice(values_begin_, working_.numel());
  ops::convert(values_, rest);
  for (const auto& p : parameters_)
    if (!p->trainable) ops::convert(p->value, p->working);
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
  buckets_[static_cast<std::size_t>(bucket)].on_its_way = true;
}

bool ParameterTable::any_on_its_way() const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const Bucket& b) { return b.on_its_way; });
}

void ParameterTable::await(const Parameter& p) {
  if (!p.trainable) return;
  Bucket& b = buckets_[static_cast<std::size_t>(p.bucket)];
  if (!b.on_its_way) return;
  b.on_its_way = false;
  arrive_(p.bucket);
}

void ParameterTable::note_use(Parameter& p) {
  if (!counting_ || !p.trainable) return;
  ++p.pending;
  ++buckets_[static_cast<std::size_t>(p.bucket)].pending;
}

void ParameterTable::note_done(Parameter& p) {
  if (!counting_ || !p.trainable) return;
  WEFT_ASSERT(p.pending > 0);
  --p.pending;
  auto& bucket = buckets_[static_cast<std::size_t>(p.bucket)];
  if (--bucket.pending == 0) {
    // Parameters of the bucket that nothing used this step still hold the last step's gradient.
    for (const auto& q : parameters_)
      if (q->trainable && q->bucket == p.bucket && !q->grad_written) q->grad_to_add();
    bucket.ready = true;
    announce();
  }
}

void ParameterTable::announce() {
  // In order of buckets on every rank, so that collectives match whatever each rank's backward did.
  while (next_bucket_ < static_cast<int>(buckets_.size()) &&
         buckets_[static_cast<std::size_t>(next_bucket_)].ready)
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

}  // namespace weft
