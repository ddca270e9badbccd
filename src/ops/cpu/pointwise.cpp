// CPU side of ops/pointwise.h.
#include "ops/pointwise.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t block = 4096;  // elements of one piece of work

// Calls f(offset, n) for vectors of all n elements, in parallel over blocks.
template <class F>
void for_elements(std::int64_t count, F&& f) {
#pragma omp parallel for schedule(static) if (count > 2 * block)
  for (std::int64_t b = 0; b < (count + block - 1) / block; ++b) {
    const std::int64_t first = b * block;
    for_vectors(std::min(block, count - first), [&](std::int64_t i, int n) { f(first + i, n); });
  }
}

constexpr float k0 = 0.79788456080286535588f;  // sqrt(2/pi)
constexpr float k1 = 0.044715f;

// (1 + tanh(u)) / 2 = sigmoid(2u).
vf gelu_gate(vf z) { return vsigmoid(2.0f * k0 * (z + k1 * z * z * z)); }

}  // namespace

void gelu_forward(const Tensor& z, Tensor& y) {
  with_type(z.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = z.data<T>();
    T* out = y.data<T>();
    for_elements(z.numel(), [&](std::int64_t i, int n) {
      const vf v = load_n(in + i, n);
      store_n(out + i, v * gelu_gate(v), n);
    });
  });
}

void gelu_backward(const Tensor& z, const Tensor& dy, Tensor& dz, Tensor& y) {
  with_type(z.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = z.data<T>(), *g = dy.data<T>();
    T* out = dz.data<T>();
    T* again = y.defined() ? y.data<T>() : nullptr;
    for_elements(z.numel(), [&](std::int64_t i, int n) {
      const vf v = load_n(in + i, n);
      const vf s = gelu_gate(v);
      const vf slope = s + v * s * (1.0f - s) * (2.0f * k0) * (1.0f + 3.0f * k1 * v * v);
      const vf d = load_n(g + i, n) * slope;
      if (again) store_n(again + i, v * s, n);
      store_n(out + i, d, n);
    });
  });
}

void silu_forward(const Tensor& z, Tensor& y) {
  const float* in = z.data<float>();
  float* out = y.data<float>();
  for_elements(z.numel(), [&](std::int64_t i, int n) {
    const vf v = load_n(in + i, n);
    store_n(out + i, v * vsigmoid(v), n);
  });
}

void silu_backward(const Tensor& z, const Tensor& dy, Tensor& dz, bool accumulate) {
  const float *in = z.data<float>(), *g = dy.data<float>();
  float* out = dz.data<float>();
  for_elements(z.numel(), [&](std::int64_t i, int n) {
    const vf v = load_n(in + i, n);
    const vf s = vsigmoid(v);
    vf d = load_n(g + i, n) * s * (1.0f + v * (1.0f - s));
    if (accumulate) d += load_n(out + i, n);
    store_n(out + i, d, n);
  });
}

void add_inplace(const Tensor& x, Tensor& y) {
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
    for_elements(x.numel(), [&](std::int64_t i, int n) {
      store_n(out + i, load_n(out + i, n) + load_n(in + i, n), n);
    });
  });
}

void fill_zero(Tensor& y) {
  std::byte* p = static_cast<std::byte*>(y.raw());
  const std::int64_t bytes = static_cast<std::int64_t>(y.bytes()), piece = 1 << 18;
#pragma omp parallel for schedule(static) if (bytes > 4 * piece)
  for (std::int64_t b = 0; b < (bytes + piece - 1) / piece; ++b)
    std::memset(p + b * piece, 0, static_cast<std::size_t>(std::min(piece, bytes - b * piece)));
}

void convert(const Tensor& x, Tensor& y) {
  if (x.dtype() == DType::f16) {
    const f16* in = x.data<f16>();
    float* out = y.data<float>();
    const std::int64_t count = x.numel();
#pragma omp parallel for schedule(static) if (count > 2 * block)
    for (std::int64_t i = 0; i < count; ++i) out[i] = _cvtsh_ss(in[i].bits);
    return;
  }
  with_type(x.dtype(), [&](auto from) {
    with_type(y.dtype(), [&](auto to) {
      const auto* in = x.data<decltype(from)>();
      auto* out = y.data<decltype(to)>();
      for_elements(x.numel(),
                   [&](std::int64_t i, int n) { store_n(out + i, load_n(in + i, n), n); });
    });
  });
}

void copy_tokens(const Tensor& x, TokenBlock k, Tensor& y) {
  const std::int64_t B = x.dim(0), width = x.dim(3) * static_cast<std::int64_t>(size_of(x.dtype()));
  const std::int64_t run = k.tokens * width;  // the tokens of a frame lie together on both sides
  const auto* from = static_cast<const std::byte*>(x.raw());
  auto* to = static_cast<std::byte*>(y.raw());
  const auto place = [width](const Tensor& t, std::int64_t b, std::int64_t frame,
                             std::int64_t token) {
    return ((b * t.dim(1) + frame) * t.dim(2) + token) * width;
  };
#pragma omp parallel for schedule(static) collapse(2) if (B * k.frames * run > (1 << 18))
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t t = 0; t < k.frames; ++t)
      std::memcpy(to + place(y, b, k.to_frame + t, k.to_token),
                  from + place(x, b, k.from_frame + t, k.from_token),
                  static_cast<std::size_t>(run));
}

WEFT_CPU_END
