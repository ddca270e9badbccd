// CPU side of ops/pointwise.h.
#include "ops/pointwise.h"

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
template <class T>
vf gelu_gate(vf z) {
  return vsigmoid_for<T>(z * (2.0f * k0 + 2.0f * k0 * k1 * z * z));
}

// Calls f(element, channel) for all elements of x, in parallel.
template <class F>
void by_channel(const Tensor& x, Channels channels, F&& f) {
  const bool last = channels == Channels::last;
  const std::int64_t C = last ? x.dim(-1) : x.dim(1), outer = last ? x.numel() / C : x.dim(0);
  const std::int64_t inner = last ? 1 : x.numel() / (outer * C);
#pragma omp parallel for collapse(2) schedule(static) if (x.numel() > 16384)
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t c = 0; c < C; ++c)
      for (std::int64_t i = 0; i < inner; ++i) f((o * C + c) * inner + i, c);
}

}  // namespace

void gelu_forward(const Tensor& z, Tensor& y) {
  with_type(z.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = z.data<T>();
    T* out = y.data<T>();
    for_elements(z.numel(), [&](std::int64_t i, int n) {
      const vf v = load_n(in + i, n);
      store_n(out + i, v * gelu_gate<T>(v), n);
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
      const vf s = gelu_gate<T>(v);
      const vf slope = s + v * s * (1.0f - s) * (2.0f * k0) * (1.0f + 3.0f * k1 * v * v);
      const vf d = load_n(g + i, n) * slope;
      if (again) store_n(again + i, v * s, n);
      store_n(out + i, d, n);
    });
  });
}

void gated_gelu_forward(const Tensor& gu, Tensor& y) {
  const std::int64_t count = gu.numel() / 2;
  with_type(gu.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *gate = gu.data<T>(), *value = gate + count;
    T* out = y.data<T>();
#pragma omp parallel for schedule(static) if (count > 2 * block)
    for (std::int64_t first = 0; first < count; first += block)
      for_vectors(std::min(block, count - first), [&](std::int64_t i, int n) {
        const vf g = load_n(gate + first + i, n);
        const vf gelu = g * gelu_gate<T>(g);
        store_n(out + first + i, gelu * load_n(value + first + i, n), n);
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

void sigmoid_forward(const Tensor& x, Tensor& y) {
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.data<T>();
    T* out = y.data<T>();
    for_elements(x.numel(), [&](std::int64_t i, int n) {
      store_n(out + i, vsigmoid_for<T>(load_n(in + i, n)), n);
    });
  });
}

void sigmoid_backward(const Tensor& y, const Tensor& dy, Tensor& dx) {
  with_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *at = y.data<T>(), *g = dy.data<T>();
    T* out = dx.data<T>();
    for_elements(y.numel(), [&](std::int64_t i, int n) {
      const vf s = load_n(at + i, n);
      store_n(out + i, load_n(g + i, n) * s * (1.0f - s), n);
    });
  });
}

void leaky_relu_forward(const Tensor& x, float slope, Tensor& y) {
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
    for_elements(x.numel(), [&](std::int64_t i, int n) {
      const vf v = load_n(in + i, n);
      store_n(out + i, v > 0.0f ? v : slope * v, n);
    });
  });
}

void leaky_relu_backward(const Tensor& y, float slope, const Tensor& dy, Tensor& dx) {
  with_type(y.dtype(), [&](auto type) {
    const auto* out = y.data<decltype(type)>();
    const auto* from = dy.data<decltype(type)>();
    auto* to = dx.data<decltype(type)>();
    for_elements(y.numel(), [&](std::int64_t i, int n) {
      const vf g = load_n(from + i, n);
      // y > 0 exactly where x > 0, for slope >= 0: x need not be kept.
      store_n(to + i, load_n(out + i, n) > 0.0f ? g : slope * g, n);
    });
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
    for (std::int64_t i = 0; i < count; ++i) {
#ifdef __x86_64__
      out[i] = _cvtsh_ss(in[i].bits);
#else
      out[i] = static_cast<float>(in[i]);
#endif
    }
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

void scaled_add(const Tensor& x, float a, const Tensor& factor, Tensor& y, bool accumulate) {
  const float f = factor.defined() ? a * factor.data<float>()[0] : a;
  with_type(x.dtype(), [&](auto tx) {
    with_type(y.dtype(), [&](auto ty) {
      const auto* in = x.data<decltype(tx)>();
      auto* out = y.data<decltype(ty)>();
      for_elements(x.numel(), [&](std::int64_t i, int n) {
        const vf v = f * load_n(in + i, n);
        store_n(out + i, accumulate ? load_n(out + i, n) + v : v, n);
      });
    });
  });
}

void add_rows(const Tensor& a, const Tensor& b, Tensor& y) {
  const float* as = a.data<float>();
  float* out = y.data<float>();
  with_type(b.dtype(), [&](auto type) {
    const auto* bs = b.data<decltype(type)>();
    for_elements(y.numel(), [&](std::int64_t i, int n) {
      store_n(out + i, load_n(as + i, n) + load_n(bs + i, n), n);
    });
  });
}

void channel_affine_forward(const Tensor& x, const Tensor& affine, Channels channels, Tensor& y) {
  const float *a = affine.data<float>(), *b = a + affine.dim(1);
  with_type(x.dtype(), [&](auto from) {
    with_type(y.dtype(), [&](auto to) {
      const auto* in = x.data<decltype(from)>();
      auto* out = y.data<decltype(to)>();
      by_channel(x, channels, [&](std::int64_t i, std::int64_t c) {
        out[i] = decltype(to)(static_cast<float>(in[i]) * a[c] + b[c]);
      });
    });
  });
}

void channel_affine_backward(const Tensor& dy, const Tensor& affine, Channels channels, Tensor& dx,
                             bool accumulate) {
  const float* a = affine.data<float>();
  with_type(dy.dtype(), [&](auto from) {
    with_type(dx.dtype(), [&](auto to) {
      const auto* g = dy.data<decltype(from)>();
      auto* out = dx.data<decltype(to)>();
      by_channel(dy, channels, [&](std::int64_t i, std::int64_t c) {
        const float d = static_cast<float>(g[i]) * a[c];
        out[i] = decltype(to)(accumulate ? static_cast<float>(out[i]) + d : d);
      });
    });
  });
}

void scale_channels(const Tensor& x, const Tensor& keep, Tensor& y) {
  const std::int64_t C = x.dim(-1), positions = x.numel() / C, each = positions / x.dim(0);
  const float* factor = keep.data<float>();
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
    auto* out = y.data<decltype(type)>();
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
    for (std::int64_t p = 0; p < positions; ++p)
      for_vectors(C, [&](std::int64_t c, int n) {
        store_n(out + p * C + c, load_n(in + p * C + c, n) * load_n(factor + p / each * C + c, n),
                n);
      });
  });
}

WEFT_CPU_END
