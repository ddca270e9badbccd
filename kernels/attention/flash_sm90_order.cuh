// Which rows each block of the Hopper kernels of flash attention works on, and in which order: the
// kernels' own index functions, which tests/kernels_cuda/attention_load_cudatest.cpp calls too, to
// sum the work of each block.
//
// There is one block a multiprocessor; each takes the next tile of a list when it is done with one
// (TileSource in flash_sm90_tiles.cuh; of flash_sm90_five.cu, which has no register for that, block
// b has the tiles b, b + blocks, ...). What a head has in its last tile may be fewer rows than the
// tile's warpgroups could take, and so less work. Such tiles stand at the end of the list: then the
// blocks end within the time of one small tile. All others stand head by head, so that the blocks
// at work read the keys and values of few heads, from L2.
#pragma once

#include <algorithm>

#include "attention/flash_common.cuh"

namespace weft::kernels {

constexpr int warpgroup_rows = 64;   // that one warpgroup multiplies
constexpr int tile_slot_bytes = 40;  // of shared memory: numbers of tiles on their way

struct Tiles {
  int each = 1;   // of a head
  int early = 1;  // of a head, the first ones: those that stand head by head
  int heads = 1;  // of all sequences
  int total = 1;

  // The tiles of `heads` heads with `rows` rows each, `own` rows a tile.
  static Tiles of_rows(int rows, int own, int heads) {
    const int each = blocks_of(rows, own), last = rows - (each - 1) * own;
    const bool late = each > 1 && last <= own - warpgroup_rows;
    return {each, late ? each - 1 : each, heads, each * heads};
  }
  // Results do not depend on it.
  unsigned blocks() const {
    return static_cast<unsigned>(std::min(total, cuda_properties().multiProcessorCount));
  }
};

struct RowTile {
  int first, head, sequence;
};
// Tile number `index` of the list. Reciprocals of divisors are not to be kept over the loop over
// tiles: accumulators need the registers.
__device__ __forceinline__ RowTile row_tile(const Tiles& tiles, const FlashShape& shape, int own,
                                            int index) {
  const int early = opaque(tiles.early), heads = opaque(shape.heads),
            late = index - early * tiles.heads;
  // The late tiles begin with those of the last heads: L2 still has their keys and values.
  const int head = late < 0 ? index / early : tiles.heads - 1 - late;
  const int tile = late < 0 ? index % early : early;
  return {tile * own, head % heads, head / heads};
}

// Forward: warpgroups that multiply, and keys of a block.
struct ForwardBlock {
  int groups, keys;
};
// Three warpgroups overlap better than two, unless 192 queries a block leave many lanes without any
// (S = 256). Key blocks of 128 rows only where they fit better: beside three warpgroups'
// accumulators they would spill. Only the sum of the captions' lengths is known here, with padding.
inline ForwardBlock forward_block(const FlashShape& shape) {
  if (shape.tile_size() > 72) return {2, 128};
  const int nq = shape.nq, nk = shape.nk;
  const bool three = 10 * blocks_of(nq, 192) * 192 <= 11 * blocks_of(nq, 128) * 128;
  if (shape.key_offsets != nullptr || three) return {3, 112};
  return {2, blocks_of(nk, 112) * 112 <= blocks_of(nk, 128) * 128 ? 112 : 128};
}

// Backward: rows that a block owns, and rows that it passes over at a time.
constexpr int backward_rows = 2 * warpgroup_rows, pass_rows = 64;

struct OwnTile {
  int first = 0, head = 0, sequence = 0;  // of packed keys, sequence -1: nothing to do
  int split = 0;
  int own = 0, pass = 0;           // rows of the sequence on either side
  int pass_first = 0, blocks = 0;  // rows to pass over, in blocks
};

// The list of the kernel that owns keys, or queries.
inline Tiles backward_tiles(const FlashShape& shape, bool keys, int splits) {
  if (keys && shape.key_offsets != nullptr) {
    const int each = static_cast<int>(key_tiles(shape, backward_rows)),
              heads = shape.heads * splits;
    return {each, each, heads, each * heads};
  }
  return Tiles::of_rows(keys ? shape.nk : shape.nq, backward_rows, shape.heads * shape.sequences);
}

// Tile number `index`. Packed keys: captions are short and have many queries, which `splits` blocks
// share.
template <bool keys, bool packed>
__device__ __forceinline__ OwnTile own_tile(const Tiles& tiles, const FlashShape& shape, int splits,
                                            int index) {
  OwnTile t;
  if constexpr (keys && packed) {
    // The tile is the slowest index: with backward_splits() one tile's parts are about as many as
    // there are blocks, each of which then has a part of every tile, whatever the clips' lengths.
    const int parts = opaque(tiles.heads), heads = opaque(shape.heads), part = index % parts;
    KeyTile key;
    find_packed_tile(shape, backward_rows, index / parts, key);
    t.head = part % heads;
    t.split = part / heads;
    t.first = key.first;
    t.sequence = key.s;
    if (t.sequence < 0) return t;
  } else {
    const RowTile rows = row_tile(tiles, shape, backward_rows, index);
    t.head = rows.head;
    t.first = rows.first;
    t.sequence = rows.sequence;
  }
  const int own = shape.keys(t.sequence);
  t.own = keys ? own : shape.nq;
  t.pass = keys ? shape.nq : own;
  t.blocks = blocks_of(t.pass, pass_rows);
  if constexpr (keys && packed) {
    const int begin = t.blocks * t.split / splits;
    t.blocks = t.blocks * (t.split + 1) / splits - begin;
    t.pass_first = begin * pass_rows;
  }
  return t;
}

// How many blocks share the queries of a tile of packed keys: so many that its parts of all heads
// fill one round of the blocks, each part with 1024 queries at least. (A part costs 16 bytes of
// traffic an element of k and v, about what 256 queries cost.) The order of the sums depends on it.
inline int backward_splits(const FlashShape& shape,
                           int blocks = cuda_properties().multiProcessorCount) {
  return std::max(1, std::min(blocks / shape.heads, shape.nq / 1024));
}

}  // namespace weft::kernels
