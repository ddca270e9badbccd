#include "jobs/engine/list_job.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
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
#include "tensor/device.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

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

void ListEngine::finished(const Json& line) {
  manifest_.add(line);
  ++made_;
}

void ListEngine::failed(std::int64_t item, const Error& e, Json line) {
  // In a group the others may be in an exchange, and wait for ever.
  if (!e.of_item() || (e.code() == Exit::usage && groups_.size > 1)) throw e;
  if (!groups_.first) return;
  const std::string& name = items_[item].name;
  if (line.is_null()) {
    manifest_.end(name);
  } else {
    line["fault"] = e.what();
    manifest_.add(line);
  }
  note_failed(name, e.what());
  ++failed_;
  log::warn("{} {} failed: {} ({})", settings_.item_name, name, e.what(), e.hint());
}

void ListEngine::skipped(std::int64_t item, const Error& e) {
  if (!groups_.first) return;
  Json line = line_of(item);
  line.update({{"fault", e.what()}, {"code", static_cast<int>(e.code())}, {"hint", e.hint()}});
  manifest_.add(line);
  ++skipped_;
}

ListEngine::ListEngine(ListSettings settings, std::vector<ListItem> items, MPI_Comm world)
    : settings_(std::move(settings)),
      items_(std::move(items)),
      world_(world),
      lock_(settings_.lock ? settings_.lock : lock_output(settings_.directory, settings_.key)),
      groups_(world, settings_.group),
      manifest_(settings_.directory, settings_.stem, groups_.rank),
      // Ranks that the launcher ends because another one has died have not died of their items.
      dispatcher_(world,
                  std::make_unique<Requests>(settings_.directory, settings_.stop_margin,
                                             settings_.max_hours),
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
                    groups_.rank, groups_.count * groups_.size, settings_.cite});
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
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const auto line = before.find(items_[i].name);
    if (line != before.end() && line->second.key == items_[i].key)
      deaths[i] = static_cast<std::uint8_t>(line->second.died);
  }
  // Rank 0's: a file may look different from node to node for a while, and all must number alike.
  broadcast_bytes(deaths.data(), deaths.size(), world_);
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const auto item = static_cast<std::int64_t>(i);
    if (finished[i] != 0) continue;
    if (deaths[i] > 0 && deaths[i] < most_deaths) suspects_.insert(item);
    if (deaths[i] < most_deaths) {
      missing_.push_back(item);
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
  // Costliest first, so that all ranks end together; stable, so that all ranks agree.
  std::ranges::stable_sort(missing_, std::greater(),
                           [&](std::int64_t item) { return items_[item].cost; });
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

std::int64_t ListEngine::take() {
  std::error_code none;
  if (!fs::exists(settings_.directory, none))
    throw Error(Exit::data,
                fmt::format("{} is gone: the folder was removed or renamed while the job ran",
                            settings_.directory.string()),
                "the same command makes what is missing", __FILE__, __LINE__)
        .for_job();
  return groups_.share(groups_.first ? dispatcher_.next() : -1);
}

void ListEngine::make(ListJob& job, const ItemBatch& batch) {
  // In hand from now on.
  for (const std::int64_t item : batch)
    if (groups_.first) manifest_.begin(items_[item].name, items_[item].key);
  const double begin = now_seconds();
  try {
    job.make(batch);
    if (groups_.first) ++batches_[std::to_string(batch.size())];
  } catch (const Error& e) {
    for (const std::int64_t item : batch) failed(item, e);
  }
  count_time(begin);
  unflushed_ = true;
  dispatcher_.took(now_seconds() - begin);
}

void ListEngine::flush(ListJob& job) {
  const double begin = now_seconds();
  job.flush();
  if (std::exchange(unflushed_, false)) count_time(begin);
}

void ListEngine::count_time(double begin) {
  const double end = now_seconds();
  last_end_ = end - start_;
  busy_ += end - begin;
}

void ListEngine::run(ListJob& job, const std::vector<ItemBatch>& wanted) {
  // What a rank has died with is made alone, by one rank, one after the other: if that rank dies,
  // too, it is clear of what.
  std::vector<ItemBatch> batches, others;
  for (const ItemBatch& batch : wanted) {
    ItemBatch left;
    for (const std::int64_t item : batch)
      if (suspects_.contains(item))
        batches.push_back({item});
      else
        left.push_back(item);
    if (!left.empty()) others.push_back(std::move(left));
  }
  const std::int64_t suspects = std::ssize(batches);
  batches.insert(batches.end(), others.begin(), others.end());
  std::vector<double> costs;
  for (const ItemBatch& batch : batches) {
    costs.push_back(0);
    for (const std::int64_t item : batch) costs.back() += items_[item].cost;
  }
  // A job without costs: all items are alike.
  if (std::ranges::all_of(costs, [](double c) { return c <= 0; }))
    std::ranges::transform(batches, costs.begin(),
                           [](const ItemBatch& b) { return static_cast<double>(b.size()); });
  std::vector<double> work(costs.size());
  std::partial_sum(costs.begin(), costs.end(), work.begin());
  if (start_ == 0) start_ = now_seconds();
  begin_part(settings_.item_name + "s");
  dispatcher_.open(costs, groups_.count, suspects);
  std::int64_t at = 0;  // batches handed out before the current one
  for (std::int64_t number; (number = take()) >= 0;) {
    const ItemBatch& batch = batches[number];
    make(job, batch);
    if (number < suspects) flush(job);
    // Batches are handed out in order: those before this one are done, or nearly.
    for (; at <= number; ++at) items_before_ += std::ssize(batches[at]);
    if (groups_.rank == 0)
      progress_->advance(std::ssize(items_) - std::ssize(missing_) - given_up_ + items_before_,
                         work_before_ + work[number], work_before_ + work.back());
  }
  flush(job);
  for (; at < std::ssize(batches); ++at) items_before_ += std::ssize(batches[at]);
  if (!work.empty()) work_before_ += work.back();
}

void ListEngine::print(const ListReport& report) const {
  log::info("{:<9} {} made, {} finished before, {} failed, of {}", settings_.item_name + "s",
            report.made, report.finished_before, report.failures.size(), report.wanted);
  for (const std::string& failure : report.failures) log::info("failed    {}", failure);
  log::sum_up_warnings();
  for (const std::string& warning : log::warnings()) log::info("warned    {}", warning);
}

void ListEngine::write(const ListReport& report, const Json& header) const {
  Json j = {{"wanted", report.wanted},
            {"made", report.made},
            {"finished_before", report.finished_before},
            {"failures", report.failures}};
  j.update(header);
  j["ranks"] = report.ranks;
  try {
    replace_file(settings_.directory / settings_.report,
                 dump_json(j, 2, ' ', false, Json::error_handler_t::replace) + "\n", Exit::data,
                 Durable::no);
  } catch (const Error& e) {
    log::warn("{}", e.what());  // the results are there without it
  }
}

// This rank's work, for gather_report() on rank 0.
std::string ListEngine::summary(const Json& own) const {
  Json share = {{"host", host_name()},
                {settings_.item_name + "s", made_.load()},
                {"failed", failed_.load()},
                {"skipped", skipped_.load()},
                {"busy", busy_},
                {"last_end", last_end_},
                {"requests", dispatcher_.requests()},
                {"seconds_requesting", dispatcher_.request_seconds()}};
  share.update(own);
  share["batches"] = batches_;
  return dump_json(Json{{"share", share}, {"failures", failures_}, {"stopped", stop_requested()}},
                   -1, ' ', false, Json::error_handler_t::replace);
}

ListReport ListEngine::gather_report(const std::vector<std::string>& summaries) const {
  ListReport report;
  report.wanted = std::ssize(items_);
  report.finished_before = report.wanted - std::ssize(missing_) - given_up_;
  double last = 0;
  for (const std::string& text : summaries) {
    const auto j = parse_json<Json>(text);
    const Json& share = report.ranks.emplace_back(j.at("share"));
    last = std::max(last, share.at("last_end").get<double>());
    report.made += share.at(settings_.item_name + "s").get<std::int64_t>();
    report.skipped += share.at("skipped").get<std::int64_t>();
    for (const Json& failure : j.at("failures")) report.failures.push_back(failure);
    report.stopped = report.stopped || j.at("stopped").get<bool>();
  }
  for (Json& share : report.ranks)
    share["busy_share"] = last > 0 ? share.at("busy").get<double>() / last : 0;
  return report;
}

// What the ranks made until the last one was done, and where their time went.
JobWork ListEngine::work_of(const ListEnd& last, const ListReport& report) const {
  JobWork work;
  work.unit = last.unit.empty() ? settings_.item_name : last.unit;
  const std::string units = last.unit.empty() ? settings_.item_name + "s" : last.units;
  work.on_gpu = on_cuda();
  work.threads = threads_of_rank();
  for (const Json& share : report.ranks) {
    work.items += share.value(units, 0.0);
    work.seconds = std::max(work.seconds, share.at("last_end").get<double>());
    work.hosts.push_back(share.at("host"));
  }
  const auto add = [&](const std::string& name, const auto& seconds_of) {
    auto& seconds = work.parts.emplace_back(name, std::vector<double>()).second;
    std::ranges::transform(report.ranks, std::back_inserter(seconds), seconds_of);
  };
  for (const std::string& stage : last.stages)
    if (std::ranges::any_of(report.ranks, [&](const Json& share) { return share.contains(stage); }))
      add(stage, [&](const Json& share) { return share.value(stage, 0.0); });
  add("idle", [&](const Json& share) { return work.seconds - share.at("busy").get<double>(); });
  return work;
}

// On rank 0: tells what was made, and the exit code of the job.
int ListEngine::conclude(const ListEnd& last, const ListReport& report) {
  // 1. What the ranks report, for people and in files.
  Manifest::gather(settings_.directory, settings_.stem);
  const ListSummary said = last.summarise ? last.summarise(report) : ListSummary();
  print(report);
  // If everything was done before, the report of the job that did it stays.
  if (report.made > 0 || !report.failures.empty()) {
    write(report, said.header);
    progress_->set_work(work_of(last, report));
  }
  const std::int64_t done = report.finished_before + report.made;
  const std::int64_t left = report.wanted - done - report.skipped - std::ssize(report.failures);
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
            (said.failed.empty() ? fmt::format("{} of {}", report.failures.size(),
                                               counted(report.wanted, settings_.item_name))
                                 : said.failed) +
                " failed",
            "see the lines above; the same command makes only what is missing");
    log::report(e);
    progress_->end(static_cast<int>(Exit::data), done, e.what());
    return static_cast<int>(Exit::data);
  }

  // 4. All are finished. What finish() does may take long: after a stop it is left to the next
  // start.
  if (report.stopped && last.finish) return stopped();
  if (last.finish) last.finish(report);
  progress_->end(0, done + report.skipped);
  return 0;
}

int ListEngine::end(const ListEnd& last) {
  progress_->hide();
  begin_part("end");
  manifest_.close();
  const auto summaries = dispatcher_.gather(summary(last.share));
  return dispatcher_.conclude(groups_.rank == 0 ? conclude(last, gather_report(summaries)) : 0);
}

}  // namespace weft
