// Backward of temporal self attention in bf16 on tensor cores (temporal_mma.cu).
#include "attention/temporal.cuh"
#include "attention/temporal_mma.cuh"

namespace weft::kernels {
namespace temporal {
namespace {

// Rows that both passes of the backward read repeatedly, per head [frames] each.
constexpr int row_values = 4;  // rstd of q, rstd of k, lse * log2(e), delta

// Halves the values that a lane holds: it keeps the upper or the lower n by its bit `bit`, with its
// partner's share added.
template <int n, int bit, int size>
__device__ __forceinline__ void fold(float (&y)[size]) {
  const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float give = upper ? y[i] : y[i + n], keep = upper ? y[i + n] : y[i];
    y[i] = keep + __shfl_xor_sync(full_mask, give, bit);
  }
}

// Sums over the eight groups of a warp, value by value: value n of a pair ends in the lane of group
// n / kept, which adds it to sum[n % kept]. 7 `kept` shuffles for 8 `kept` values, in a fixed
// order.
template <int values, int kept>
__device__ __forceinline__ void add_over_groups(const float (&x)[values], float (&sum)[kept]) {
  float y[8 * kept];
#pragma unroll
  for (int i = 0; i < 8 * kept; ++i) y[i] = i < values ? x[i < values ? i : 0] : 0.0f;
  fold<4 * kept, 16>(y);
  fold<2 * kept, 8>(y);
  fold<kept, 4>(y);
#pragma unroll
  for (int i = 0; i < kept; ++i) sum[i] += y[i];
}

// From the gradient factor g of the prepared rows of a tile to that of the raw rows x, in their
// place; the
// gradient of the norm's weight goes to `sum` as add_over_groups has it.
template <int chunks, Tiling tiling, int kept>
__device__ void unprepare(float (&g)[chunks][4], bf16_t* x, int tile, const float* rstd,
                          const float* weight, const Constants<chunks>& constants,
                          const Shape& shape, float factor, float (&sum)[kept]) {
  using H = Head<chunks>;
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const float2* const w = reinterpret_cast<const float2*>(weight) + pair;
  float scale[2], pull[2];
  std::uint32_t raw[2][chunks];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = 16 * tile + group + 8 * r;
    const float2* turns = constants.turns(frame_of<tiling>(t), shape.T) + pair;
    scale[r] = rstd[t];
    float pulled = 0.0f;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      raw[r][c] = load_pair(x + t * H::stride + 2 * pair + 8 * c);
      const float2 turn = turns[4 * c], v = unpack(raw[r][c]);
      const float g0 = g[c][2 * r], g1 = g[c][2 * r + 1];
      g[c][2 * r] = g0 * turn.x + g1 * turn.y;
      g[c][2 * r + 1] = g1 * turn.x - g0 * turn.y;
      pulled = dot(make_float2(g[c][2 * r] * w[4 * c].x, g[c][2 * r + 1] * w[4 * c].y), v, pulled);
    }
    // With g times the weight, d/dx of x rstd(x) is rstd (g - x rstd^2 mean(g x)); without norm
    // rstd is the constant 1.
    pull[r] = shape.norm ? row_sum(pulled) * scale[r] * scale[r] * (1.0f / H::D) : 0.0f;
    scale[r] *= factor;
    pull[r] *= scale[r];
  }
  float dw[2 * chunks] = {};
#pragma unroll
  for (int c = 0; c < chunks; ++c)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bf16_t* const at = x + (16 * tile + group + 8 * r) * H::stride + 2 * pair + 8 * c;
      const float2 v = unpack(raw[r][c]);
      const float g0 = g[c][2 * r] * scale[r], g1 = g[c][2 * r + 1] * scale[r];
      dw[2 * c] += g0 * v.x;
      dw[2 * c + 1] += g1 * v.y;
      store_pair(at, pack(g0 * w[4 * c].x - v.x * pull[r], g1 * w[4 * c].y - v.y * pull[r]));
    }
  if (shape.norm) add_over_groups(dw, sum);
}

// Matrices of a head in the backward; the fifth holds out first, where it is read, and then q'.
enum { at_q, at_k, at_v, at_do, at_o, at_k_prepared, matrices };

// delta = sum over keys of P dP, of each query that this lane holds a part of, where one tile holds
// all keys. Rows of p and dp are queries, or with `of_keys` their columns are; delta[n][i] goes
// with p[n][i].
__device__ __forceinline__ void sum_over_keys(const float (&p)[2][4], const float (&dp)[2][4],
                                              bool of_keys, float (&delta)[2][4]) {
  float row[2] = {}, column[2][2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row[i / 2] += p[n][i] * dp[n][i];
      column[n][i % 2] += p[n][i] * dp[n][i];
    }
  if (of_keys) {
#pragma unroll
    for (int bit = 4; bit <= 16; bit *= 2)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        column[j / 2][j % 2] += __shfl_xor_sync(full_mask, column[j / 2][j % 2], bit);
  } else {
    row[0] = row_sum(row[0]);
    row[1] = row_sum(row[1]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) delta[n][i] = of_keys ? column[n][i % 2] : row[i / 2];
}

// Two kinds of warps, by the parity of their number within the head: even ones make the gradients
// of queries from
//   dq' = dS k' factor,  dS = P (dP - delta),  P = exp(q' k'^T - lse),  dP = dout v^T,
// odd ones those of keys from the same with rows and columns exchanged, dk' = dS^T q', dP^T = v
// dout^T. What both need is computed twice rather than exchanged: 20 mma a tile of 16 x 16, and no
// transposes through shared memory. Where one tile holds all frames (T <= 16), delta is
// summed from P and dP as they are, and out, an eighth of the traffic, is not read; and P stays
// with the warp for dv.
template <int chunks, Tiling tiling>
__global__ void __launch_bounds__(tiling == Tiling::many ? 256 : 128,
                                  (chunks > 9 ? 1 : 2) * (tiling == Tiling::many ? 1 : 2))
    backward_kernel(const bf16_t* qkv, const float* wq, const float* wk, const float* rope,
                    const bf16_t* out, const float* lse, const bf16_t* dout, bf16_t* dqkv,
                    float* partial, Shape shape, unsigned units, float factor) {
  using H = Head<chunks>;
  constexpr int kept = (2 * chunks + 7) / 8;
  constexpr bool single = tiling != Tiling::many;
  unsigned char* shared = shared_memory<unsigned char>();
  const int frames = single ? 16 : 16 * shape.tiles, matrix = frames * H::stride;
  bf16_t* heads = reinterpret_cast<bf16_t*>(shared);  // [heads][matrices][frames][stride]
  float* rows = reinterpret_cast<float*>(heads + shape.heads * matrices * matrix);
  Constants<chunks> constants(rows + shape.heads * row_values * frames);
  constants.fill(wq, wk, rope, shape.T);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  const int head = warp / shape.warps_per_head, share = warp % shape.warps_per_head;
  const bool of_keys = share % 2 == 1;
  bf16_t* const m = heads + head * matrices * matrix;
  bf16_t *const q = m + at_q * matrix, *const k = m + at_k * matrix, *const v = m + at_v * matrix;
  bf16_t *const d_o = m + at_do * matrix, *const o = m + at_o * matrix;
  bf16_t *const qp = o, *const kp = m + at_k_prepared * matrix;
  float* const rstd_q = rows + head * row_values * frames;
  float *const rstd_k = rstd_q + frames, *const lse2 = rstd_k + frames,
               *const delta = lse2 + frames;

  const Copies<chunks, tiling> copies(shape, matrices * matrix);
  const int C = shape.H * H::D;
  const float scale = factor * log2_e;
  float sum[kept] = {};  // of the weight's gradient, of queries or of keys
  for (unsigned number = blockIdx.x; number < units; number += gridDim.x) {
    const Unit<chunks, tiling> unit(number, shape);
    __syncthreads();  // the previous unit is stored
    copies.template fetch<3>(qkv + unit.head * H::D, unit, 3 * C, C, shape, heads, matrix);
    copies.template fetch<1>(dout + unit.head * H::D, unit, C, 0, shape, heads + at_do * matrix,
                             matrix);
    if constexpr (!single)
      copies.template fetch<1>(out + unit.head * H::D, unit, C, 0, shape, heads + at_o * matrix,
                               matrix);
    cp_async_commit();
#pragma unroll 1
    for (int i = threadIdx.x; i < shape.heads * frames; i += blockDim.x) {
      const int of_head = i / frames, t = i - of_head * frames, frame = frame_of<tiling>(t);
      const int other = tiling == Tiling::shared ? t / 8 : 0;
      const std::int64_t row =
          static_cast<std::int64_t>(unit.token + other) * shape.H + unit.head + of_head;
      // Queries beyond T get the probability 2^-inf = 0 everywhere.
      rows[(of_head * row_values + 2) * frames + t] =
          frame < shape.T && other < unit.present ? lse[row * shape.T + frame] * log2_e : INFINITY;
    }
    cp_async_wait<0>();
    __syncthreads();

    for (int half = share; half < 2 * shape.tiles; half += shape.warps_per_head) {
      const int t = 8 * half + group;
      if constexpr (!single) {
        float of_row = 0.0f;
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const int at = t * H::stride + 2 * pair + 8 * c;
          const float2 a = unpack(load_pair(o + at)), b = unpack(load_pair(d_o + at));
          of_row = dot(a, b, of_row);
        }
        of_row = row_sum(of_row);
        if (pair == 0) delta[t] = of_row;
      }
      prepare<chunks, tiling>(q, k, qp, kp, t, constants, shape, rstd_q, rstd_k);
    }
    __syncthreads();

    std::uint32_t kept_p[4] = {};  // of `single`
    for (int tile = share / 2; tile < shape.tiles; tile += shape.warps_per_head / 2) {
      const bf16_t *const x = of_keys ? kp : qp, *const y = of_keys ? qp : kp;
      float g[chunks][4] = {};
      for (int other = 0; other < shape.tiles; ++other) {
        float p[2][4], ds[2][4], minus[2][4];
        multiply_rows<chunks, 2>(p, x, 16 * tile, y, 16 * other);
        multiply_rows<chunks, 2>(ds, of_keys ? v : d_o, 16 * tile, of_keys ? d_o : v, 16 * other);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int r = 16 * tile + group + i / 2 * 8, c = 16 * other + 8 * n + 2 * pair + i % 2;
            const int query = of_keys ? c : r, key = of_keys ? r : c;
            // The rows of one of two tokens, i / 2, meet only the columns of that token, n.
            const bool meet =
                frame_of<tiling>(key) < shape.T && (tiling != Tiling::shared || n == i / 2);
            p[n][i] = meet ? exp2_approx(p[n][i] * scale - lse2[query]) : 0.0f;
            if constexpr (!single) minus[n][i] = delta[query];
          }
        if constexpr (single) {
          sum_over_keys(p, ds, of_keys, minus);
          as_left(kept_p, p);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) ds[n][i] = p[n][i] * (ds[n][i] - minus[n][i]);
        std::uint32_t left[4];
        as_left(left, ds);
        multiply<chunks>(g, left, y, 16 * other);
      }
      unprepare<chunks, tiling>(g, of_keys ? k : q, tile, of_keys ? rstd_k : rstd_q,
                                of_keys ? constants.wk : constants.wq, constants, shape, factor,
                                sum);
    }
    __syncthreads();  // v gives way to its gradient

    // dv = P^T dout, by the odd warp that has P^T, or in tiles by all.
    for (int tile = single ? 1 - share : share; tile >= 0 && tile < shape.tiles;
         tile += shape.warps_per_head) {
      float dv[chunks][4] = {};
      if constexpr (single) {
        multiply<chunks>(dv, kept_p, d_o, 0);
      } else {
        for (int queries = 0; queries < shape.tiles; ++queries) {
          float p[2][4];
          multiply_rows<chunks, 2>(p, kp, 16 * tile, qp, 16 * queries);
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int query = 16 * queries + 8 * n + 2 * pair + i % 2;
              p[n][i] = 16 * tile + group + i / 2 * 8 < shape.T
                            ? exp2_approx(p[n][i] * scale - lse2[query])
                            : 0.0f;
            }
          std::uint32_t left[4];
          as_left(left, p);
          multiply<chunks>(dv, left, d_o, 16 * queries);
        }
      }
#pragma unroll
      for (int c = 0; c < chunks; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          store_pair(v + (16 * tile + group + 8 * r) * H::stride + 8 * c + 2 * pair,
                     pack(dv[c][2 * r], dv[c][2 * r + 1]));
    }
    __syncthreads();
    copies.template put<3>(heads, matrix, shape, unit, 3 * C, C, dqkv + unit.head * H::D);
  }
  if (partial == nullptr) return;

  // The block's sums for dwq (even warps) and dwk (odd ones), over warps in their order.
  __syncthreads();
  constexpr int width = 8 * kept * 4;
  float* const sums = reinterpret_cast<float*>(shared);  // [warps][values][pairs]
#pragma unroll
  for (int i = 0; i < kept; ++i) sums[warp * width + (group * kept + i) * 4 + pair] = sum[i];
  __syncthreads();
  const int block_warps = static_cast<int>(blockDim.x) / 32;
  for (int i = threadIdx.x; i < 2 * H::D; i += blockDim.x) {
    const int d = i % H::D;
    const int value = d / 8 * 2 + d % 2, of_pair = d % 8 / 2;  // d = 8 chunk + 2 pair + 0 or 1
    float total = 0.0f;
    for (int w = i / H::D; w < block_warps; w += 2) total += sums[w * width + value * 4 + of_pair];
    partial[static_cast<std::int64_t>(i) * gridDim.x + blockIdx.x] = total;
  }
}

}  // namespace

bool mma_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                  const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                  Tensor& dwq, Tensor& dwk) {
  if (qkv.dtype() != DType::bf16) return false;
  if (!aligned<8>(qkv, out, dout, dqkv)) return false;
  return by_size(qkv, [&]<int chunks, Tiling tiling>() {
    const Shape s = shape_of(qkv, wq.defined(), true);
    const std::size_t frames = 16 * static_cast<std::size_t>(s.tiles);
    const std::size_t shared =
        s.heads * frames *
            (matrices * Head<chunks>::stride * sizeof(bf16_t) + row_values * sizeof(float)) +
        Constants<chunks>::bytes(s.T);
    if (!fits(shared)) return false;
    const std::int64_t units = units_of(s);
    const int blocks = pieces(units);
    Tensor partial;
    if (dwq.defined()) partial = Tensor::empty({2 * qkv.dim(5), blocks}, DType::f32);
    launch(backward_kernel<chunks, tiling>, dim3(static_cast<unsigned>(blocks)),
           dim3(threads_of(s)), shared, data<bf16_t>(qkv), data_or_null<float>(wq),
           data_or_null<float>(wk), data_or_null<float>(rope), data<bf16_t>(out), data<float>(lse),
           data<bf16_t>(dout), data<bf16_t>(dqkv), data_or_null<float>(partial), s,
           static_cast<unsigned>(units), inverse_root(qkv.dim(5)));
    if (partial.defined()) add_pieces(partial, dwq, dwk);
    return true;
  });
}

}  // namespace temporal
}  // namespace weft::kernels
