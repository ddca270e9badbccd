// Gradients of linear layers in bf16, summed in f32, for processors with AVX512_BF16 and without
// AMX: at 0.8 to 0.9 of what its instruction allows, where oneDNN reaches 0.6 to 0.85. Included
// within WEFT_CPU_BEGIN and an unnamed namespace, after Product.
//
// A tile of 6 x 64 sums stays in registers over 256 of the depth; its columns of B, a panel, in the
// first-level cache over 192 rows; those rows' sums in the second-level one over the whole depth. B
// is packed by all threads, some panels at a time, into pairs across its depth. So is A where it is
// stored transposed, a block at a time by the thread that multiplies it; else it is read where it
// lies. One thread adds up an element, in the order of its depth: how many there are does not show.
#pragma once

#include "ops/cpu/gemm_tile.h"

#ifdef __AVX512F__

constexpr std::int64_t panel_columns = 64, deepest_block = 128;  // of the depth in pairs
constexpr std::int64_t row_block = 192, chunk_rows = 48;         // chunks: whole tiles and vectors
constexpr std::int64_t most_panels = 6;                          // packed at a time
constexpr std::int64_t most_packed = std::int64_t{1} << 22;      // pairs, if one panel fits

// Whether it is faster so. Forward products are not: B would have to be turned. A short depth ends
// too many tiles, unless the library is slow as well.
bool suits_pairs(const Product& p) {
  if (p.b_transposed || p.bias || p.residual || p.m < 64 || p.n < 64) return false;
  return p.a_transposed ? p.k >= 256 : p.k >= 1024 && p.k % 2 == 0;
}

// Columns [first, first + width) of x [k, ld] at depth [k0, k0 + depth) in pairs: pieces of `step`
// columns, each [depth, step], `piece` pairs from one to the next.
inline void pack_columns(const bf16* x, std::int64_t k, std::int64_t ld, std::int64_t first,
                         std::int64_t width, std::int64_t k0, std::int64_t depth, Pair* to,
                         std::int64_t step, std::int64_t piece) {
  for (std::int64_t i = 0; i < depth; ++i) {
    const bf16* one = x + 2 * (k0 + i) * ld + first;
    const bf16* two = 2 * (k0 + i) + 1 < k ? one + ld : nullptr;
    for (std::int64_t j0 = 0; j0 < width; j0 += step)
      for_vectors(std::min(step, width - j0), [&](std::int64_t j, int n) {
        __builtin_prefetch(one + 8 * ld + j0 + j);
        __builtin_prefetch(one + 9 * ld + j0 + j);
        const vu pairs = pairs_of(one + j0 + j, two ? two + j0 + j : nullptr, n);
        __builtin_memcpy(to + j0 / step * piece + i * step + j, &pairs, sizeof pairs);
      });
  }
}

// c [rows,width] (ld n) (+)= sums [rows,64].
template <class O>
void finish_pairs(std::int64_t rows, std::int64_t width, const float* sums, O* c, std::int64_t n,
                  bool accumulate) {
  for (std::int64_t i = 0; i < rows; ++i)
    for_vectors(width, [&](std::int64_t j, int lanes) {
      vf v = load(sums + i * panel_columns + j);
      if (accumulate) v += load_n(c + i * n + j, lanes);
      store_n(c + i * n + j, v, lanes);
    });
}

template <class O>
void multiply_pairs(const Product& p, const bf16* a, const bf16* b, O* c) {
  const std::int64_t depth = (p.k + 1) / 2, panels = (p.n + panel_columns - 1) / panel_columns;
  // Blocks of the depth alike, in whole vectors.
  const std::int64_t blocks = (depth + deepest_block - 1) / deepest_block;
  const std::int64_t depth_block = ((depth + blocks - 1) / blocks + W - 1) / W * W;
  const std::int64_t together =
      std::clamp<std::int64_t>(most_packed / (depth * panel_columns), 1, most_panels);
  // Rows in equal pieces for the threads; with fewer rows than that, panels are shared out too.
  const std::int64_t threads = omp_get_max_threads(), chunks = (p.m + chunk_rows - 1) / chunk_rows;
  std::int64_t pieces = (p.m + row_block - 1) / row_block;
  pieces = std::min((pieces + threads - 1) / threads * threads, chunks);
  const std::int64_t parts = std::clamp<std::int64_t>(threads / pieces, 1, together);
  struct PackedB;
  Pair* const packed = reinterpret_cast<Pair*>(
      scratch<PackedB>(static_cast<std::size_t>(together * depth * panel_columns)));
  // Where panel j of a group of `count` lies at depth k0: [depth block][panel][pairs][64].
  const auto panel_at = [&](std::int64_t k0, std::int64_t count, std::int64_t j) {
    return packed + (k0 * count + j * std::min(depth_block, depth - k0)) * panel_columns;
  };

  // Rows [from, to) by panels [first, last) of the group of `count` at `group`.
  const auto multiply = [&](std::int64_t from, std::int64_t to, std::int64_t group,
                            std::int64_t count, std::int64_t first, std::int64_t last) {
    struct Sums;
    struct PackedA;
    float* const sums =
        scratch<Sums>(static_cast<std::size_t>(most_panels * row_block * panel_columns));
    Pair* const turned = reinterpret_cast<Pair*>(
        p.a_transposed ? scratch<PackedA>(static_cast<std::size_t>(row_block * deepest_block))
                       : nullptr);
    for (std::int64_t i0 = from; i0 < to; i0 += row_block) {
      const std::int64_t rows = std::min(row_block, to - i0);
      for (std::int64_t k0 = 0; k0 < depth; k0 += depth_block) {
        const std::int64_t d = std::min(depth_block, depth - k0);
        if (p.a_transposed)
          pack_columns(a, p.k, p.m, i0, rows, k0, d, turned, chunk_rows, chunk_rows * d);
        for (std::int64_t j = first; j < last; ++j) {
          const Pair* panel_of = panel_at(k0, count, j);
          const std::int64_t column = (group + j) * panel_columns;
          for (std::int64_t i = 0; i < rows; i += chunk_rows) {
            const std::int64_t some = std::min(chunk_rows, rows - i), row = i0 + i;
            float* to_sums = sums + ((j - first) * row_block + i) * panel_columns;
            if (p.a_transposed)
              panel<widest_tile>(some, d, turned + i * d, 1, chunk_rows, panel_of, panel_columns,
                                 to_sums, panel_columns, k0 > 0);
            else
              panel<widest_tile>(some, d, reinterpret_cast<const Pair*>(a + row * p.k) + k0,
                                 p.k / 2, 1, panel_of, panel_columns, to_sums, panel_columns,
                                 k0 > 0);
            if (k0 + d == depth)
              finish_pairs(some, std::min(panel_columns, p.n - column), to_sums,
                           c + row * p.n + column, p.n, p.accumulate);
          }
        }
      }
    }
  };

#pragma omp parallel
  for (std::int64_t group = 0; group < panels; group += together) {
    const std::int64_t count = std::min(together, panels - group);
#pragma omp for schedule(static)
    for (std::int64_t k = 0; k < depth; k += W) {
      const std::int64_t k0 = k / depth_block * depth_block, d = std::min(depth_block, depth - k0);
      const std::int64_t some = std::min<std::int64_t>(W, depth - k), first = group * panel_columns;
      const std::int64_t width = std::min(count * panel_columns, p.n - first);
      Pair* const to = panel_at(k0, count, 0) + (k - k0) * panel_columns;
      pack_columns(b, p.k, p.n, first, width, k, some, to, panel_columns, d * panel_columns);
    }
#pragma omp for schedule(static) collapse(2)
    for (std::int64_t piece = 0; piece < pieces; ++piece)
      for (std::int64_t part = 0; part < parts; ++part)
        multiply(chunks * piece / pieces * chunk_rows,
                 std::min(chunks * (piece + 1) / pieces * chunk_rows, p.m), group, count,
                 count * part / parts, count * (part + 1) / parts);
  }
}

#endif
