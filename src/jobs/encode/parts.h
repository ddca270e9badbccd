// Encoded clips before they are merged into one store: in a folder beside it that survives a kill
// at any moment. OUTPUT.parts/ holds
//   job                what is encoded, and by which weights: a folder of another job is refused
//   G-R.data           clips one behind the other, written by rank R of the G-th start
//   encoded.jsonl      a line for each: file, offset, bytes, XXH3-128 (jobs/engine/manifest.h);
//                      encoded.rankR.jsonl while it runs
//   text_features.*    the captions' features (jobs/generate/prompts/prompt_features.h)
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "core/file.h"
#include "jobs/engine/manifest.h"

namespace weft {

// Collective. Makes the folder for this job, or reuses that of an earlier start. Exit::usage for
// the folder of another job, with the first line that differs.
void open_parts(const std::filesystem::path& folder, const std::string& job, MPI_Comm world);

// This rank's file of clips, made with the first one.
class PartWriter {
 public:
  PartWriter(std::filesystem::path folder, int rank) : folder_(std::move(folder)), rank_(rank) {}
  // Appends a clip. Adds the members file, offset, bytes and file_xxh3 to its line.
  void append(std::span<const std::byte> clip, nlohmann::ordered_json& line);
  // From then on other nodes can read all of it, also over NFS.
  void close();

 private:
  std::filesystem::path folder_;
  int rank_;
  std::optional<File> file_;
  std::uint64_t end_ = 0;
};

// Clips of all parts, by their lines.
class PartReader {
 public:
  PartReader(std::filesystem::path folder, ManifestLines lines)
      : folder_(std::move(folder)), lines_(std::move(lines)) {}
  // Exit::data if its bytes are damaged.
  void read(const std::string& name, std::span<std::byte> clip);

 private:
  std::filesystem::path folder_;
  ManifestLines lines_;
  std::map<std::string, File> files_;
};

}  // namespace weft
