#include "jobs/generate/report.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

constexpr double mib = 1ull << 20;

// Whichever rank speaks for all: rank 0 may be lost.
template <class... A>
void say(fmt::format_string<A...> f, A&&... a) {
  log::write_info(fmt::format(f, std::forward<A>(a)...));
}

LostRank enter_lost(GenerateReport& report, const RollEntry& state, int rank,
                    const std::function<TakenClips(int, std::int64_t)>& taken) {
  LostRank lost{rank, state.host, {}};
  GenerateShare& share = report.ranks[static_cast<std::size_t>(rank)];
  share.failed = std::ssize(state.failures);
  share.stopped = state.stopped ? 1 : 0;
  report.failures.insert(report.failures.end(), state.failures.begin(), state.failures.end());
  for (const std::int64_t place : state.taken) {
    const TakenClips clips = taken(rank, place);
    share.clips += clips.finished;
    lost.in_hand.insert(lost.in_hand.end(), clips.in_hand.begin(), clips.in_hand.end());
  }
  return lost;
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GenerateShare, clips, failed, busy, last_end, encode, sample,
                                   decode, write, write_wait, arena_planned, arena_peak,
                                   arena_capacity, frames_planned, frames_peak, weights, resident,
                                   micro_batch, stopped, batches)

std::string last_word(const GenerateShare& mine, const std::vector<std::string>& failures) {
  return nlohmann::json{{"share", mine}, {"failures", failures}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

GenerateReport read_report(const RankRoll& roll,
                           const std::function<TakenClips(int, std::int64_t)>& taken) {
  GenerateReport report;
  report.ranks.resize(static_cast<std::size_t>(roll.ranks()));
  for (int r = 0; r < roll.ranks(); ++r) {
    const RollEntry state = roll.state(r);
    // Those that have said their last word may be gone by now: all ranks judge alike.
    if (state.end.empty()) {
      report.lost.push_back(enter_lost(report, state, r, taken));
      continue;
    }
    if (report.speaker < 0) report.speaker = r;
    const auto word = parse_json(state.end);
    word.at("share").get_to(report.ranks[static_cast<std::size_t>(r)]);
    for (const auto& failure : word.at("failures"))
      report.failures.push_back(failure.get<std::string>());
  }
  return report;
}

std::vector<double> GenerateReport::busy_shares() const {
  double last = 0;
  for (const GenerateShare& r : ranks) last = std::max(last, r.last_end);
  std::vector<double> shares;
  for (const GenerateShare& r : ranks) shares.push_back(last > 0 ? r.busy / last : 0);
  return shares;
}

std::int64_t GenerateReport::made() const {
  std::int64_t clips = 0;
  for (const GenerateShare& r : ranks) clips += r.clips;
  return clips;
}

void GenerateReport::print() const {
  if (made() > 0 || !failures.empty()) {
    say("rank  clips  busy%  encode s  sample s  decode s  write s  arena MiB peak/planned/there  "
        "frames MiB peak/planned  frames at once");
    const std::vector<double> shares = busy_shares();
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const GenerateShare& s = ranks[r];
      say("{:4}  {:5}  {:5.1f}  {:8.1f}  {:8.1f}  {:8.1f}  {:7.1f}  {:8.1f}/{:.1f}/{:.0f}  "
          "{:.2f}/{:.2f}  {}",
          r, s.clips, 100 * shares[r], s.encode, s.sample, s.decode, s.write, s.arena_peak / mib,
          s.arena_planned / mib, s.arena_capacity / mib, s.frames_peak / mib,
          s.frames_planned / mib, static_cast<std::int64_t>(s.micro_batch));
    }
  }
  say("stages    text {:.1f} s, weights {:.1f} s, clips {:.1f} s", stages.text, stages.load,
      stages.clips);
  say("clips     {} made, {} finished before, {} failed, of {}", made(), finished_before,
      failures.size(), wanted);
  for (const LostRank& l : lost)
    say("lost      rank {} on {}, with {} in hand", l.rank, l.host,
        l.in_hand.empty() ? "nothing" : fmt::format("{}", fmt::join(l.in_hand, ", ")));
  for (const std::string& failure : failures) say("failed    {}", failure);
  for (const std::string& warning : log::warnings()) say("warned    {}", warning);
}

void GenerateReport::write(const std::filesystem::path& directory) const {
  nlohmann::ordered_json j = {
      {"wanted", wanted},
      {"made", made()},
      {"finished_before", finished_before},
      {"failures", failures},
      {"ranks_a_clip", ranks_a_clip},
      {"share_out", share_out},
      {"seconds", {{"text", stages.text}, {"load", stages.load}, {"clips", stages.clips}}}};
  if (!text_taken.empty())
    j["text"] = {{"bytes_planned", text_planned}, {"bytes_taken", text_taken}};
  for (const LostRank& l : lost)
    j["lost"].push_back({{"rank", l.rank}, {"host", l.host}, {"in_hand", l.in_hand}});
  const std::vector<double> shares = busy_shares();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const GenerateShare& s = ranks[r];
    j["ranks"].push_back({{"clips", s.clips},
                          {"failed", s.failed},
                          {"busy_share", shares[r]},
                          {"busy", s.busy},
                          {"last_end", s.last_end},
                          {"encode", s.encode},
                          {"sample", s.sample},
                          {"decode", s.decode},
                          {"write", s.write},
                          {"write_wait", s.write_wait},
                          {"weights_bytes", s.weights},
                          {"arena_planned_bytes", s.arena_planned},
                          {"arena_peak_bytes", s.arena_peak},
                          {"arena_capacity_bytes", s.arena_capacity},
                          {"frames_planned_bytes", s.frames_planned},
                          {"frames_peak_bytes", s.frames_peak},
                          {"resident_bytes", s.resident},
                          {"micro_batch", s.micro_batch},
                          {"batches", s.batches}});
  }
  std::ofstream out(directory / "generate_report.json");
  out << j.dump(2) << "\n";
  out.close();
  if (!out) log::warn("cannot write {}", (directory / "generate_report.json").string());
}

}  // namespace weft
