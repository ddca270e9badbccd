// Flash attention backward in bf16 with mma.sync. CPU twin: src/ops/cpu/attention/attention.cpp.
// Cases: tests/kernels/attention.cpp.
//
// With P = exp(scale Q K^T - lse), dP = dO V^T, dS = P (dP - delta):  dV = P^T dO, dK = scale dS^T
// Q, dQ = scale dS K. Least work of one head: 10 nq nk D operations; q, k, v, out, dout read, dq,
// dk, dv written. Here it is 14 nq nk D: one kernel owns 64 keys and passes over the queries (dk,
// dv), another owns 64 queries and passes over the keys (dq), and each makes P and dP anew. So
// every sum has one owner and one order: no atomics, and a run repeats its bits.
#include "attention/flash_sm80.cuh"

namespace weft::kernels {
namespace {

template <int KD_, int ND_>
struct Sm80BackwardTile {
  static constexpr int KD = KD_, ND = ND_;
  static constexpr bool biased = ND == 128;  // looks at last_bias
  static constexpr int threads = 128;
  static constexpr int own = 64;                   // rows that the block owns, 16 a warp
  static constexpr int pass = ND <= 72 ? 64 : 32;  // rows of the other side at a time
  static constexpr int pitch = tile_pitch(KD);
  static constexpr int own_size = own * pitch, pass_size = pass * pitch;
  // Two own tiles, two stages of two passing tiles, two stages of two numbers for each passing row.
  static constexpr std::size_t shared =
      sizeof(bf16_t) * (2 * own_size + 4 * pass_size) + sizeof(float) * 4 * pass;
  static_assert(shared <= 99 * 1024);
};

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    flash_sm80_keys_kernel(FlashBackward<bf16_t> p, unsigned tiles) {
  constexpr int KD = Tile::KD, ND = Tile::ND, NT = Tile::pass / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const KeyTile tile = find_key_tile(p.shape, Tile::own, tiles, blockIdx.x);
  if (tile.s < 0) return;  // the whole block
  const int D = p.shape.D, s = tile.s, h = tile.h, nk = p.shape.keys(s);
  // This block's share of the queries, in whole blocks.
  const int each = blocks_of(blocks_of(p.shape.nq, Tile::pass), p.splits) * Tile::pass;
  const int begin = tile.split * each, end = min(p.shape.nq, begin + each);
  const int blocks = end > begin ? blocks_of(end - begin, Tile::pass) : 0;

  bf16_t* const keys = shared_memory<bf16_t>();
  bf16_t* const values = keys + Tile::own_size;
  bf16_t* const stages = values + Tile::own_size;
  float* const stats = reinterpret_cast<float*>(stages + 4 * Tile::pass_size);
  const bf16_t* const q = p.q.at(s, h, p.shape.inner);
  const bf16_t* const g = p.dout.at(s, h, p.shape.inner);
  const std::int64_t stat_row = (static_cast<std::int64_t>(s) * p.shape.heads + h) * p.shape.nq;

  const auto stage_q = [&](int stage) { return stages + stage * 2 * Tile::pass_size; };
  const auto load_queries = [&](int block, int stage) {
    const int first = begin + block * Tile::pass;
    load_rows<Tile::pass, KD / 8, Tile::pitch, Tile::threads>(stage_q(stage), q, p.q.row, first,
                                                              end, D);
    load_rows<Tile::pass, KD / 8, Tile::pitch, Tile::threads>(stage_q(stage) + Tile::pass_size, g,
                                                              p.dout.row, first, end, D);
  };
  // The first half of the threads fetches lse, the other delta, one row each. An infinite lse makes
  // P zero.
  const int stat = threadIdx.x % (Tile::threads / 2);
  const bool is_delta = threadIdx.x >= Tile::threads / 2;
  const auto fetch_stat = [&](int block) {
    const int i = begin + block * Tile::pass + stat;
    if (stat >= Tile::pass || i >= end) return is_delta ? 0.0f : INFINITY;
    return is_delta ? p.delta[stat_row + i] : p.lse[stat_row + i] * log2_e;
  };
  const auto put_stat = [&](int stage, float x) {
    if (stat < Tile::pass) stats[(stage * 2 + is_delta) * Tile::pass + stat] = x;
  };

  const std::int64_t key_row = p.shape.first_key(s);
  load_rows<Tile::own, KD / 8, Tile::pitch, Tile::threads>(
      keys, p.k.at(s, h, p.shape.inner) + key_row * p.k.row, p.k.row, tile.first, nk, D);
  load_rows<Tile::own, KD / 8, Tile::pitch, Tile::threads>(
      values, p.v.at(s, h, p.shape.inner) + key_row * p.v.row, p.v.row, tile.first, nk, D);
  if (blocks > 0) {
    load_queries(0, 0);
    put_stat(0, fetch_stat(0));
  }
  cp_async_commit();

  float dk[ND / 8][4], dv[ND / 8][4];
#pragma unroll
  for (int t = 0; t < ND / 8; ++t)
    for (int e = 0; e < 4; ++e) dk[t][e] = dv[t][e] = 0.0f;
  const float to_log2 = p.shape.scale * log2_e;
  const float bias = Tile::biased ? p.shape.bias(s) : 0.0f;
  for (int block = 0; block < blocks; ++block) {
    const int stage = block % 2;
    float next = 0.0f;
    if (block + 1 < blocks) {
      load_queries(block + 1, 1 - stage);
      next = fetch_stat(block + 1);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();

    // Transposed scores: this warp's 16 keys are the rows, so that P^T and dS^T are A operands as
    // they stand.
    const bf16_t* const queries = stage_q(stage);
    const bf16_t* const gradients = queries + Tile::pass_size;
    const float* const lse = stats + stage * 2 * Tile::pass;
    const float* const delta = lse + Tile::pass;
    float prob[NT][4], ds[NT][4];
    row_products<KD, NT, Tile::pitch>(prob, keys, warp * 16, queries);
    if constexpr (Tile::biased) add_to_row(prob, nk - 1 - tile.first - warp * 16, bias);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        prob[t][e] = exp2_approx(prob[t][e] * to_log2 - lse[t * 8 + lane % 4 * 2 + e % 2]);
    weighted_rows<ND, NT, Tile::pitch>(dv, prob, gradients);
    row_products<KD, NT, Tile::pitch>(ds, values, warp * 16, gradients);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        ds[t][e] = prob[t][e] * (ds[t][e] - delta[t * 8 + lane % 4 * 2 + e % 2]);
    weighted_rows<ND, NT, Tile::pitch>(dk, ds, queries);

    // The other stage's numbers were last read before the barrier that ended the previous pass.
    if (block + 1 < blocks) put_stat(1 - stage, next);
    __syncthreads();
  }
  cp_async_wait<0>();

  const int row = tile.first + warp * 16;
  if (p.partial == nullptr) {
    store_rows<ND>(dk, p.shape.scale, p.shape.scale, p.dk.at(s, h, p.shape.inner), p.dk.row, row,
                   nk, D);
    store_rows<ND>(dv, 1.0f, 1.0f, p.dv.at(s, h, p.shape.inner), p.dv.row, row, nk, D);
    return;
  }
#pragma unroll
  for (int t = 0; t < ND / 8; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + lane / 4 + 8 * r, c = t * 8 + lane % 4 * 2;
      if (i >= nk || c >= D) continue;
      float* const to = partial_row(p, tile.split, key_row + i, h) + c;
      const std::int64_t part = static_cast<std::int64_t>(p.shape.heads) * D;
      *reinterpret_cast<float2*>(to) =
          make_float2(dk[t][2 * r] * p.shape.scale, dk[t][2 * r + 1] * p.shape.scale);
      *reinterpret_cast<float2*>(to + part) = make_float2(dv[t][2 * r], dv[t][2 * r + 1]);
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    flash_sm80_queries_kernel(FlashBackward<bf16_t> p, int tiles) {
  constexpr int KD = Tile::KD, ND = Tile::ND, NT = Tile::pass / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int h = static_cast<int>(blockIdx.x) / tiles % p.shape.heads;
  const int s = static_cast<int>(blockIdx.x) / tiles / p.shape.heads;
  const int D = p.shape.D, nq = p.shape.nq, nk = p.shape.keys(s), first = tile * Tile::own;
  bf16_t* const queries = shared_memory<bf16_t>();
  bf16_t* const gradients = queries + Tile::own_size;
  bf16_t* const stages = gradients + Tile::own_size;
  const bf16_t* const k = p.k.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.k.row;
  const bf16_t* const v = p.v.at(s, h, p.shape.inner) + p.shape.first_key(s) * p.v.row;

  const auto stage_k = [&](int stage) { return stages + stage * 2 * Tile::pass_size; };
  const auto load_keys = [&](int block, int stage) {
    load_rows<Tile::pass, KD / 8, Tile::pitch, Tile::threads>(stage_k(stage), k, p.k.row,
                                                              block * Tile::pass, nk, D);
    load_rows<Tile::pass, KD / 8, Tile::pitch, Tile::threads>(stage_k(stage) + Tile::pass_size, v,
                                                              p.v.row, block * Tile::pass, nk, D);
  };
  load_rows<Tile::own, KD / 8, Tile::pitch, Tile::threads>(queries, p.q.at(s, h, p.shape.inner),
                                                           p.q.row, first, nq, D);
  load_rows<Tile::own, KD / 8, Tile::pitch, Tile::threads>(
      gradients, p.dout.at(s, h, p.shape.inner), p.dout.row, first, nq, D);
  const int blocks = blocks_of(nk, Tile::pass);
  if (blocks > 0) load_keys(0, 0);
  cp_async_commit();

  float lse[2], delta[2], dq[ND / 8][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + warp * 16 + lane / 4 + 8 * r;
    const std::int64_t at = (static_cast<std::int64_t>(s) * p.shape.heads + h) * nq + i;
    lse[r] = i < nq ? p.lse[at] * log2_e : INFINITY;
    delta[r] = i < nq ? p.delta[at] : 0.0f;
  }
#pragma unroll
  for (int t = 0; t < ND / 8; ++t)
    for (int e = 0; e < 4; ++e) dq[t][e] = 0.0f;
  const float to_log2 = p.shape.scale * log2_e;
  const float bias = Tile::biased ? p.shape.bias(s) : 0.0f;
  for (int block = 0; block < blocks; ++block) {
    const int stage = block % 2;
    if (block + 1 < blocks) load_keys(block + 1, 1 - stage);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();

    const bf16_t* const keys = stage_k(stage);
    float prob[NT][4], ds[NT][4];
    row_products<KD, NT, Tile::pitch>(prob, queries, warp * 16, keys);
    const int left = nk - block * Tile::pass;
    if (Tile::biased && left <= Tile::pass) add_to_column(prob, left - 1, bias);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        prob[t][e] = exp2_approx(prob[t][e] * to_log2 - lse[e / 2]);
        // A key beyond the end has zeros for k, but exp(0 - lse) may be infinite.
        if (t * 8 + lane % 4 * 2 + e % 2 >= left) prob[t][e] = 0.0f;
      }
    row_products<KD, NT, Tile::pitch>(ds, gradients, warp * 16, keys + Tile::pass_size);
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[t][e] = prob[t][e] * (ds[t][e] - delta[e / 2]);
    weighted_rows<ND, NT, Tile::pitch>(dq, ds, keys);
    __syncthreads();
  }
  cp_async_wait<0>();
  store_rows<ND>(dq, p.shape.scale, p.shape.scale, p.dq.at(s, h, p.shape.inner), p.dq.row,
                 first + warp * 16, nq, D);
}

}  // namespace

void flash_sm80_backward(const FlashBackward<bf16_t>& p) {
  by_head_size(p.shape.tile_size(), [&]<int KD, int ND>() {
    using Tile = Sm80BackwardTile<KD, ND>;
    const auto heads = static_cast<unsigned>(p.shape.heads);
    const unsigned key_blocks = key_tiles(p.shape, Tile::own);
    launch(flash_sm80_keys_kernel<Tile>, dim3(key_blocks * heads * static_cast<unsigned>(p.splits)),
           dim3(Tile::threads), Tile::shared, p, key_blocks);
    const unsigned query_blocks = blocks_for(p.shape.nq, Tile::own);
    launch(flash_sm80_queries_kernel<Tile>,
           dim3(query_blocks * heads * static_cast<unsigned>(p.shape.sequences)),
           dim3(Tile::threads), Tile::shared, p, static_cast<int>(query_blocks));
  });
}

}  // namespace weft::kernels
