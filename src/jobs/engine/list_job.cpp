#include "jobs/engine/list_job.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <tuple>

#include "core/clock.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "parallel/broadcast.h"
#include "parallel/end_job.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

// A rank failed during collective work: MPI calls of the others would wait for it.
void end_for_failed(const Members& members, int rank, const std::string& noun, MPI_Comm world) {
  log::error("ERROR: rank {} on {} failed before the {}s were begun", rank,
             members.state(rank).host, noun);
  log::error(
      "HINT: did it run out of memory? the log of its node tells; the same command goes on where "
      "this one was");
  end_job(world, Exit::hang);
}

// A rank of this group failed: this rank ends too, and other groups make the items that were in
// hand.
void leave_group(const Members& members, int rank) {
  log::warn("rank {} on {} failed: this rank, of the same group, ends too", rank,
            members.state(rank).host);
  std::fflush(nullptr);
  // By a signal, as the failed rank did: an mpirun that lets the others live treats an exit without
  // MPI_Finalize as a worse failure.
  kill(getpid(), SIGKILL);
}

// Ends this rank without MPI_Finalize, which would wait for the failed ranks. The coordinator ends
// the job with the exit code.
[[noreturn]] void leave_job(int code, bool coordinator, MPI_Comm world) {
  std::fflush(nullptr);
  if (coordinator && code != 0) end_job(world, static_cast<Exit>(code));
  _exit(0);
}

// Whether the launcher passes on the exit codes of ranks that end by themselves. An mpirun that
// lets the others live only passes on that of MPI_Abort.
bool exit_codes_pass() {
  const char* set = std::getenv("OMPI_MCA_orte_abort_on_non_zero_status");
  return set == nullptr || (std::string_view(set) != "0" && std::string_view(set) != "false");
}

Json summary_of(const RankShare& s) {
  return {{"made", s.made}, {"failed", s.failed},     {"skipped", s.skipped},
          {"busy", s.busy}, {"last_end", s.last_end}, {"batches", s.batches},
          {"own", s.own}};
}

RankShare read_summary(const std::string& text) {
  const auto j = parse_json<Json>(text);
  return {j.at("made"),     j.at("failed"),
          j.at("skipped"),  j.at("busy"),
          j.at("last_end"), j.at("batches").get<std::map<std::string, std::int64_t>>(),
          j.at("own")};
}

// Any rank may be the coordinator, and log::info is rank 0's.
template <class... A>
void say(fmt::format_string<A...> f, A&&... a) {
  log::write_info(fmt::format(f, std::forward<A>(a)...));
}

}  // namespace

void ItemResults::finished(const Json& line) {
  engine_.manifest_->add(line);
  ++engine_.made_;
}

void ItemResults::failed(std::int64_t item, const Error& e) {
  const bool of_item = (e.code() == Exit::data || e.code() == Exit::non_finite ||
                        (e.code() == Exit::usage && engine_.groups_.size == 1)) &&
                       dynamic_cast<const JobError*>(&e) == nullptr;
  // Called from a handler: passes the error on.
  if (!of_item) throw;
  if (!engine_.groups_.first) return;
  const std::string& name = engine_.items_[static_cast<std::size_t>(item)].name;
  engine_.members_.note_failed(item, fmt::format("{}: {}", name, e.what()));
  ++engine_.failed_;
  log::warn("{} {} failed: {} ({})", engine_.settings_.noun, name, e.what(), e.hint());
}

void ItemResults::failed(std::int64_t item, const Error& e, Json line) {
  line["fault"] = e.what();
  engine_.manifest_->add(line);
  failed(item, e);
}

void ItemResults::failed(const std::string& name, const std::string& why) {
  const auto item = std::find_if(engine_.items_.begin(), engine_.items_.end(),
                                 [&](const ListItem& i) { return i.name == name; });
  WEFT_ASSERT(item != engine_.items_.end());
  failed(item - engine_.items_.begin(), Error(Exit::data, why, "is the disk full?"));
}

void ItemResults::skipped(std::int64_t item) {
  if (!engine_.groups_.first) return;
  engine_.members_.note_resolved(item);
  ++engine_.skipped_;
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
      members_(settings_.directory / ".ranks", settings_.key, world),
      stop_(members_, settings_.directory, settings_.stop_margin) {
  members_.watch(members_.neighbour(),
                 [this](int rank) { end_for_failed(members_, rank, settings_.noun, world_); });
  // Rank 0's keys and costs: files, and their times, may look different from node to node.
  std::string keys;
  std::vector<double> costs;
  for (const ListItem& item : items_) {
    keys += item.key + "\n";
    costs.push_back(item.cost);
  }
  broadcast_sized(keys, world_);
  MPI_Bcast(costs.data(), static_cast<int>(costs.size()), MPI_DOUBLE, 0, world_);
  for (std::size_t i = 0, at = 0; i < items_.size(); ++i) {
    const std::size_t end = keys.find('\n', at);
    items_[i].key = keys.substr(at, end - at);
    items_[i].cost = costs[i];
    at = end + 1;
  }
  find_missing();
  if (settings_.status.empty()) settings_.status = settings_.directory / "status.json";
  progress_ = std::make_unique<Progress>(Progress::Job{
      settings_.status, settings_.command, settings_.noun, settings_.stem, std::ssize(items_),
      std::ssize(items_) - std::ssize(missing_), members_.rank(), members_.ranks()});
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
  const auto ranks = static_cast<std::size_t>(members_.ranks());
  // Parts come last: those of a finished whole are not looked at.
  for (const bool parts : {false, true}) {
    for (auto i = static_cast<std::size_t>(groups_.rank); i < items_.size(); i += ranks) {
      const ListItem& item = items_[i];
      if ((item.whole >= 0) != parts) continue;
      if ((parts && finished[static_cast<std::size_t>(item.whole)] != 0) ||
          is_finished(before, item.name, item.key, settings_.directory))
        finished[i] = 1;
    }
    MPI_Allreduce(MPI_IN_PLACE, finished.data(), static_cast<int>(finished.size()), MPI_UINT8_T,
                  MPI_MAX, world_);
  }
  for (std::size_t i = 0; i < items_.size(); ++i)
    if (finished[i] == 0) missing_.push_back(static_cast<std::int64_t>(i));
  const auto cost = [&](std::int64_t i) { return items_[static_cast<std::size_t>(i)].cost; };
  if (settings_.shared)
    // Costliest first, so that all ranks end together; stable, so that all ranks agree.
    std::stable_sort(missing_.begin(), missing_.end(),
                     [&](std::int64_t a, std::int64_t b) { return cost(a) > cost(b); });
}

std::vector<ItemBatch> ListEngine::one_by_one() const {
  std::vector<ItemBatch> batches;
  for (const std::int64_t item : missing_) batches.push_back({item});
  return batches;
}

const ListEngine::Past& ListEngine::past_of(int failed_rank) {
  const auto [past, is_new] = pasts_.try_emplace(failed_rank);
  if (is_new)
    past->second = {Manifest::of_rank(settings_.directory, settings_.stem, failed_rank),
                    members_.state(failed_rank).resolved};
  return past->second;
}

bool ListEngine::finished_by(int failed_rank, std::int64_t item) {
  const ListItem& i = items_[static_cast<std::size_t>(item)];
  return is_finished(past_of(failed_rank).lines, i.name, i.key, settings_.directory);
}

bool ListEngine::left_by(int failed_rank, std::int64_t item) {
  return !past_of(failed_rank).resolved.contains(item) && !finished_by(failed_rank, item);
}

// The items of a place that no failed rank has made or failed at.
ItemBatch ListEngine::left_of(std::int64_t place) {
  ItemBatch items = batches_[static_cast<std::size_t>(place)];
  for (int rank = 0; rank < members_.ranks(); ++rank)
    if (members_.failed(rank))
      std::erase_if(items, [&](std::int64_t item) { return !left_by(rank, item); });
  return items;
}

ListEngine::Claimed ListEngine::take(WorkQueue& queue, bool leftover) {
  Claimed claimed{leftover ? queue.leftover() : queue.next(), {}};
  if (claimed.place < 0) return claimed;
  const ItemBatch& whole = batches_[static_cast<std::size_t>(claimed.place)];
  if (!leftover) {
    claimed.items = whole;
    return claimed;
  }
  if (groups_.first) {
    claimed.items = left_of(claimed.place);
    for (const std::int64_t item : whole)
      if (std::find(claimed.items.begin(), claimed.items.end(), item) == claimed.items.end())
        members_.note_resolved(item);
    for (const std::int64_t item : claimed.items)
      if (queue.retried())
        log::warn("{}: retrying, its rank failed", items_[static_cast<std::size_t>(item)].name);
  }
  groups_.share(claimed.items);
  return claimed;
}

void ListEngine::make(ListJob& job, WorkQueue& queue, const Claimed& batch) {
  const double begin = now_seconds();
  try {
    job.make(batch.items, results_);
    if (groups_.first) ++mine_.batches[std::to_string(batch.items.size())];
  } catch (const Error& e) {
    for (const std::int64_t item : batch.items) results_.failed(item, e);
  }
  const double end = now_seconds();
  mine_.last_end = end - start_;
  mine_.busy += end - begin;
  stop_.took(end - begin);
  queue.took(end - begin);
  tell_progress(batch);
}

// Places are claimed in order; where a list is not shared, all groups count as far as this one.
void ListEngine::tell_progress(const Claimed& batch) {
  if (groups_.rank != 0) return;
  std::int64_t items = 0;
  double work = 0;
  if (settings_.shared) {
    std::tie(items, work) = work_[static_cast<std::size_t>(batch.place)];
  } else {
    own_items_ += std::ssize(batch.items) * groups_.count;
    items = std::min(own_items_, std::ssize(missing_));
    work = work_.back().second * static_cast<double>(items) / static_cast<double>(missing_.size());
  }
  progress_->advance(std::ssize(items_) - std::ssize(missing_) + items, work, work_.back().second);
}

void ListEngine::run(ListJob& job, std::vector<ItemBatch> batches) {
  batches_ = std::move(batches);
  for (const ItemBatch& batch : batches_) {
    auto [items, cost] = work_.empty() ? std::pair<std::int64_t, double>() : work_.back();
    for (const std::int64_t item : batch) cost += items_[static_cast<std::size_t>(item)].cost;
    work_.emplace_back(items + std::ssize(batch), cost);
  }
  // A job without costs: all items are alike.
  if (!work_.empty() && !(work_.back().second > 0))
    for (auto& [items, cost] : work_) cost = static_cast<double>(items);
  manifest_ = std::make_unique<Manifest>(settings_.directory, settings_.stem, groups_.rank);
  WorkQueue queue(
      members_, &stop_, groups_, std::ssize(batches_), settings_.shared,
      [this](int rank, std::int64_t place) {
        const ItemBatch& items = batches_[static_cast<std::size_t>(place)];
        return std::none_of(items.begin(), items.end(),
                            [&](std::int64_t item) { return left_by(rank, item); });
      },
      world_);
  // From here on each group works by itself, so it only watches its own ranks.
  members_.watch(groups_.mates(), [this](int rank) { leave_group(members_, rank); });
  start_ = now_seconds();
  const bool ahead = settings_.ahead && groups_.size == 1;
  const auto claim = [&](bool leftover) {
    Claimed claimed = take(queue, leftover);
    if (!claimed.items.empty()) job.prepare(claimed.items);
    return claimed;
  };
  for (Claimed now = claim(false);;) {
    if (now.place < 0) {
      job.flush(results_);
      now = claim(true);
      if (now.place < 0) break;
    }
    Claimed next;
    // Claimed before the current batch is made: prepare() reads its input meanwhile.
    if (ahead) next = claim(false);
    if (!now.items.empty()) make(job, queue, now);
    now = ahead ? std::move(next) : claim(false);
    if (ahead && now.place >= 0 && stop_.requested()) {
      queue.drop(now.place);
      now = {};
    }
  }
  if (queue.claims() > 0)
    log::info("queue     {} claims of rank 0, {:.2g} s each, {:.2g} % of its time", queue.claims(),
              queue.claim_seconds() / static_cast<double>(queue.claims()),
              100 * queue.claim_seconds() / (now_seconds() - start_));
  manifest_.reset();
}

ListReport ListEngine::read_report() {
  ListReport report;
  report.wanted = std::ssize(items_);
  report.finished_before = report.wanted - std::ssize(missing_);
  for (int r = 0; r < members_.ranks(); ++r) {
    const MemberState state = members_.state(r);
    RankShare& share = report.ranks.emplace_back();
    report.stopped = report.stopped || state.stopped;
    report.failures.insert(report.failures.end(), state.failures.begin(), state.failures.end());
    // By the summary, not by liveness, so that all ranks judge alike: a rank with a summary may
    // have ended by now.
    if (!state.summary.empty()) {
      share = read_summary(state.summary);
      continue;
    }
    FailedRank failed{r, state.host, {}};
    share.failed = std::ssize(state.failures);
    for (const auto& number : mine_.own.items()) share.own[number.key()] = 0;
    for (const std::int64_t place : state.taken)
      for (const std::int64_t item : batches_.at(static_cast<std::size_t>(place)))
        if (finished_by(r, item))
          ++share.made;
        else if (state.begun.contains(place) && !state.resolved.contains(item))
          failed.in_hand.push_back(items_[static_cast<std::size_t>(item)].name);
    report.failed_ranks.push_back(std::move(failed));
  }
  return report;
}

// Adds as failures the items that no rank has made or failed at, though no stop was requested: left
// by a failed rank too late to be made again, or given up.
void ListEngine::add_unmade(ListReport& report) {
  if (report.stopped) return;
  const ManifestLines finished = lines();
  std::set<std::int64_t> resolved;
  for (int r = 0; r < members_.ranks(); ++r) resolved.merge(members_.state(r).resolved);
  for (const std::int64_t number : missing_) {
    const ListItem& item = items_[static_cast<std::size_t>(number)];
    const auto line = finished.find(item.name);
    // A line with a fault is of an earlier start: this one was to make the item again.
    const bool made = line != finished.end() && line->second.key == item.key &&
                      !line->second.parsed().contains("fault");
    if (made || resolved.contains(number)) continue;
    const auto had = std::count_if(
        report.failed_ranks.begin(), report.failed_ranks.end(), [&](const FailedRank& f) {
          return std::find(f.in_hand.begin(), f.in_hand.end(), item.name) != f.in_hand.end();
        });
    report.failures.push_back(item.name + ": " + counted(had, "rank") + " failed while making it");
  }
}

void ListEngine::print(const ListReport& report) const {
  say("{:<9} {} made, {} finished before, {} failed, of {}", settings_.noun + "s", report.made(),
      report.finished_before, report.failures.size(), report.wanted);
  for (const FailedRank& f : report.failed_ranks)
    say("failed    rank {} on {}, with {} in hand", f.rank, f.host,
        f.in_hand.empty() ? "nothing" : fmt::format("{}", fmt::join(f.in_hand, ", ")));
  for (const std::string& failure : report.failures) say("failed    {}", failure);
  for (const std::string& warning : log::warnings()) say("warned    {}", warning);
}

void ListEngine::write(const ListReport& report, const Json& header) const {
  Json j = {{"wanted", report.wanted},
            {"made", report.made()},
            {"finished_before", report.finished_before},
            {"failures", report.failures}};
  j.update(header);
  for (const FailedRank& f : report.failed_ranks)
    j["lost"].push_back({{"rank", f.rank}, {"host", f.host}, {"in_hand", f.in_hand}});
  const std::vector<double> busy = report.busy_shares();
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const RankShare& s = report.ranks[r];
    Json rank = {{settings_.noun + "s", s.made},
                 {"failed", s.failed},
                 {"busy_share", busy[r]},
                 {"busy", s.busy},
                 {"last_end", s.last_end}};
    rank.update(s.own);
    rank["batches"] = s.batches;
    j["ranks"].push_back(std::move(rank));
  }
  try {
    replace_file(settings_.directory / settings_.report,
                 j.dump(2, ' ', false, Json::error_handler_t::replace) + "\n", Exit::data,
                 Durable::no);
  } catch (const Error& e) {
    log::warn("{}", e.what());  // the results are there without it
  }
}

// On the coordinator, for all ranks: the report and the exit code of the job.
int ListEngine::conclude(const ListEnd& last) {
  members_.check_folder();
  ListReport report = read_report();
  Manifest::gather(settings_.directory, settings_.stem);
  add_unmade(report);
  if (last.print) last.print(report);
  print(report);
  // If everything was done before, the report of the job that did it stays.
  if (report.made() > 0 || !report.failures.empty()) write(report, last.header);
  const std::int64_t left = report.wanted - report.finished_before - report.made() -
                            report.skipped() - std::ssize(report.failures);
  // What finish() does may take long: it is left to the next start, as are items that nobody has
  // begun.
  const bool stopped = report.stopped && (left > 0 || last.finish);
  const std::int64_t done = report.finished_before + report.made();
  if (!report.failures.empty() && !(stopped && left > 0)) {
    if (last.finish && last.finish_with_failures) last.finish(report);
    Error e(Exit::data,
            (last.failed.empty() ? report.failed_of(settings_.noun) : last.failed) + " failed",
            "see the lines above; the same command makes only what is missing");
    log::report(e);
    progress_->end(static_cast<int>(Exit::data), done, e.what());
    return static_cast<int>(Exit::data);
  }
  if (stopped) {
    log::write_info("stopped on request: run the same command to go on");
    progress_->end(static_cast<int>(Exit::stopped), done);
    return static_cast<int>(Exit::stopped);
  }
  if (last.finish) last.finish(report);
  progress_->end(0, done);
  return 0;
}

int ListEngine::end(const ListEnd& last) {
  progress_->hide();
  mine_.made = made_;
  mine_.failed = failed_;
  mine_.skipped = skipped_;
  mine_.own = last.share;
  members_.note_summary(summary_of(mine_).dump(-1, ' ', false, Json::error_handler_t::replace));
  members_.wait_for_summaries();
  members_.watch({}, {});  // nobody waits for anybody in MPI until the job is concluded
  // All wait for the coordinator, also because the launcher may end the job with the first rank
  // that leaves. If the coordinator fails meanwhile, the next rank takes its place.
  std::optional<int> code;
  bool any_failed = false;
  int coordinator = 0;
  for (; !code; ++coordinator) {
    if (members_.state(coordinator).summary.empty()) {
      any_failed = true;
      continue;
    }
    if (coordinator == members_.rank()) {
      code = conclude(last);
      members_.note_code(*code);
      break;
    }
    while (!(code = members_.state(coordinator).code) && !members_.failed(coordinator))
      members_.pause();
    // It may have noted the code just before it ended.
    if (!code) code = members_.state(coordinator).code;
    if (code) break;
    any_failed = true;
  }
  const bool mine = coordinator == members_.rank();
  for (int r = coordinator; r < members_.ranks(); ++r)
    any_failed = any_failed || members_.state(r).summary.empty();
  if (any_failed) {
    while (!mine && !members_.failed(coordinator)) members_.pause();
    leave_job(*code, mine, world_);
  }
  if (*code != 0 && members_.ranks() > 1 && !exit_codes_pass())
    end_job(world_, static_cast<Exit>(*code));
  members_.watch(members_.neighbour(),
                 [this, result = *code, mine](int) { leave_job(result, mine, world_); });
  return *code;
}

}  // namespace weft
