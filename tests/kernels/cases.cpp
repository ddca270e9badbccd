#include "tests/kernels/cases.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/philox.h"
#include "tensor/tensor.h"

namespace weft {

void Cases::push_back(KernelCase c) {
  finish();
  last_ = std::move(c);
}

void Cases::finish() {
  if (last_) take_(*last_);
  last_.reset();
}

void for_each_case(CaseSize size, const Cases::Take& take) {
  Cases cases(take);
  for (const auto make :
       {attention_cases, batch_norm_cases, class_loss_cases, conv_cases,      deform_cases,
        diffusion_cases, embed_cases,      evaluate_cases,   fp8_cases,       fusion_cases,
        layout_cases,    loss_cases,       matmul_cases,     modulated_cases, norm_cases,
        optimizer_cases, pointwise_cases,  pool_cases,       random_cases,    reduce_cases,
        resize_cases,    spade_cases,      text_loss_cases,  volume_cases})
    make(size, cases);
  cases.finish();
}

KernelCase make_case(std::string op, std::string shape, DType dtype, double bytes,
                     double tolerance) {
  KernelCase c;
  c.op = std::move(op);
  c.shape = std::move(shape);
  c.dtype = dtype;
  c.bytes = bytes;
  c.tolerance = tolerance;
  return c;
}

KernelCase bandwidth_case(std::string op, std::string shape, DType dtype, std::int64_t values,
                          std::vector<Tensor> inputs, KernelCase::Run run) {
  // bf16: one unit of the largest value's last place where two sides round either way.
  KernelCase c = make_case(std::move(op), std::move(shape), dtype,
                           static_cast<double>(values) * static_cast<double>(size_of(dtype)),
                           dtype == DType::bf16 ? 1.0 / 128 : 2e-5);
  c.inputs = std::move(inputs);
  c.run = std::move(run);
  return c;
}

Tensor random_tensor(const Shape& shape, DType dtype, std::uint64_t seed, float deviation,
                     float mean) {
  // Counter-based and on all threads: real shapes have hundreds of millions of elements.
  const Philox random(seed, Purpose::noise, 0, 0);
  Tensor t = Tensor::host(shape, dtype);
  const std::int64_t count = t.numel();
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < count; first += 4) {
    const auto words = random.block(static_cast<std::uint32_t>(first / 4));
    for (std::int64_t i = first; i < std::min(first + 4, count); ++i) {
      const auto pair = static_cast<std::size_t>(i - first) / 2 * 2;
      const float v = mean + deviation * Philox::gauss(words[pair], words[pair + 1], i % 2 != 0);
      if (dtype == DType::bf16)
        t.data<bf16>()[i] = bf16(v);
      else
        t.data<float>()[i] = v;
    }
  }
  return t;
}

// Copies of host tensors on the current arena's device; undefined tensors stay undefined.
std::vector<Tensor> copies(const std::vector<Tensor>& inputs) {
  std::vector<Tensor> to;
  for (const Tensor& t : inputs) {
    to.push_back(t.defined() ? Tensor::empty(t.shape(), t.dtype()) : Tensor());
    if (t.defined()) to.back().set(std::span(static_cast<const std::byte*>(t.raw()), t.bytes()));
  }
  return to;
}

Values values_of(const Tensor& on_device) {
  if (!on_device.defined()) return {};
  const Tensor t = on_device.to_host();
  Values v(t.numel());
  for (std::size_t i = 0; i < v.size(); ++i) switch (t.dtype()) {
      case DType::f32:
        v[i] = static_cast<double>(t.data<float>()[i]);
        break;
      case DType::bf16:
        v[i] = static_cast<double>(static_cast<float>(t.data<bf16>()[i]));
        break;
      case DType::f64:
        v[i] = t.data<double>()[i];
        break;
      case DType::i32:
        v[i] = t.data<std::int32_t>()[i];
        break;
      case DType::i64:
        v[i] = static_cast<double>(t.data<std::int64_t>()[i]);
        break;
      case DType::u8:
        v[i] = t.data<std::uint8_t>()[i];
        break;
      default:
        WEFT_ASSERT(false);
    }
  return v;
}

Verdict compare(const std::vector<Values>& got, const std::vector<Values>& wanted,
                double tolerance) {
  WEFT_ASSERT(got.size() == wanted.size());
  Verdict v;
  for (std::size_t o = 0; o < got.size(); ++o) {
    const Values &a = got[o], &b = wanted[o];
    WEFT_ASSERT(a.size() == b.size());
    double largest = 0;
    for (const double x : b)
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    if (largest == 0) largest = 1;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
      const double off = std::abs(a[i] - b[i]) / largest;
      if (!(off <= tolerance)) ++v.wrong;  // a NaN is wrong, too
      v.worst = std::isnan(off) ? off : std::max(v.worst, off);
    }
  }
  return v;
}

std::vector<Values> values_of(const std::vector<Tensor>& tensors) {
  std::vector<Values> all;
  for (const Tensor& t : tensors) all.push_back(values_of(t));
  return all;
}

Verdict compare(const std::vector<Tensor>& got, const std::vector<Piece>& wanted,
                double tolerance) {
  std::vector<Values> a(got.size()), b(got.size());
  for (const Piece& p : wanted) {
    const auto n = static_cast<std::int64_t>(p.values.size());
    const Values part =
        values_of(got[p.output].view({got[p.output].numel()}).slice(p.first, p.first + n));
    a[p.output].insert(a[p.output].end(), part.begin(), part.end());
    b[p.output].insert(b[p.output].end(), p.values.begin(), p.values.end());
  }
  return compare(a, b, tolerance);
}

}  // namespace weft
