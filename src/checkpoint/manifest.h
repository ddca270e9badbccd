// The files of a checkpoint (docs/checkpoints.md): its manifest, which says where every element is
// and has all hashes, and the run directory: names, publishing, deleting.
#pragma once

#include <filesystem>
#include <optional>
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
};
Layout layout_of(std::span<const FlatArray> arrays);

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

namespace fs = std::filesystem;

// Called by name at every point of a save where a crash or a delay could matter ("shard", "rename",
// ...): tests stop, slow or kill the process there. Null in a job.
extern void (*at_site)(const char* site);
inline void pass(const char* site) {
  if (at_site != nullptr) at_site(site);
}

std::string step_name(std::int64_t step);  // "step_120"
// The step of a directory's name, nullopt if it is no checkpoint's ("step_120.tmp", "samples").
std::optional<std::int64_t> step_of(const std::string& name);

// The steps that have a directory of their own (links are not followed), newest first. A run
// directory that does not exist has none; one that cannot be read throws Exit::checkpoint.
std::vector<std::int64_t> list_steps(const fs::path& run_dir);
// The target of RUN/latest, unchecked; nullopt if there is no such link.
std::optional<std::string> read_latest(const fs::path& run_dir);

// Creates the directory, proves that this process can write, sync and delete in it, and open some
// more files. `rank` keeps the probes of several ranks apart. Throws Exit::checkpoint.
void probe_directory(const fs::path& run_dir, int rank);
// Checks that the names a job reads and writes in its run directory are regular files: neither a
// link, through which it would write elsewhere, nor a pipe, on which it would block. Throws
// Exit::checkpoint. A world-writable directory is one WARN line.
void check_own_files(const fs::path& run_dir);
// Check that the limits of this process and of the file system allow a checkpoint: a shard of
// `bytes` bytes (ulimit -f), all shards (free space). Throw Exit::checkpoint.
void check_file_size(const fs::path& shard, std::uint64_t bytes);
void check_free_space(const fs::path& run_dir, std::uint64_t bytes);
// Bytes that this user may still write on the file system where that path is or will be; nullopt
// where the system does not say.
std::optional<std::uint64_t> free_space(const fs::path& path);
// A WARN where the file system has less than the run will take beyond the checkpoints it has:
// `keep` of them, and one that is being written.
void warn_of_little_space(const fs::path& run_dir, std::uint64_t bytes, std::int64_t keep);
// Removes the remains of interrupted saves and deletions.
void clear_remains(const fs::path& run_dir);

// Puts step_N.tmp in the place of step_N. An older step_N is exchanged in one step and lies at
// step_N.tmp afterwards.
void publish(const fs::path& run_dir, std::int64_t step);
// Undoes publish(): step_N is gone, or what it was before.
void withdraw(const fs::path& run_dir, std::int64_t step);
// Writes the mark `verified` with the manifest's hash, then points `latest` at the step.
void mark_verified(const fs::path& run_dir, std::int64_t step, const std::string& manifest_hash);
// Points RUN/best at the step, unless it does or the step is not there and verified.
void link_best(const fs::path& run_dir, std::int64_t step);
// Deletes checkpoints older than the `keep` newest verified ones up to `step`, but for the one that
// RUN/best names. Those of later steps (left by a run that went back) are not counted and not
// touched.
void delete_older(const fs::path& run_dir, std::int64_t step, int keep);

}  // namespace weft::checkpoint
