// Temporal self attention in bf16 on tensor cores, D = 64, 72, 128. CPU twin
// src/ops/cpu/attention/attention.cpp, cases src/bench/kernels/attention.cpp; other sizes and f32
// in temporal.cu.
//   forward   reads q, k, v and writes out: 8 T D bytes a head and 4 T^2 D operations, at T 15 7.5
//             operations a byte, where a GPU has some 200: only traffic counts. Each byte is moved
//             once, by runs of whole 16-byte pieces.
//   backward  reads q, k, v, dout (beyond 16 frames out, too) and writes three gradients: 14 (16) T
//             D bytes, 10 T^2 D operations.
// A block takes one token of one sample and a few neighbouring heads for all frames, so that a
// frame's piece is one run of memory (2 heads of 72: 288 bytes, nine whole sectors), fetched with
// cp.async; nothing is permuted. There is no pipeline within a block: blocks are small, and while
// one computes others fetch. At T 15 and D 72, by count and not measured:
//   forward   4 warps, 33 KiB, at most 96 registers: 5 blocks, so 130 KiB under way on a
//             multiprocessor of an H200, where 4.3 TB/s times a microsecond of latency over 132 of
//             them is 33 KiB. A head takes 19 mma and about 300 clocks of shared memory, where
//             memory takes about 480.
//   backward  4 warps, 33 KiB, at most 128 registers: 4 blocks, 74 KiB under way. A head takes 58
//             mma and about 700 clocks of shared memory, where memory takes about 830: the tighter
//             one.
// Fragments come by ldmatrix and without bank conflicts, for shared memory is what could bind
// beside memory. Scratch: 2 D f32 for each block of the backward, at most 4096 blocks.
#include "attention/temporal_mma.cuh"

#include <algorithm>

#include "attention/temporal.cuh"

namespace weft::kernels {
namespace temporal {
namespace {

// Rows that both passes of the backward read repeatedly, per head [frames] each.
constexpr int row_values = 4;  // rstd of q, rstd of k, lse * log2(e), delta

// The row of [B,T,S] where a token of a sample has frame 0; tokens count over B and S.
__device__ __forceinline__ std::int64_t first_row(unsigned token, const Shape& shape) {
  const unsigned S = static_cast<unsigned>(shape.S);
  return static_cast<std::int64_t>(token / S) * shape.T * shape.S + token % S;
}

template <int chunks, int most_threads>
__global__ void __launch_bounds__(most_threads, (chunks > 9 ? 3 : 5) * 128 / most_threads)
    forward_kernel(const bf16_t* qkv, const float* wq, const float* wk, const float* rope,
                   bf16_t* out, float* lse, Shape shape, float factor) {
  using H = Head<chunks>;
  unsigned char* shared = shared_memory<unsigned char>();
  const int frames = 16 * shape.tiles, matrix = frames * H::stride;
  bf16_t* heads = reinterpret_cast<bf16_t*>(shared);  // [heads][q, k, v][frames][stride]
  Constants<chunks> constants(reinterpret_cast<float*>(heads + shape.heads * 3 * matrix));

  const unsigned groups = static_cast<unsigned>(shape.H / shape.heads);
  const int first = static_cast<int>(blockIdx.x % groups) * shape.heads;
  const unsigned token = blockIdx.x / groups;
  const std::int64_t C = static_cast<std::int64_t>(shape.H) * H::D;
  const std::int64_t row = first_row(token, shape);  // frames are S rows apart

  for (int part = 0; part < 3; ++part)
    fetch<chunks>(qkv + (row * 3 + part) * C + first * H::D, shape.S * 3 * C, shape,
                  heads + part * matrix, 3 * matrix);
  cp_async_commit();
  constants.fill(wq, wk, rope, shape.T);
  cp_async_wait<0>();
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  const int head = warp / shape.warps_per_head, share = warp % shape.warps_per_head;
  bf16_t* const q = heads + head * 3 * matrix;
  bf16_t *const k = q + matrix, *const v = k + matrix;
  for (int half = share; half < 2 * shape.tiles; half += shape.warps_per_head)
    prepare<chunks>(q, k, q, k, 8 * half + group, constants, shape, nullptr, nullptr);
  __syncthreads();

  const float scale = factor * log2_e;
  for (int tile = share; tile < shape.tiles; tile += shape.warps_per_head) {
    float o[chunks][4] = {};
    // Of rows group and group + 8; the maximum is of the scores before `scale`.
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    for (int keys = 0; keys < shape.tiles; ++keys) {
      float p[2][4];
      multiply_rows<chunks>(p, q, 16 * tile, k, 16 * keys);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (16 * keys + 8 * n + 2 * pair + i % 2 >= shape.T) p[n][i] = -INFINITY;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Every tile of keys has at least one below T, so the maximum is finite.
        const float high = row_max(
            fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1])));
        const float before = top[r];
        top[r] = fmaxf(before, high);
        if (keys > 0) {
          const float shrink = exp2_approx((before - top[r]) * scale);
          sum[r] *= shrink;
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
            o[c][2 * r] *= shrink;
            o[c][2 * r + 1] *= shrink;
          }
        }
        const float high2 = top[r] * scale;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 2 * r; i < 2 * r + 2; ++i) {
            p[n][i] = exp2_approx(p[n][i] * scale - high2);
            sum[r] += p[n][i];
          }
      }
      std::uint32_t left[4];
      as_left(left, p);
      multiply<chunks>(o, left, v, 16 * keys);
    }
    // This warp alone reads this tile of q: out takes its place.
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = 16 * tile + group + 8 * r;
      const float total = row_sum(sum[r]), inverse = 1.0f / total;
#pragma unroll
      for (int c = 0; c < chunks; ++c)
        store_pair(q + t * H::stride + 8 * c + 2 * pair,
                   pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse));
      if (pair == 0 && t < shape.T)
        lse[(static_cast<std::int64_t>(token) * shape.H + first + head) * shape.T + t] =
            top[r] * factor + logf(total);
    }
  }
  __syncthreads();
  put<chunks>(heads, 3 * matrix, shape, out + row * C + first * H::D, shape.S * C);
}

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

// From the gradient g of the prepared rows of a tile to that of the raw rows x, in their place; the
// gradient of the norm's weight goes to `sum` as add_over_groups has it.
template <int chunks, int kept>
__device__ void unprepare(float (&g)[chunks][4], bf16_t* x, int tile, const float* rstd,
                          const float* weight, const Constants<chunks>& constants,
                          const Shape& shape, float (&sum)[kept]) {
  using H = Head<chunks>;
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const float2* const w = reinterpret_cast<const float2*>(weight) + pair;
  float scale[2], pull[2];
  std::uint32_t raw[2][chunks];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = 16 * tile + group + 8 * r;
    const float2* turns = constants.rope + (t < shape.T ? t : 0) * H::rope_stride + pair;
    scale[r] = rstd[t];
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      raw[r][c] = load_pair(x + t * H::stride + 2 * pair + 8 * c);
      const float2 turn = turns[4 * c], v = unpack(raw[r][c]);
      const float g0 = g[c][2 * r], g1 = g[c][2 * r + 1];
      g[c][2 * r] = g0 * turn.x + g1 * turn.y;
      g[c][2 * r + 1] = g1 * turn.x - g0 * turn.y;
      dot += g[c][2 * r] * w[4 * c].x * v.x + g[c][2 * r + 1] * w[4 * c].y * v.y;
    }
    // With g times the weight, d/dx of x rstd(x) is rstd (g - x rstd^2 mean(g x)); without norm
    // rstd is the constant 1.
    pull[r] = shape.norm ? row_sum(dot) * scale[r] * scale[r] * (1.0f / H::D) : 0.0f;
  }
  float dw[2 * chunks] = {};
#pragma unroll
  for (int c = 0; c < chunks; ++c)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bf16_t* const at = x + (16 * tile + group + 8 * r) * H::stride + 2 * pair + 8 * c;
      const float2 v = unpack(raw[r][c]);
      const float g0 = g[c][2 * r], g1 = g[c][2 * r + 1];
      dw[2 * c] += g0 * v.x * scale[r];
      dw[2 * c + 1] += g1 * v.y * scale[r];
      store_pair(at, pack(scale[r] * (g0 * w[4 * c].x - v.x * pull[r]),
                          scale[r] * (g1 * w[4 * c].y - v.y * pull[r])));
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
// transposes through shared memory. `single`: one tile holds all frames (T <= 16). Then delta is
// summed from P and dP as they are, and out, an eighth of the traffic, is not read; and P stays
// with the warp for dv.
template <int chunks, bool single>
__global__ void __launch_bounds__(single ? 128 : 256, chunks > 9 ? 1 + single : 2 + 2 * single)
    backward_kernel(const bf16_t* qkv, const float* wq, const float* wk, const float* rope,
                    const bf16_t* out, const float* lse, const bf16_t* dout, bf16_t* dqkv,
                    float* partial, Shape shape, unsigned units, float factor) {
  using H = Head<chunks>;
  constexpr int kept = (2 * chunks + 7) / 8;
  unsigned char* shared = shared_memory<unsigned char>();
  const int frames = 16 * shape.tiles, matrix = frames * H::stride;
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

  const unsigned groups = static_cast<unsigned>(shape.H / shape.heads);
  const std::int64_t C = static_cast<std::int64_t>(shape.H) * H::D;
  const float scale = factor * log2_e;
  float sum[kept] = {};  // of the weight's gradient, of queries or of keys
  for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int first = static_cast<int>(unit % groups) * shape.heads;
    const unsigned token = unit / groups;
    const std::int64_t row = first_row(token, shape);
    const std::int64_t at_qkv = row * 3 * C + first * H::D, at_out = row * C + first * H::D;
    __syncthreads();  // the previous unit is stored
#pragma unroll 1
    for (int i = at_q; i <= (single ? at_do : at_o); ++i) {
      const bf16_t* from = i == at_do ? dout : i == at_o ? out : qkv + i * C;
      const bool of_qkv = i <= at_v;
      fetch<chunks>(from + (of_qkv ? at_qkv : at_out), shape.S * (of_qkv ? 3 * C : C), shape,
                    heads + i * matrix, matrices * matrix);
    }
    cp_async_commit();
    for (int i = threadIdx.x; i < shape.heads * frames; i += blockDim.x) {
      const int t = i % frames;
      const std::int64_t of_head = static_cast<std::int64_t>(token) * shape.H + first + i / frames;
      // Queries beyond T get the probability 2^-inf = 0 everywhere.
      rows[(i / frames * row_values + 2) * frames + t] =
          t < shape.T ? lse[of_head * shape.T + t] * log2_e : INFINITY;
    }
    cp_async_wait<0>();
    __syncthreads();

    for (int half = share; half < 2 * shape.tiles; half += shape.warps_per_head) {
      const int t = 8 * half + group;
      if constexpr (!single) {
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const int at = t * H::stride + 2 * pair + 8 * c;
          const float2 a = unpack(load_pair(o + at)), b = unpack(load_pair(d_o + at));
          dot += a.x * b.x + a.y * b.y;
        }
        dot = row_sum(dot);
        if (pair == 0) delta[t] = dot;
      }
      prepare<chunks>(q, k, qp, kp, t, constants, shape, rstd_q, rstd_k);
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
            p[n][i] = key < shape.T ? exp2_approx(p[n][i] * scale - lse2[query]) : 0.0f;
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
#pragma unroll
      for (int c = 0; c < chunks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) g[c][i] *= factor;
      unprepare<chunks>(g, of_keys ? k : q, tile, of_keys ? rstd_k : rstd_q,
                        of_keys ? constants.wk : constants.wq, constants, shape, sum);
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
#pragma unroll 1
    for (int i = at_q; i <= at_v; ++i)
      put<chunks>(heads + i * matrix, matrices * matrix, shape, dqkv + at_qkv + i * C,
                  shape.S * 3 * C);
  }
  if (partial == nullptr) return;

  // The block's sums for dwq (even warps) and dwk (odd ones), over warps in their order.
  __syncthreads();
  constexpr int width = 8 * kept * 4;
  float* const sums = reinterpret_cast<float*>(shared);  // [warps][values][pairs]
#pragma unroll
  for (int i = 0; i < kept; ++i) sums[warp * width + (group * kept + i) * 4 + pair] = sum[i];
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int i = threadIdx.x; i < 2 * H::D; i += blockDim.x) {
    const int d = i % H::D;
    const int value = d / 8 * 2 + d % 2, of_pair = d % 8 / 2;  // d = 8 chunk + 2 pair + 0 or 1
    float total = 0.0f;
    for (int w = i / H::D; w < warps; w += 2) total += sums[w * width + value * 4 + of_pair];
    partial[static_cast<std::int64_t>(i) * gridDim.x + blockIdx.x] = total;
  }
}

// The largest of 4, 2, 1 heads a block that divides H and is at most `most`.
int heads_of_block(int H, int most) {
  while (H % most != 0) most /= 2;
  return most;
}

Shape shape_of(const Tensor& qkv, bool norm, bool backward) {
  Shape s{};
  s.B = qkv.dim(0);
  s.T = static_cast<int>(qkv.dim(1));
  s.S = static_cast<int>(qkv.dim(2));
  s.H = static_cast<int>(qkv.dim(4));
  s.tiles = (s.T + 15) / 16;
  // About 50 KiB a block, so that several are at work on a multiprocessor.
  const int most = backward ? (s.tiles <= 2 ? 2 : 1) : (s.tiles <= 2 ? 4 : 2);
  s.heads = heads_of_block(s.H, most);
  // A warp takes a tile; in the backward one for its queries and one for its keys.
  s.warps_per_head = std::min((backward ? 2 : 1) * s.tiles, 8 / s.heads);
  if (backward) s.warps_per_head -= s.warps_per_head % 2;
  s.norm = norm;
  return s;
}

template <int chunks>
std::size_t shared_bytes(const Shape& s, bool backward) {
  const std::size_t frames = 16 * static_cast<std::size_t>(s.tiles);
  const std::size_t heads = static_cast<std::size_t>(s.heads);
  const std::size_t matrix = frames * Head<chunks>::stride * sizeof(bf16_t);
  return heads * matrix * (backward ? matrices : 3) +
         (backward ? heads * row_values * frames * sizeof(float) : 0) +
         Constants<chunks>::bytes(s.T);
}

bool fits(std::size_t shared) { return shared <= cuda_properties().sharedMemPerBlockOptin; }

bool aligned(const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0; }

// Calls f.operator()<D / 8>() for the sizes of which there is a kernel; false for others.
template <class F>
bool by_size(std::int64_t D, F&& f) {
  if (D == 64) return f.template operator()<8>();
  if (D == 72) return f.template operator()<9>();
  if (D == 128) return f.template operator()<16>();
  return false;
}

}  // namespace

bool mma_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                 Tensor& out, Tensor& lse) {
  if (qkv.dtype() != DType::bf16 || !aligned(qkv) || !aligned(out)) return false;
  const Shape s = shape_of(qkv, wq.defined(), false);
  return by_size(qkv.dim(5), [&]<int chunks>() {
    const std::size_t shared = shared_bytes<chunks>(s, false);
    if (!fits(shared)) return false;
    const unsigned threads = static_cast<unsigned>(32 * s.heads * s.warps_per_head);
    launch(threads <= 128 ? forward_kernel<chunks, 128> : forward_kernel<chunks, 256>,
           dim3(blocks_for(s.B * s.S * s.H, s.heads)), dim3(threads), shared, data<bf16_t>(qkv),
           data_or_null<float>(wq), data_or_null<float>(wk), data_or_null<float>(rope),
           data<bf16_t>(out), data<float>(lse), s, inverse_root(qkv.dim(5)));
    return true;
  });
}

bool mma_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                  const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                  Tensor& dwq, Tensor& dwk) {
  if (qkv.dtype() != DType::bf16) return false;
  if (!aligned(qkv) || !aligned(out) || !aligned(dout) || !aligned(dqkv)) return false;
  const Shape s = shape_of(qkv, wq.defined(), true);
  return by_size(qkv.dim(5), [&]<int chunks>() {
    const std::size_t shared = shared_bytes<chunks>(s, true);
    if (!fits(shared)) return false;
    const std::int64_t units = s.B * s.S * (s.H / s.heads);
    const int blocks = pieces(units);
    Tensor partial;
    if (dwq.defined()) partial = Tensor::empty({2 * qkv.dim(5), blocks}, DType::f32);
    const unsigned threads = static_cast<unsigned>(32 * s.heads * s.warps_per_head);
    launch(s.tiles == 1 ? backward_kernel<chunks, true> : backward_kernel<chunks, false>,
           dim3(static_cast<unsigned>(blocks)), dim3(threads), shared, data<bf16_t>(qkv),
           data_or_null<float>(wq), data_or_null<float>(wk), data_or_null<float>(rope),
           data<bf16_t>(out), data<float>(lse), data<bf16_t>(dout), data<bf16_t>(dqkv),
           data_or_null<float>(partial), s, units, inverse_root(qkv.dim(5)));
    if (partial.defined()) add_pieces(partial, dwq, dwk);
    return true;
  });
}

}  // namespace temporal
}  // namespace weft::kernels
