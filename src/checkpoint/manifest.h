// The manifest of a checkpoint: where every element is, and all hashes (docs/checkpoints.md).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/hash.h"
#include "core/parts.h"

namespace weft::checkpoint {

// Shards are hashed in blocks of this many bytes; the last of a shard may be shorter.
inline constexpr std::uint64_t block_bytes = std::uint64_t{16} << 20;

inline constexpr const char* manifest_name = "manifest.json";
inline constexpr const char* verified_name = "verified";

// How a stretch is divided among the ranks that write it.
enum class Division {
  units,  // part_of() of core/parts.h
  even,   // elements [len*r/n, len*(r+1)/n): format 1, which is still read
};

// What the state consists of and how it is divided: enough to say where every element is, at any
// rank count.
struct Layout {
  struct Array {
    std::string name;
    std::int64_t elements = 0;
    std::size_t cuts = 0;  // which list
  };
  std::vector<Array> arrays;
  // Ends of stretches, growing, the last the array's length. Arrays that are cut alike share a
  // list.
  std::vector<std::vector<std::int64_t>> cuts;
  Division division = Division::units;
};
Layout layout_of(std::span<const FlatArray> arrays);

// Part `rank` of [begin, end) among `ranks`, by the layout's rule.
Part divide(Division division, std::int64_t begin, std::int64_t end, int rank, int ranks);

// Elements [begin, end) of array number `array`, at byte `offset` of a shard.
struct Piece {
  std::size_t array = 0;
  std::int64_t begin = 0, end = 0;
  std::uint64_t offset = 0;
};
// What rank `rank` of `ranks` writes: array after array, stretch after stretch. Pieces may be
// empty.
std::vector<Piece> pieces_of(const Layout& layout, int rank, int ranks);

struct ShardTable {
  std::string file;  // "shard_0003.bin"
  std::uint64_t bytes = 0;
  std::vector<Hash128> blocks;
};
// The shard of a rank: its name, its size, and as many blocks, whose hashes are to be filled in.
ShardTable shard_of(const Layout& layout, int rank, int ranks);

struct Manifest {
  CheckpointInfo info;
  Layout layout;
  std::vector<ShardTable> shards;  // one a rank
  Hash128 state_hash;              // of all block hashes, in order: the state at the cut
};

Hash128 state_hash(std::span<const ShardTable> shards);

// The manifest as JSON whose last member is the hash of all bytes before it.
std::string to_text(const Manifest& manifest);
// Reads and checks it: its own hash, the schema, and that the shards match the layout. Throws
// Exit::checkpoint with a message that begins with `where`.
Manifest manifest_from_text(const std::string& text, const std::string& where);
// The hash at the end of a manifest's text, which the mark `verified` repeats.
std::string manifest_hash(const std::string& text);

// The tensors that bytes [begin, end) of shard `rank` hold, for messages: "master: a.weight,
// b.bias".
std::string tensors_in(const Manifest& manifest, int rank, std::uint64_t begin, std::uint64_t end);

}  // namespace weft::checkpoint
