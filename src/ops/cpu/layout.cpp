// CPU side of the rearrangements of ops/conv.h: each moves every element once.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
namespace {

// Calls f with a value of an integer type as wide as the elements.
template <class F>
void with_width(const Tensor& x, F&& f) {
  if (size_of(x.dtype()) == 2)
    f(std::uint16_t{});
  else
    f(std::uint32_t{});
}

// to [B,n,m] = from [B,m,n], in blocks that keep both sides' lines in the cache.
template <class T>
void transpose(const T* from, std::int64_t B, std::int64_t m, std::int64_t n, T* to) {
  constexpr std::int64_t block = 32;
  const std::int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t k = 0; k < blocks; ++k)
      for (std::int64_t i0 = 0; i0 < m; i0 += block)
        for (std::int64_t j = k * block; j < std::min(n, (k + 1) * block); ++j)
          for (std::int64_t i = i0; i < std::min(m, i0 + block); ++i)
            to[(b * n + j) * m + i] = from[(b * m + i) * n + j];
}

}  // namespace

void to_channels_last(const Tensor& x, Tensor& y) {
  const std::int64_t B = x.dim(0), C = x.dim(1), P = x.numel() / (B * C);
  with_width(x, [&](auto type) {
    using T = decltype(type);
    transpose(static_cast<const T*>(x.raw()), B, C, P, static_cast<T*>(y.raw()));
  });
}

void to_channels_first(const Tensor& x, Tensor& y) {
  const std::int64_t B = x.dim(0), C = x.dim(-1), P = x.numel() / (B * C);
  with_width(x, [&](auto type) {
    using T = decltype(type);
    transpose(static_cast<const T*>(x.raw()), B, P, C, static_cast<T*>(y.raw()));
  });
}

void depth_to_time_forward(const Tensor& x, Tensor& y) {
  const std::int64_t frames = y.dim(0) * y.dim(1), P = x.dim(2) * x.dim(3), C = y.dim(-1);
  WEFT_ASSERT(y.dim(1) == 2 * x.dim(1) && x.dim(-1) == 2 * C);
  with_width(x, [&](auto type) {
    using E = decltype(type);
    const E* xs = static_cast<const E*>(x.raw());
    E* ys = static_cast<E*>(y.raw());
#pragma omp parallel for schedule(static)
    for (std::int64_t t = 0; t < frames; ++t) {
      const E* from = xs + t / 2 * P * 2 * C + t % 2;
      E* to = ys + t * P * C;
      for (std::int64_t i = 0; i < P * C; ++i) to[i] = from[2 * i];
    }
  });
}

void depth_to_time_backward(const Tensor& dy, Tensor& dx) {
  const std::int64_t frames = dy.dim(0) * dy.dim(1), P = dx.dim(2) * dx.dim(3), C = dy.dim(-1);
  WEFT_ASSERT(dy.dim(1) == 2 * dx.dim(1) && dx.dim(-1) == 2 * C);
  with_width(dy, [&](auto type) {
    using E = decltype(type);
    const E* from = static_cast<const E*>(dy.raw());
    E* to = static_cast<E*>(dx.raw());
#pragma omp parallel for schedule(static)
    for (std::int64_t t = 0; t < frames; ++t) {
      const E* in = from + t * P * C;
      E* out = to + t / 2 * P * 2 * C + t % 2;
      for (std::int64_t i = 0; i < P * C; ++i) out[2 * i] = in[i];
    }
  });
}

WEFT_CPU_END
