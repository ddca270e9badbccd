// The list engine: a job that makes many independent items (clips, scores, masks) says what an item
// is and how it is made; the engine does the rest on all ranks.
//
//   order      costliest items first; rank 0 hands them to whoever is free (dispatch.h)
//   restart    finished items are lines of DIR/STEM.jsonl with hashes of their files (manifest.h):
//              the same command makes only what is missing, was damaged, or has another key
//   stop       a request to any rank stops all at their next item: exit 75
//   replacing  finished results of another request (other keys) are replaced with --replace alone
//   failures   an item that fails is reported by name and the others are made: exit 3; an error
//              that is not tied to an item ends the job (Error::of_item)
//   deaths     a rank that dies ends the job, and the same command resumes it; what it had in hand
//              is made one at a time from then on, and given up by name if a second rank dies with
//              it
//   folder     one job at a time: another one is refused, and told who is in it (manifest.h)
//   report     progress lines, a table at the end, DIR/STEM_report.json
//
// A job in five steps (tests/jobs/engine/list_job_mpitest.cpp has one of 50 lines):
//   ListEngine engine(settings, items, world);      // 1. what is missing
//   if (!engine.missing().empty()) {
//     load weights, plan memory ...                 // 2. collective work (engine.stop_requested())
//     MyJob job(...);                               // 3. make(): items to lines of the manifest
//     engine.run(job, engine.one_by_one());         // 4. each rank by itself: no collective calls
//   }
//   return engine.end({...});                       // 5. the one way out: report and exit code
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "config/deck.h"
#include "core/error.h"
#include "core/log.h"
#include "core/progress.h"
#include "jobs/engine/dispatch.h"
#include "jobs/engine/manifest.h"
#include "models/cite.h"
#include "parallel/rank_device.h"

namespace weft {

struct Command;

// The arguments of a list job's command: a deck, and --replace, which sets replace_asked.
void takes_list_job(Command& command);
inline bool replace_asked = false;

// What every list job begins with, collective: stop requests are heard, the rank has its device,
// and `threads` of it (the deck's run.threads) or its share of the host's cores.
struct ListStart {
  RankDevice device;
  int threads = 1;
};
inline ListStart start_list_job(const Deck& deck, MPI_Comm world, std::int64_t threads = 0) {
  watch_stop_signals();
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  if (threads <= 0) threads = deck.run.threads;
  return {device, set_threads(static_cast<int>(threads), device.core_sharers)};
}

struct ListItem {
  std::string name;  // unique in the job
  std::string key;   // hash of everything that decides the result
  double cost = 0;   // any unit
  // The item, by number, that this one is a part of: it is needed only while that one is missing,
  // and its file may be gone afterwards. -1: it stands for itself.
  std::int64_t whole = -1;
};

struct ListSettings {
  std::filesystem::path directory;  // of the results; all ranks share it
  std::string command;              // in the status file, status.json in `directory`
  std::string stem;                 // of the manifest's and the report's file names
  std::string report;               // file name of the report in `directory`
  std::string item_name = "clip";   // in messages; its plural is a key of the report
  std::string key;                  // of the deck, that `directory` comes from
  double stop_margin = 0;           // run.stop_margin, seconds
  double max_hours = 0;             // run.max_hours
  int group = 1;                    // ranks that make an item together
  std::filesystem::path status{};   // another status file, where `directory` goes with the job
  std::string cite{};               // text of its cite.bib, beside the status file
  bool replace = replace_asked;     // finished results of another request
  // The lock of `directory`, if the job writes there before the engine; else the engine takes it.
  std::shared_ptr<FolderLock> lock{};
};

// Settings of `weft COMMAND`, whose results are in `directory`: COMMAND.jsonl, COMMAND_report.json.
inline ListSettings list_settings(const Deck& deck, const std::string& command,
                                  const std::filesystem::path& directory,
                                  const std::string& item_name) {
  ListSettings s;
  s.directory = directory;
  s.command = s.stem = command;
  s.report = command + "_report.json";
  s.item_name = item_name;
  s.key = command + ".output";
  s.stop_margin = deck.run.stop_margin;
  s.max_hours = deck.run.max_hours;
  s.cite = citations(deck, command);
  return s;
}

// Before any work, on one rank. Where finished results of another request, `names` in `output`,
// would be replaced: Exit::checkpoint, or with --replace a WARN. `key` of the deck names the
// output.
void check_replaced(const std::string& output, const std::string& key,
                    const std::vector<std::string>& names, bool replace = replace_asked);

// Collective: calls `make` on rank 0 alone, and broadcasts its result. Texts may be of any bytes.
nlohmann::ordered_json from_first_rank(MPI_Comm world,
                                       const std::function<nlohmann::ordered_json()>& make);

// Items, by number, that are made by one call.
using ItemBatch = std::vector<std::int64_t>;

class ListJob {
 public:
  virtual ~ListJob() = default;
  // Makes the items, collective over the group. Each of them gets ListEngine::finished(), failed()
  // or skipped(), at once or, if another thread has it, by the next flush(). A thrown Error fails
  // all items of the batch, or if it is no item's, ends the job.
  virtual void make(const ItemBatch& items) = 0;
  // Waits until all items made are reported.
  virtual void flush() {}
};

struct ListReport {
  // Each rank's share, as the report has it: how many items (by their plural name) it has made,
  // failed and skipped; seconds "busy" with them, "last_end" from the start of run() until its last
  // one, and "busy_share" of the time until the last one of all ranks; requests to rank 0; how
  // often so many were made together; and the job's own numbers.
  std::vector<nlohmann::ordered_json> ranks;
  std::vector<std::string> failures;  // "NAME: why", of all ranks
  std::int64_t wanted = 0, finished_before = 0;
  std::int64_t made = 0, skipped = 0;
  bool stopped = false;
};

// What rank 0 says of all ranks' work.
struct ListSummary {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();  // the report's own members
  std::string failed = {};  // "2 of 4 clips", where items are only parts of what was asked for
};

struct ListEnd {
  nlohmann::ordered_json share = nlohmann::ordered_json::object();  // this rank's own numbers
  // Members of `share` that are seconds of the time that this rank was busy, for the job's last
  // lines; by default a Feed's. Rates count `unit`s, of which `share` has `units`; "": items.
  std::vector<std::string> stages = {"network", "network_waited"};
  std::string unit = {}, units = {};
  // Run on rank 0: `summarise` logs lines above the engine's, `finish` does the work that follows
  // once all items are finished. Neither may call MPI.
  std::function<ListSummary(const ListReport&)> summarise = {};
  std::function<void(const ListReport&)> finish = {};
  bool finish_with_failures = false;  // `finish` runs also if items failed
};

class ListEngine {
 public:
  // Collective. Uses rank 0's keys and costs: files, and their times, may look different from node
  // to node.
  ListEngine(ListSettings settings, std::vector<ListItem> items, MPI_Comm world);
  ListEngine(const ListEngine&) = delete;
  ListEngine& operator=(const ListEngine&) = delete;

  const ListSettings& settings() const { return settings_; }
  const std::vector<ListItem>& items() const { return items_; }
  // What the item's line of the manifest begins with: its name, its key, this rank.
  nlohmann::ordered_json line_of(std::int64_t item) const;
  // Numbers of the items to make, in that order: the same on all ranks.
  const std::vector<std::int64_t>& missing() const { return missing_; }
  // Those of them that a rank has died with. run() makes them first, each alone, in the order of
  // its batches.
  const std::set<std::int64_t>& suspects() const { return suspects_; }
  // The costliest of the missing items, of which there must be one.
  std::int64_t costliest() const;
  // How many of them a rank may read ahead: half of an even share, so that of a short list all
  // ranks have some.
  std::int64_t ahead_of_others() const;
  // Each of them a batch of its own.
  std::vector<ItemBatch> one_by_one() const;
  const RankGroups& groups() const { return groups_; }
  // Whether any rank was asked to stop, as far as this one knows. Thread-safe.
  bool stop_requested() const { return dispatcher_.stop_requested(); }
  // ", 12 made before" where the manifest has so many of them; or "".
  std::string made_before(const std::string& how = "made") const;

  // Collective at its beginning, once or several times in turn: makes batches until none are left
  // or the job is to stop.
  void run(ListJob& job, const std::vector<ItemBatch>& batches);
  // All ranks, once, with or without run(). Waits for the others; rank 0 finishes, prints and
  // writes the report. Returns the exit code: 0, 3 if items failed, 75 if stopped early.
  int end(const ListEnd& last);

  // ---- For jobs, from any thread; in a group the first rank's calls count ----

  // The item's files are there: its line of the manifest (line_of(), files, the job's own members).
  void finished(const nlohmann::ordered_json& line);
  // The item will not be made, which the job reports. `line`: what can be said of the item in spite
  // of that, for lines(); the next start makes it all the same. Throws `e` where it is no item's.
  void failed(std::int64_t item, const Error& e, nlohmann::ordered_json line = {});
  // The item will not be made, and that is no failure of the job, or the item that it is a part of
  // reports it: from the members fault, code and hint of its line.
  void skipped(std::int64_t item, const Error& e);

  // The lines of all finished items. For ListEnd::finish.
  ManifestLines lines() const { return Manifest::gathered(settings_.directory, settings_.stem); }

 private:
  // The next batch's number, for all of the group; -1: there are no more.
  std::int64_t take();
  void make(ListJob& job, const ItemBatch& batch);
  void flush(ListJob& job);
  void count_time(double begin);
  void check_shared();
  void find_missing();
  void check_others(const ManifestLines& before, const std::vector<std::uint8_t>& finished) const;
  void note_failed(const std::string& name, const std::string& why);
  std::string summary(const nlohmann::ordered_json& own) const;
  ListReport gather_report(const std::vector<std::string>& summaries) const;
  JobWork work_of(const ListEnd& last, const ListReport& report) const;
  int conclude(const ListEnd& last, const ListReport& report);
  void print(const ListReport& report) const;
  void write(const ListReport& report, const nlohmann::ordered_json& header) const;

  ListSettings settings_;
  std::vector<ListItem> items_;
  MPI_Comm world_;
  std::shared_ptr<FolderLock> lock_;  // on rank 0
  std::vector<std::int64_t> missing_;
  std::set<std::int64_t> suspects_;
  std::int64_t given_up_ = 0;  // items that are neither finished nor missing
  RankGroups groups_;
  Manifest manifest_;
  Dispatcher dispatcher_;
  std::map<std::string, std::int64_t> batches_;  // items made together: how often
  std::mutex failures_mutex_;
  std::vector<std::string> failures_;  // of this rank; rank 0's begin with the items given up
  std::atomic<std::int64_t> made_ = 0, failed_ = 0, skipped_ = 0;
  double start_ = 0, busy_ = 0, last_end_ = 0;  // of the first run(); as ListReport::ranks
  bool unflushed_ = false;                      // items were made since the last flush()
  std::int64_t items_before_ = 0;               // of earlier runs
  double work_before_ = 0;                      // their costs
  std::unique_ptr<Progress> progress_;
};

}  // namespace weft
