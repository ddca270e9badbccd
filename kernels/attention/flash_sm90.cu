// Flash attention forward in bf16 for Hopper: wgmma, bulk tensor copies by a warp of their own,
// queries and heads shared out to blocks that stay. CPU twin: src/ops/cpu/attention/attention.cpp.
// Cases: src/bench/kernels/attention.cpp (WEFT_ATTENTION=sm80 runs the same cases through
// flash_sm80.cu). tests/cuda_on_cpu runs it where WEFT_EMULATION_CAPABILITY=9.0.
//
// Least work as in flash_sm80.cu: 4 nq nk D operations a head; q, k, v read and out written once.
// Of the lanes that multiply 2 D / (KD + ND) are useful, for D = 72 144 of 152. A multiprocessor
// does 4096 bf16 operations and 16 exponentials a cycle, so that one element of P takes 2 (KD + ND)
// / 4096 cycles of the tensor cores and 1/16 of the exponential units: for D = 72 0.074 and 0.063.
// Either alone would be near its limit only while the other runs too. So
//   - one warpgroup only copies; two or three multiply, 64 queries each;
//   - within a warpgroup the scores of block j are multiplied together with P V of block j - 1, and
//     the softmax of block j runs while P V is under way;
//   - the warpgroups take turns in issuing products (named barriers), so that one's softmax meets
//     the other's products.
#include "attention/flash_sm90_tiles.cuh"

#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace weft::kernels {
namespace {

template <int KD_, int ND_, int groups_>
struct ForwardTile {
  static constexpr int KD = KD_, ND = ND_,
                       groups = groups_;  // warpgroups that multiply
  static constexpr int threads = 128 * (groups + 1);
  static constexpr int queries = 64 * groups, keys = 128, stages = KD <= 64 ? 4 : 2;
  static constexpr int q_bytes = tile_bytes(KD, queries), kv_bytes = tile_bytes(KD, keys);
  static constexpr std::size_t shared =
      q_bytes + stages * 2 * kv_bytes + sizeof(std::uint64_t) * (2 + 4 * stages);
  // Registers a thread: 65536 a multiprocessor, in portions of 8; copying needs few.
  static constexpr int copy_registers = 24, work_registers = groups == 3 ? 160 : 240;
  static_assert(copy_registers * 128 + work_registers * 128 * groups <= 65536);
  static_assert(shared <= 227 * 1024);
  // Accumulators of the results and of the scores, P as an operand; the rest is for addresses and
  // rows' sums.
  static_assert(ND / 2 + keys / 2 + keys / 4 <= work_registers - 20);
};

struct ForwardWork {
  FlashShape shape;
  FlashRows<__nv_bfloat16> out;
  float* lse;
  int tiles;  // of queries, a head
  int total;  // tiles x heads x sequences
};

#ifdef WEFT_SM90
using namespace sm90;

// Shared memory of a block: the queries, the ring of keys and values, the barriers.
template <class Tile>
struct ForwardMemory {
  unsigned char* base;
  __device__ __forceinline__ unsigned char* queries() const { return base; }
  __device__ __forceinline__ unsigned char* keys(int stage) const {
    return base + Tile::q_bytes + stage * 2 * Tile::kv_bytes;
  }
  __device__ __forceinline__ unsigned char* values(int stage) const {
    return keys(stage) + Tile::kv_bytes;
  }
  __device__ __forceinline__ std::uint64_t* barriers() const {
    return reinterpret_cast<std::uint64_t*>(base + Tile::q_bytes +
                                            Tile::stages * 2 * Tile::kv_bytes);
  }
  // "full": the bulk copies have arrived. "empty": every multiplying warp has finished with it.
  __device__ __forceinline__ std::uint64_t* q_full() const { return barriers(); }
  __device__ __forceinline__ std::uint64_t* q_empty() const { return barriers() + 1; }
  __device__ __forceinline__ std::uint64_t* k_full(int s) const { return barriers() + 2 + s; }
  __device__ __forceinline__ std::uint64_t* k_empty(int s) const {
    return k_full(s) + Tile::stages;
  }
  __device__ __forceinline__ std::uint64_t* v_full(int s) const {
    return k_full(s) + 2 * Tile::stages;
  }
  __device__ __forceinline__ std::uint64_t* v_empty(int s) const {
    return k_full(s) + 3 * Tile::stages;
  }
};

struct QueryTile {
  int first, head, sequence;
};
__device__ __forceinline__ QueryTile query_tile(const ForwardWork& work, int index, int queries) {
  return {index % work.tiles * queries, index / work.tiles % work.shape.heads,
          index / work.tiles / work.shape.heads};
}

// The copying thread. The first wait for a stage's "empty" barrier is with parity 1, which a new
// barrier satisfies.
template <class Tile>
__device__ __forceinline__ void copy_forward(const CUtensorMap* q, const CUtensorMap* k,
                                             const CUtensorMap* v, const ForwardWork& work,
                                             const ForwardMemory<Tile>& memory) {
  const int blocks = blocks_of(work.shape.nk, Tile::keys);
  Ring<Tile::stages> ring;
  int q_parity = 0;
  for (int index = static_cast<int>(blockIdx.x); index < work.total;
       index += static_cast<int>(gridDim.x)) {
    const QueryTile tile = query_tile(work, index, Tile::queries);
    mbarrier_wait(memory.q_empty(), q_parity ^ 1);
    mbarrier_arrive_expect(memory.q_full(), Tile::q_bytes);
    copy_tile<Tile::KD, Tile::queries>(memory.queries(), q, memory.q_full(), tile.head, tile.first,
                                       tile.sequence);
    q_parity ^= 1;
    for (int block = 0; block < blocks; ++block, ring.advance()) {
      const int row = block * Tile::keys, s = ring.stage;
      mbarrier_wait(memory.k_empty(s), ring.parity ^ 1);
      mbarrier_arrive_expect(memory.k_full(s), Tile::kv_bytes);
      copy_tile<Tile::KD, Tile::keys>(memory.keys(s), k, memory.k_full(s), tile.head, row,
                                      tile.sequence);
      mbarrier_wait(memory.v_empty(s), ring.parity ^ 1);
      mbarrier_arrive_expect(memory.v_full(s), Tile::kv_bytes);
      copy_tile<Tile::KD, Tile::keys>(memory.values(s), v, memory.v_full(s), tile.head, row,
                                      tile.sequence);
    }
  }
}

template <class Tile>
__device__ __forceinline__ void issue_scores(float (&scores)[Tile::keys / 2],
                                             const unsigned char* queries, int group,
                                             const unsigned char* keys) {
#pragma unroll
  for (int k = 0; k < Tile::KD / 16; ++k)
    Wgmma<Tile::keys>::from_shared(
        scores, describe_rows(column_step<Tile::queries>(queries, group * 64, k)),
        describe_rows(column_step<Tile::keys>(keys, 0, k)), k > 0);
}

// Scores become exp(scale (score - largest)); `top` and `sum` follow (sum over this lane's columns
// only), and `shrink` is what earlier results are to be multiplied with. Keys from `left` on are
// not there.
template <int n>
__device__ __forceinline__ void softmax(float (&scores)[n], float (&top)[2], float (&sum)[2],
                                        float (&shrink)[2], float to_log2, int left) {
  if (left < 2 * n) {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= static_cast<unsigned>(left))
        scores[i] = -INFINITY;
  }
  // Accumulator i belongs to the row of the upper eight where i / 2 is even, of the lower where it
  // is odd.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = top[r];
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(full_mask, largest, 2));
    shrink[r] = exp2_approx((top[r] - largest) * to_log2);
    const float shift = largest * to_log2;
    top[r] = largest;
    float added = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < n; i += 4)
#pragma unroll
      for (int e = i; e < i + 2; ++e) {
        scores[e] = exp2_approx(scores[e] * to_log2 - shift);
        added += scores[e];
      }
    sum[r] = sum[r] * shrink[r] + added;
  }
}

// One warpgroup's part of all tiles of this block. Named barriers 1 .. groups: whose turn it is to
// issue products.
template <class Tile>
__device__ __forceinline__ void multiply_forward(const ForwardWork& work,
                                                 const ForwardMemory<Tile>& memory) {
  constexpr int ND = Tile::ND, n = Tile::keys / 2;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1, lane = threadIdx.x % 32;
  const int next_group = group + 1 < Tile::groups ? group + 1 : 0;
  const int nq = work.shape.nq, nk = work.shape.nk, blocks = blocks_of(nk, Tile::keys);
  const float to_log2 = work.shape.scale * log2_e;
  const auto done_with = [&](std::uint64_t* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  if (group == Tile::groups - 1) named_arrive(1, 256);  // group 0 begins

  Ring<Tile::stages> ring;  // of the scores' block; the values' is one behind
  int q_parity = 0;
  for (int index = static_cast<int>(blockIdx.x); index < work.total;
       index += static_cast<int>(gridDim.x)) {
    const QueryTile tile = query_tile(work, index, Tile::queries);
    float scores[n], out[ND / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, shrink[2];
    std::uint32_t p[Tile::keys / 16][4];

    mbarrier_wait(memory.q_full(), q_parity);
    mbarrier_wait(memory.k_full(ring.stage), ring.parity);
    wgmma_fence();
    issue_scores<Tile>(scores, memory.queries(), group, memory.keys(ring.stage));
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_place(scores);
    done_with(memory.k_empty(ring.stage));
    softmax(scores, top, sum, shrink, to_log2, nk);
    pack_operand<Tile::keys>(p, scores);
    mbarrier_wait(memory.v_full(ring.stage), ring.parity);
    int v_stage = ring.stage;
    ring.advance();

    for (int block = 1; block < blocks; ++block) {
      mbarrier_wait(memory.k_full(ring.stage), ring.parity);
      named_wait(1 + group, 256);
      keep_in_place(scores);
      keep_in_place(out);
      wgmma_fence();
      issue_scores<Tile>(scores, memory.queries(), group, memory.keys(ring.stage));
      wgmma_commit();
      wgmma_fence();
      issue_weighted_rows<ND, Tile::keys>(out, p, memory.values(v_stage), block > 1);
      wgmma_commit();
      named_arrive(1 + next_group, 256);
      wgmma_wait<1>();
      keep_in_place(scores);
      done_with(memory.k_empty(ring.stage));
      softmax(scores, top, sum, shrink, to_log2, nk - block * Tile::keys);
      keep_in_place(scores);
      // This also keeps ptxas from moving the wait for P V ahead of the softmax: it schedules
      // within straight-line code only.
      mbarrier_wait(memory.v_full(ring.stage), ring.parity);
      wgmma_wait<0>();
      keep_in_place(out);
      done_with(memory.v_empty(v_stage));
#pragma unroll
      for (int i = 0; i < ND / 2; ++i) out[i] *= shrink[i / 2 % 2];
      pack_operand<Tile::keys>(p, scores);
      v_stage = ring.stage;
      ring.advance();
    }
    done_with(memory.q_empty());
    q_parity ^= 1;
    keep_in_place(out);
    wgmma_fence();
    issue_weighted_rows<ND, Tile::keys>(out, p, memory.values(v_stage), blocks > 1);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_place(out);
    done_with(memory.v_empty(v_stage));

    const int first = tile.first + group * 64;
    float* const lse =
        work.lse + (static_cast<std::int64_t>(tile.sequence) * work.shape.heads + tile.head) * nq;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(full_mask, sum[r], 1);
      sum[r] += __shfl_xor_sync(full_mask, sum[r], 2);
      const int i = first + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
      if (lane % 4 == 0 && i < nq) lse[i] = top[r] * work.shape.scale + logf(sum[r]);
    }
    store_accumulators<ND>(out, 1.0f / sum[0], 1.0f / sum[1],
                           work.out.at(tile.sequence, tile.head, 1), work.out.row, first, nq,
                           work.shape.D);
  }
}
#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    flash_sm90_forward_kernel(const __grid_constant__ CUtensorMap q,
                              const __grid_constant__ CUtensorMap k,
                              const __grid_constant__ CUtensorMap v, ForwardWork work) {
#ifdef WEFT_SM90
  const ForwardMemory<Tile> memory{shared_memory<unsigned char>()};
  if (threadIdx.x == 0) {
    constexpr int warps = 4 * Tile::groups;
    mbarrier_init(memory.q_full(), 1);
    mbarrier_init(memory.q_empty(), warps);
    for (int s = 0; s < Tile::stages; ++s) {
      mbarrier_init(memory.k_full(s), 1);
      mbarrier_init(memory.k_empty(s), warps);
      mbarrier_init(memory.v_full(s), 1);
      mbarrier_init(memory.v_empty(s), warps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<Tile::copy_registers>();
    if (threadIdx.x == 0) copy_forward<Tile>(&q, &k, &v, work, memory);
  } else {
    take_registers<Tile::work_registers>();
    multiply_forward<Tile>(work, memory);
  }
#endif
}

template <class Tile>
void launch_forward(const FlashForward<__nv_bfloat16>& p) {
  ForwardWork work{p.shape, p.out, p.lse, blocks_of(p.shape.nq, Tile::queries), 0};
  work.total = work.tiles * p.shape.heads * p.shape.sequences;
  const int blocks = std::min(work.total, cuda_properties().multiProcessorCount);
  launch(flash_sm90_forward_kernel<Tile>, dim3(static_cast<unsigned>(blocks)), dim3(Tile::threads),
         Tile::shared, make_tensor_map(p.q, p.shape, p.shape.nq, Tile::queries),
         make_tensor_map(p.k, p.shape, p.shape.nk, Tile::keys),
         make_tensor_map(p.v, p.shape, p.shape.nk, Tile::keys), work);
}

}  // namespace

CUtensorMap make_tensor_map(const FlashRows<const __nv_bfloat16>& rows, const FlashShape& shape,
                            int count, int box_rows) {
  // Looks the driver's function up through the runtime: the binary references no libcuda symbol and
  // starts without a driver.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found));
#else
    CUDA_CHECK(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    WEFT_CHECK(found == cudaDriverEntryPointSuccess, Exit::hardware,
               "use a driver for CUDA 12 or newer, or WEFT_ATTENTION=sm80",
               "the CUDA driver has no cuTensorMapEncodeTiled (query result {})",
               static_cast<int>(found));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  CUtensorMap map;
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  // From the fastest dimension on; each stride is a multiple of the one before it.
  const cuuint64_t dims[4] = {size(shape.D), size(shape.heads), size(count), size(shape.sequences)};
  const cuuint64_t strides[3] = {size(rows.head) * 2, size(rows.row) * 2, size(rows.outer) * 2};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<__nv_bfloat16*>(rows.base), dims,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEFT_CHECK(result == CUDA_SUCCESS, Exit::hardware,
             "this is a bug in weft; WEFT_ATTENTION=sm80 goes round it",
             "cuTensorMapEncodeTiled failed with {} for {} sequences of {} rows, {} heads of {}",
             static_cast<int>(result), shape.sequences, count, shape.heads, shape.D);
  return map;
}

bool flash_sm90_takes(const FlashShape& shape) {
  static const bool allowed = [] {
    const char* choice = std::getenv("WEFT_ATTENTION");
    WEFT_CHECK(
        choice == nullptr || std::strcmp(choice, "sm80") == 0 || std::strcmp(choice, "sm90") == 0,
        Exit::usage, "set it to sm80 or sm90, or leave it unset",
        "WEFT_ATTENTION={} names no attention kernels", choice);
#ifdef WEFT_WITHOUT_SM90A  // built without WEFT_CUDA_ARCHITECTURES=90a: on any GPU these kernels
                           // are empty
    const bool hopper = false;
#else
    const bool hopper = cuda_properties().major == 9 && cuda_properties().minor == 0;
#endif
    WEFT_CHECK(hopper || choice == nullptr || std::strcmp(choice, "sm90") != 0, Exit::usage,
               "leave it unset on other GPUs, or build with WEFT_CUDA_ARCHITECTURES=90a",
               "WEFT_ATTENTION=sm90 on a GPU of compute capability {}.{}, or in a program built "
               "without sm_90a",
               cuda_properties().major, cuda_properties().minor);
    return hopper && (choice == nullptr || std::strcmp(choice, "sm90") == 0);
  }();
  return allowed && shape.key_offsets == nullptr && shape.inner == 1 && shape.D >= 64 &&
         shape.D % 8 == 0;
}

void flash_sm90_forward(const FlashForward<__nv_bfloat16>& p) {
  // Three warpgroups overlap better than two, unless 192 queries a block leave many lanes without
  // any (S = 256).
  const int wide = blocks_of(p.shape.nq, 192) * 192, narrow = blocks_of(p.shape.nq, 128) * 128;
  const bool three = 10 * wide <= 11 * narrow;
  if (p.shape.D > 72)
    launch_forward<ForwardTile<128, 128, 2>>(p);
  else if (p.shape.D > 64)
    three ? launch_forward<ForwardTile<80, 72, 3>>(p) : launch_forward<ForwardTile<80, 72, 2>>(p);
  else
    three ? launch_forward<ForwardTile<64, 64, 3>>(p) : launch_forward<ForwardTile<64, 64, 2>>(p);
}

}  // namespace weft::kernels
