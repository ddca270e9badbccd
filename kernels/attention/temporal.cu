// Self attention along T <= 128 frames (ops/attention.h with Axis::time). CPU twin
// src/ops/cpu/attention/attention.cpp, cases tests/kernels/attention.cpp. bf16 with D = 64, 72,
// 128 runs on tensor cores (temporal_mma.cu, where bytes and operations are counted); here are the
// kernels for f32, whose products are exact FFMA, and for every other even D up to 128 in either
// type. They read qkv [B,T,S,3,H,D] where it lies, a block one head of one token, each value once
// from memory, and once from shared memory for each multiply-add: that binds them, at about a fifth
// of the FFMA rate. One frame in bf16 (images) is a copy and is done as one, at 8 D bytes a head
// and direction. Scratch of the backward: 2 D f32 for each block, at most 4096 blocks.
#include "attention/temporal.cuh"

#include "attention/qk_norm.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace temporal {
namespace {

constexpr int max_frames = 128;
constexpr int unit_warps = 4, unit_threads = 32 * unit_warps;  // of a block that takes units
constexpr int per_lane = 2;  // pairs of columns a lane: 2 (lane + 32 i) and the next
constexpr int columns = 4;   // frames, or columns, of a lane: lane + 32 i

struct Layout {
  int T, S, H, D;
  unsigned units;  // B S H
};

// One row in the registers of a warp.
struct Row {
  float v[per_lane][2];
};

template <class T>
__device__ Row load_row(const T* from, int D) {
  Row x;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int d = 2 * (threadIdx.x % 32 + 32 * i);
    x.v[i][0] = d < D ? to_float(from[d]) : 0.0f;
    x.v[i][1] = d < D ? to_float(from[d + 1]) : 0.0f;
  }
  return x;
}
template <class T>
__device__ void store_row(const Row& x, T* to, int D) {
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int d = 2 * (threadIdx.x % 32 + 32 * i);
    if (d >= D) continue;
    to[d] = from_float<T>(x.v[i][0]);
    to[d + 1] = from_float<T>(x.v[i][1]);
  }
}

__device__ float inverse_rms(const Row& x, int D) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) squares += x.v[i][0] * x.v[i][0] + x.v[i][1] * x.v[i][1];
  return rsqrtf(__fdividef(warp_sum(squares), static_cast<float>(D)) + qk_norm_epsilon);
}

// rope(norm(x)) * factor; weight and table [D/2] of this position may be null.
__device__ Row prepare(Row x, const float* weight, const float2* table, float factor, int D) {
  const float scale = weight != nullptr ? factor * inverse_rms(x, D) : factor;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int pair = threadIdx.x % 32 + 32 * i;
    if (2 * pair >= D) continue;
    float a = x.v[i][0] * scale, b = x.v[i][1] * scale;
    if (weight != nullptr) {
      a *= weight[2 * pair];
      b *= weight[2 * pair + 1];
    }
    const float2 turn = table != nullptr ? table[pair] : make_float2(1.0f, 0.0f);
    x.v[i][0] = a * turn.x - b * turn.y;
    x.v[i][1] = b * turn.x + a * turn.y;
  }
  return x;
}

// The gradient of x from that of prepare(x, ..., factor); the weight's is added to dw.
__device__ Row unprepare(Row g, const Row& x, const float* weight, const float2* table,
                         float factor, int D, Row& dw) {
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int pair = threadIdx.x % 32 + 32 * i;
    if (2 * pair >= D) continue;
    const float a = g.v[i][0] * factor, b = g.v[i][1] * factor;
    const float2 turn = table != nullptr ? table[pair] : make_float2(1.0f, 0.0f);
    g.v[i][0] = a * turn.x + b * turn.y;
    g.v[i][1] = b * turn.x - a * turn.y;
  }
  if (weight == nullptr) return g;
  const float rstd = inverse_rms(x, D);
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int pair = threadIdx.x % 32 + 32 * i;
    if (2 * pair >= D) continue;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float normed = x.v[i][e] * rstd;
      dw.v[i][e] += g.v[i][e] * normed;
      g.v[i][e] *= weight[2 * pair + e];
      dot += g.v[i][e] * normed;
    }
  }
  const float mean = __fdividef(warp_sum(dot), static_cast<float>(D));
#pragma unroll
  for (int i = 0; i < per_lane; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) g.v[i][e] = rstd * (g.v[i][e] - x.v[i][e] * rstd * mean);
  return g;
}

// products[i] = sum over d of a[d] m[lane + 32 i][d], for rows below T. Rows of m are D + 1 apart:
// no bank conflicts.
__device__ void rows_times(const float* a, const float* m, int T, int D,
                           float (&products)[columns]) {
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    const int t = threadIdx.x % 32 + 32 * i;
    float sum = 0.0f;
    if (t < T)
      for (int d = 0; d < D; ++d) sum += a[d] * m[t * (D + 1) + d];
    products[i] = sum;
  }
}

// The row p m for weights p [T].
__device__ Row times_rows(const float* p, const float* m, int T, int D) {
  Row y{};
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int d = 2 * (threadIdx.x % 32 + 32 * i);
    if (d >= D) continue;
    for (int t = 0; t < T; ++t) {
      y.v[i][0] += p[t] * m[t * (D + 1) + d];
      y.v[i][1] += p[t] * m[t * (D + 1) + d + 1];
    }
  }
  return y;
}

// Where frame t of a unit lies.
struct Place {
  unsigned token;
  int head;
  std::int64_t row;  // of frame 0
  __device__ Place(unsigned unit, const Layout& l)
      : token(unit / static_cast<unsigned>(l.H)),
        head(static_cast<int>(unit % static_cast<unsigned>(l.H))),
        row(static_cast<std::int64_t>(token / static_cast<unsigned>(l.S)) * l.T * l.S +
            token % static_cast<unsigned>(l.S)) {}
  // In [B,T,S,parts,H,D].
  __device__ std::int64_t at(int t, int part, int parts, const Layout& l) const {
    return ((row + static_cast<std::int64_t>(t) * l.S) * parts + part) * l.H * l.D +
           static_cast<std::int64_t>(head) * l.D;
  }
};

__device__ const float2* turn_of(const float* rope, int t, int D) {
  return rope == nullptr
             ? nullptr
             : reinterpret_cast<const float2*>(rope) + static_cast<std::int64_t>(t) * (D / 2);
}

template <class T>
__global__ void __launch_bounds__(unit_threads)
    forward_any_kernel(const T* qkv, const float* wq, const float* wk, const float* rope, T* out,
                       float* lse, Layout l, float factor) {
  float* keys = shared_memory<float>();    // [T][D + 1]
  float* values = keys + l.T * (l.D + 1);  // [T][D + 1]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* query = values + l.T * (l.D + 1) + warp * (l.D + l.T);  // [D] of this warp
  float* p = query + l.D;                                        // [T] of this warp
  const Place place(blockIdx.x, l);
  for (int t = warp; t < l.T; t += unit_warps) {
    const Row k = load_row(qkv + place.at(t, 1, 3, l), l.D);
    store_row(prepare(k, wk, turn_of(rope, t, l.D), 1.0f, l.D), keys + t * (l.D + 1), l.D);
    store_row(load_row(qkv + place.at(t, 2, 3, l), l.D), values + t * (l.D + 1), l.D);
  }
  __syncthreads();
  for (int t = warp; t < l.T; t += unit_warps) {
    const Row q = load_row(qkv + place.at(t, 0, 3, l), l.D);
    store_row(prepare(q, wq, turn_of(rope, t, l.D), factor, l.D), query, l.D);
    __syncwarp();
    float s[columns];
    rows_times(query, keys, l.T, l.D, s);
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < columns; ++i)
      if (lane + 32 * i < l.T) top = fmaxf(top, s[i]);
    top = warp_max(top);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      if (lane + 32 * i >= l.T) continue;
      s[i] = expf(s[i] - top);
      sum += s[i];
      p[lane + 32 * i] = s[i];
    }
    sum = warp_sum(sum);
    __syncwarp();
    const float inverse = 1.0f / sum;
    Row y = times_rows(p, values, l.T, l.D);
#pragma unroll
    for (int i = 0; i < per_lane; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) y.v[i][e] *= inverse;
    store_row(y, out + place.at(t, 0, 1, l), l.D);
    if (lane == 0)
      lse[(static_cast<std::int64_t>(place.token) * l.H + place.head) * l.T + t] = top + logf(sum);
    __syncwarp();  // query and p are free again
  }
}

// Writes a block's sums of a weight's gradient over its warps; `scratch` holds [warps][D].
__device__ void store_sums(const Row& dw, float* scratch, float* partial, int D) {
  __syncthreads();
  store_row(dw, scratch + static_cast<int>(threadIdx.x) / 32 * D, D);
  __syncthreads();
  for (int d = threadIdx.x; d < D; d += unit_threads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < unit_warps; ++w) sum += scratch[w * D + d];
    partial[static_cast<std::int64_t>(d) * gridDim.x + blockIdx.x] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(unit_threads, 4)
    backward_any_kernel(const T* qkv, const float* wq, const float* wk, const float* rope,
                        const float* lse, const T* dout, T* dqkv, float* partial, Layout l,
                        float factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = l.D + 1;
  float* x = shared_memory<float>();  // [T][D + 1]: k', then q'
  float* y = x + l.T * stride;        // [T][D + 1]: v, then dout
  float* log_sum = y + l.T * stride;  // [T]
  float* delta = log_sum + l.T;       // [T]
  float* a =
      delta + l.T +
      warp * 2 * (l.D + l.T);  // of this warp: a row [D], another [D], weights [T], others [T]
  float *b = a + l.D, *p = b + l.D, *ds = p + l.T;
  Row sum_q{}, sum_k{};
  for (unsigned unit = blockIdx.x; unit < l.units; unit += gridDim.x) {
    const Place place(unit, l);
    __syncthreads();  // the previous unit is done with shared memory
    for (int t = warp; t < l.T; t += unit_warps) {
      const Row k = load_row(qkv + place.at(t, 1, 3, l), l.D);
      store_row(prepare(k, wk, turn_of(rope, t, l.D), 1.0f, l.D), x + t * stride, l.D);
      store_row(load_row(qkv + place.at(t, 2, 3, l), l.D), y + t * stride, l.D);
    }
    __syncthreads();
    // A query against all keys.
    for (int t = warp; t < l.T; t += unit_warps) {
      const Row q = load_row(qkv + place.at(t, 0, 3, l), l.D);
      const Row g = load_row(dout + place.at(t, 0, 1, l), l.D);
      const float log = lse[(static_cast<std::int64_t>(place.token) * l.H + place.head) * l.T + t];
      const float2* turn = turn_of(rope, t, l.D);
      store_row(prepare(q, wq, turn, factor, l.D), a, l.D);
      store_row(g, b, l.D);
      __syncwarp();
      float s[columns], dp[columns];
      rows_times(a, x, l.T, l.D, s);
      rows_times(b, y, l.T, l.D, dp);
      // The softmax's correction from the probabilities themselves: exact where `out` was rounded
      // to bf16, which is not read.
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < columns; ++i) {
        s[i] = lane + 32 * i < l.T ? expf(s[i] - log) : 0.0f;
        if (lane + 32 * i < l.T) dot += s[i] * dp[i];
      }
      dot = warp_sum(dot);
      if (lane == 0) {
        delta[t] = dot;
        log_sum[t] = log;
      }
#pragma unroll
      for (int i = 0; i < columns; ++i)
        if (lane + 32 * i < l.T) ds[lane + 32 * i] = s[i] * (dp[i] - dot);
      __syncwarp();
      const Row dq = times_rows(ds, x, l.T, l.D);
      store_row(unprepare(dq, q, wq, turn, factor, l.D, sum_q), dqkv + place.at(t, 0, 3, l), l.D);
      __syncwarp();
    }
    __syncthreads();
    for (int t = warp; t < l.T; t += unit_warps) {
      const Row q = load_row(qkv + place.at(t, 0, 3, l), l.D);
      store_row(prepare(q, wq, turn_of(rope, t, l.D), factor, l.D), x + t * stride, l.D);
      store_row(load_row(dout + place.at(t, 0, 1, l), l.D), y + t * stride, l.D);
    }
    __syncthreads();
    // A key and its value against all queries.
    for (int t = warp; t < l.T; t += unit_warps) {
      const Row k = load_row(qkv + place.at(t, 1, 3, l), l.D);
      const float2* turn = turn_of(rope, t, l.D);
      store_row(prepare(k, wk, turn, 1.0f, l.D), a, l.D);
      store_row(load_row(qkv + place.at(t, 2, 3, l), l.D), b, l.D);
      __syncwarp();
      float s[columns], dp[columns];
      rows_times(a, x, l.T, l.D, s);
      rows_times(b, y, l.T, l.D, dp);
#pragma unroll
      for (int i = 0; i < columns; ++i) {
        const int j = lane + 32 * i;
        if (j >= l.T) continue;
        p[j] = expf(s[i] - log_sum[j]);
        ds[j] = p[j] * (dp[i] - delta[j]);
      }
      __syncwarp();
      store_row(times_rows(p, y, l.T, l.D), dqkv + place.at(t, 2, 3, l), l.D);
      const Row dk = times_rows(ds, x, l.T, l.D);
      store_row(unprepare(dk, k, wk, turn, 1.0f, l.D, sum_k), dqkv + place.at(t, 1, 3, l), l.D);
      __syncwarp();
    }
  }
  if (partial == nullptr) return;
  float* scratch =
      delta + l.T;  // the warps' rows, which all are done with behind the barrier in store_sums
  store_sums(sum_q, scratch, partial, l.D);
  store_sums(sum_k, scratch, partial + static_cast<std::int64_t>(l.D) * gridDim.x, l.D);
}

// One frame. The softmax of a single score is 1 whatever the score: out is v, dv is dout, q and k
// get no gradient, and the weights none. Only lse takes q and k; the rotation, which is the same
// for both, does not change their product.

constexpr int one_lanes = 16, one_pack = 8;  // a row of D <= 128 for 16 lanes

__global__ void __launch_bounds__(threads)
    one_frame_forward_kernel(const __nv_bfloat16* qkv, const float* wq, const float* wk,
                             __nv_bfloat16* out, float* lse, Layout l, float factor) {
  const int c = static_cast<int>(threadIdx.x) % one_lanes * one_pack;
  const unsigned row = blockIdx.x * (threads / one_lanes) + threadIdx.x / one_lanes;
  float sums[3] = {0.0f, 0.0f, 0.0f};  // q k, q q, k k
  if (row < l.units && c < l.D) {
    const unsigned token = row / static_cast<unsigned>(l.H);
    const std::int64_t C = static_cast<std::int64_t>(l.H) * l.D;
    const __nv_bfloat16* at = qkv + static_cast<std::int64_t>(row) * l.D + token * 2 * C + c;
    const auto q = load_vec<one_pack>(at, 0), k = load_vec<one_pack>(at + C, 0),
               v = load_vec<one_pack>(at + 2 * C, 0);
    store_vec<one_pack>(out + static_cast<std::int64_t>(row) * l.D + c, 0, v);
    float x[one_pack], y[one_pack];
    unpack(q, x);
    unpack(k, y);
#pragma unroll
    for (int e = 0; e < one_pack; ++e) {
      sums[0] += x[e] * y[e] * (wq != nullptr ? wq[c + e] * wk[c + e] : 1.0f);
      sums[1] += x[e] * x[e];
      sums[2] += y[e] * y[e];
    }
  }
#pragma unroll
  for (int offset = one_lanes / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < 3; ++i) sums[i] += __shfl_xor_sync(full_mask, sums[i], offset);
  if (c > 0 || row >= l.units) return;
  if (wq != nullptr) {
    const float size = static_cast<float>(l.D);
    factor *= rsqrtf(sums[1] / size + qk_norm_epsilon) * rsqrtf(sums[2] / size + qk_norm_epsilon);
  }
  lse[row] = sums[0] * factor;
}

// A thread: 8 columns of a token's C = H D.
__global__ void __launch_bounds__(threads)
    one_frame_backward_kernel(const __nv_bfloat16* dout, __nv_bfloat16* dqkv, unsigned count,
                              unsigned row_packs) {
  const unsigned i = blockIdx.x * threads + threadIdx.x;
  if (i >= count) return;
  const auto g = load_vec<one_pack>(dout, i);
  const Vec<__nv_bfloat16, one_pack> zero{};
  const std::int64_t to = static_cast<std::int64_t>(i / row_packs) * 2 * row_packs + i;
  store_vec<one_pack>(dqkv, to, zero);
  store_vec<one_pack>(dqkv, to + row_packs, zero);
  store_vec<one_pack>(dqkv, to + 2 * static_cast<std::int64_t>(row_packs), g);
}

// Whether the two above can do it: row lengths and addresses of whole packs.
bool one_frame(const Tensor& qkv, const Layout& l, const Tensor& a, const Tensor& b) {
  return l.T == 1 && qkv.dtype() == DType::bf16 && l.D % one_pack == 0 &&
         qkv.numel() / one_pack < std::int64_t{1} << 32 && aligned<one_pack>(a, b);
}

// Shared memory of the kernels for f32.
std::size_t forward_bytes(std::int64_t T, std::int64_t D) {
  return sizeof(float) * static_cast<std::size_t>(2 * T * (D + 1) + unit_warps * (D + T));
}
std::size_t backward_bytes(std::int64_t T, std::int64_t D) {
  return sizeof(float) * static_cast<std::size_t>(2 * T * (D + 2) + 2 * unit_warps * (D + T));
}

// One column a block.
__global__ void __launch_bounds__(256)
    add_pieces_kernel(const float* partial, int pieces, int D, float* dwq, float* dwk) {
  float* scratch = shared_memory<float>();
  const int column = static_cast<int>(blockIdx.x);
  const float* from = partial + static_cast<std::int64_t>(column) * pieces;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) sum += from[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) (column < D ? dwq[column] : dwk[column - D]) += sum;
}

Layout layout_of(const Tensor& qkv) {
  Layout l{static_cast<int>(qkv.dim(1)), static_cast<int>(qkv.dim(2)), static_cast<int>(qkv.dim(4)),
           static_cast<int>(qkv.dim(5)), 0};
  const std::int64_t units = qkv.dim(0) * l.S * l.H;
  WEFT_ASSERT(units < std::int64_t{1} << 31);
  l.units = static_cast<unsigned>(units);
  WEFT_ASSERT(l.T <= max_frames && l.D <= 128 && l.D % 2 == 0);
  return l;
}

}  // namespace

void add_pieces(const Tensor& partial, Tensor& dwq, Tensor& dwk) {
  const auto D = static_cast<int>(partial.dim(0) / 2), n = static_cast<int>(partial.dim(1));
  launch(add_pieces_kernel, dim3(static_cast<unsigned>(2 * D)), dim3(256), 32 * sizeof(float),
         data<float>(partial), n, D, data<float>(dwq), data<float>(dwk));
}

}  // namespace temporal

bool temporal_takes(const Tensor& qkv) {
  const std::int64_t T = qkv.dim(1), D = qkv.dim(5);
  return T <= temporal::max_frames &&
         temporal::backward_bytes(T, D) <= cuda_properties().sharedMemPerBlockOptin;
}

void temporal_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      Tensor& out, Tensor& lse) {
  using namespace temporal;
  const Layout l = layout_of(qkv);
  if (one_frame(qkv, l, qkv, out)) {
    launch(one_frame_forward_kernel, dim3(blocks_for(l.units, threads / one_lanes)), dim3(threads),
           0, data<__nv_bfloat16>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
           data<__nv_bfloat16>(out), data<float>(lse), l, inverse_root(l.D));
    return;
  }
  if (l.units == 0 || mma_forward(qkv, wq, wk, rope, out, lse)) return;
  by_type(qkv, [&]<class T>() {
    launch(forward_any_kernel<T>, dim3(l.units), dim3(unit_threads), forward_bytes(l.T, l.D),
           data<T>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
           data_or_null<float>(rope), data<T>(out), data<float>(lse), l, inverse_root(l.D));
  });
}

void temporal_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                       const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                       Tensor& dwq, Tensor& dwk) {
  using namespace temporal;
  const Layout l = layout_of(qkv);
  if (one_frame(qkv, l, dout, dqkv)) {
    const auto count = static_cast<unsigned>(dout.numel() / one_pack);
    launch(one_frame_backward_kernel, dim3(blocks_for(count, threads)), dim3(threads), 0,
           data<__nv_bfloat16>(dout), data<__nv_bfloat16>(dqkv), count,
           static_cast<unsigned>(l.H * l.D / one_pack));
    return;
  }
  if (l.units == 0 || mma_backward(qkv, wq, wk, rope, out, lse, dout, dqkv, dwq, dwk)) return;
  const int blocks = pieces(l.units);
  Tensor partial;
  if (dwq.defined()) partial = Tensor::empty({2 * qkv.dim(5), blocks}, DType::f32);
  by_type(qkv, [&]<class T>() {
    launch(backward_any_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(unit_threads),
           backward_bytes(l.T, l.D), data<T>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
           data_or_null<float>(rope), data<float>(lse), data<T>(dout), data<T>(dqkv),
           data_or_null<float>(partial), l, inverse_root(l.D));
  });
  if (partial.defined()) add_pieces(partial, dwq, dwk);
}

}  // namespace weft::kernels
