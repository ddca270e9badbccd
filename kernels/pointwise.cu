// CUDA side of ops/pointwise.h. CPU twin: src/ops/cpu/pointwise.cpp; cases:
// tests/kernels/pointwise.cpp.
//
// Bound by memory. Least bytes an element, bf16 (f32 twice that):
//   gelu_forward 4, gelu_backward 6 (8 with y), add_inplace 6, fill_zero 2, convert 6 (f32 to bf16
//     or back), copy_tokens 4;
//   silu_forward 8 and silu_backward 12 (16 added), f32 alone.
// 16 bytes an access and four of them a thread and input, so that with every thread resident an SM
// of an H200 has some 64 KB under way, twice what its share of 4.8 TB/s needs. The GELU in bf16
// comes nearest to the processor's own limits: two special-function results an element, where an SM
// makes 16 a clock and 5 elements a clock arrive.
#include "ops/pointwise.h"

#include "math.cuh"
#include "ops/conv.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int packs = 4;  // of a thread

constexpr float k0 = 0.79788456080286535588f;  // sqrt(2/pi)
constexpr float k1 = 0.044715f;

// (1 + tanh(u)) / 2 = sigmoid(2u).
__device__ __forceinline__ float gelu_gate(float z) {
  return sigmoid(2.0f * k0 * (z + k1 * z * z * z));
}

// Element `e` of op's inputs a and outputs b.
template <int inputs, int outputs, int V, class Operation>
__device__ __forceinline__ void apply(Operation op, const float (&a)[inputs][V],
                                      float (&b)[outputs][V], int e) {
  float from[inputs], to[outputs];
#pragma unroll
  for (int i = 0; i < inputs; ++i) from[i] = a[i][e];
#pragma unroll
  for (int o = 0; o < outputs; ++o) to[o] = b[o][e];
  op(from, to);
#pragma unroll
  for (int o = 0; o < outputs; ++o) b[o][e] = to[o];
}

// Calls op(inputs, outputs) for each of `count` elements, V an access. op finds the first output as
// it was if it reads it, zeros otherwise. Inputs and outputs may be the same memory, because each
// thread reads its elements before it writes them; an output may be null.
template <int V, bool reads_output, class In, class Out, class Operation, int inputs, int outputs>
__device__ __forceinline__ void walk(const In* const (&in)[inputs], Out* const (&out)[outputs],
                                     std::int64_t count, Operation op) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads * packs + threadIdx.x;
  Vec<In, V> x[packs][inputs];
  Vec<Out, V> y[packs];
#pragma unroll
  for (int p = 0; p < packs; ++p) {
    const std::int64_t at = first + p * threads;
    if ((at + 1) * V > count) continue;
#pragma unroll
    for (int i = 0; i < inputs; ++i) x[p][i] = load_vec<V>(in[i], at);
    if constexpr (reads_output) y[p] = load_vec<V>(static_cast<const Out*>(out[0]), at);
  }
#pragma unroll
  for (int p = 0; p < packs; ++p) {
    const std::int64_t at = first + p * threads;
    if ((at + 1) * V <= count) {
      float a[inputs][V], b[outputs][V] = {};
#pragma unroll
      for (int i = 0; i < inputs; ++i) unpack(x[p][i], a[i]);
      if constexpr (reads_output) unpack(y[p], b[0]);
#pragma unroll
      for (int e = 0; e < V; ++e) apply<inputs, outputs>(op, a, b, e);
#pragma unroll
      for (int o = 0; o < outputs; ++o)
        if (out[o] != nullptr) store_vec<V>(out[o], at, pack<Out, V>(b[o]));
    } else {  // the last few elements, by one thread
      for (std::int64_t i = at * V; i < count; ++i) {
        float a[inputs][1], b[outputs][1] = {};
        for (int k = 0; k < inputs; ++k) a[k][0] = to_float(in[k][i]);
        if constexpr (reads_output) b[0][0] = to_float(out[0][i]);
        apply<inputs, outputs>(op, a, b, 0);
        for (int o = 0; o < outputs; ++o)
          if (out[o] != nullptr) out[o][i] = from_float<Out>(b[o][0]);
      }
    }
  }
}

template <int V, class T>
__global__ void __launch_bounds__(threads, 3)
    gelu_forward_kernel(const T* z, T* y, std::int64_t count) {
  const T* const in[] = {z};
  T* const out[] = {y};
  walk<V, false>(in, out, count,
                 [](const float(&a)[1], float(&b)[1]) { b[0] = a[0] * gelu_gate(a[0]); });
}

template <int V, class T>
__global__ void __launch_bounds__(threads, 3)
    gelu_backward_kernel(const T* z, const T* dy, T* dz, T* y, std::int64_t count) {
  const T* const in[] = {z, dy};
  T* const out[] = {dz, y};
  walk<V, false>(in, out, count, [](const float(&a)[2], float(&b)[2]) {
    const float v = a[0], s = gelu_gate(v);
    b[0] = a[1] * (s + v * s * (1.0f - s) * (2.0f * k0) * (1.0f + 3.0f * k1 * v * v));
    b[1] = v * s;
  });
}

template <int V>
__global__ void __launch_bounds__(threads, 3)
    silu_forward_kernel(const float* z, float* y, std::int64_t count) {
  const float* const in[] = {z};
  float* const out[] = {y};
  walk<V, false>(in, out, count,
                 [](const float(&a)[1], float(&b)[1]) { b[0] = a[0] * sigmoid(a[0]); });
}

template <int V, bool accumulate>
__global__ void __launch_bounds__(threads, 3)
    silu_backward_kernel(const float* z, const float* dy, float* dz, std::int64_t count) {
  const float* const in[] = {z, dy};
  float* const out[] = {dz};
  walk<V, accumulate>(in, out, count, [](const float(&a)[2], float(&b)[1]) {
    const float s = sigmoid(a[0]);
    b[0] += a[1] * s * (1.0f + a[0] * (1.0f - s));
  });
}

template <int V, class T>
__global__ void __launch_bounds__(threads, 3) add_kernel(const T* x, T* y, std::int64_t count) {
  const T* const in[] = {x};
  T* const out[] = {y};
  walk<V, true>(in, out, count, [](const float(&a)[1], float(&b)[1]) { b[0] += a[0]; });
}

template <int V, class From, class To>
__global__ void __launch_bounds__(threads, 3)
    convert_kernel(const From* x, To* y, std::int64_t count) {
  const From* const in[] = {x};
  To* const out[] = {y};
  walk<V, false>(in, out, count, [](const float(&a)[1], float(&b)[1]) { b[0] = a[0]; });
}

// In integers alone, so that no header for half floats is needed: what is subnormal in f16 is a
// multiple of 2^-24.
__global__ void __launch_bounds__(threads)
    widen_half_kernel(const std::uint16_t* x, float* y, std::int64_t count) {
  const auto stride = static_cast<std::int64_t>(gridDim.x) * threads;
  for (auto i = thread_index(); i < count; i += stride) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x[i] & 0x8000u) << 16;
    const std::uint32_t a = x[i] & 0x7fffu;
    const float magnitude = a >= 0x7c00u  ? __uint_as_float(0x7f800000u | (a & 0x3ffu) << 13)
                            : a >= 0x400u ? __uint_as_float((a << 13) + 0x38000000u)
                                          : static_cast<float>(a) * 0x1p-24f;
    y[i] = sign != 0 ? -magnitude : magnitude;
  }
}

template <int V, class Kernel, class... A>
void launch_packs(Kernel kernel, std::int64_t count, A... args) {
  launch(kernel, dim3(blocks_for(count, threads * packs * V)), dim3(threads), 0, args..., count);
}

// gelu(g) u, g sigmoid(2 k0 (g + k1 g^3)) u.
template <class T, int V>
__global__ void __launch_bounds__(threads)
    gated_gelu_kernel(const T* gate, const T* value, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float g[V], u[V];
  unpack(load_vec<V>(gate, i), g);
  unpack(load_vec<V>(value, i), u);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float z = 2.0f * k0 * (g[k] + k1 * g[k] * g[k] * g[k]);
    g[k] *= sigmoid(z) * u[k];
  }
  store_vec<V>(y, i, pack<T, V>(g));
}

// Exact to f32's last places, unlike sigmoid(): it is a result here, not a factor.
template <class T>
__global__ void sigmoid_kernel(const T* x, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i < count) y[i] = from_float<T>(1.0f / (1.0f + expf(-to_float(x[i]))));
}

template <class T>
__global__ void sigmoid_backward_kernel(const T* y, const T* dy, T* dx, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float s = to_float(y[i]);
  dx[i] = from_float<T>(to_float(dy[i]) * s * (1.0f - s));
}

template <class T>
__global__ void leaky_relu_kernel(const T* x, float slope, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float v = to_float(x[i]);
  y[i] = from_float<T>(v > 0.0f ? v : slope * v);
}

template <class T>
__global__ void leaky_relu_backward_kernel(const T* y, float slope, const T* dy, T* dx,
                                           std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float d = to_float(dy[i]);
  dx[i] = from_float<T>(to_float(y[i]) > 0.0f ? d : slope * d);
}

template <class X, class Y>
__global__ void scaled_add_kernel(const X* x, float a, const float* factor, Y* y, bool accumulate,
                                  std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float v = (factor == nullptr ? a : a * factor[0]) * to_float(x[i]);
  y[i] = from_float<Y>(accumulate ? to_float(y[i]) + v : v);
}

// a, b and y may have any alignment: a few rows.
// `count` accesses of V elements.
template <class T, int V>
__global__ void add_rows_kernel(const float* a, const T* b, float* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float v[V], w[V];
  unpack(load_vec<V>(a, i), v);
  unpack(load_vec<V>(b, i), w);
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] += w[e];
  store_vec<V>(y, i, pack<float, V>(v));
}

// A tensor with C channels, seen as [outer,C,inner].
struct ChannelGrid {
  std::int64_t C, inner;
};
ChannelGrid channel_grid(const Tensor& x, ops::Channels channels) {
  if (channels == ops::Channels::last) return {x.dim(-1), 1};
  return {x.dim(1), x.numel() / (x.dim(0) * x.dim(1))};
}

template <class X, class Y>
__global__ void affine_kernel(const X* x, const float* affine, ChannelGrid g, Y* y,
                              std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t c = i / g.inner % g.C;
  y[i] = from_float<Y>(to_float(x[i]) * affine[c] + affine[g.C + c]);
}

template <class Y, class X>
__global__ void affine_backward_kernel(const Y* dy, const float* affine, ChannelGrid g, X* dx,
                                       bool accumulate, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float d = to_float(dy[i]) * affine[i / g.inner % g.C];
  dx[i] = from_float<X>(accumulate ? to_float(dx[i]) + d : d);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void gelu_forward(const Tensor& z, Tensor& y) {
  by_type(z, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (aligned<V>(z, y))
      launch_packs<V>(gelu_forward_kernel<V, T>, z.numel(), data<T>(z), data<T>(y));
    else
      launch_packs<1>(gelu_forward_kernel<1, T>, z.numel(), data<T>(z), data<T>(y));
  });
}

void gelu_backward(const Tensor& z, const Tensor& dy, Tensor& dz, Tensor& y) {
  by_type(z, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (aligned<V>(z, dy, dz, y))
      launch_packs<V>(gelu_backward_kernel<V, T>, z.numel(), data<T>(z), data<T>(dy), data<T>(dz),
                      data_or_null<T>(y));
    else
      launch_packs<1>(gelu_backward_kernel<1, T>, z.numel(), data<T>(z), data<T>(dy), data<T>(dz),
                      data_or_null<T>(y));
  });
}

void gated_gelu_forward(const Tensor& gu, Tensor& y) {
  const std::int64_t count = gu.numel() / 2;
  by_access(
      count,
      [&]<class T, int V>() {
        launch_items(gated_gelu_kernel<T, V>, count / V, data<T>(gu), data<T>(gu) + count,
                     data<T>(y));
      },
      gu, y);
}

void silu_forward(const Tensor& z, Tensor& y) {
  if (aligned<4>(z, y))
    launch_packs<4>(silu_forward_kernel<4>, z.numel(), data<float>(z), data<float>(y));
  else
    launch_packs<1>(silu_forward_kernel<1>, z.numel(), data<float>(z), data<float>(y));
}

void silu_backward(const Tensor& z, const Tensor& dy, Tensor& dz, bool accumulate) {
  const auto run = [&]<int V>() {
    launch_packs<V>(accumulate ? silu_backward_kernel<V, true> : silu_backward_kernel<V, false>,
                    z.numel(), data<float>(z), data<float>(dy), data<float>(dz));
  };
  if (aligned<4>(z, dy, dz))
    run.operator()<4>();
  else
    run.operator()<1>();
}

void sigmoid_forward(const Tensor& x, Tensor& y) {
  by_type(x,
          [&]<class T>() { launch_items(sigmoid_kernel<T>, x.numel(), data<T>(x), data<T>(y)); });
}

void sigmoid_backward(const Tensor& y, const Tensor& dy, Tensor& dx) {
  by_type(y, [&]<class T>() {
    launch_items(sigmoid_backward_kernel<T>, y.numel(), data<T>(y), data<T>(dy), data<T>(dx));
  });
}

void leaky_relu_forward(const Tensor& x, float slope, Tensor& y) {
  by_type(x, [&]<class T>() {
    launch_items(leaky_relu_kernel<T>, x.numel(), data<T>(x), slope, data<T>(y));
  });
}

void leaky_relu_backward(const Tensor& y, float slope, const Tensor& dy, Tensor& dx) {
  by_type(y, [&]<class T>() {
    launch_items(leaky_relu_backward_kernel<T>, y.numel(), data<T>(y), slope, data<T>(dy),
                 data<T>(dx));
  });
}

void add_inplace(const Tensor& x, Tensor& y) {
  by_type(x, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (aligned<V>(x, y))
      launch_packs<V>(add_kernel<V, T>, x.numel(), data<T>(x), data<T>(y));
    else
      launch_packs<1>(add_kernel<1, T>, x.numel(), data<T>(x), data<T>(y));
  });
}

void fill_zero(Tensor& y) {
  if (y.bytes() > 0)
    CUDA_CHECK(cudaMemsetAsync(y.raw(), 0, y.bytes(), cuda_stream(Stream::compute)));
}

void convert(const Tensor& x, Tensor& y) {
  if (x.dtype() == y.dtype()) {
    if (x.bytes() > 0)
      CUDA_CHECK(cudaMemcpyAsync(y.raw(), x.raw(), x.bytes(), cudaMemcpyDeviceToDevice,
                                 cuda_stream(Stream::compute)));
    return;
  }
  if (x.dtype() == DType::f16) {
    const std::int64_t count = x.numel();
    launch(widen_half_kernel, dim3(blocks_for(count, threads * packs)), dim3(threads), 0,
           static_cast<const std::uint16_t*>(x.raw()), data<float>(y), count);
    return;
  }
  const auto run = [&]<class From, class To>() {
    if (aligned<4>(x, y))
      launch_packs<4>(convert_kernel<4, From, To>, x.numel(), data<From>(x), data<To>(y));
    else
      launch_packs<1>(convert_kernel<1, From, To>, x.numel(), data<From>(x), data<To>(y));
  };
  if (x.dtype() == DType::f32)
    run.operator()<float, __nv_bfloat16>();
  else
    run.operator()<__nv_bfloat16, float>();
}

void scaled_add(const Tensor& x, float a, const Tensor& factor, Tensor& y, bool accumulate) {
  by_type(x, [&]<class X>() {
    by_type(y, [&]<class Y>() {
      launch_items(scaled_add_kernel<X, Y>, x.numel(), data<X>(x), a, data_or_null<float>(factor),
                   data<Y>(y), accumulate);
    });
  });
}

void add_rows(const Tensor& a, const Tensor& b, Tensor& y) {
  by_type(b, [&]<class T>() {
    by_width<4>(
        y.numel(),
        [&]<int V>() {
          launch_items(add_rows_kernel<T, V>, y.numel() / V, data<float>(a), data<T>(b),
                       data<float>(y));
        },
        a, b, y);
  });
}

void channel_affine_forward(const Tensor& x, const Tensor& affine, Channels channels, Tensor& y) {
  by_types(x, y, [&]<class X, class Y>() {
    launch_items(affine_kernel<X, Y>, x.numel(), data<X>(x), data<float>(affine),
                 channel_grid(x, channels), data<Y>(y));
  });
}

void channel_affine_backward(const Tensor& dy, const Tensor& affine, Channels channels, Tensor& dx,
                             bool accumulate) {
  by_types(dy, dx, [&]<class Y, class X>() {
    launch_items(affine_backward_kernel<Y, X>, dy.numel(), data<Y>(dy), data<float>(affine),
                 channel_grid(dy, channels), data<X>(dx), accumulate);
  });
}

void scale_channels(const Tensor& x, const Tensor& keep, Tensor& y) {
  if (x.numel() == 0) return;
  const std::int64_t N = x.dim(0), C = x.dim(-1);
  const Shape shape{N, 1, 1, x.numel() / (N * C), C};
  Tensor to = y.view(shape);
  modulate(x.view(shape), keep, to);
}

}  // namespace weft::ops::cuda
