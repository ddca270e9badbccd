// CUDA side of ops/optimizer.h. CPU twin: src/ops/cpu/optimizer.cpp; cases: src/bench/kernels/optimizer.cpp. Not
// yet run on a GPU.
//
// adamw_step, bound by memory: gradient, weight, two moments and EMA in, all but the gradient out, the bf16 copy out: 38
// bytes an element (28 without EMA, 36 without the copy) for some 40 operations, a twentieth of what an SM of an H200 does
// meanwhile, hence exact square roots and quotients. One pass, four elements a thread, every load before the first use.
// Clipping and the decision to leave a non-finite step out are taken on the device: one thread a block reads the sum of
// squares while the block's loads are on the way.
//
// sum_of_squares: 4 bytes and one f64 multiplication and addition an element. A fixed number of blocks walks the tensor,
// each thread its own sums, added in fixed orders: the result depends on the length alone. Scratch: 8 KiB (Tensor::empty).
#include "ops/optimizer.h"

#include <algorithm>
#include <limits>

#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

// What the norm decides: by what the gradient is multiplied, or that nothing is done.
struct Verdict {
  float scale;
  bool finite;
};

__device__ __forceinline__ Verdict judge(double squares, float grad_clip) {
  const double over = sqrt(squares) + 1e-6;
  return {grad_clip > 0 && over > grad_clip ? static_cast<float>(grad_clip / over) : 1.0f,
          squares <= std::numeric_limits<double>::max()};  // false for NaN too
}

struct State {
  float *p, *m, *v, *ema;  // ema may be null
  __nv_bfloat16* copy;     // may be null
};

// One element: g is its gradient, before clipping.
__device__ __forceinline__ void adamw(const ops::AdamW& a, float scale, float rc1, float rc2,
                                      float g, float& p, float& m, float& v, float& ema) {
  g *= scale;
  m = a.beta1 * m + a.rest1 * g;
  v = a.beta2 * v + a.rest2 * g * g;
  p -= a.lr * ((m * rc1) / (sqrtf(v) * rc2 + a.eps) + a.weight_decay * p);
  ema = a.ema_decay * ema + (1.0f - a.ema_decay) * p;
}

template <int V>
__global__ void __launch_bounds__(threads, 4)
    adamw_kernel(ops::AdamW a, const double* __restrict__ squares, const float* __restrict__ grad,
                 State s, std::int64_t count) {
  Verdict* shared = shared_memory<Verdict>();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  const bool whole = (at + 1) * V <= count;
  Vec<float, V> g{}, p{}, m{}, v{}, ema{};
  if (whole) {
    g = load_vec<V>(grad, at);
    p = load_vec<V>(static_cast<const float*>(s.p), at);
    m = load_vec<V>(static_cast<const float*>(s.m), at);
    v = load_vec<V>(static_cast<const float*>(s.v), at);
    if (s.ema != nullptr) ema = load_vec<V>(static_cast<const float*>(s.ema), at);
  }
  if (threadIdx.x == 0) *shared = judge(*squares, a.grad_clip);
  __syncthreads();
  const Verdict verdict = *shared;
  if (!verdict.finite) return;
  const float rc1 = 1.0f / a.correction1, rc2 = 1.0f / sqrtf(a.correction2);
  if (whole) {
#pragma unroll
    for (int e = 0; e < V; ++e)
      adamw(a, verdict.scale, rc1, rc2, g.v[e], p.v[e], m.v[e], v.v[e], ema.v[e]);
    store_vec<V>(s.p, at, p);
    store_vec<V>(s.m, at, m);
    store_vec<V>(s.v, at, v);
    if (s.ema != nullptr) store_vec<V>(s.ema, at, ema);
    if (s.copy != nullptr) store_vec<V>(s.copy, at, pack<__nv_bfloat16, V>(p.v));
    return;
  }
  for (std::int64_t i = at * V; i < count; ++i) {  // the last few elements, by one thread
    float old = s.ema != nullptr ? s.ema[i] : 0.0f;
    adamw(a, verdict.scale, rc1, rc2, grad[i], s.p[i], s.m[i], s.v[i], old);
    if (s.ema != nullptr) s.ema[i] = old;
    if (s.copy != nullptr) s.copy[i] = from_float<__nv_bfloat16>(s.p[i]);
  }
}

constexpr int sum_blocks = 1024;  // fixed: the order of the sum may not depend on the GPU

// The block's sum, in thread 0; `shared` holds a double a thread.
__device__ __forceinline__ double sum_of_block(double x, double* shared) {
  shared[threadIdx.x] = x;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  return shared[0];
}

template <int V>
__global__ void __launch_bounds__(threads)
    squares_kernel(const float* __restrict__ x, std::int64_t count, double* __restrict__ partial) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  double sum = 0;
#pragma unroll 4
  for (std::int64_t i = first; i < count / V; i += stride) {
    const Vec<float, V> v = load_vec<V>(x, i);
#pragma unroll
    for (int e = 0; e < V; ++e) sum += static_cast<double>(v.v[e]) * static_cast<double>(v.v[e]);
  }
  if (first < count % V) {
    const double last = static_cast<double>(x[count - 1 - first]);
    sum += last * last;
  }
  sum = sum_of_block(sum, shared_memory<double>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(threads)
    add_squares_kernel(const double* __restrict__ partial, int count, bool accumulate,
                       double* __restrict__ total) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += threads) sum += partial[i];
  sum = sum_of_block(sum, shared_memory<double>());
  if (threadIdx.x == 0) *total = accumulate ? *total + sum : sum;
}

__device__ __forceinline__ bool is_finite(double x) {
  return fabs(x) <= std::numeric_limits<double>::max();  // false for NaN
}

// A few thousand values at most: one block, microseconds.
__global__ void __launch_bounds__(threads)
    carry_kernel(const double* __restrict__ values, std::int64_t count,
                 double* __restrict__ total) {
  double odd = threadIdx.x == 0 && !is_finite(*total) ? 1 : 0;
  for (std::int64_t i = threadIdx.x; i < count; i += threads) odd += is_finite(values[i]) ? 0 : 1;
  odd = sum_of_block(odd, shared_memory<double>());
  if (threadIdx.x == 0) *total = odd == 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void adamw_step(const AdamW& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& m,
                Tensor& v, Tensor& ema, Tensor& copy) {
  const State s{data<float>(p), data<float>(m), data<float>(v),
                a.ema_decay > 0 ? data_or_null<float>(ema) : nullptr,
                data_or_null<__nv_bfloat16>(copy)};
  const auto run = [&]<int V>() {
    launch(adamw_kernel<V>, dim3(blocks_for(p.numel(), threads * V)), dim3(threads),
           sizeof(Verdict), a, data<double>(squares), data<float>(grad), s, p.numel());
  };
  if (aligned<4>(grad, p, m, v, ema, copy))
    run.operator()<4>();
  else
    run.operator()<1>();
}

void sum_of_squares(const Tensor& x, Tensor& sum, bool accumulate) {
  // As many blocks as there is work for, so that short tensors are not all start-up.
  const unsigned blocks =
      std::min<unsigned>(sum_blocks, std::max(1u, blocks_for(x.numel(), threads * 16)));
  const Tensor partial = Tensor::empty({blocks}, DType::f64);
  const std::size_t shared = threads * sizeof(double);
  const auto run = [&]<int V>() {
    launch(squares_kernel<V>, dim3(blocks), dim3(threads), shared, data<float>(x), x.numel(),
           data<double>(partial));
  };
  if (aligned<4>(x))
    run.operator()<4>();
  else
    run.operator()<1>();
  launch(add_squares_kernel, dim3(1), dim3(threads), shared, data<double>(partial),
         static_cast<int>(blocks), accumulate, data<double>(sum));
}

void carry_non_finite(const Tensor& values, Tensor& sum) {
  launch(carry_kernel, dim3(1), dim3(threads), threads * sizeof(double), data<double>(values),
         values.numel(), data<double>(sum));
}

}  // namespace weft::ops::cuda
