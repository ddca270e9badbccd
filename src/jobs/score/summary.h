// What a scoring found, and what bounded it: for the end table, score_report.json and the page.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "jobs/engine/list_job.h"
#include "jobs/engine/prefetch.h"

namespace weft {

// How long all ranks' stages took, and who waited.
struct PrefetchSummary {
  int ranks = 0;
  bool on_gpu = false;  // the network
  double cores = 0;     // of all hosts, as far as ranks could use them
  PrefetchTimes sum;    // of all ranks; of elapsed, batch, readers and threads the largest

  // A rank's numbers, and its share of the cores.
  void add(const PrefetchTimes& rank, double rank_cores);
  bool empty() const { return sum.frames == 0; }
  double rate() const;  // frames a second, measured
  // Frames a second that could be reached if only decode, resize and post-processing took time, and
  // if only the network did.
  double host_rate() const;
  double network_rate() const;
  double network_busy() const;  // the share of the ranks' time that the network was at work
  // The stage that bounds the job: "decode", "resize", "post-processing" or "network".
  std::string bound() const;
  // That, the rate, and what the others could do.
  std::string verdict() const;
  // Which waited for which, how long.
  std::string waits() const;
  nlohmann::ordered_json json() const;
};

// A rank's numbers as members of its share of the report, and back; zeros where there are none.
nlohmann::ordered_json as_share(const PrefetchTimes& times);
PrefetchTimes from_share(const nlohmann::ordered_json& share);

struct ScoreSummary {
  std::filesystem::path input, output, folder;     // folder: of finished items
  std::int64_t rows = 0, files = 0;                // of the table (or shard); different ones
  std::int64_t left_out = 0;                       // rows above score.maximum
  std::int64_t without = 0;                        // rows without a count
  std::map<std::int64_t, std::int64_t> histogram;  // rows of each count
  std::vector<std::string> faults;                 // "PATH: why", of files
  std::vector<std::pair<std::string, std::string>> pictures;  // path, file in `folder`
  std::vector<std::pair<std::string, std::string>> facts;     // for people: name and value
  PrefetchSummary feed;

  std::int64_t with_text() const;  // rows whose count is above 0
  // Rows by ranges of counts (0, 1, 2, 3, 4, 5 to 8, 9 to 16 ...): label and rows.
  std::vector<std::pair<std::string, std::int64_t>> bins() const;
  std::string table() const;  // for a terminal
};

}  // namespace weft
