// Flash attention backward in bf16 for Hopper in one kernel, with five products of tiles where
// flash_sm90_backward.cu has seven: the least work, 10 nq nk D operations a head. dQ is a sum over
// blocks, added in memory in the order in which they come: no two runs have the same bits. It is
// untested on a GPU, and the way "five" (ops/ways.h). CPU twin:
// src/ops/cpu/attention/attention.cpp. Cases: tests/kernels/attention.cpp by `weft_kernels --ways`.
// tests/cuda_on_cpu runs it where WEFT_EMULATION_CAPABILITY=9.0.
//
// A block owns 128 keys, 64 a warpgroup, and passes over 64 queries at a time:
//   S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q   dQ += dS K
// The first four are those of the keys kernel there, P^T and dS^T being A operands in registers.
// dS K sums over the keys of both warpgroups: each stores its 64 rows of dS^T in shared memory, as
// they are - an A operand may lie there by its columns - and for D <= 72 the warpgroups take turns
// at the product, for D = 128 each makes half of dQ's columns. Its accumulators are added to a
// scratch in f32 in the order in which they lie in registers, so that a warp's addition is one
// instruction of 512 contiguous bytes; flash_sm90_five_queries_kernel() makes rows of bf16 of it.
//
// Cycles of a multiprocessor for one tile of 64 x 128:
//                                        D = 64      D = 72     D = 128
//   tensor cores                           1280        1504        2560
//   the same in the two kernels            1792        2144        3584
//   shared memory: products                 768         880        2048
//                  dS stored, rows copied   256         384         384
//   exponentials, 16 a cycle                512         512         512
//   bytes added to dQ, at L2                16K         18K         32K
// Staging dQ in shared memory for a bulk reduction would cost 512 more cycles there at D = 128,
// more than its tensor cores leave.
//
// Within a warpgroup products end in the order of their issue,
//   S(0) | dP(0) | dV(0) | dK(0) | dQ(0) | S(1) | dP(1) ..
// P is made while dP is under way, dS during dV; for D <= 72 dQ is added during the next S, for
// which D = 128 has too few registers.
#include <type_traits>

#include "attention/flash_sm90_tiles.cuh"

namespace weft::kernels {
namespace {

template <int KD_, int ND_>
struct FiveTile {
  static constexpr int KD = KD_, ND = ND_, groups = 2, threads = 128 * (groups + 1);
  static constexpr bool x_in_registers = ND <= 72;  // K and V as A operands
  // Each warpgroup makes half of the columns of every dQ; else all of every second one.
  static constexpr bool shares_columns = ND == 128;
  static constexpr int dq_columns = shares_columns ? ND / 2 : ND;
  // The next scores are issued before dQ is added where registers allow accumulators for both.
  static constexpr bool ahead = ND <= 72;
  // V in registers leaves its place to the next tile's at once, K is needed to the end.
  static constexpr int k_stages = x_in_registers ? 2 : 1, stages = ND == 72 ? 3 : 4;
  static constexpr int own_bytes = tile_bytes(KD, backward_rows),
                       pass_bytes = tile_bytes(KD, pass_rows), stat_bytes = pass_rows * 8,
                       ds_bytes = backward_rows * 128;
  static constexpr std::size_t shared = (k_stages + 1) * own_bytes +
                                        stages * (2 * pass_bytes + stat_bytes) + 2 * ds_bytes +
                                        2 * sizeof(std::uint64_t) * (k_stages + 1 + stages + 2);
  static constexpr int copy_registers = 24, work_registers = 240;
  static_assert(copy_registers + work_registers * groups <= registers_of_groups(groups + 1));
  static_assert(shared <= 227 * 1024);
  // Accumulators of dV and dK, of S and dP or of dQ and the next S, one operand, K and V; the rest
  // is for addresses.
  static_assert(ND + std::max(pass_rows, dq_columns / 2 + (ahead ? pass_rows / 2 : 0)) +
                    pass_rows / 4 + (x_in_registers ? KD / 2 : 0) <=
                work_registers - 20);
};

struct FiveWork {
  FlashShape shape;
  const float2* stats;  // as in flash_sm90_backward.cu
  int blocks;           // of queries
  FlashRows<__nv_bfloat16> dk, dv;
  float* dq;  // [sequences, heads, blocks, ND / 8, 128 threads, 4]
  Tiles tiles;
};

#ifdef WEFT_SM90
using namespace sm90;

// Shared memory of a block. "full": it may be read. "empty": every reading warp has finished.
template <class Tile>
struct FiveMemory {
  unsigned char* base;
  __device__ __forceinline__ unsigned char* k(int stage) const {
    return base + stage * Tile::own_bytes;
  }
  __device__ __forceinline__ unsigned char* v() const { return k(Tile::k_stages); }
  __device__ __forceinline__ unsigned char* q(int stage) const {
    return k(Tile::k_stages + 1) + stage * 2 * Tile::pass_bytes;
  }
  __device__ __forceinline__ unsigned char* dout(int stage) const {
    return q(stage) + Tile::pass_bytes;
  }
  // dS^T [128 keys][64 queries]
  __device__ __forceinline__ unsigned char* ds(int stage) const {
    return q(Tile::stages) + stage * Tile::ds_bytes;
  }
  __device__ __forceinline__ float4* stats(int stage) const {
    return reinterpret_cast<float4*>(ds(2) + stage * Tile::stat_bytes);
  }
  __device__ __forceinline__ std::uint64_t* k_full(int stage) const {
    return reinterpret_cast<std::uint64_t*>(stats(Tile::stages)) + stage;
  }
  __device__ __forceinline__ std::uint64_t* k_empty(int stage) const {
    return k_full(Tile::k_stages) + stage;
  }
  __device__ __forceinline__ std::uint64_t* v_full() const { return k_empty(Tile::k_stages); }
  __device__ __forceinline__ std::uint64_t* v_empty() const { return v_full() + 1; }
  __device__ __forceinline__ std::uint64_t* y_full(int stage) const {
    return v_empty() + 1 + stage;
  }
  __device__ __forceinline__ std::uint64_t* y_empty(int stage) const {
    return y_full(Tile::stages) + stage;
  }
  __device__ __forceinline__ std::uint64_t* ds_full(int stage) const {
    return y_empty(Tile::stages) + stage;
  }
  __device__ __forceinline__ std::uint64_t* ds_empty(int stage) const { return ds_full(2) + stage; }
};

// The keys that a block owns. It begins with block `start` of the queries: the blocks of one head
// begin in different places, and add to different ones.
struct KeysTile {
  int first, head, sequence, start;
};
__device__ __forceinline__ KeysTile keys_tile(const FiveWork& work, int index) {
  const RowTile rows = row_tile(work.tiles, work.shape, backward_rows, index);
  return {rows.first, rows.head, rows.sequence, rows.first / backward_rows % 16 % work.blocks};
}

// The block of queries after number `at`.
__device__ __forceinline__ int following(const FiveWork& work, int at) {
  return at + 1 < work.blocks ? at + 1 : 0;
}

__device__ __forceinline__ std::int64_t head_number(const FiveWork& work, const KeysTile& tile) {
  return static_cast<std::int64_t>(tile.sequence) * work.shape.heads + tile.head;
}

template <class Tile>
__device__ __forceinline__ void copy_five(const CUtensorMap* k, const CUtensorMap* v,
                                          const CUtensorMap* q, const CUtensorMap* dout,
                                          const FiveWork& work, const FiveMemory<Tile>& memory) {
  Ring<Tile::stages> ring;
  Ring<Tile::k_stages> k_ring;
  int v_parity = 0;
  for (int index = static_cast<int>(blockIdx.x); index < work.tiles.total;
       index += static_cast<int>(gridDim.x)) {
    const KeysTile tile = keys_tile(work, index);
    const auto copy_own = [&](unsigned char* to, const CUtensorMap* map, std::uint64_t* full,
                              std::uint64_t* empty, int parity) {
      mbarrier_wait(empty, parity ^ 1);
      mbarrier_arrive_expect(full, Tile::own_bytes);
      copy_tile<Tile::KD, backward_rows>(to, map, full, tile.head, tile.first, tile.sequence);
    };
    const int stage = k_ring.stage();
    copy_own(memory.k(stage), k, memory.k_full(stage), memory.k_empty(stage), k_ring.parity());
    k_ring.advance();
    copy_own(memory.v(), v, memory.v_full(), memory.v_empty(), v_parity);
    v_parity ^= 1;
    const float2* const stats = work.stats + head_number(work, tile) * work.blocks * pass_rows;
    int at = tile.start;
    for (int block = 0; block < work.blocks; ++block, at = following(work, at), ring.advance()) {
      const int row = at * pass_rows, s = ring.stage();
      std::uint64_t* const full = memory.y_full(s);
      mbarrier_wait(memory.y_empty(s), ring.parity() ^ 1);
      mbarrier_arrive_expect(full, 2 * Tile::pass_bytes + Tile::stat_bytes);
      copy_tile<Tile::KD, pass_rows>(memory.q(s), q, full, tile.head, row, tile.sequence);
      copy_tile<Tile::KD, pass_rows>(memory.dout(s), dout, full, tile.head, row, tile.sequence);
      copy_bulk(memory.stats(s), stats + row, Tile::stat_bytes, full);
    }
  }
}

// x [64, 64] = (64 rows of the 128 of `own` from `row` on, or `a`, the same in registers) x (the 64
// rows of y)^T.
template <class Tile>
__device__ __forceinline__ void issue_by_columns(float (&x)[pass_rows / 2],
                                                 const std::uint32_t (&a)[Tile::KD / 16][4],
                                                 const unsigned char* own, int row,
                                                 const unsigned char* y) {
#pragma unroll
  for (int k = 0; k < Tile::KD / 16; ++k) {
    const std::uint64_t b = describe_rows(column_step<pass_rows>(y, 0, k));
    if constexpr (Tile::x_in_registers)
      Wgmma<pass_rows>::template from_registers<false>(x, a[k], b, k > 0);
    else
      Wgmma<pass_rows>::from_shared(x, describe_rows(column_step<backward_rows>(own, row, k)), b,
                                    k > 0);
  }
}

// dq [64 queries, n] = (dS^T)^T x (n columns of K).
template <int n>
__device__ __forceinline__ void issue_queries(float (&dq)[n / 2], const unsigned char* ds,
                                              const unsigned char* k) {
#pragma unroll
  for (int step = 0; step < backward_rows / 16; ++step)
    Wgmma<n>::template from_shared<true, true>(
        dq, describe_columns<backward_rows>(ds + step * 2048),
        describe_columns<backward_rows>(k + step * 2048), step > 0);
}

// Rows are keys, of which this lane has number 0 and 8 of those from its first on, and `left` are
// there: the others have zeros for K, but exp(0 - lse) may be infinite. Columns are queries: each
// lane needs lse and delta of two of every eight.
__device__ __forceinline__ void make_probabilities(float (&prob)[pass_rows / 2],
                                                   const float4* stats, float to_log2, int left) {
#pragma unroll
  for (int t = 0; t < pass_rows / 8; ++t) {
    const float4 two = stats[t * 4 + threadIdx.x % 4];
#pragma unroll
    for (int e = 4 * t; e < 4 * t + 4; ++e)
      prob[e] = exp2_approx(prob[e] * to_log2 - (e % 2 ? two.z : two.x));
  }
  if (left <= 8) {
#pragma unroll
    for (int e = 0; e < pass_rows / 2; ++e)
      if (e / 2 % 2 * 8 >= left) prob[e] = 0.0f;
  }
}
__device__ __forceinline__ void make_score_gradients(float (&ds)[pass_rows / 2],
                                                     const float (&prob)[pass_rows / 2],
                                                     const float4* stats) {
#pragma unroll
  for (int t = 0; t < pass_rows / 8; ++t) {
    const float4 two = stats[t * 4 + threadIdx.x % 4];
#pragma unroll
    for (int e = 4 * t; e < 4 * t + 4; ++e) ds[e] = prob[e] * (ds[e] - (e % 2 ? two.w : two.y));
  }
}

// This warp's 16 rows of a tile of 64 columns, from A operands.
__device__ __forceinline__ void store_operand(unsigned char* tile, int row,
                                              const std::uint32_t (&a)[pass_rows / 16][4]) {
  const int thread = thread_here() % 128, lane = thread % 32;
  const int r = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < pass_rows / 16; ++k)
    stmatrix_x4(tile + r * 128 + ((2 * k + lane / 16) ^ r % 8) * 16, a[k]);
}

template <class Tile>
__device__ __forceinline__ void multiply_five(const FiveWork& work,
                                              const FiveMemory<Tile>& memory) {
  constexpr int KD = Tile::KD, ND = Tile::ND, n = pass_rows / 2;
  const int group = thread_here() / 128 - 1;
  const float to_log2 = work.shape.scale * log2_e;
  const auto done_with = [&](std::uint64_t* barrier) {
    if (thread_here() % 32 == 0) mbarrier_arrive(barrier);
  };
  Ring<Tile::stages> ring;
  Ring<Tile::k_stages> k_ring;
  Ring<2> ds_ring;
  int v_parity = 0;
  for (int index = static_cast<int>(blockIdx.x); index < work.tiles.total;
       index += static_cast<int>(gridDim.x)) {
    float dv[ND / 2], dk[ND / 2], prob[n], ds[n], dq[Tile::dq_columns / 2];
    std::uint32_t kx[KD / 16][4], vx[KD / 16][4], p[pass_rows / 16][4], d[pass_rows / 16][4];
    const KeysTile tile = keys_tile(work, index);
    const int left =
        work.shape.nk - tile.first - (thread_here() - 128) / 32 * 16 - thread_here() % 32 / 4;
    int at = tile.start;
    const int first_block = static_cast<int>(head_number(work, tile)) * work.blocks;

    const auto issue_scores = [&] {
      const int s = ring.stage();
      mbarrier_wait(memory.y_full(s), ring.parity());
      keep_in_place(prob);
      wgmma_fence();
      issue_by_columns<Tile>(prob, kx, memory.k(k_ring.stage()), group * 64, memory.q(s));
      wgmma_commit();
    };
    // Makes dV, and dS as an operand, of one block of queries, the scores of which are under way.
    const auto make_ds = [&](bool accumulate) {
      const int stage = ring.stage(), buffer = ds_ring.stage();
      keep_in_place(ds);
      wgmma_fence();
      issue_by_columns<Tile>(ds, vx, memory.v(), group * 64, memory.dout(stage));
      wgmma_commit();
      wgmma_wait<1>();
      keep_in_place(prob);
      make_probabilities(prob, memory.stats(stage), to_log2, left);
      pack_operand<pass_rows>(p, prob);
      keep_in_place(dv);
      wgmma_fence();
      issue_weighted_rows<ND, pass_rows>(dv, p, memory.dout(stage), accumulate);
      wgmma_commit();
      wgmma_wait<1>();
      keep_in_place(ds);
      make_score_gradients(ds, prob, memory.stats(stage));
      pack_operand<pass_rows>(d, ds);
      mbarrier_wait(memory.ds_empty(buffer), ds_ring.parity() ^ 1);
      store_operand(memory.ds(buffer), group * 64, d);
      async_proxy_fence();
      __syncwarp();
      done_with(memory.ds_full(buffer));
      // Between passes nothing is under way, so that ptxas can follow what is.
      wgmma_wait<0>();
      keep_in_place(dv);
    };
    // dK and dQ of that block; and the scores of the next.
    const auto use_ds = [&](auto more, bool accumulate) {
      const int stage = ring.stage(), buffer = ds_ring.stage();
      const bool mine = Tile::shares_columns || buffer == group;
      keep_in_place(dk);
      wgmma_fence();
      issue_weighted_rows<ND, pass_rows>(dk, d, memory.q(stage), accumulate);
      wgmma_commit();
      const auto issue_dq = [&] {
        mbarrier_wait(memory.ds_full(buffer), ds_ring.parity());
        keep_in_place(dq);
        wgmma_fence();
        issue_queries<Tile::dq_columns>(
            dq, memory.ds(buffer),
            memory.k(k_ring.stage()) +
                (Tile::shares_columns ? group * atom_bytes(backward_rows) : 0));
        wgmma_commit();
      };
      const auto issue_next = [&] {
        ring.advance();
        if constexpr (more && Tile::ahead) {
          issue_scores();
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        keep_in_place(dk);
        done_with(memory.y_empty(stage));
      };
      const auto add_dq = [&] {
        keep_in_place(dq);
        done_with(memory.ds_empty(buffer));
        const int thread = thread_here();
        float* const to = work.dq + static_cast<std::int64_t>(first_block + at) * (pass_rows * ND) +
                          (Tile::shares_columns ? (thread / 128 - 1) * (pass_rows * ND / 2) : 0) +
                          thread % 128 * 4;
#pragma unroll
        for (int t = 0; t < Tile::dq_columns / 8; ++t)
          add_four(to + t * 512, dq[4 * t], dq[4 * t + 1], dq[4 * t + 2], dq[4 * t + 3]);
      };
      // Each branch has all of it: ptxas must see which products are pending at each wait.
      if (mine) {
        issue_dq();
        issue_next();
        add_dq();
      } else {
        issue_next();
      }
      if constexpr (more && !Tile::ahead) issue_scores();
      ds_ring.advance();
      at = following(work, at);
    };

    mbarrier_wait(memory.k_full(k_ring.stage()), k_ring.parity());
    if constexpr (Tile::x_in_registers)
      load_operand<KD, backward_rows>(kx, memory.k(k_ring.stage()), group * 64);
    issue_scores();
    mbarrier_wait(memory.v_full(), v_parity);
    v_parity ^= 1;
    if constexpr (Tile::x_in_registers) {
      load_operand<KD, backward_rows>(vx, memory.v(), group * 64);
      // Reads by this warp's lanes come before what the bulk copies bring next.
      __syncwarp();
      done_with(memory.v_empty());
    }
    make_ds(false);
    for (int block = 1; block < work.blocks; ++block) {
      use_ds(std::true_type{}, block > 1);
      make_ds(true);
    }
    use_ds(std::false_type{}, work.blocks > 1);
    done_with(memory.k_empty(k_ring.stage()));
    k_ring.advance();
    if constexpr (!Tile::x_in_registers) done_with(memory.v_empty());

    // Computed again: kept across the loop, these numbers would take registers that accumulators
    // need.
    asm volatile("" : "+r"(index));
    const KeysTile to = keys_tile(work, index);
    const int row = to.first + (thread_here() / 128 - 1) * 64, nk = work.shape.nk, D = work.shape.D;
    store_accumulators<ND>(dv, 1.0f, 1.0f, work.dv.at(to.sequence, to.head, 1), work.dv.row, row,
                           nk, D);
    store_accumulators<ND>(dk, work.shape.scale, work.shape.scale,
                           work.dk.at(to.sequence, to.head, 1), work.dk.row, row, nk, D);
  }
}
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    flash_sm90_five_kernel(const __grid_constant__ CUtensorMap k,
                           const __grid_constant__ CUtensorMap v,
                           const __grid_constant__ CUtensorMap q,
                           const __grid_constant__ CUtensorMap dout, FiveWork work) {
#ifdef WEFT_SM90
  const FiveMemory<Tile> memory{shared_memory<unsigned char>()};
  if (threadIdx.x == 0) {
    constexpr int warps = 4 * Tile::groups;
    const auto init = [](std::uint64_t* full, int writers, std::uint64_t* empty, int readers,
                         int stages) {
      for (int s = 0; s < stages; ++s) {
        mbarrier_init(full + s, writers);
        mbarrier_init(empty + s, readers);
      }
    };
    init(memory.k_full(0), 1, memory.k_empty(0), warps, Tile::k_stages);
    init(memory.v_full(), 1, memory.v_empty(), warps, 1);
    init(memory.y_full(0), 1, memory.y_empty(0), warps, Tile::stages);
    init(memory.ds_full(0), warps, memory.ds_empty(0), Tile::shares_columns ? warps : 4, 2);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<Tile::copy_registers>();
    if (threadIdx.x == 0) copy_five<Tile>(&k, &v, &q, &dout, work, memory);
  } else {
    take_registers<Tile::work_registers>();
    multiply_five<Tile>(work, memory);
  }
#endif
}

// dq as rows of bf16, times the scale of the scores: a block for each block of queries of a head, a
// thread for 8 columns of two rows. Reads 4 bytes an element and writes 2.
template <int ND>
__global__ void __launch_bounds__(256)
    flash_sm90_five_queries_kernel(const float* sums, int blocks, FlashShape shape,
                                   FlashRows<__nv_bfloat16> dq) {
  const int head = static_cast<int>(blockIdx.x) / blocks,
            first = static_cast<int>(blockIdx.x) % blocks * pass_rows, pieces = shape.D / 8;
  const float* const from = sums + static_cast<std::int64_t>(blockIdx.x) * (pass_rows * ND);
  __nv_bfloat16* const to = dq.at(head / shape.heads, head % shape.heads, 1);
  for (int i = static_cast<int>(threadIdx.x); i < pass_rows / 2 * pieces; i += 256) {
    const int group = i % 8, piece = i / 8 % pieces, warp = i / 8 / pieces;
    Pack<__nv_bfloat16> upper, lower;
    for (int pair = 0; pair < 4; ++pair) {
      const float4 x =
          *reinterpret_cast<const float4*>(from + (piece * 128 + warp * 32 + group * 4 + pair) * 4);
      upper.v[2 * pair] = from_float<__nv_bfloat16>(x.x * shape.scale);
      upper.v[2 * pair + 1] = from_float<__nv_bfloat16>(x.y * shape.scale);
      lower.v[2 * pair] = from_float<__nv_bfloat16>(x.z * shape.scale);
      lower.v[2 * pair + 1] = from_float<__nv_bfloat16>(x.w * shape.scale);
    }
    const int row = first + warp * 16 + group;
    if (row < shape.nq) store_pack(to + row * dq.row + piece * 8, upper);
    if (row + 8 < shape.nq) store_pack(to + (row + 8) * dq.row + piece * 8, lower);
  }
}

template <int KD, int ND>
void run_five(const FlashBackward<__nv_bfloat16>& p, const Tensor& stats, const Tensor& sums) {
  using Tile = FiveTile<KD, ND>;
  const FlashShape& shape = p.shape;
  const int heads = shape.heads * shape.sequences, blocks = blocks_of(shape.nq, pass_rows);
  FiveWork work{shape,
                nullptr,
                blocks,
                p.dk,
                p.dv,
                data<float>(sums),
                Tiles::of_rows(shape.nk, backward_rows, heads)};
  float2* const at = reinterpret_cast<float2*>(data<float>(stats));
  work.stats = at;
  flash_row_stats(p, blocks * pass_rows, at);
  CUDA_CHECK(cudaMemsetAsync(work.dq, 0, sums.bytes(), cuda_stream(Stream::compute)));
  launch(flash_sm90_five_kernel<Tile>, dim3(work.tiles.blocks()), dim3(Tile::threads), Tile::shared,
         make_tensor_map(p.k, shape, shape.nk, backward_rows),
         make_tensor_map(p.v, shape, shape.nk, backward_rows),
         make_tensor_map(p.q, shape, shape.nq, pass_rows),
         make_tensor_map(p.dout, shape, shape.nq, pass_rows), work);
  launch(flash_sm90_five_queries_kernel<ND>, dim3(static_cast<unsigned>(heads * blocks)), dim3(256),
         0, work.dq, blocks, shape, p.dq);
}

// Scratch of an operation is not in the plan of the arena: there may be too little of it left.
Tensor scratch_if_it_fits(const Shape& shape) {
  try {
    return Tensor::empty(shape, DType::f32);
  } catch (const Error& e) {
    if (e.code() != Exit::usage) throw;
    return Tensor();
  }
}

}  // namespace

bool flash_sm90_five(const FlashBackward<__nv_bfloat16>& p) {
  const FlashShape& shape = p.shape;
  const int columns = shape.D <= 64 ? 64 : shape.D <= 72 ? 72 : 128;
  const int rows = blocks_of(shape.nq, pass_rows) * pass_rows;
  const Tensor stats = scratch_if_it_fits({shape.sequences, shape.heads, rows, 2});
  const Tensor sums = scratch_if_it_fits({shape.sequences, shape.heads, rows, columns});
  if (!stats.defined() || !sums.defined()) return false;
  if (columns == 64)
    run_five<64, 64>(p, stats, sums);
  else if (columns == 72)
    run_five<80, 72>(p, stats, sums);
  else
    run_five<128, 128>(p, stats, sums);
  return true;
}

}  // namespace weft::kernels
