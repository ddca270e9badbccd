// The run directory as checkpoints see it: names, the lock, publishing, deleting.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace weft::checkpoint {

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
// Removes the remains of interrupted saves and deletions.
void clear_remains(const fs::path& run_dir);

// Puts step_N.tmp in the place of step_N. An older step_N is exchanged in one step and lies at
// step_N.tmp afterwards.
void publish(const fs::path& run_dir, std::int64_t step);
// Undoes publish(): step_N is gone, or what it was before.
void withdraw(const fs::path& run_dir, std::int64_t step);
// Writes the mark `verified` with the manifest's hash, then points `latest` at the step.
void mark_verified(const fs::path& run_dir, std::int64_t step, const std::string& manifest_hash);
// Deletes checkpoints older than the `keep` newest verified ones up to `step`. Those of later
// steps (left by a run that went back) are not counted and not touched.
void delete_older(const fs::path& run_dir, std::int64_t step, int keep);

}  // namespace weft::checkpoint
