// CPU side of ops/optimizer.h: each reads its operands once.
#include "ops/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t block = 16384;  // of a sum of squares

template <class T>
void add_terms(const void* const* terms, int ranks, std::int64_t count, float* sum, bool rounded) {
  const auto term = [&](int r) { return static_cast<const T*>(terms[r]); };
  for_vectors(count, [&](std::int64_t i, int n) {
    vf s = load_n(term(0) + i, n);
    for (int r = 1; r < ranks; ++r) s += load_n(term(r) + i, n);
    if (rounded) {
      bf16 half[W];
      store(half, s);
      s = load(half);
    }
    store_n(sum + i, s, n);
  });
}

}  // namespace

void sum_of_squares(const Tensor& x, Tensor& sum, bool accumulate) {
  const float* in = x.data<float>();
  const std::int64_t count = x.numel(), blocks = (count + block - 1) / block;
  static thread_local std::vector<double> partial_store;
  partial_store.assign(blocks, 0.0);
  double* partial = partial_store.data();
#pragma omp parallel for schedule(static) if (count > block)
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t first = b * block, last = std::min(first + block, count);
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (std::int64_t i = first; i < last; ++i) s += static_cast<double>(in[i]) * in[i];
    partial[b] = s;
  }
  double total = accumulate ? sum.data<double>()[0] : 0;
  for (std::int64_t b = 0; b < blocks; ++b) total += partial[b];
  sum.data<double>()[0] = total;
}

void carry_non_finite(const Tensor& values, Tensor& sum) {
  // isfinite() explicitly: under -fno-signed-zeros GCC 12 folds a sum of 0 * v to 0, whatever v is.
  bool finite = std::isfinite(sum.data<double>()[0]);
  for (const double v : values.span<double>()) finite = finite && std::isfinite(v);
  sum.data<double>()[0] = finite ? 0 : std::numeric_limits<double>::quiet_NaN();
}

void add_sum(const Tensor& x, Tensor& total) {
  const float* in = x.data<float>();
  double sum = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) sum += in[i];
  total.data<double>()[0] += sum;
}

void checksum(const Tensor& x, Tensor& sum) {
  WEFT_ASSERT(x.bytes() % 4 == 0);
  const auto count = static_cast<std::int64_t>(x.bytes() / 4);
  const auto* bytes = static_cast<const std::byte*>(x.raw());
  std::uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) if (count > 65536)
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, bytes + 4 * i, 4);
    total += checksum_mix(static_cast<std::uint64_t>(i), word);
  }
  // In two halves, because a double holds whole numbers only up to 2^53.
  sum.data<double>()[0] = static_cast<double>(total & 0xffffffffu);
  sum.data<double>()[1] = static_cast<double>(total >> 32);
}

void sum_terms(const void* const* terms, int ranks, DType type, std::int64_t count, void* sum,
               bool rounded) {
  if (type == DType::f32) {
    add_terms<float>(terms, ranks, count, static_cast<float*>(sum), rounded);
  } else if (type == DType::bf16) {
    add_terms<bf16>(terms, ranks, count, static_cast<float*>(sum), rounded);
  } else {
    WEFT_ASSERT(type == DType::f64 && !rounded);
    auto* to = static_cast<double*>(sum);
    for (std::int64_t i = 0; i < count; ++i) {
      double s = static_cast<const double*>(terms[0])[i];
      for (int r = 1; r < ranks; ++r) s += static_cast<const double*>(terms[r])[i];
      to[i] = s;
    }
  }
}

void convert_range(const void* x, DType from, void* y, DType to, std::int64_t count) {
  if (from == to) {
    if (count > 0) std::memcpy(y, x, static_cast<std::size_t>(count) * size_of(from));
  } else if (to == DType::bf16) {
    WEFT_ASSERT(from == DType::f32);
    for_vectors(count, [&](std::int64_t i, int n) {
      store_n(static_cast<bf16*>(y) + i, load_n(static_cast<const float*>(x) + i, n), n);
    });
  } else {
    WEFT_ASSERT(from == DType::bf16 && to == DType::f32);
    for_vectors(count, [&](std::int64_t i, int n) {
      store_n(static_cast<float*>(y) + i, load_n(static_cast<const bf16*>(x) + i, n), n);
    });
  }
}

void sum_parts(const Tensor& parts, Tensor& sum, Stream) {
  const std::int64_t ranks = parts.dim(0), count = sum.numel();
  WEFT_ASSERT(parts.numel() == ranks * count && sum.dtype() == DType::f32);
  std::vector<const void*> terms;
  for (std::int64_t r = 0; r < ranks; ++r) terms.push_back(parts.slice(r, r + 1).raw());
  sum_terms(terms.data(), static_cast<int>(ranks), parts.dtype(), count, sum.raw(), false);
}

void convert_on_stream(const Tensor& x, Tensor& y, Stream) {
  WEFT_ASSERT(x.numel() == y.numel());
  convert_range(x.raw(), x.dtype(), y.raw(), y.dtype(), x.numel());
}

WEFT_CPU_END
