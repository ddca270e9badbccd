// CUDA side of ops/loss.h. CPU twin: src/ops/cpu/loss.cpp; cases: src/bench/kernels/loss.cpp.
//
// Bound by memory: each operand read once, each gradient written once (lpips reads a position a
// second time, from L1). Sums are made in two stages of an order that the shape alone decides: f32
// within a block's chunk, f64 over the blocks. The penalty reads a gradient of frames twice and
// writes it once; a frame's norm is a block's: frames are few, but the backward through the
// discriminator before it takes a hundred times as long.
#include "ops/loss.h"

#include <algorithm>

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr std::int64_t most_blocks = 1024, least_items = 2048;
constexpr float lowest = -30.0f, highest = 20.0f;  // of a log variance

__device__ __forceinline__ std::int64_t index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
}

// partial[block] = the sum of f(i) over the block's chunk of `count` items.
template <class F>
__global__ void __launch_bounds__(threads)
    sum_kernel(F f, std::int64_t count, std::int64_t chunk, float* partial) {
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  float sum = 0.0f;
  for (std::int64_t i = first + threadIdx.x; i < last; i += threads) sum += f(i);
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The same where a warp takes an item: every lane returns its share of f(i).
template <class F>
__global__ void __launch_bounds__(threads)
    sum_by_warps_kernel(F f, std::int64_t count, std::int64_t chunk, float* partial) {
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  float sum = 0.0f;
  for (std::int64_t i = first + threadIdx.x / 32; i < last; i += warps) sum += f(i);
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The sum of n numbers in f64, by one warp, to all lanes.
__device__ __forceinline__ double total_of(const float* partial, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += 32) sum += partial[i];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(full_mask, sum, offset);
  return sum;
}
__global__ void add_total_kernel(const float* partial, std::int64_t n, double factor, float* loss) {
  const double sum = total_of(partial, n);
  if (threadIdx.x == 0) loss[0] += static_cast<float>(factor * sum);
}
__global__ void adaptive_weight_kernel(const float* n, std::int64_t n_blocks, const float* g,
                                       std::int64_t g_blocks, float a, float* weight) {
  const double norm = sqrt(total_of(n, n_blocks)), other = sqrt(total_of(g, g_blocks));
  if (threadIdx.x == 0) {
    const double ratio = norm / (other + 1e-4);
    weight[0] = a * static_cast<float>(ratio < 1e4 ? ratio : 1e4);
  }
}

// The chunks' sums of f over `count` items.
template <bool by_warps, class F>
Tensor partial_sums(const F& f, std::int64_t count, std::int64_t items) {
  const std::int64_t chunk = std::max(items, (count + most_blocks - 1) / most_blocks);
  const std::int64_t blocks = std::max<std::int64_t>(1, (count + chunk - 1) / chunk);
  const Tensor partial = Tensor::empty({blocks}, DType::f32);
  launch(by_warps ? sum_by_warps_kernel<F> : sum_kernel<F>, dim3(static_cast<unsigned>(blocks)),
         dim3(threads), 32 * sizeof(float), f, count, chunk, data<float>(partial));
  return partial;
}
template <bool by_warps, class F>
void add_sum(const F& f, std::int64_t count, std::int64_t items, double factor, Tensor& loss) {
  const Tensor partial = partial_sums<by_warps>(f, count, items);
  launch(add_total_kernel, dim3(1), dim3(32), 0, data<float>(partial), partial.numel(), factor,
         data<float>(loss));
}

// ---- Classes of positions: a warp takes one, its lanes the classes ----

__device__ __forceinline__ double warp_sum_f64(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(full_mask, x, offset);
  return x;
}

// The greatest logit of a position, and the sum of exp(logit - greatest), to all lanes.
struct Softmax {
  float top, sum;
  template <class T>
  __device__ __forceinline__ Softmax(const T* x, int C) {
    const int lane = threadIdx.x % 32;
    top = -INFINITY;
    for (int c = lane; c < C; c += 32) top = fmaxf(top, to_float(x[c]));
    top = warp_max(top);
    sum = 0.0f;
    for (int c = lane; c < C; c += 32) sum += expf(to_float(x[c]) - top);
    sum = warp_sum(sum);
  }
};

// partial [blocks,3]: the block's share of nll_forward's stats.
template <class T>
__global__ void __launch_bounds__(threads)
    nll_kernel(const T* logits, const std::uint8_t* labels, int C, std::int64_t count,
               std::int64_t chunk, double* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first = blockIdx.x * chunk,
                     last = first + chunk < count ? first + chunk : count;
  double nll = 0, valid = 0, right = 0;  // alike in all lanes
  for (std::int64_t p = first + warp; p < last; p += warps) {
    const int k = static_cast<int>(labels[p]) - 1;
    if (k < 0) continue;
    const T* x = logits + p * C;
    const Softmax s(x, C);
    const float own = k < C ? to_float(x[k]) : NAN;
    float before = 0.0f;  // greatest logits in front of the label's
    for (int c = lane; c < k && c < C; c += 32) before += to_float(x[c]) == s.top ? 1.0f : 0.0f;
    before = warp_sum(before);
    nll += log(static_cast<double>(s.sum)) + (static_cast<double>(s.top) - own);
    valid += 1;
    right += own == s.top && before == 0.0f ? 1 : 0;
  }
  double* shared = shared_memory<double>();  // [warps,3]
  if (lane == 0) shared[3 * warp] = nll, shared[3 * warp + 1] = valid, shared[3 * warp + 2] = right;
  __syncthreads();
  if (threadIdx.x >= 3) return;
  double sum = 0;
  for (int w = 0; w < warps; ++w) sum += shared[3 * w + threadIdx.x];
  partial[3 * blockIdx.x + threadIdx.x] = sum;
}

__global__ void add_stats_kernel(const double* partial, std::int64_t blocks, double* stats) {
  for (int k = 0; k < 3; ++k) {
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < blocks; i += 32) sum += partial[3 * i + k];
    sum = warp_sum_f64(sum);
    if (threadIdx.x == 0) stats[k] += sum;
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    nll_backward_kernel(const T* logits, const std::uint8_t* labels, int C, std::int64_t count,
                        const double* stats, float weight, T* dlogits) {
  const std::int64_t p = index() / 32;
  if (p >= count) return;
  const int lane = threadIdx.x % 32, k = static_cast<int>(labels[p]) - 1;
  const T* x = logits + p * C;
  T* d = dlogits + p * C;
  if (k < 0) {
    for (int c = lane; c < C; c += 32) d[c] = from_float<T>(0.0f);
    return;
  }
  const Softmax s(x, C);
  const float factor = static_cast<float>(weight / stats[1]), share = factor / s.sum;
  for (int c = lane; c < C; c += 32)
    d[c] = from_float<T>(share * expf(to_float(x[c]) - s.top) - (c == k ? factor : 0.0f));
}

template <class A, class B>
struct Difference {
  const A* a;
  const B* b;
  __device__ float operator()(std::int64_t i) const {
    return fabsf(to_float(a[i]) - to_float(b[i]));
  }
};

template <class T>
struct Divergence {
  const T* moments;
  std::int64_t C;
  __device__ float operator()(std::int64_t i) const {
    const std::int64_t at = i / C * 2 * C + i % C;
    const float mu = to_float(moments[at]);
    const float lv = fminf(fmaxf(to_float(moments[at + C]), lowest), highest);
    return 0.5f * (mu * mu + expm1f(lv) - lv);
  }
};

template <class T>
struct Gan {
  const T* x;
  ops::GanLoss kind;
  float sign;
  __device__ float operator()(std::int64_t i) const {
    const float v = sign * to_float(x[i]);
    if (kind == ops::GanLoss::linear) return v;
    if (kind == ops::GanLoss::hinge) return fmaxf(0.0f, 1.0f + v);
    return fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v)));
  }
};

struct Square {
  const float* x;
  __device__ float operator()(std::int64_t i) const { return x[i] * x[i]; }
};

// 1 / (|a| + 1e-10) and the like of a position, by its warp.
struct Norms {
  float of_a, of_b, norm_b;
};
template <class T>
__device__ __forceinline__ Norms norms_of(const T* a, const T* b, std::int64_t C) {
  float aa = 0.0f, bb = 0.0f;
  for (std::int64_t c = threadIdx.x % 32; c < C; c += 32) {
    const float u = to_float(a[c]), v = to_float(b[c]);
    aa += u * u;
    bb += v * v;
  }
  const float norm_b = sqrtf(warp_sum(bb));
  return {1.0f / (sqrtf(warp_sum(aa)) + 1e-10f), 1.0f / (norm_b + 1e-10f), norm_b};
}

template <class T>
struct Lpips {
  const T *a, *b;
  const float* w;
  std::int64_t C;
  __device__ float operator()(std::int64_t p) const {
    const T *x = a + p * C, *y = b + p * C;
    const Norms n = norms_of(x, y, C);
    float sum = 0.0f;
    for (std::int64_t c = threadIdx.x % 32; c < C; c += 32) {
      const float d = to_float(x[c]) * n.of_a - to_float(y[c]) * n.of_b;
      sum += w[c] * d * d;
    }
    return sum;
  }
};

// With g = the gradient of the normalised b: db = g / (|b| + e) - b (g b) / (|b| (|b| + e)^2).
template <class T>
__global__ void __launch_bounds__(threads)
    lpips_backward_kernel(const T* a, const T* b, const float* w, float scale, std::int64_t C,
                          std::int64_t positions, T* db) {
  const std::int64_t p = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  if (p >= positions) return;  // the whole warp
  const T *x = a + p * C, *y = b + p * C;
  const Norms n = norms_of(x, y, C);
  const auto gradient = [&](std::int64_t c) {
    return scale * w[c] * (to_float(x[c]) * n.of_a - to_float(y[c]) * n.of_b);
  };
  float along = 0.0f;
  for (std::int64_t c = threadIdx.x % 32; c < C; c += 32) along += gradient(c) * to_float(y[c]);
  along = warp_sum(along);
  const float back = n.norm_b > 0.0f ? along * n.of_b * n.of_b / n.norm_b : 0.0f;
  for (std::int64_t c = threadIdx.x % 32; c < C; c += 32)
    db[p * C + c] =
        from_float<T>(n.norm_b > 0.0f ? gradient(c) * n.of_b - to_float(y[c]) * back : 0.0f);
}

template <class T>
__device__ __forceinline__ void put(T* to, float v, bool accumulate) {
  *to = from_float<T>(accumulate ? to_float(*to) + v : v);
}

template <class A, class B>
__global__ void l1_backward_kernel(const A* a, const B* b, float weight, A* da, bool accumulate,
                                   std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const float d = to_float(a[i]) - to_float(b[i]);
  put(da + i, d > 0.0f ? weight : d < 0.0f ? -weight : 0.0f, accumulate);
}

template <class T>
__global__ void kl_backward_kernel(const T* moments, std::int64_t C, float weight, T* dmoments,
                                   bool accumulate, std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const std::int64_t at = i / C * 2 * C + i % C;
  const float lv = to_float(moments[at + C]);
  put(dmoments + at, weight * to_float(moments[at]), accumulate);
  put(dmoments + at + C, lv < lowest || lv > highest ? 0.0f : weight * 0.5f * expm1f(lv),
      accumulate);
}

template <class T>
__global__ void gan_backward_kernel(const T* x, ops::GanLoss kind, float sign, float scale, T* dx,
                                    bool accumulate, std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const float v = sign * to_float(x[i]);
  float g = scale;
  if (kind == ops::GanLoss::hinge && 1.0f + v <= 0.0f) g = 0.0f;
  if (kind == ops::GanLoss::logistic) g = scale / (1.0f + expf(-v));
  put(dx + i, g, accumulate);
}

template <class... P, class... A>
void start(void (*kernel)(P...), std::int64_t count, A&&... args) {
  launch(kernel, dim3(blocks_for(count, threads)), dim3(threads), 0, std::forward<A>(args)...,
         count);
}

template <class F>
void by_types(const Tensor& a, const Tensor& b, F&& f) {
  by_type(a, [&]<class A>() { by_type(b, [&]<class B>() { f.template operator()<A, B>(); }); });
}

constexpr int norm_threads = 1024;

__global__ void nll_summary_kernel(const double* main, const double* aux, float scale, int n,
                                   float* losses, float* terms) {
  const double of_main = main[1] > 0 ? main[0] / main[1] : 0;
  const double of_aux = aux != nullptr && aux[1] > 0 ? aux[0] / aux[1] : 0;
  for (int i = 0; i < n; ++i) losses[i] = static_cast<float>(of_main + scale * of_aux);
  terms[0] = static_cast<float>(n * (main[1] > 0 ? main[2] / main[1] : 0));
  terms[1] = static_cast<float>(n * of_main);
  if (aux != nullptr) terms[2] = static_cast<float>(n * of_aux);
}

__global__ void lecam_kernel(const float* mean, const float* other, float sign, float weight,
                             float* loss, float* slope) {
  const float d = fmaxf(0.0f, sign * (mean[0] - other[0]));
  loss[0] += weight * d * d;
  slope[0] = 2.0f * sign * d;
}

template <class T>
__global__ void __launch_bounds__(norm_threads)
    frame_norms_kernel(const T* g, std::int64_t size, float* norms) {
  const T* const from = g + blockIdx.x * size;
  float sum = 0.0f;
  for (std::int64_t i = threadIdx.x; i < size; i += norm_threads) {
    const float v = to_float(from[i]);
    sum += v * v;
  }
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(sum);
}

__global__ void penalty_kernel(const float* norms, std::int64_t frames, float weight, float* loss) {
  double sum = 0.0;
  for (std::int64_t f = 0; f < frames; ++f) sum += (norms[f] - 1.0) * (norms[f] - 1.0);
  loss[0] += static_cast<float>(weight * sum / static_cast<double>(frames));
}

template <class T>
__global__ void penalty_backward_kernel(const T* g, const float* norms, std::int64_t size,
                                        float weight, T* dg, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const float norm = norms[i / size];
  dg[i] = from_float<T>(norm > 0.0f ? weight * (norm - 1.0f) / norm * to_float(g[i]) : 0.0f);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void l1_forward(const Tensor& a, const Tensor& b, float weight, Tensor& loss) {
  by_types(a, b, [&]<class A, class B>() {
    add_sum<false>(Difference<A, B>{data<A>(a), data<B>(b)}, a.numel(), least_items, weight, loss);
  });
}

void l1_backward(const Tensor& a, const Tensor& b, float weight, Tensor& da, bool accumulate) {
  by_types(a, b, [&]<class A, class B>() {
    start(l1_backward_kernel<A, B>, a.numel(), data<A>(a), data<B>(b), weight, data<A>(da),
          accumulate);
  });
}

void kl_forward(const Tensor& moments, float weight, Tensor& loss) {
  by_type(moments, [&]<class T>() {
    add_sum<false>(Divergence<T>{data<T>(moments), moments.dim(-1) / 2}, moments.numel() / 2,
                   least_items, weight, loss);
  });
}

void kl_backward(const Tensor& moments, float weight, Tensor& dmoments, bool accumulate) {
  by_type(moments, [&]<class T>() {
    start(kl_backward_kernel<T>, moments.numel() / 2, data<T>(moments), moments.dim(-1) / 2, weight,
          data<T>(dmoments), accumulate);
  });
}

void lpips_forward(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& loss) {
  const std::int64_t C = a.dim(-1), frame = a.dim(2) * a.dim(3);
  by_type(a, [&]<class T>() {
    add_sum<true>(Lpips<T>{data<T>(a), data<T>(b), data<float>(w), C}, a.numel() / C, 32,
                  weight / static_cast<double>(frame), loss);
  });
}

void lpips_backward(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& db) {
  const std::int64_t C = a.dim(-1), positions = a.numel() / C;
  const float scale = -2.0f * weight / static_cast<float>(a.dim(2) * a.dim(3));
  by_type(a, [&]<class T>() {
    launch(lpips_backward_kernel<T>, dim3(blocks_for(positions, warps)), dim3(threads), 0,
           data<T>(a), data<T>(b), data<float>(w), scale, C, positions, data<T>(db));
  });
}

void nll_forward(const Tensor& logits, const Tensor& labels, Tensor& stats) {
  const std::int64_t count = labels.numel();
  if (count == 0) return;
  const std::int64_t chunk =
      std::max<std::int64_t>(4 * warps, (count + most_blocks - 1) / most_blocks);
  const Tensor partial = Tensor::empty({(count + chunk - 1) / chunk, 3}, DType::f64);
  by_type(logits, [&]<class T>() {
    launch(nll_kernel<T>, dim3(static_cast<unsigned>(partial.dim(0))), dim3(threads),
           3 * warps * sizeof(double), data<T>(logits), data<std::uint8_t>(labels),
           static_cast<int>(logits.dim(-1)), count, chunk, data<double>(partial));
  });
  launch(add_stats_kernel, dim3(1), dim3(32), 0, data<double>(partial), partial.dim(0),
         data<double>(stats));
}

void nll_backward(const Tensor& logits, const Tensor& labels, const Tensor& stats, float weight,
                  Tensor& dlogits) {
  by_type(logits, [&]<class T>() {
    launch(nll_backward_kernel<T>, dim3(blocks_for(labels.numel(), warps)), dim3(threads), 0,
           data<T>(logits), data<std::uint8_t>(labels), static_cast<int>(logits.dim(-1)),
           labels.numel(), data<double>(stats), weight, data<T>(dlogits));
  });
}

void gan_loss_forward(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& loss) {
  by_type(x, [&]<class T>() {
    add_sum<false>(Gan<T>{data<T>(x), kind, sign}, x.numel(), least_items,
                   weight / static_cast<double>(x.numel()), loss);
  });
}

void gan_loss_backward(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& dx,
                       bool accumulate) {
  by_type(x, [&]<class T>() {
    start(gan_backward_kernel<T>, x.numel(), data<T>(x), kind, sign,
          sign * weight / static_cast<float>(x.numel()), data<T>(dx), accumulate);
  });
}

void adaptive_weight(const Tensor& n, const Tensor& g, float a, Tensor& weight) {
  const Tensor of_n = partial_sums<false>(Square{data<float>(n)}, n.numel(), least_items),
               of_g = partial_sums<false>(Square{data<float>(g)}, g.numel(), least_items);
  launch(adaptive_weight_kernel, dim3(1), dim3(32), 0, data<float>(of_n), of_n.numel(),
         data<float>(of_g), of_g.numel(), a, data<float>(weight));
}

void nll_summary(const Tensor& main, const Tensor& aux, float scale, Tensor& losses,
                 Tensor& terms) {
  launch(nll_summary_kernel, dim3(1), dim3(1), 0, data<double>(main),
         aux.defined() ? data<double>(aux) : nullptr, scale, static_cast<int>(losses.numel()),
         data<float>(losses), data<float>(terms));
}

void lecam(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
           Tensor& slope) {
  launch(lecam_kernel, dim3(1), dim3(1), 0, data<float>(mean), data<float>(other), sign, weight,
         data<float>(loss), data<float>(slope));
}

void gradient_penalty_forward(const Tensor& g, float weight, Tensor& norms, Tensor& loss) {
  const std::int64_t F = g.dim(1);
  by_type(g, [&]<class T>() {
    launch(frame_norms_kernel<T>, dim3(static_cast<unsigned>(F)), dim3(norm_threads),
           32 * sizeof(float), data<T>(g), g.numel() / F, data<float>(norms));
  });
  launch(penalty_kernel, dim3(1), dim3(1), 0, data<float>(norms), F, weight, data<float>(loss));
}

void gradient_penalty_backward(const Tensor& g, const Tensor& norms, float weight, Tensor& dg) {
  const std::int64_t F = g.dim(1);
  by_type(g, [&]<class T>() {
    launch(penalty_backward_kernel<T>, dim3(blocks_for(g.numel(), threads)), dim3(threads), 0,
           data<T>(g), data<float>(norms), g.numel() / F, 2.0f * weight / static_cast<float>(F),
           data<T>(dg), g.numel());
  });
}

}  // namespace weft::ops::cuda
