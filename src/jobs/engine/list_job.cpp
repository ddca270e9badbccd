#include "jobs/engine/list_job.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "config/command.h"
#include "core/clock.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/mpi.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int most_deaths = 2;  // the item may be what ends its ranks

// A rank's report to rank 0.
struct Summary {
  RankShare share;
  std::vector<std::string> failures;
  bool stopped = false;
};

std::string to_text(const Summary& s) {
  const Json j = {{"made", s.share.made},         {"failed", s.share.failed},
                  {"skipped", s.share.skipped},   {"busy", s.share.busy},
                  {"last_end", s.share.last_end}, {"requests", s.share.requests},
                  {"batches", s.share.batches},   {"requesting", s.share.requesting},
                  {"own", s.share.own},           {"failures", s.failures},
                  {"stopped", s.stopped}};
  return dump_json(j, -1, ' ', false, Json::error_handler_t::replace);
}

Summary read_summary(const std::string& text) {
  const auto j = parse_json<Json>(text);
  return {{j.at("made"), j.at("failed"), j.at("skipped"), j.at("busy"), j.at("last_end"),
           j.at("requests"), j.at("requesting"),
           j.at("batches").get<std::map<std::string, std::int64_t>>(), j.at("own")},
          j.at("failures").get<std::vector<std::string>>(),
          j.at("stopped")};
}

}  // namespace

void takes_list_job(Command& command) {
  command.takes_deck();
  command.option("--replace", replace_asked,
                 "replace finished results of another request in the output");
}

void check_replaced(const std::string& output, const std::string& key,
                    const std::vector<std::string>& names, bool replace) {
  constexpr std::size_t most = 3;
  if (names.empty()) return;
  std::string first;
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i)
    first += (i > 0 ? ", " : "") + printable(names[i], 100);
  const std::string what = fmt::format(
      "{} of another request (other inputs, settings or weights): {}{}",
      counted(std::ssize(names), "finished result"), first, names.size() > most ? ", ..." : "");
  WEFT_CHECK(replace, Exit::checkpoint,
             fmt::format("choose another {}, or give --replace to replace them", key),
             "output {} holds {}", output, what);
  log::warn("{}: replaces {}", output, what);
}

Json from_first_rank(MPI_Comm world, const std::function<Json()>& make) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  std::vector<std::uint8_t> binary;
  Json made;
  if (rank == 0) {
    made = make();
    Json::to_cbor(made, binary);
  }
  broadcast_sized(binary, world);
  return rank == 0 ? made : Json::from_cbor(binary);
}

void ItemResults::begun(std::int64_t item) {
  const ListItem& i = engine_.items_[item];
  if (engine_.groups_.first) engine_.manifest_.begin(i.name, i.key);
}

void ItemResults::finished(const Json& line) {
  engine_.manifest_.add(line);
  ++engine_.made_;
}

void ItemResults::failed(std::int64_t item, const Error& e) {
  const bool of_item = (e.code() == Exit::data || e.code() == Exit::non_finite ||
                        (e.code() == Exit::usage && engine_.groups_.size == 1)) &&
                       dynamic_cast<const JobError*>(&e) == nullptr;
  // Called from a handler: passes the error on.
  if (!of_item) throw;
  if (!engine_.groups_.first) return;
  const std::string& name = engine_.items_[item].name;
  engine_.manifest_.end(name);
  engine_.note_failed(name, e.what());
  ++engine_.failed_;
  log::warn("{} {} failed: {} ({})", engine_.settings_.item_name, name, e.what(), e.hint());
}

void ItemResults::failed(std::int64_t item, const Error& e, Json line) {
  line["fault"] = e.what();
  engine_.manifest_.add(line);
  failed(item, e);
}

void ItemResults::failed(const std::string& name, const std::string& why) {
  const auto item = std::find_if(engine_.items_.begin(), engine_.items_.end(),
                                 [&](const ListItem& i) { return i.name == name; });
  WEFT_ASSERT(item != engine_.items_.end());
  failed(item - engine_.items_.begin(), Error(Exit::data, why, "is the disk full?"));
}

void ItemResults::skipped(Json line, const Error& e) {
  line["fault"] = e.what();
  line["code"] = static_cast<int>(e.code());
  line["hint"] = e.hint();
  engine_.manifest_.add(line);
  if (engine_.groups_.first) ++engine_.skipped_;
}

std::vector<double> ListReport::busy_shares() const {
  double last = 0;
  for (const RankShare& r : ranks) last = std::max(last, r.last_end);
  std::vector<double> shares;
  for (const RankShare& r : ranks) shares.push_back(last > 0 ? r.busy / last : 0);
  return shares;
}

ListEngine::ListEngine(ListSettings settings, std::vector<ListItem> items, MPI_Comm world)
    : settings_(std::move(settings)),
      items_(std::move(items)),
      world_(world),
      lock_(settings_.lock ? settings_.lock : lock_output(settings_.directory, settings_.key)),
      groups_(world, settings_.group),
      manifest_(settings_.directory, settings_.stem, groups_.rank),
      // Ranks that the launcher ends because another one has died have not died of their items.
      dispatcher_(world, std::make_unique<Requests>(settings_.directory, settings_.stop_margin),
                  [this] { manifest_.end_all(); }) {
  check_shared();
  // Rank 0's keys and costs: files, and their times, may look different from node to node.
  const Json first = from_first_rank(world_, [&] {
    Json all = Json::array();
    for (const ListItem& item : items_) all.push_back({item.key, item.cost});
    return all;
  });
  for (std::size_t i = 0; i < items_.size(); ++i) {
    items_[i].key = first[i][0];
    items_[i].cost = first[i][1];
  }
  find_missing();
  if (settings_.status.empty()) settings_.status = settings_.directory / "status.json";
  progress_ = std::make_unique<Progress>(
      Progress::Job{settings_.status, settings_.command, settings_.item_name, settings_.stem,
                    std::ssize(items_), std::ssize(items_) - std::ssize(missing_) - given_up_,
                    groups_.rank, groups_.count * groups_.size});
}

// Each rank reads what rank 0 has written: a folder of the node's own would lose results.
void ListEngine::check_shared() {
  const fs::path file = settings_.directory / ".ranks";
  std::string token = fmt::format("{} {} {}", host_name(), getpid(), now_seconds());
  broadcast_sized(token, world_);
  std::error_code none;
  if (groups_.rank == 0) {
    fs::create_directories(settings_.directory, none);
    fs::remove_all(file, none);  // a folder of this name is from an older weft
    replace_file(file, token, Exit::data, Durable::no);
  }
  MPI_Barrier(world_);
  std::string found;
  // A network file system may show it a little later.
  for (int tries = 0; tries < 50 && found != token; ++tries) {
    if (tries > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::getline(std::ifstream(file), found);
  }
  WEFT_CHECK(found == token, Exit::data,
             settings_.key + " must be in a directory that all ranks share",
             "rank {} on {} cannot read {}, which rank 0 has written", groups_.rank, host_name(),
             file.string());
  MPI_Barrier(world_);
  if (groups_.rank == 0) fs::remove(file, none);
}

// Rank 0 gathers the lines; then the ranks share the reading of the items' files, to check that
// they are whole.
void ListEngine::find_missing() {
  if (groups_.rank == 0) {
    std::set<std::string> names;
    for (const ListItem& item : items_) names.insert(item.name);
    remove_remains(settings_.directory, names);
    Manifest::gather(settings_.directory, settings_.stem);
  }
  MPI_Barrier(world_);
  std::vector<std::uint8_t> finished(items_.size(), 0);
  const ManifestLines before = lines();
  const auto ranks = static_cast<std::size_t>(groups_.count * groups_.size);
  // Parts come last: those of a finished whole are not looked at.
  for (const bool parts : {false, true}) {
    for (auto i = static_cast<std::size_t>(groups_.rank); i < items_.size(); i += ranks) {
      const ListItem& item = items_[i];
      if ((item.whole >= 0) != parts) continue;
      if ((parts && finished[item.whole] != 0) ||
          is_finished(before, item.name, item.key, settings_.directory))
        finished[i] = 1;
    }
    MPI_Allreduce(MPI_IN_PLACE, finished.data(), static_cast<int>(finished.size()), MPI_UINT8_T,
                  MPI_MAX, world_);
  }
  if (groups_.rank == 0) check_others(before, finished);
  std::vector<std::uint8_t> deaths(items_.size(), 0);
  for (std::size_t i = 0; i < items_.size(); ++i)
    deaths[i] = static_cast<std::uint8_t>(deaths_of(before, items_[i].name, items_[i].key));
  // Rank 0's: a file may look different from node to node for a while, and all must number alike.
  MPI_Bcast(deaths.data(), static_cast<int>(deaths.size()), MPI_UINT8_T, 0, world_);
  std::vector<std::int64_t> suspects;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (finished[i] != 0) continue;
    if (deaths[i] < most_deaths) {
      (deaths[i] > 0 ? suspects : missing_).push_back(static_cast<std::int64_t>(i));
      continue;
    }
    ++given_up_;
    if (groups_.rank == 0)
      note_failed(
          items_[i].name,
          fmt::format("gave up after {} ranks died while making it; to try again, remove its "
                      "line from {}",
                      most_deaths, settings_.stem + ".jsonl"));
  }
  const auto cost = [&](std::int64_t i) { return items_[i].cost; };
  // Costliest first, so that all ranks end together; stable, so that all ranks agree.
  std::stable_sort(missing_.begin(), missing_.end(),
                   [&](std::int64_t a, std::int64_t b) { return cost(a) > cost(b); });
  // Spread out, so that the next death finds only one of them in hand.
  for (std::size_t i = 0; i < suspects.size(); ++i)
    missing_.insert(
        missing_.begin() + static_cast<std::ptrdiff_t>(std::min(i * (ranks + 1), missing_.size())),
        suspects[i]);
  suspects_ = {suspects.begin(), suspects.end()};
}

// What the folder holds of other requests: results that this one replaces, and those that it does
// not name.
void ListEngine::check_others(const ManifestLines& before,
                              const std::vector<std::uint8_t>& finished) const {
  std::set<std::string_view> own;
  std::vector<std::string> replaced;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const ListItem& item = items_[i];
    own.insert(item.name);
    if (finished[i] != 0 || item.whole >= 0) continue;
    const auto line = before.find(item.name);
    if (line != before.end() && line->second.key != item.key &&
        has_result(line->second, settings_.directory))
      replaced.push_back(item.name);
  }
  check_replaced(settings_.directory.string(), settings_.key, replaced, settings_.replace);
  const auto left = std::ranges::count_if(before, [&](const auto& line) {
    return !own.contains(line.first) && has_result(line.second, settings_.directory);
  });
  if (left > 0)
    log::info("kept      {} in {} that this list does not name: not in its report and tables",
              counted(left, "finished result"), settings_.directory.string());
}

bool ListEngine::is_suspect(const ItemBatch& batch) const {
  return std::ranges::any_of(batch, [&](std::int64_t item) { return suspects_.contains(item); });
}

Json ListEngine::line_of(std::int64_t item) const {
  const ListItem& i = items_[item];
  return {{"name", i.name}, {"key", i.key}, {"rank", groups_.rank}};
}

std::string ListEngine::made_before(const std::string& how) const {
  const std::size_t before = items_.size() - missing_.size();
  return before > 0 ? fmt::format(", {} {} before", before, how) : "";
}

std::int64_t ListEngine::costliest() const {
  return *std::ranges::max_element(missing_, {},
                                   [&](std::int64_t item) { return items_[item].cost; });
}

std::int64_t ListEngine::ahead_of_others() const {
  return std::max<std::int64_t>(2, std::ssize(missing_) / (2 * groups_.count));
}

std::vector<ItemBatch> ListEngine::one_by_one() const {
  std::vector<ItemBatch> batches;
  for (const std::int64_t item : missing_) batches.push_back({item});
  return batches;
}

void ListEngine::note_failed(const std::string& name, const std::string& why) {
  const std::lock_guard lock(failures_mutex_);
  failures_.push_back(name + ": " + why);
}

ListEngine::Taken ListEngine::take() {
  Taken batch;
  std::error_code none;
  if (!fs::exists(settings_.directory, none))
    throw JobError(Exit::data,
                   fmt::format("{} is gone: the folder was removed or renamed while the job ran",
                               settings_.directory.string()),
                   "the same command makes what is missing", __FILE__, __LINE__);
  if (groups_.first) batch.number = dispatcher_.next();
  batch.number = groups_.share(batch.number);
  if (batch.number >= 0) batch.items = batches_[batch.number];
  return batch;
}

void ListEngine::make(ListJob& job, const Taken& batch) {
  const double begin = now_seconds();
  try {
    job.make(batch.items, results_);
    if (groups_.first) ++mine_.batches[std::to_string(batch.items.size())];
  } catch (const Error& e) {
    for (const std::int64_t item : batch.items) results_.failed(item, e);
  }
  count_time(begin);
  unflushed_ = true;
  dispatcher_.took(now_seconds() - begin);
  tell_progress(batch);
}

void ListEngine::count_time(double begin) {
  const double end = now_seconds();
  mine_.last_end = end - start_;
  mine_.busy += end - begin;
}

// Batches are handed out in order.
void ListEngine::tell_progress(const Taken& batch) {
  if (groups_.rank != 0) return;
  const auto& [items, work] = work_[first_work_ + static_cast<std::size_t>(batch.number)];
  progress_->advance(std::ssize(items_) - std::ssize(missing_) - given_up_ + items, work,
                     work_.back().second);
}

void ListEngine::run(ListJob& job, std::vector<ItemBatch> batches) {
  batches_ = std::move(batches);
  first_work_ = work_.size();
  for (const ItemBatch& batch : batches_) {
    auto [items, cost] = work_.empty() ? std::pair<std::int64_t, double>() : work_.back();
    for (const std::int64_t item : batch) cost += items_[item].cost;
    work_.emplace_back(items + std::ssize(batch), cost);
  }
  // A job without costs: all items are alike.
  if (!work_.empty() && !(work_.back().second > 0))
    for (auto& [items, cost] : work_) cost = static_cast<double>(items);
  if (start_ == 0) start_ = now_seconds();
  dispatcher_.open(std::ssize(batches_), groups_.count);
  const auto flush = [&] {
    const double begin = now_seconds();
    job.flush(results_);
    if (std::exchange(unflushed_, false)) count_time(begin);
  };
  // The batch is in hand from now on. A suspect is alone, so that the next death tells.
  const auto begin = [&](const Taken& batch) {
    if (is_suspect(batch.items)) flush();
    if (settings_.batch_is_begun)
      for (const std::int64_t item : batch.items) results_.begun(item);
    if (!batch.items.empty()) job.prepare(batch.items);
  };
  const bool ahead = settings_.ahead && groups_.size == 1;
  Taken now = take();
  begin(now);
  while (now.number >= 0) {
    Taken next;
    bool begun = false;
    if (ahead) {
      // Taken before the current one is made: prepare() reads its input meanwhile.
      next = take();
      begun = !is_suspect(now.items) && !is_suspect(next.items);
      if (begun) begin(next);
    }
    make(job, now);
    if (is_suspect(now.items)) flush();
    if (ahead && stop_requested()) break;
    if (!ahead) next = take();
    if (!begun) begin(next);
    now = std::move(next);
  }
  flush();
}

void ListEngine::print(const ListReport& report) const {
  log::info("{:<9} {} made, {} finished before, {} failed, of {}", settings_.item_name + "s",
            report.made(), report.finished_before, report.failures.size(), report.wanted);
  for (const std::string& failure : report.failures) log::info("failed    {}", failure);
  log::sum_up_warnings();
  for (const std::string& warning : log::warnings()) log::info("warned    {}", warning);
}

void ListEngine::write(const ListReport& report, const Json& header) const {
  Json j = {{"wanted", report.wanted},
            {"made", report.made()},
            {"finished_before", report.finished_before},
            {"failures", report.failures}};
  j.update(header);
  const std::vector<double> busy = report.busy_shares();
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const RankShare& s = report.ranks[r];
    Json rank = {{settings_.item_name + "s", s.made},
                 {"failed", s.failed},
                 {"busy_share", busy[r]},
                 {"busy", s.busy},
                 {"last_end", s.last_end},
                 {"requests", s.requests},
                 {"seconds_requesting", s.requesting}};
    rank.update(s.own);
    rank["batches"] = s.batches;
    j["ranks"].push_back(std::move(rank));
  }
  try {
    replace_file(settings_.directory / settings_.report,
                 dump_json(j, 2, ' ', false, Json::error_handler_t::replace) + "\n", Exit::data,
                 Durable::no);
  } catch (const Error& e) {
    log::warn("{}", e.what());  // the results are there without it
  }
}

// The ranks' summaries, in their order.
ListReport ListEngine::gather_report(const std::vector<std::string>& summaries) const {
  ListReport report;
  report.wanted = std::ssize(items_);
  report.finished_before = report.wanted - std::ssize(missing_) - given_up_;
  for (const std::string& text : summaries) {
    Summary s = read_summary(text);
    report.ranks.push_back(std::move(s.share));
    std::ranges::move(s.failures, std::back_inserter(report.failures));
    report.stopped = report.stopped || s.stopped;
  }
  return report;
}

// On rank 0: tells what was made, and the exit code of the job.
int ListEngine::conclude(const ListEnd& last, const ListReport& report) {
  // 1. What the ranks report, for people and in files.
  Manifest::gather(settings_.directory, settings_.stem);
  if (last.print) last.print(report);
  print(report);
  // If everything was done before, the report of the job that did it stays.
  if (report.made() > 0 || !report.failures.empty()) write(report, last.header);
  const std::int64_t done = report.finished_before + report.made();
  const std::int64_t left = report.wanted - done - report.skipped() - std::ssize(report.failures);
  WEFT_CHECK(left == 0 || report.stopped, Exit::internal,
             "this is a bug in weft, please report it with the log",
             "{} were neither made nor failed", counted(left, settings_.item_name));

  // 2. Stopped with items left: they come before failures, so that the job is queued again.
  const auto stopped = [&] {
    log::info("stopped on request; run the same command to resume");
    progress_->end(static_cast<int>(Exit::stopped), done);
    return static_cast<int>(Exit::stopped);
  };
  if (report.stopped && left > 0) return stopped();

  // 3. Items failed.
  if (!report.failures.empty()) {
    if (last.finish && last.finish_with_failures) last.finish(report);
    Error e(Exit::data,
            (last.failed.empty() ? report.failed_of(settings_.item_name) : last.failed) + " failed",
            "see the lines above; the same command makes only what is missing");
    log::report(e);
    progress_->end(static_cast<int>(Exit::data), done, e.what());
    return static_cast<int>(Exit::data);
  }

  // 4. All are finished. What finish() does may take long: after a stop it is left to the next
  // start.
  if (report.stopped && last.finish) return stopped();
  if (last.finish) last.finish(report);
  progress_->end(0, done);
  return 0;
}

int ListEngine::end(const ListEnd& last) {
  progress_->hide();
  mine_.made = made_;
  mine_.failed = failed_;
  mine_.skipped = skipped_;
  mine_.requests = dispatcher_.requests();
  mine_.requesting = dispatcher_.request_seconds();
  mine_.own = last.share;
  manifest_.close();
  const auto summaries = dispatcher_.gather(to_text({mine_, failures_, stop_requested()}));
  return dispatcher_.conclude(groups_.rank == 0 ? conclude(last, gather_report(summaries)) : 0);
}

}  // namespace weft
