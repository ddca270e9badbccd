// CUDA side of ops/pointwise.h. CPU twin: src/ops/cpu/pointwise.cpp; cases: src/bench/kernels/pointwise.cpp. Not
// yet run on a GPU.
//
// Bound by memory. Least bytes an element, bf16 (f32 twice that):
//   gelu_forward 4, gelu_backward 6 (8 with y), add_inplace 6, fill_zero 2, convert 6 (f32 to bf16 or back), copy_tokens 4;
//   silu_forward 8 and silu_backward 12 (16 added), f32 alone.
// 16 bytes an access and four of them a thread and input, so that with every thread resident an SM of an H200 has some
// 64 KB under way, twice what its share of 4.8 TB/s needs. The GELU in bf16 comes nearest to the processor's own limits:
// two special-function results an element, where an SM makes 16 a clock and 5 elements a clock arrive.
#include "ops/pointwise.h"

#include "ptx.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;
constexpr int packs = 4;  // of a thread

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) {
  return rcp_approx(1.0f + exp2_approx(-1.44269504088896341f * x));
}

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

// Calls op(inputs, outputs) for each of `count` elements, V an access. op finds the first output as it was if it reads it,
// zeros otherwise. Inputs and outputs may be the same memory, because each thread reads its elements before it writes
// them; an output may be null.
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

// By integers alone, so that no header for half numbers is wanted: what is subnormal in f16 is a multiple of 2^-24.
__global__ void __launch_bounds__(threads)
    widen_half_kernel(const std::uint16_t* x, float* y, std::int64_t count) {
  const auto stride = static_cast<std::int64_t>(gridDim.x) * threads;
  for (auto i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count;
       i += stride) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x[i] & 0x8000u) << 16;
    const std::uint32_t a = x[i] & 0x7fffu;
    const float magnitude = a >= 0x7c00u  ? __uint_as_float(0x7f800000u | (a & 0x3ffu) << 13)
                            : a >= 0x400u ? __uint_as_float((a << 13) + 0x38000000u)
                                          : static_cast<float>(a) * 0x1p-24f;
    y[i] = sign != 0 ? -magnitude : magnitude;
  }
}

template <int V, class Kernel, class... A>
void start(Kernel kernel, std::int64_t count, A... args) {
  launch(kernel, dim3(blocks_for(count, threads * packs * V)), dim3(threads), 0, args..., count);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void gelu_forward(const Tensor& z, Tensor& y) {
  by_type(z, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (aligned<V>(z, y))
      start<V>(gelu_forward_kernel<V, T>, z.numel(), data<T>(z), data<T>(y));
    else
      start<1>(gelu_forward_kernel<1, T>, z.numel(), data<T>(z), data<T>(y));
  });
}

void gelu_backward(const Tensor& z, const Tensor& dy, Tensor& dz, Tensor& y) {
  by_type(z, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (aligned<V>(z, dy, dz, y))
      start<V>(gelu_backward_kernel<V, T>, z.numel(), data<T>(z), data<T>(dy), data<T>(dz),
               data_or_null<T>(y));
    else
      start<1>(gelu_backward_kernel<1, T>, z.numel(), data<T>(z), data<T>(dy), data<T>(dz),
               data_or_null<T>(y));
  });
}

void silu_forward(const Tensor& z, Tensor& y) {
  if (aligned<4>(z, y))
    start<4>(silu_forward_kernel<4>, z.numel(), data<float>(z), data<float>(y));
  else
    start<1>(silu_forward_kernel<1>, z.numel(), data<float>(z), data<float>(y));
}

void silu_backward(const Tensor& z, const Tensor& dy, Tensor& dz, bool accumulate) {
  const auto run = [&]<int V>() {
    start<V>(accumulate ? silu_backward_kernel<V, true> : silu_backward_kernel<V, false>, z.numel(),
             data<float>(z), data<float>(dy), data<float>(dz));
  };
  if (aligned<4>(z, dy, dz))
    run.operator()<4>();
  else
    run.operator()<1>();
}

void add_inplace(const Tensor& x, Tensor& y) {
  by_type(x, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (aligned<V>(x, y))
      start<V>(add_kernel<V, T>, x.numel(), data<T>(x), data<T>(y));
    else
      start<1>(add_kernel<1, T>, x.numel(), data<T>(x), data<T>(y));
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
      start<4>(convert_kernel<4, From, To>, x.numel(), data<From>(x), data<To>(y));
    else
      start<1>(convert_kernel<1, From, To>, x.numel(), data<From>(x), data<To>(y));
  };
  if (x.dtype() == DType::f32)
    run.operator()<float, __nv_bfloat16>();
  else
    run.operator()<__nv_bfloat16, float>();
}

// The runtime's own copy of a rectangle, one a sample: a frame's tokens are a row of it.
void copy_tokens(const Tensor& x, TokenBlock k, Tensor& y) {
  const std::size_t width = static_cast<std::size_t>(x.dim(3)) * size_of(x.dtype());
  const std::size_t run = static_cast<std::size_t>(k.tokens) * width;
  if (run == 0 || k.frames == 0) return;
  const auto place = [width](const Tensor& t, std::int64_t b, std::int64_t frame,
                             std::int64_t token) {
    return static_cast<std::byte*>(t.raw()) +
           static_cast<std::size_t>((b * t.dim(1) + frame) * t.dim(2) + token) * width;
  };
  const auto pitch = [width](const Tensor& t) {
    return static_cast<std::size_t>(t.dim(2)) * width;
  };
  for (std::int64_t b = 0; b < x.dim(0); ++b)
    CUDA_CHECK(cudaMemcpy2DAsync(place(y, b, k.to_frame, k.to_token), pitch(y),
                                 place(x, b, k.from_frame, k.from_token), pitch(x), run,
                                 static_cast<std::size_t>(k.frames), cudaMemcpyDeviceToDevice,
                                 cuda_stream(Stream::compute)));
}

}  // namespace weft::ops::cuda
