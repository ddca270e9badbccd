// The manifest of a checkpoint: what is where, and the hash of everything (docs/checkpoints.md).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "formats/hash.h"
#include "train/checkpoint.h"

namespace weft::checkpoint {

// Shards are hashed in blocks of this many bytes; the last of a shard may be shorter.
inline constexpr std::uint64_t block_bytes = std::uint64_t{16} << 20;

inline constexpr const char* manifest_name = "manifest.json";
inline constexpr const char* verified_name = "verified";

struct ArrayLength {
  std::string name;
  std::int64_t elements = 0;
};

// Elements [begin, end) of an array, at byte `offset` of a shard.
struct Range {
  std::string array;
  std::int64_t begin = 0, end = 0;
  std::uint64_t offset = 0;
};

struct ShardTable {
  std::string file;  // "shard_0003.bin"
  std::uint64_t bytes = 0;
  std::vector<Range> ranges;
  std::vector<Hash128> blocks;
};

struct Manifest {
  CheckpointInfo info;
  std::vector<ArrayLength> arrays;
  std::vector<ShardTable> shards;  // one a rank
  Hash128 state_hash;              // of all block hashes, in order: the state at the cut
};

// What rank `rank` of `ranks` writes, without the hashes.
ShardTable shard_layout(std::span<const ArrayLength> arrays, int rank, int ranks);

Hash128 state_hash(std::span<const ShardTable> shards);

// The manifest as JSON whose last member is the hash of all bytes before it.
std::string to_text(const Manifest& manifest);
// Reads and checks it: own hash, schema, and that the shards tile every array. Throws
// Exit::checkpoint with a message that begins with `where`.
Manifest manifest_from_text(const std::string& text, const std::string& where);
// The hash at the end of a manifest's text, which the mark `verified` repeats.
std::string manifest_hash(const std::string& text);

// The tensors that bytes [begin, end) of a shard hold, for messages: "master: a.weight, b.bias".
std::string tensors_in(const Manifest& manifest, const ShardTable& shard, std::uint64_t begin,
                       std::uint64_t end);

}  // namespace weft::checkpoint
