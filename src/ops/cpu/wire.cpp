// CPU side of ops/wire.h.
#include "ops/wire.h"

#include <immintrin.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

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

void convert_for_wire(const Tensor& x, Tensor& y, Stream) {
  WEFT_ASSERT(x.numel() == y.numel());
  convert_range(x.raw(), x.dtype(), y.raw(), y.dtype(), x.numel());
}
WEFT_CPU_END
