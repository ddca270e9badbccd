// What ranks have encoded so far, in a folder beside the store that it becomes: plain files that survive a kill at any
// moment. OUTPUT.parts/ holds
//   job                 what is encoded, and by which weights: a folder of another job is refused
//   G-R.data            clips one behind the other, written by rank R of the G-th start
//   G-R.journal         a line "sample offset bytes xxh3" for each, written after its bytes
//   text_features.*     the captions' features (jobs/generate/prompts/prompt_features.h)
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace weft {

class EncodeParts {
 public:
  // Collective. Makes the folder, or takes up the one of an earlier start: clips whose bytes are whole, by their hash, count as
  // made. Exit::usage, naming the first line that differs, if the folder is of another `job`.
  EncodeParts(const std::filesystem::path& folder, const std::string& job, std::int64_t samples,
              MPI_Comm world);
  ~EncodeParts();
  EncodeParts(const EncodeParts&) = delete;
  EncodeParts& operator=(const EncodeParts&) = delete;

  // The same on every rank, as it was when the job started.
  bool made(std::int64_t sample) const { return made_[static_cast<std::size_t>(sample)] != 0; }
  // Appends a clip to this rank's part.
  void append(std::int64_t sample, std::span<const std::byte> clip);

  // This rank's part is whole and on the disk: every rank calls it before rank 0 looks for clips of all.
  void finish();

  // Rank 0, after all have finished: a clip's bytes from whichever part has them. Exit::data if they are damaged.
  void find_all();
  void read(std::int64_t sample, std::span<std::byte> clip) const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  struct Place {
    std::int64_t file = 0;  // in journals_
    std::uint64_t offset = 0, bytes = 0, xxh3 = 0;
  };
  std::multimap<std::int64_t, Place> read_journals();
  bool whole(const Place& place, std::vector<std::byte>& buffer) const;
  void check_job(const std::string& job) const;

  std::filesystem::path folder_;
  int rank_ = 0, ranks_ = 1;
  std::int64_t samples_;
  std::vector<std::uint8_t> made_;  // [sample]
  std::vector<std::filesystem::path> journals_;
  std::multimap<std::int64_t, Place> places_;
  int data_ = -1, journal_ = -1;  // of this rank
  std::uint64_t end_ = 0;         // of data_
  std::string stem_;
};

}  // namespace weft
