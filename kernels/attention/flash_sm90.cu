// Flash attention forward in bf16 for Hopper: wgmma, bulk tensor copies by a warp of their own,
// queries and heads shared out to blocks that stay. CPU twin: src/ops/cpu/attention/attention.cpp.
// Cases: tests/kernels/attention.cpp (WEFT_ATTENTION=sm80 runs the same cases through
// flash_sm80.cu). tests/cuda_on_cpu runs it where WEFT_EMULATION_CAPABILITY=9.0.
//
// Least work as in flash_sm80.cu: 4 nq nk D operations a head; q, k, v read and out written once.
// The useful share of the lanes that multiply is 2 D / (KD + ND), for D = 72 144 of 152. A
// multiprocessor does 4096 bf16 operations and 16 exponentials a cycle, so that one element of P
// takes 2 (KD + ND) / 4096 cycles of the tensor cores and 1/16 of the exponential units: for D = 72
// 0.074 and 0.063. Either alone would be near its limit only while the other runs too. So
//   - one warpgroup only copies; two or three multiply, 64 queries each;
//   - within a warpgroup the scores of block j are multiplied together with P V of block j - 1, and
//     the softmax of block j runs while P V is under way;
//   - the warpgroups take turns in issuing products (named barriers), so that one's softmax meets
//     the other's products.
// A warpgroup without queries, at the end of a sequence, multiplies nothing; key blocks of 112 rows
// are for lengths that 128 does not fit (S = 405: 448 keys instead of 512).
//
// Captions are short: a block passes from queries to queries after few products, so that the next
// queries come while these are worked on.
#include "attention/flash_sm90_tiles.cuh"

namespace weft::kernels {
namespace {

template <int KD_, int ND_, int groups_, int keys_, bool packed_ = false>
struct Sm90ForwardTile {
  static constexpr int KD = KD_, ND = ND_, keys = keys_,
                       groups = groups_;               // warpgroups that multiply
  static constexpr bool packed = packed_;              // keys are those of packed captions
  static constexpr bool biased = packed && ND == 128;  // looks at last_bias
  static constexpr int threads = 128 * (groups + 1);
  static constexpr int queries = 64 * groups;
  static constexpr int q_bytes = tile_bytes(KD, queries), kv_bytes = tile_bytes(KD, keys);
  static constexpr std::size_t bytes(int q, int k, int v) {
    return q * q_bytes + (k + v) * kv_bytes + 2 * sizeof(std::uint64_t) * (q + k + v) +
           tile_slot_bytes;
  }
  static constexpr std::size_t most = 227 * 1024;
  // Values stay longer than keys.
  static constexpr int q_stages = packed ? 2 : 1;
  static constexpr int v_stages = bytes(q_stages, 4, 4) <= most   ? 4
                                  : bytes(q_stages, 2, 3) <= most ? 3
                                                                  : 2;
  static constexpr int k_stages = v_stages == 4 ? 4 : bytes(q_stages, 3, v_stages) <= most ? 3 : 2;
  static constexpr std::size_t shared = bytes(q_stages, k_stages, v_stages);
  static_assert(shared <= most);
  // Where two warpgroups have the registers, queries are operands in them, and shared memory is
  // read for keys and values alone: 64 of its 128 bytes a cycle while the tensor cores are busy.
  static constexpr bool q_in_registers = groups == 2;
  // Registers a thread: 65536 a multiprocessor, in portions of 8; copying needs few.
  static constexpr int copy_registers = groups == 3 ? 32 : 40,
                       work_registers = groups == 3 ? 160 : 232;
  static_assert(!biased || packed);  // the bias is looked for at the end of packed keys
  static_assert(copy_registers + work_registers * groups <= registers_of_groups(groups + 1));
  // Accumulators of the results and of the scores, P and queries as operands; the rest is for
  // addresses and rows' sums.
  static_assert(ND / 2 + keys / 2 + keys / 4 + (q_in_registers ? KD / 4 : 0) <=
                work_registers - 20);
};

struct ForwardWork {
  FlashShape shape;
  FlashRows<__nv_bfloat16> out;
  float* lse;
  Tiles tiles;  // of queries
};

__device__ unsigned forward_tiles_taken = 0;

#ifdef WEFT_SM90
using namespace sm90;

// Shared memory of a block: rings of queries, keys and values, the barriers.
template <class Tile>
struct ForwardMemory {
  unsigned char* base;
  __device__ __forceinline__ unsigned char* queries(int stage) const {
    return base + stage * Tile::q_bytes;
  }
  __device__ __forceinline__ unsigned char* keys(int stage) const {
    return base + Tile::q_stages * Tile::q_bytes + stage * Tile::kv_bytes;
  }
  __device__ __forceinline__ unsigned char* values(int stage) const {
    return keys(Tile::k_stages) + stage * Tile::kv_bytes;
  }
  // "full": the bulk copies have arrived. "empty": every multiplying warp has finished with it.
  __device__ __forceinline__ std::uint64_t* q_full(int s) const {
    return reinterpret_cast<std::uint64_t*>(values(Tile::v_stages)) + s;
  }
  __device__ __forceinline__ std::uint64_t* q_empty(int s) const {
    return q_full(Tile::q_stages) + s;
  }
  __device__ __forceinline__ std::uint64_t* k_full(int s) const {
    return q_empty(Tile::q_stages) + s;
  }
  __device__ __forceinline__ std::uint64_t* k_empty(int s) const {
    return k_full(Tile::k_stages) + s;
  }
  __device__ __forceinline__ std::uint64_t* v_full(int s) const {
    return k_empty(Tile::k_stages) + s;
  }
  __device__ __forceinline__ std::uint64_t* v_empty(int s) const {
    return v_full(Tile::v_stages) + s;
  }
  __device__ __forceinline__ TileSlots tiles() const { return {v_empty(Tile::v_stages)}; }
};

template <class Tile>
__device__ __forceinline__ RowTile query_tile(const ForwardWork& work, int index) {
  return row_tile(work.tiles, work.shape, Tile::queries, index);
}

template <class Tile>
__device__ __forceinline__ int keys_of(const ForwardWork& work, const RowTile& tile) {
  return Tile::packed ? work.shape.keys(tile.sequence) : work.shape.nk;
}

// The copying thread. The first wait for a stage's "empty" barrier is with parity 1, which a new
// barrier satisfies. Values come after the keys of the next block, which are needed first.
template <class Tile>
__device__ __forceinline__ void copy_forward(const CUtensorMap* q, const CUtensorMap* k,
                                             const CUtensorMap* v, const ForwardWork& work,
                                             const ForwardMemory<Tile>& memory) {
  Ring<Tile::q_stages> q_ring;
  Ring<Tile::k_stages> k_ring;
  Ring<Tile::v_stages> v_ring;
  TileSource tiles(memory.tiles(), work.tiles.total, &forward_tiles_taken);
  for (int index; (index = tiles.next()) >= 0;) {
    const RowTile tile = query_tile<Tile>(work, index);
    const int blocks = blocks_of(keys_of<Tile>(work, tile), Tile::keys);
    if (blocks == 0) continue;
    const int first = Tile::packed ? work.shape.key_offsets[tile.sequence] : 0,
              sequence = Tile::packed ? 0 : tile.sequence;
    std::uint64_t* const q_full = memory.q_full(q_ring.stage());
    mbarrier_wait(memory.q_empty(q_ring.stage()), q_ring.parity() ^ 1);
    mbarrier_arrive_expect(q_full, Tile::q_bytes);
    copy_tile<Tile::KD, Tile::queries>(memory.queries(q_ring.stage()), q, q_full, tile.head,
                                       tile.first, tile.sequence);
    q_ring.advance();
    const auto copy_values = [&](int block) {
      std::uint64_t* const full = memory.v_full(v_ring.stage());
      mbarrier_wait(memory.v_empty(v_ring.stage()), v_ring.parity() ^ 1);
      mbarrier_arrive_expect(full, Tile::kv_bytes);
      copy_tile<Tile::KD, Tile::keys>(memory.values(v_ring.stage()), v, full, tile.head,
                                      first + block * Tile::keys, sequence);
      v_ring.advance();
    };
    for (int block = 0; block < blocks; ++block, k_ring.advance()) {
      std::uint64_t* const full = memory.k_full(k_ring.stage());
      mbarrier_wait(memory.k_empty(k_ring.stage()), k_ring.parity() ^ 1);
      mbarrier_arrive_expect(full, Tile::kv_bytes);
      copy_tile<Tile::KD, Tile::keys>(memory.keys(k_ring.stage()), k, full, tile.head,
                                      first + block * Tile::keys, sequence);
      if (block > 0) copy_values(block - 1);
    }
    copy_values(blocks - 1);
  }
}

// `q` where queries are in registers, else `queries`.
template <class Tile>
__device__ __forceinline__ void issue_scores(float (&scores)[Tile::keys / 2],
                                             const std::uint32_t (&q)[Tile::KD / 16][4],
                                             const unsigned char* queries, int group,
                                             const unsigned char* keys) {
#pragma unroll
  for (int k = 0; k < Tile::KD / 16; ++k) {
    const std::uint64_t b = describe_rows(column_step<Tile::keys>(keys, 0, k));
    if constexpr (Tile::q_in_registers)
      Wgmma<Tile::keys>::template from_registers<false>(scores, q[k], b, k > 0);
    else
      Wgmma<Tile::keys>::from_shared(
          scores, describe_rows(column_step<Tile::queries>(queries, group * 64, k)), b, k > 0);
  }
}

// Scores become exp(scale (score - largest)); `top` and `sum` follow (sum over this lane's columns
// only), and `shrink` is what earlier results are to be multiplied with. Keys from `left` on are
// not there; the one before them gets the bias.
template <bool biased, int n>
__device__ __forceinline__ void softmax(float (&scores)[n], float (&top)[2], float (&sum)[2],
                                        float (&shrink)[2], float to_log2, int left, float bias) {
  if (biased && left <= 2 * n) {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 == static_cast<unsigned>(left - 1))
        scores[i] += bias;
  }
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

// This warpgroup's results: rows group and group + 8 of each warp's 16, with lse and factor.
template <class Tile>
__device__ __forceinline__ void store_queries(const ForwardWork& work, const RowTile& tile,
                                              int group, const float (&out)[Tile::ND / 2],
                                              const float (&lse)[2], float factor0, float factor1) {
  const int nq = work.shape.nq, first = tile.first + group * 64, lane = threadIdx.x % 32;
  float* const to =
      work.lse + (static_cast<std::int64_t>(tile.sequence) * work.shape.heads + tile.head) * nq;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
    if (lane % 4 == 0 && i < nq) to[i] = lse[r];
  }
  store_accumulators<Tile::ND>(out, factor0, factor1, work.out.at(tile.sequence, tile.head, 1),
                               work.out.row, first, nq, work.shape.D);
}

// One warpgroup's part of all tiles of this block. Named barriers 1 .. groups: whose turn it is to
// issue products; those behind them are the warpgroups' own.
template <class Tile>
__device__ __forceinline__ void multiply_forward(const ForwardWork& work,
                                                 const ForwardMemory<Tile>& memory) {
  constexpr int KD = Tile::KD, ND = Tile::ND, n = Tile::keys / 2;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1, lane = threadIdx.x % 32;
  const int next_group = group + 1 < Tile::groups ? group + 1 : 0;
  const float to_log2 = work.shape.scale * log2_e;
  const auto done_with = [&](std::uint64_t* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  if (group == Tile::groups - 1) named_arrive(1, 256);  // group 0 begins

  Ring<Tile::q_stages> q_ring;
  Ring<Tile::k_stages> k_ring;
  Ring<Tile::v_stages> v_ring;
  // Four times the tile's number, and below it two bits that count turns of the slots: one
  // register.
  for (int at = 0;;) {
    at = memory.tiles().take(at & 1, at >> 1 & 1) * 4 | ((at + 1) & 3);
    if (at >> 2 >= work.tiles.total) break;
    const RowTile tile = query_tile<Tile>(work, at >> 2);
    const int nk = keys_of<Tile>(work, tile);
    const float bias = Tile::biased ? work.shape.bias(tile.sequence) : 0.0f;
    float scores[n], out[ND / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, shrink[2];
    std::uint32_t q[KD / 16][4], p[Tile::keys / 16][4];
#pragma unroll
    for (int i = 0; i < ND / 2; ++i) out[i] = 0.0f;
    if (Tile::packed && nk == 0) {
      store_queries<Tile>(work, tile, group, out, {0.0f, 0.0f}, 0.0f, 0.0f);
      continue;
    }

    mbarrier_wait(memory.q_full(q_ring.stage()), q_ring.parity());
    if (tile.first + group * 64 >= work.shape.nq) {
      // Without products nothing else keeps a warp's lanes together, and one that comes late to a
      // barrier would miss its phase.
      const auto pass_on = [&](std::uint64_t* empty) {
        __syncwarp();
        done_with(empty);
      };
      pass_on(memory.q_empty(q_ring.stage()));
      q_ring.advance();
      for (int left = nk; left > 0; left -= Tile::keys, k_ring.advance(), v_ring.advance()) {
        mbarrier_wait(memory.k_full(k_ring.stage()), k_ring.parity());
        if (left < nk) {
          named_wait(1 + group, 256);
          named_arrive(1 + next_group, 256);
        }
        pass_on(memory.k_empty(k_ring.stage()));
        mbarrier_wait(memory.v_full(v_ring.stage()), v_ring.parity());
        pass_on(memory.v_empty(v_ring.stage()));
      }
      continue;
    }
    if constexpr (Tile::q_in_registers) {
      load_operand<KD, Tile::queries>(q, memory.queries(q_ring.stage()), group * 64);
      // Reads by this warp's lanes come before what the bulk copies bring next.
      __syncwarp();
      done_with(memory.q_empty(q_ring.stage()));
    }
    const auto issue = [&] {
      issue_scores<Tile>(scores, q, memory.queries(q_ring.stage()), group,
                         memory.keys(k_ring.stage()));
      wgmma_commit();
    };
    // Values of a block that has come.
    const auto await_values = [&](const Ring<Tile::v_stages>& ring, int left) {
      mbarrier_wait(memory.v_full(ring.stage()), ring.parity());
      if constexpr (Tile::packed)
        if (left < Tile::keys)
          clear_rows<KD, Tile::keys>(memory.values(ring.stage()), left, 1 + Tile::groups + group);
    };
    mbarrier_wait(memory.k_full(k_ring.stage()), k_ring.parity());
    wgmma_fence();
    issue();
    wgmma_wait<0>();
    keep_in_place(scores);
    done_with(memory.k_empty(k_ring.stage()));
    k_ring.advance();
    softmax<Tile::biased>(scores, top, sum, shrink, to_log2, nk, bias);
    pack_operand<Tile::keys>(p, scores);
    await_values(v_ring, nk);

    for (int left = nk - Tile::keys; left > 0; left -= Tile::keys) {
      mbarrier_wait(memory.k_full(k_ring.stage()), k_ring.parity());
      named_wait(1 + group, 256);
      keep_in_place(scores);
      keep_in_place(out);
      wgmma_fence();
      issue();
      wgmma_fence();
      issue_weighted_rows<ND, Tile::keys>(out, p, memory.values(v_ring.stage()), true);
      wgmma_commit();
      named_arrive(1 + next_group, 256);
      wgmma_wait<1>();
      keep_in_place(scores);
      done_with(memory.k_empty(k_ring.stage()));
      k_ring.advance();
      softmax<Tile::biased>(scores, top, sum, shrink, to_log2, left, bias);
      keep_in_place(scores);
      // This also keeps ptxas from moving the wait for P V ahead of the softmax: it schedules
      // within straight-line code only.
      Ring<Tile::v_stages> next = v_ring;
      next.advance();
      await_values(next, left);
      wgmma_wait<0>();
      keep_in_place(out);
      done_with(memory.v_empty(v_ring.stage()));
#pragma unroll
      for (int i = 0; i < ND / 2; ++i) out[i] *= shrink[i / 2 % 2];
      pack_operand<Tile::keys>(p, scores);
      v_ring = next;
    }
    q_ring.forget();
    if constexpr (!Tile::q_in_registers) done_with(memory.q_empty(q_ring.stage()));
    q_ring.advance();
    keep_in_place(out);
    wgmma_fence();
    issue_weighted_rows<ND, Tile::keys>(out, p, memory.values(v_ring.stage()), true);
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_place(out);
    done_with(memory.v_empty(v_ring.stage()));
    v_ring.advance();

    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(full_mask, sum[r], 1);
      sum[r] += __shfl_xor_sync(full_mask, sum[r], 2);
      lse[r] = top[r] * work.shape.scale + logf(sum[r]);
    }
    // Computed again: kept across the loop, these numbers would take registers that accumulators
    // need.
    store_queries<Tile>(work, query_tile<Tile>(work, opaque(at) >> 2), group, out, lse,
                        1.0f / sum[0], 1.0f / sum[1]);
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
    const auto init = [](std::uint64_t* full, std::uint64_t* empty, int stages) {
      for (int s = 0; s < stages; ++s) {
        mbarrier_init(full + s, 1);
        mbarrier_init(empty + s, warps);
      }
    };
    init(memory.q_full(0), memory.q_empty(0), Tile::q_stages);
    init(memory.k_full(0), memory.k_empty(0), Tile::k_stages);
    init(memory.v_full(0), memory.v_empty(0), Tile::v_stages);
    memory.tiles().init(warps);
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
  const ForwardWork work{
      p.shape, p.out, p.lse,
      Tiles::of_rows(p.shape.nq, Tile::queries, p.shape.heads * p.shape.sequences)};
  launch(flash_sm90_forward_kernel<Tile>, dim3(work.tiles.blocks()), dim3(Tile::threads),
         Tile::shared, make_tensor_map(p.q, p.shape, p.shape.nq, Tile::queries),
         make_key_map(p.k, p.shape, Tile::keys), make_key_map(p.v, p.shape, Tile::keys), work);
}

template <int KD, int ND>
void launch_by_size(const FlashForward<__nv_bfloat16>& p) {
  const ForwardBlock block = forward_block(p.shape);
  if (p.shape.key_offsets != nullptr)
    launch_forward<Sm90ForwardTile<KD, ND, 3, 112, true>>(p);
  else if (block.groups == 3)
    launch_forward<Sm90ForwardTile<KD, ND, 3, 112>>(p);
  else if (block.keys == 112)
    launch_forward<Sm90ForwardTile<KD, ND, 2, 112>>(p);
  else
    launch_forward<Sm90ForwardTile<KD, ND, 2, 128>>(p);
}

}  // namespace

void flash_sm90_forward(const FlashForward<__nv_bfloat16>& p) {
  if (p.shape.tile_size() > 72 && p.shape.key_offsets != nullptr)
    launch_forward<Sm90ForwardTile<128, 128, 2, 128, true>>(p);
  else if (p.shape.D > 72)
    launch_forward<Sm90ForwardTile<128, 128, 2, 128>>(p);
  else if (p.shape.D > 64)
    launch_by_size<80, 72>(p);
  else
    launch_by_size<64, 64>(p);
}

}  // namespace weft::kernels
