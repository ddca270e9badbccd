// CUDA side of ops/optimizer.h. CPU twin: src/ops/cpu/optimizer.cpp; cases:
// tests/kernels/optimizer.cpp.
//
// adamw_step, bound by memory: gradient, weight, two moments and EMA in, all but the gradient out,
// the bf16 copy out: 38 bytes an element (28 without EMA, 36 without the copy) for some 40
// operations, a twentieth of what an SM of an H200 does meanwhile, hence exact square roots and
// quotients. One pass, four elements a thread, every load before the first use. Clipping and the
// decision to leave a non-finite step out are taken on the device: one thread a block reads the sum
// of squares while the block's loads are on the way. sgd_step likewise, with one moment less: 28
// bytes an element, 20 without EMA.
#include "ops/optimizer.h"

#include <algorithm>
#include <limits>

#include "vector.cuh"

namespace weft::kernels {
namespace {

// What the norm decides: the factor of the gradient, or that the step is left out.
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
  float *p, *m, *v, *ema;  // ema may be null, and m where there is one moment
  __nv_bfloat16* copy;     // may be null
};

// One element: g is its gradient, before clipping.
struct AdamwRule {
  static constexpr bool two_moments = true;
  ops::AdamW a;
  __device__ __forceinline__ void operator()(float scale, float g, float& p, float& m, float& v,
                                             float& ema) const {
    const float rc1 = 1.0f / a.correction1, rc2 = 1.0f / sqrtf(a.correction2);
    g *= scale;
    m = a.beta1 * m + a.rest1 * g;
    v = a.beta2 * v + a.rest2 * g * g;
    p -= a.lr * ((m * rc1) / (sqrtf(v) * rc2 + a.eps) + a.weight_decay * p);
    ema = a.ema_decay * ema + (1.0f - a.ema_decay) * p;
  }
};
struct SgdRule {
  static constexpr bool two_moments = false;
  ops::Sgd a;
  __device__ __forceinline__ void operator()(float scale, float g, float& p, float&, float& v,
                                             float& ema) const {
    g = g * scale + a.weight_decay * p;
    v = a.first ? g : a.momentum * v + g;
    p -= a.lr * v;
    ema = a.ema_decay * ema + (1.0f - a.ema_decay) * p;
  }
};

template <class Rule, int V>
__global__ void __launch_bounds__(threads, 4)
    step_kernel(Rule rule, const double* __restrict__ squares, const float* __restrict__ grad,
                State s, std::int64_t count) {
  constexpr bool two = Rule::two_moments;
  Verdict* shared = shared_memory<Verdict>();
  const std::int64_t at = thread_index();
  const bool whole = (at + 1) * V <= count;
  Vec<float, V> g{}, p{}, m{}, v{}, ema{};
  if (whole) {
    g = load_vec<V>(grad, at);
    p = load_vec<V>(static_cast<const float*>(s.p), at);
    if constexpr (two) m = load_vec<V>(static_cast<const float*>(s.m), at);
    v = load_vec<V>(static_cast<const float*>(s.v), at);
    if (s.ema != nullptr) ema = load_vec<V>(static_cast<const float*>(s.ema), at);
  }
  if (threadIdx.x == 0) *shared = judge(*squares, rule.a.grad_clip);
  __syncthreads();
  const Verdict verdict = *shared;
  if (!verdict.finite) return;
  if (whole) {
#pragma unroll
    for (int e = 0; e < V; ++e) rule(verdict.scale, g.v[e], p.v[e], m.v[e], v.v[e], ema.v[e]);
    store_vec<V>(s.p, at, p);
    if constexpr (two) store_vec<V>(s.m, at, m);
    store_vec<V>(s.v, at, v);
    if (s.ema != nullptr) store_vec<V>(s.ema, at, ema);
    if (s.copy != nullptr) store_vec<V>(s.copy, at, pack<__nv_bfloat16, V>(p.v));
    return;
  }
  for (std::int64_t i = at * V; i < count; ++i) {  // the last few elements, by one thread
    float old = s.ema != nullptr ? s.ema[i] : 0.0f, none = 0.0f;
    rule(verdict.scale, grad[i], s.p[i], two ? s.m[i] : none, s.v[i], old);
    if (s.ema != nullptr) s.ema[i] = old;
    if (s.copy != nullptr) s.copy[i] = from_float<__nv_bfloat16>(s.p[i]);
  }
}

// A further average: 12 bytes an element.
template <int V>
__global__ void __launch_bounds__(threads)
    ema_kernel(float decay, const double* __restrict__ squares, const float* __restrict__ p,
               float* __restrict__ ema, std::int64_t count) {
  const std::int64_t at = thread_index();
  if (!judge(*squares, 0.0f).finite) return;
  const auto average = [&](float e, float w) { return decay * e + (1.0f - decay) * w; };
  if ((at + 1) * V <= count) {
    const Vec<float, V> w = load_vec<V>(p, at);
    Vec<float, V> e = load_vec<V>(static_cast<const float*>(ema), at);
#pragma unroll
    for (int i = 0; i < V; ++i) e.v[i] = average(e.v[i], w.v[i]);
    store_vec<V>(ema, at, e);
    return;
  }
  for (std::int64_t i = at * V; i < count; ++i) ema[i] = average(ema[i], p[i]);
}

__global__ void running_average_kernel(const double* rows, std::int64_t width, std::int64_t first,
                                       std::int64_t ranks, float scale, float decay,
                                       float* average) {
  double sum = 0.0;
  for (std::int64_t r = 0; r < ranks; ++r) sum += rows[r * width + first + threadIdx.x];
  if (!(fabs(sum) < 1e300)) return;  // not finite
  float& a = average[threadIdx.x];
  a = decay * a + (1.0f - decay) * scale * static_cast<float>(sum);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

template <class Rule>
static void step(Rule rule, const Tensor& squares, const Tensor& grad, Tensor& p, const Tensor& m,
                 Tensor& v, Tensor& ema, Tensor& copy) {
  const State s{data<float>(p), data_or_null<float>(m), data<float>(v),
                rule.a.ema_decay > 0 ? data_or_null<float>(ema) : nullptr,
                data_or_null<__nv_bfloat16>(copy)};
  const auto run = [&]<int V>() {
    launch(step_kernel<Rule, V>, dim3(blocks_for(p.numel(), threads * V)), dim3(threads),
           sizeof(Verdict), rule, data<double>(squares), data<float>(grad), s, p.numel());
  };
  if (aligned<4>(grad, p, m, v, ema, copy))
    run.template operator()<4>();
  else
    run.template operator()<1>();
}

void adamw_step(const AdamW& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& m,
                Tensor& v, Tensor& ema, Tensor& copy) {
  step(AdamwRule{a}, squares, grad, p, m, v, ema, copy);
}
void sgd_step(const Sgd& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& v,
              Tensor& ema, Tensor& copy) {
  step(SgdRule{a}, squares, grad, p, Tensor(), v, ema, copy);
}

void ema_step(float decay, const Tensor& squares, const Tensor& p, Tensor& ema) {
  const auto run = [&]<int V>() {
    launch(ema_kernel<V>, dim3(blocks_for(p.numel(), threads * V)), dim3(threads), 0, decay,
           data<double>(squares), data<float>(p), data<float>(ema), p.numel());
  };
  if (aligned<4>(p, ema))
    run.operator()<4>();
  else
    run.operator()<1>();
}

void running_average(const Tensor& rows, std::int64_t width, std::int64_t first, float scale,
                     float decay, Tensor& average) {
  launch(running_average_kernel, dim3(1), dim3(static_cast<unsigned>(average.numel())), 0,
         data<double>(rows), width, first, rows.numel() / width, scale, decay,
         data<float>(average));
}

}  // namespace weft::ops::cuda
