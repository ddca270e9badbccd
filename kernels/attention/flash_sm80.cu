// Flash attention forward in bf16 with mma.sync, for sm_80 and whatever has nothing better. CPU
// twin: src/ops/cpu/attention/attention.cpp. Cases: tests/kernels/attention.cpp.
//
// Least work of one head of one sequence: 4 nq nk D operations; q, k, v read and out written once,
// 2 (nq + nk) 2 D bytes, so that at nq = nk = 1590, D = 72 an element is worth 1600 operations and
// the tensor cores are the limit. The kernel multiplies (KD + ND) / 2 D as many lanes (D = 72: 80
// and 72, 1.06). Each block holds 128 queries and passes over the keys 64 (48) at a time through
// two stages of shared memory filled by cp.async; k and v come from L2 once a block. A warp holds
// 32 queries (16 for D > 72) so that one ldmatrix feeds four (two) mma.
#include "attention/flash_sm80.cuh"

namespace weft::kernels {
namespace {

template <int KD_, int ND_>
struct Sm80ForwardTile {
  static constexpr int KD = KD_, ND = ND_;
  static constexpr bool biased = ND == 128;         // looks at last_bias
  static constexpr int m_tiles = ND <= 72 ? 2 : 1;  // of 16 queries a warp
  static constexpr int warps = ND <= 72 ? 4 : 8, threads = 32 * warps;
  // Wide heads take fewer keys: with 64 two stages would not fit the 99 KiB that GPUs for desktops
  // have.
  static constexpr int queries = 16 * m_tiles * warps, keys = ND <= 72 ? 64 : 48;
  static constexpr int k_pitch = tile_pitch(KD), v_pitch = tile_pitch(ND);
  static constexpr int k_size = keys * k_pitch, v_size = keys * v_pitch;
  // The queries stay in shared memory: in registers they would not leave enough for 32 of them a
  // warp.
  static constexpr int q_size = queries * k_pitch;
  static constexpr std::size_t shared = sizeof(bf16_t) * (2 * (k_size + v_size) + q_size);
  static_assert(shared <= 99 * 1024);
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    flash_sm80_forward_kernel(FlashForward<bf16_t> p, int tiles) {
  constexpr int MT = Tile::m_tiles, NT = Tile::keys / 8, KD = Tile::KD, ND = Tile::ND;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int h = static_cast<int>(blockIdx.x) / tiles % p.shape.heads;
  const int s = static_cast<int>(blockIdx.x) / tiles / p.shape.heads;
  const int D = p.shape.D, nq = p.shape.nq, nk = p.shape.keys(s);
  const int first = tile * Tile::queries;
  const bf16_t* const k = p.k.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.k.row;
  const bf16_t* const v = p.v.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.v.row;
  bf16_t* const queries = shared_memory<bf16_t>();

  const auto stage_k = [&](int stage) {
    return queries + Tile::q_size + stage * (Tile::k_size + Tile::v_size);
  };
  const auto stage_v = [&](int stage) { return stage_k(stage) + Tile::k_size; };
  const auto load_keys = [&](int block, int stage) {
    load_rows<Tile::keys, KD / 8, Tile::k_pitch, Tile::threads>(stage_k(stage), k, p.k.row,
                                                                block * Tile::keys, nk, D);
    load_rows<Tile::keys, ND / 8, Tile::v_pitch, Tile::threads>(stage_v(stage), v, p.v.row,
                                                                block * Tile::keys, nk, D);
  };

  // The first group of copies: queries and the first keys.
  load_rows<Tile::queries, KD / 8, Tile::k_pitch, Tile::threads>(
      queries, p.q.at(s, h, p.shape.inner), p.q.row, first, nq, D);

  float out[MT][ND / 8][4], top[MT][2], sum[MT][2];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    for (int t = 0; t < ND / 8; ++t)
      for (int e = 0; e < 4; ++e) out[m][t][e] = 0.0f;
    for (int r = 0; r < 2; ++r) {
      top[m][r] = -INFINITY;
      sum[m][r] = 0.0f;
    }
  }
  const float to_log2 = p.shape.scale * log2_e;
  const float bias = Tile::biased ? p.shape.bias(s) : 0.0f;
  const int blocks = blocks_of(nk, Tile::keys);
  if (blocks > 0) load_keys(0, 0);
  cp_async_commit();
  for (int block = 0; block < blocks; ++block) {
    const int stage = block % 2;
    if (block + 1 < blocks) load_keys(block + 1, 1 - stage);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();

    float scores[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
      for (int t = 0; t < NT; ++t)
        for (int e = 0; e < 4; ++e) scores[m][t][e] = 0.0f;
#pragma unroll
    for (int kk = 0; kk < KD / 16; ++kk) {
      std::uint32_t q[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m)
        load_a<Tile::k_pitch>(q[m], queries, (warp * MT + m) * 16, kk * 16);
#pragma unroll
      for (int t = 0; t < NT; t += 2) {
        std::uint32_t b[4];
        load_b<Tile::k_pitch>(b, stage_k(stage), t * 8, kk * 16);
#pragma unroll
        for (int m = 0; m < MT; ++m) mma_pair(scores[m][t], scores[m][t + 1], q[m], b);
      }
    }
    const int left = nk - block * Tile::keys;
    if (Tile::biased && left <= Tile::keys) {
#pragma unroll
      for (int m = 0; m < MT; ++m) add_to_column(scores[m], left - 1, bias);
    }
    if (left < Tile::keys) {
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (t * 8 + lane % 4 * 2 + e % 2 >= left)
#pragma unroll
            for (int m = 0; m < MT; ++m) scores[m][t][e] = -INFINITY;
    }

    // A row lies in the four lanes of a quad; r picks the row of the upper or lower eight.
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = top[m][r];
#pragma unroll
        for (int t = 0; t < NT; ++t)
          largest = fmaxf(largest, fmaxf(scores[m][t][2 * r], scores[m][t][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, 2));
        const float shrink = exp2_approx((top[m][r] - largest) * to_log2);
        const float shift = largest * to_log2;
        top[m][r] = largest;
        float added = 0.0f;
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            scores[m][t][e] = exp2_approx(scores[m][t][e] * to_log2 - shift);
            added += scores[m][t][e];
          }
        sum[m][r] = sum[m][r] * shrink + added;
#pragma unroll
        for (int t = 0; t < ND / 8; ++t) {
          out[m][t][2 * r] *= shrink;
          out[m][t][2 * r + 1] *= shrink;
        }
      }

      // As weighted_rows(), with one fragment of v feeding all of this warp's queries.
#pragma unroll
    for (int t = 0; t < NT; t += 2) {
      std::uint32_t a[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        a[m][0] = pack_bf16(scores[m][t][0], scores[m][t][1]);
        a[m][1] = pack_bf16(scores[m][t][2], scores[m][t][3]);
        a[m][2] = pack_bf16(scores[m][t + 1][0], scores[m][t + 1][1]);
        a[m][3] = pack_bf16(scores[m][t + 1][2], scores[m][t + 1][3]);
      }
#pragma unroll
      for (int n = 0; n + 1 < ND / 8; n += 2) {
        std::uint32_t b[4];
        load_b_trans<Tile::v_pitch>(b, stage_v(stage), t * 8, n * 8);
#pragma unroll
        for (int m = 0; m < MT; ++m) mma_pair(out[m][n], out[m][n + 1], a[m], b);
      }
      if constexpr (ND / 8 % 2 == 1) {
        std::uint32_t b[2];
        load_b_trans<Tile::v_pitch>(b, stage_v(stage), t * 8, ND - 8);
#pragma unroll
        for (int m = 0; m < MT; ++m) mma_16x8x16(out[m][ND / 8 - 1], a[m], b);
      }
    }
    __syncthreads();  // the next pass fills this stage
  }
  cp_async_wait<0>();  // without keys the queries are still in flight

  bf16_t* const to = p.out.at(s, h, p.shape.inner);
  float* const lse = p.lse + (static_cast<std::int64_t>(s) * p.shape.heads + h) * nq;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    float inverse[2];
    const int row = first + (warp * MT + m) * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[m][r];
      total += __shfl_xor_sync(full_mask, total, 1);
      total += __shfl_xor_sync(full_mask, total, 2);
      inverse[r] = nk > 0 ? 1.0f / total : 0.0f;
      const int i = row + lane / 4 + 8 * r;
      if (lane % 4 == 0 && i < nq) lse[i] = nk > 0 ? top[m][r] * p.shape.scale + logf(total) : 0.0f;
    }
    store_rows<ND>(out[m], inverse[0], inverse[1], to, p.out.row, row, nq, D);
  }
}

}  // namespace

void flash_sm80_forward(const FlashForward<bf16_t>& p) {
  by_head_size(p.shape.tile_size(), [&]<int KD, int ND>() {
    using Tile = Sm80ForwardTile<KD, ND>;
    const unsigned tiles = blocks_for(p.shape.nq, Tile::queries);
    launch(flash_sm80_forward_kernel<Tile>,
           dim3(tiles * static_cast<unsigned>(p.shape.heads * p.shape.sequences)),
           dim3(Tile::threads), Tile::shared, p, static_cast<int>(tiles));
  });
}

}  // namespace weft::kernels
