// Flash attention backward in bf16 for Hopper, built as the forward is (flash_sm90.cu). CPU twin:
// src/ops/cpu/attention/attention.cpp. Cases: tests/kernels/attention.cpp (WEFT_ATTENTION=sm80
// runs the same cases through flash_sm80_backward.cu). tests/cuda_on_cpu runs it where
// WEFT_EMULATION_CAPABILITY=9.0.
//
// Least work of one head: 10 nq nk D operations; here 14, in two kernels whose sums have one owner
// and one order each, as in flash_sm80_backward.cu. The usual single kernel saves two of seven
// products, but adds dQ in memory in the order in which blocks come, or pays for an order with
// waiting, and passes dS through shared memory; for D = 72 that was no clear gain.
//
// Both kernels are one: the block owns 64 rows a warpgroup of one side (X1, X2), and passes over 64
// rows at a time of the other (Y1, Y2), which a copying warpgroup brings:
//   keys kernel:    X = K, V Y = Q, dO S^T = X1 Y1^T, dP^T = X2 Y2^T dV += P^T Y2, dK += dS^T Y1
//   queries kernel: X = Q, dO Y = K, V    S = X1 Y1^T, dP = X2 Y2^T dQ += dS Y1
// so that P and dS are always A operands in registers as they come out of the first products. For D
// <= 72 X stays in registers too, and shared memory is read for Y alone: 64 of its 128 bytes a
// cycle while the tensor cores are busy. The first products of the next rows are issued before the
// second ones of these rows, so that the elementwise part of one block runs while the products of
// another do.
//
// Captions are packed, short, and have many queries: the keys kernel's blocks share the queries of
// one tile of keys, and write f32 sums that flash_merge_splits() adds. Tiles of packed keys for D
// up to 128 also take the bias of each sequence's last key.
#include "attention/flash_sm90_tiles.cuh"

namespace weft::kernels {
namespace {

template <int KD_, int ND_, bool keys_, bool packed_>
struct Sm90BackwardTile {
  static constexpr int KD = KD_, ND = ND_;
  static constexpr bool keys = keys_;                  // owns keys, or queries
  static constexpr bool packed = packed_;              // keys are those of packed captions
  static constexpr bool biased = packed && ND == 128;  // looks at last_bias
  static constexpr bool splits = keys && packed;       // queries are shared out over blocks
  static constexpr int groups = 2, threads = 128 * (groups + 1), own_rows = backward_rows;
  static constexpr int stages = 4;
  static constexpr bool x_in_registers = ND <= 72;
  // The next first products are issued before the second ones where registers allow accumulators
  // for both.
  static constexpr bool ahead = ND <= 72 || !keys;
  static constexpr int own_bytes = tile_bytes(KD, own_rows), pass_bytes = tile_bytes(KD, pass_rows);
  static constexpr int stat_bytes = keys ? pass_rows * 8 : 0;
  static constexpr int stage_bytes = 2 * pass_bytes;
  // A bias of a key and its row, for each warp: in registers they would be two too many.
  static constexpr int bias_bytes = keys && biased ? 4 * groups * 8 : 0;
  static constexpr std::size_t shared = 2 * own_bytes + stages * (stage_bytes + stat_bytes) +
                                        sizeof(std::uint64_t) * (2 + 2 * stages) + bias_bytes +
                                        tile_slot_bytes;
  static constexpr int copy_registers = 24, work_registers = 240;
  static_assert(!biased || packed);  // the bias is looked for at the end of packed keys
  static_assert(copy_registers + work_registers * groups <= registers_of_groups(groups + 1));
  static_assert(shared <= 227 * 1024);
  // Accumulators of the sums and of the first products, P and dS as operands beside them, X; the
  // rest is for addresses.
  static_assert((keys ? 2 : 1) * (ND / 2 + (ahead ? pass_rows / 4 : 0)) + pass_rows +
                    (x_in_registers ? KD / 2 : 0) <=
                work_registers - 20);
};

struct BackwardWork {
  FlashShape shape;
  const float2*
      stats;  // [sequences, heads, padded queries] (lse / ln 2, delta), (infinity, 0) beyond nq
  int padded_queries;
  FlashRows<__nv_bfloat16> d1, d2;  // gradients of X1 and, in the keys kernel, X2
  float* partial;                   // both, of packed keys (FlashBackward)
  int splits;
  Tiles tiles;
  float to_log2;  // scale / ln 2: read where it is used, it takes no register over the loops
};

__device__ unsigned backward_tiles_taken = 0;

#ifdef WEFT_SM90
using namespace sm90;

template <class Tile>
struct BackwardMemory {
  unsigned char* base;
  __device__ __forceinline__ unsigned char* x1() const { return base; }
  __device__ __forceinline__ unsigned char* x2() const { return base + Tile::own_bytes; }
  __device__ __forceinline__ unsigned char* y1(int stage) const {
    return base + 2 * Tile::own_bytes + stage * Tile::stage_bytes;
  }
  __device__ __forceinline__ unsigned char* y2(int stage) const {
    return y1(stage) + Tile::pass_bytes;
  }
  __device__ __forceinline__ float4* stats(int stage) const {
    return reinterpret_cast<float4*>(base + 2 * Tile::own_bytes + Tile::stages * Tile::stage_bytes +
                                     stage * Tile::stat_bytes);
  }
  __device__ __forceinline__ std::uint64_t* x_full() const {
    return reinterpret_cast<std::uint64_t*>(base + 2 * Tile::own_bytes +
                                            Tile::stages * (Tile::stage_bytes + Tile::stat_bytes));
  }
  __device__ __forceinline__ std::uint64_t* x_empty() const { return x_full() + 1; }
  __device__ __forceinline__ std::uint64_t* y_full(int s) const { return x_full() + 2 + s; }
  __device__ __forceinline__ std::uint64_t* y_empty(int s) const {
    return x_full() + 2 + Tile::stages + s;
  }
  __device__ __forceinline__ TileSlots tiles() const { return {y_empty(Tile::stages)}; }
  // The last key's bias, and its row among the 16 of warp number `warp`.
  struct Bias {
    float value;
    int row;
  };
  __device__ __forceinline__ Bias* bias(int warp) const {
    return reinterpret_cast<Bias*>(base + Tile::shared - Tile::bias_bytes) + warp;
  }
};

template <class Tile>
__device__ __forceinline__ OwnTile own_tile_of(const BackwardWork& work, int index) {
  return own_tile<Tile::keys, Tile::packed>(work.tiles, work.shape, work.splits, index);
}

__device__ __forceinline__ const float2* stats_of(const BackwardWork& work, const OwnTile& tile) {
  return work.stats + (static_cast<std::int64_t>(tile.sequence) * work.shape.heads + tile.head) *
                          work.padded_queries;
}

template <class Tile>
__device__ __forceinline__ void copy_backward(const CUtensorMap* x1, const CUtensorMap* x2,
                                              const CUtensorMap* y1, const CUtensorMap* y2,
                                              const BackwardWork& work,
                                              const BackwardMemory<Tile>& memory) {
  Ring<Tile::stages> ring;
  int x_parity = 0;
  TileSource tiles(memory.tiles(), work.tiles.total, &backward_tiles_taken);
  for (int index; (index = tiles.next()) >= 0;) {
    const OwnTile tile = own_tile_of<Tile>(work, index);
    if (tile.sequence < 0 || tile.blocks == 0) continue;
    // Where the rows of either side lie in their tensors.
    const int key_row = work.shape.first_key(tile.sequence),
              key_sequence = Tile::packed ? 0 : tile.sequence;
    const int x_row = tile.first + (Tile::keys ? key_row : 0),
              x_sequence = Tile::keys ? key_sequence : tile.sequence,
              y_row = tile.pass_first + (Tile::keys ? 0 : key_row),
              y_sequence = Tile::keys ? tile.sequence : key_sequence;
    mbarrier_wait(memory.x_empty(), x_parity ^ 1);
    mbarrier_arrive_expect(memory.x_full(), 2 * Tile::own_bytes);
    copy_tile<Tile::KD, Tile::own_rows>(memory.x1(), x1, memory.x_full(), tile.head, x_row,
                                        x_sequence);
    copy_tile<Tile::KD, Tile::own_rows>(memory.x2(), x2, memory.x_full(), tile.head, x_row,
                                        x_sequence);
    x_parity ^= 1;
    const float2* const stats = stats_of(work, tile) + tile.pass_first;
    for (int block = 0; block < tile.blocks; ++block, ring.advance()) {
      const int row = block * pass_rows, s = ring.stage();
      std::uint64_t* const full = memory.y_full(s);
      mbarrier_wait(memory.y_empty(s), ring.parity() ^ 1);
      mbarrier_arrive_expect(full, Tile::stage_bytes + Tile::stat_bytes);
      copy_tile<Tile::KD, pass_rows>(memory.y1(s), y1, full, tile.head, y_row + row, y_sequence);
      copy_tile<Tile::KD, pass_rows>(memory.y2(s), y2, full, tile.head, y_row + row, y_sequence);
      if constexpr (Tile::keys) copy_bulk(memory.stats(s), stats + row, Tile::stat_bytes, full);
    }
  }
}

// x [64, 64] = (64 rows of X from `row` on, or `a`, the same in registers) x (the 64 rows of y)^T.
template <class Tile>
__device__ __forceinline__ void issue_products(float (&x)[pass_rows / 2],
                                               const std::uint32_t (&a)[Tile::KD / 16][4],
                                               const unsigned char* own, int row,
                                               const unsigned char* y) {
#pragma unroll
  for (int k = 0; k < Tile::KD / 16; ++k) {
    const std::uint64_t b = describe_rows(column_step<pass_rows>(y, 0, k));
    if constexpr (Tile::x_in_registers)
      Wgmma<pass_rows>::template from_registers<false>(x, a[k], b, k > 0);
    else
      Wgmma<pass_rows>::from_shared(x, describe_rows(column_step<Tile::own_rows>(own, row, k)), b,
                                    k > 0);
  }
}

// Scores become P = exp(scale score - lse), their gradient dS = P (dP - delta). Columns are
// queries: each lane needs lse and delta of two of every eight.
__device__ __forceinline__ void keys_elementwise(float (&prob)[pass_rows / 2],
                                                 float (&ds)[pass_rows / 2], const float4* stats,
                                                 float to_log2) {
#pragma unroll
  for (int t = 0; t < pass_rows / 8; ++t) {
    const float4 two = stats[t * 4 + threadIdx.x % 4];
#pragma unroll
    for (int e = 4 * t; e < 4 * t + 4; ++e) {
      prob[e] = exp2_approx(prob[e] * to_log2 - (e % 2 ? two.z : two.x));
      ds[e] = prob[e] * (ds[e] - (e % 2 ? two.w : two.y));
    }
  }
}
// The same where rows are queries: stat[0] for the upper eight, stat[1] for the lower. Keys from
// `left` on are not there: they have zeros for K, but exp(0 - lse) may be infinite. The one before
// them gets the bias.
template <bool biased>
__device__ __forceinline__ void queries_elementwise(float (&prob)[pass_rows / 2],
                                                    float (&ds)[pass_rows / 2],
                                                    const float2 (&stat)[2], float to_log2,
                                                    int left, float bias) {
  if (biased && left <= pass_rows) {
#pragma unroll
    for (int e = 0; e < pass_rows / 2; ++e)
      if (e / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + e % 2 == left - 1) prob[e] += bias;
  }
#pragma unroll
  for (int e = 0; e < pass_rows / 2; ++e)
    prob[e] = exp2_approx(prob[e] * to_log2 - stat[e / 2 % 2].x);
  if (left < pass_rows) {
#pragma unroll
    for (int e = 0; e < pass_rows / 2; ++e)
      if (e / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + e % 2 >= left) prob[e] = 0.0f;
  }
#pragma unroll
  for (int e = 0; e < pass_rows / 2; ++e) ds[e] = prob[e] * (ds[e] - stat[e / 2 % 2].y);
}

// The gradients of this warpgroup's rows.
template <class Tile>
__device__ __forceinline__ void store_own(const BackwardWork& work, const OwnTile& to, int group,
                                          const float (&sum1)[Tile::ND / 2],
                                          const float (&sum2)[Tile::ND / 2]) {
  constexpr int ND = Tile::ND;
  const int row = to.first + group * 64, D = work.shape.D;
  const float scale = work.shape.scale;
  if constexpr (Tile::splits) {
    const std::int64_t part = static_cast<std::int64_t>(work.shape.heads) * D;
    float* const dk =
        work.partial +
        (to.split * static_cast<std::int64_t>(work.shape.nk) + work.shape.first_key(to.sequence)) *
            2 * part +
        to.head * D;
    store_accumulators<ND>(sum1, 1.0f, 1.0f, dk + part, 2 * part, row, to.own, D);
    store_accumulators<ND>(sum2, scale, scale, dk, 2 * part, row, to.own, D);
    return;
  }
  if constexpr (Tile::keys)
    store_accumulators<ND>(sum1, 1.0f, 1.0f, work.d2.at(to.sequence, to.head, 1), work.d2.row, row,
                           to.own, D);
  store_accumulators<ND>(sum2, scale, scale, work.d1.at(to.sequence, to.head, 1), work.d1.row, row,
                         to.own, D);
}

template <class Tile>
__device__ __forceinline__ void multiply_backward(const BackwardWork& work,
                                                  const BackwardMemory<Tile>& memory) {
  constexpr int KD = Tile::KD, ND = Tile::ND, n = pass_rows / 2;
  // `group` is for the loop's products alone: elsewhere it is made where it is needed.
  const int group = static_cast<int>(threadIdx.x) / 128 - 1, lane = threadIdx.x % 32;
  const auto group_here = [] { return thread_here() / 128 - 1; };
  const auto done_with = [&](std::uint64_t* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  Ring<Tile::stages> ring;
  // Eight times the tile's number, and below it the parity of x_full and two bits that count turns
  // of the slots: one register.
  for (int at = 0;;) {
    at = memory.tiles().take(at & 1, at >> 1 & 1) * 8 | (at & 4) | ((at + 1) & 3);
    if (at >> 3 >= work.tiles.total) break;
    // Sums for P Y2 (keys kernel only) and dS Y1.
    float sum1[ND / 2], sum2[ND / 2], prob[n], ds[n];
    std::uint32_t x1[KD / 16][4], x2[KD / 16][4], p[pass_rows / 16][4], d[pass_rows / 16][4];
    float2 stat[2];
    const OwnTile tile = own_tile_of<Tile>(work, at >> 3);
    if (Tile::packed && tile.sequence < 0) continue;
    // What is still to be passed over, from the present block on.
    int rows = Tile::keys ? tile.blocks * pass_rows : tile.pass;
    float bias = 0.0f;
    if constexpr (Tile::biased && !Tile::keys) bias = work.shape.bias(tile.sequence);
    if constexpr (Tile::biased && Tile::keys) {
      const int warp = thread_here() / 32 - 4;
      __syncwarp();
      if (lane == 0)
        *memory.bias(warp) = {work.shape.bias(tile.sequence),
                              tile.own - 1 - tile.first - warp * 16};
      __syncwarp();
    }
    if constexpr (Tile::packed && !Tile::keys) {
      if (rows == 0) {
#pragma unroll
        for (int i = 0; i < ND / 2; ++i) sum2[i] = 0.0f;
        store_own<Tile>(work, tile, group_here(), sum1, sum2);
        continue;
      }
    }
    if constexpr (!Tile::keys) {
      const float2* const stats = stats_of(work, tile);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = tile.first + (thread_here() - 128) / 32 * 16 + lane / 4 + 8 * r;
        stat[r] = i < work.padded_queries ? stats[i] : make_float2(INFINITY, 0.0f);
      }
    }

    mbarrier_wait(memory.x_full(), at >> 2 & 1);
    at ^= 4;
    if (tile.first + group_here() * 64 >= tile.own) {
      // Without products nothing else keeps a warp's lanes together, and one that comes late to a
      // barrier would miss its phase.
      __syncwarp();
      done_with(memory.x_empty());
      for (; rows > 0; rows -= pass_rows, ring.advance()) {
        mbarrier_wait(memory.y_full(ring.stage()), ring.parity());
        __syncwarp();
        done_with(memory.y_empty(ring.stage()));
      }
      continue;
    }
    if constexpr (Tile::x_in_registers) {
      load_operand<KD, Tile::own_rows>(x1, memory.x1(), group_here() * 64);
      load_operand<KD, Tile::own_rows>(x2, memory.x2(), group_here() * 64);
      // Reads by this warp's lanes come before what the bulk copies bring next.
      __syncwarp();
      done_with(memory.x_empty());
    }
#pragma unroll
    for (int i = 0; i < ND / 2; ++i) sum1[i] = sum2[i] = 0.0f;
    const auto issue_first = [&] {
      keep_in_place(prob);
      keep_in_place(ds);
      wgmma_fence();
      issue_products<Tile>(prob, x1, memory.x1(), group * 64, memory.y1(ring.stage()));
      issue_products<Tile>(ds, x2, memory.x2(), group * 64, memory.y2(ring.stage()));
      wgmma_commit();
    };
    const auto issue_second = [&](int stage) {
      if constexpr (Tile::keys) keep_in_place(sum1);
      keep_in_place(sum2);
      wgmma_fence();
      if constexpr (Tile::keys) issue_weighted_rows<ND, pass_rows>(sum1, p, memory.y2(stage), true);
      issue_weighted_rows<ND, pass_rows>(sum2, d, memory.y1(stage), true);
      wgmma_commit();
    };
    const auto finish_second = [&](int stage) {
      wgmma_wait<0>();
      if constexpr (Tile::keys) keep_in_place(sum1);
      keep_in_place(sum2);
      done_with(memory.y_empty(stage));
    };
    const auto elementwise = [&] {
      keep_in_place(prob);
      keep_in_place(ds);
      if constexpr (Tile::keys && Tile::biased) {
        // A row of accumulators belongs to one key: the upper eight's where e / 2 is even.
        const auto last = *memory.bias(thread_here() / 32 - 4);
        if (last.row >= 0 && last.row < 16 && last.row % 8 == lane / 4) {
#pragma unroll
          for (int e = 0; e < n; ++e)
            if (e / 2 % 2 == last.row / 8) prob[e] += last.value;
        }
      }
      if constexpr (Tile::keys)
        keys_elementwise(prob, ds, memory.stats(ring.stage()), work.to_log2);
      else
        queries_elementwise<Tile::biased>(prob, ds, stat, work.to_log2, rows, bias);
      keep_in_place(prob);
      keep_in_place(ds);
    };
    // Waiting for the next rows also keeps ptxas from moving a wait for products ahead of the
    // elementwise part: it schedules within straight-line code only.
    const auto await_rows = [&] {
      if (rows <= 0) return;
      mbarrier_wait(memory.y_full(ring.stage()), ring.parity());
      if constexpr (Tile::packed && !Tile::keys)
        if (rows < pass_rows) {
          clear_rows<KD, pass_rows>(memory.y1(ring.stage()), rows, 1 + group_here());
          clear_rows<KD, pass_rows>(memory.y2(ring.stage()), rows, 1 + group_here());
        }
    };
    const auto next_rows = [&] {
      ring.advance();
      rows -= pass_rows;
      await_rows();
    };
    const auto pack = [&] {
      if constexpr (Tile::keys) pack_operand<pass_rows>(p, prob);
      pack_operand<pass_rows>(d, ds);
    };

    await_rows();
    issue_first();
    wgmma_wait<0>();
    elementwise();
    pack();
    // Stage of the rows whose second products are pending. With `ahead` it follows from the ring,
    // which saves a register.
    int stage = ring.stage();
    next_rows();
    while (rows > 0) {
      if constexpr (Tile::ahead) {
        issue_first();
        issue_second(ring.before(1));
        wgmma_wait<1>();
        elementwise();
        next_rows();
        finish_second(ring.before(2));
      } else {
        issue_second(stage);
        finish_second(stage);
        stage = ring.stage();
        issue_first();
        wgmma_wait<0>();
        elementwise();
        next_rows();
      }
      pack();
    }
    if constexpr (Tile::ahead) stage = ring.before(1);
    issue_second(stage);
    finish_second(stage);
    if constexpr (!Tile::x_in_registers) done_with(memory.x_empty());

    // Computed again: kept across the loop, these numbers would take registers that accumulators
    // need.
    store_own<Tile>(work, own_tile_of<Tile>(work, opaque(at) >> 3), group_here(), sum1, sum2);
  }
}
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    flash_sm90_backward_kernel(const __grid_constant__ CUtensorMap x1,
                               const __grid_constant__ CUtensorMap x2,
                               const __grid_constant__ CUtensorMap y1,
                               const __grid_constant__ CUtensorMap y2, BackwardWork work) {
#ifdef WEFT_SM90
  const BackwardMemory<Tile> memory{shared_memory<unsigned char>()};
  if (threadIdx.x == 0) {
    constexpr int warps = 4 * Tile::groups;
    mbarrier_init(memory.x_full(), 1);
    mbarrier_init(memory.x_empty(), warps);
    for (int s = 0; s < Tile::stages; ++s) {
      mbarrier_init(memory.y_full(s), 1);
      mbarrier_init(memory.y_empty(s), warps);
    }
    memory.tiles().init(warps);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<Tile::copy_registers>();
    if (threadIdx.x == 0) copy_backward<Tile>(&x1, &x2, &y1, &y2, work, memory);
  } else {
    take_registers<Tile::work_registers>();
    multiply_backward<Tile>(work, memory);
  }
#endif
}

template <class Tile>
void launch_backward(BackwardWork work, const FlashBackward<__nv_bfloat16>& p) {
  const FlashShape& shape = work.shape;
  work.splits = p.splits;
  work.tiles = backward_tiles(shape, Tile::keys, p.splits);
  const auto queries = [&](const FlashRows<const __nv_bfloat16>& rows, int box) {
    return make_tensor_map(rows, shape, shape.nq, box);
  };
  const auto keys = [&](const FlashRows<const __nv_bfloat16>& rows, int box) {
    return make_key_map(rows, shape, box);
  };
  const auto run = [&](const CUtensorMap& x1, const CUtensorMap& x2, const CUtensorMap& y1,
                       const CUtensorMap& y2) {
    launch(flash_sm90_backward_kernel<Tile>, dim3(work.tiles.blocks()), dim3(Tile::threads),
           Tile::shared, x1, x2, y1, y2, work);
  };
  if constexpr (Tile::keys)
    run(keys(p.k, Tile::own_rows), keys(p.v, Tile::own_rows), queries(p.q, pass_rows),
        queries(p.dout, pass_rows));
  else
    run(queries(p.q, Tile::own_rows), queries(p.dout, Tile::own_rows), keys(p.k, pass_rows),
        keys(p.v, pass_rows));
}

template <int KD, int ND, bool packed>
void launch_both(const FlashBackward<__nv_bfloat16>& p, BackwardWork work) {
  work.d1 = p.dk;
  work.d2 = p.dv;
  launch_backward<Sm90BackwardTile<KD, ND, true, packed>>(work, p);
  work.d1 = p.dq;
  launch_backward<Sm90BackwardTile<KD, ND, false, packed>>(work, p);
}

template <int KD, int ND>
void launch_kind(const FlashBackward<__nv_bfloat16>& p, const BackwardWork& work) {
  if (p.shape.key_offsets != nullptr)
    launch_both<KD, ND, true>(p, work);
  else
    launch_both<KD, ND, false>(p, work);
}

}  // namespace

void flash_sm90_backward(const FlashBackward<__nv_bfloat16>& p) {
  BackwardWork work{};
  work.shape = p.shape;
  work.partial = p.partial;
  work.to_log2 = p.shape.scale * log2_e;
  work.padded_queries = blocks_of(p.shape.nq, pass_rows) * pass_rows;
  const Tensor stats =
      Tensor::empty({p.shape.sequences, p.shape.heads, work.padded_queries, 2}, DType::f32);
  float2* const at = reinterpret_cast<float2*>(data<float>(stats));
  work.stats = at;
  flash_row_stats(p, work.padded_queries, at);
  if (p.shape.tile_size() <= 64)
    launch_kind<64, 64>(p, work);
  else if (p.shape.tile_size() <= 72)
    launch_kind<80, 72>(p, work);
  else
    launch_kind<128, 128>(p, work);
}

}  // namespace weft::kernels
