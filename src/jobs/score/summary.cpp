#include "jobs/score/summary.h"
#include "core/log.h"

#include <algorithm>
#include <array>

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<const char*, double PrefetchTimes::*>, 7> seconds_members = {{
    {"decode", &PrefetchTimes::decode},
    {"resize", &PrefetchTimes::resize},
    {"network", &PrefetchTimes::network},
    {"post_processing", &PrefetchTimes::finish},
    {"network_waited", &PrefetchTimes::network_waited},
    {"frames_waited", &PrefetchTimes::frames_waited},
    {"network_core_seconds", &PrefetchTimes::network_cores},
}};

double per(double count, double seconds) { return seconds > 0 ? count / seconds : 0; }

// "41", "2.1", "0.35": no more digits than a measurement has.
std::string rate_text(double rate) {
  return rate >= 20 ? fmt::format("{:.0f}", rate) : fmt::format("{:.2g}", rate);
}

std::string seconds_text(double seconds) {
  return fmt::format("{:.{}f} s", seconds, seconds < 10 ? 2 : 1);
}

}  // namespace

void PrefetchSummary::add(const PrefetchTimes& rank, double rank_cores) {
  ++ranks;
  cores += rank_cores;
  for (const auto& [name, member] : seconds_members) sum.*member += rank.*member;
  sum.frames += rank.frames;
  sum.batches += rank.batches;
  sum.elapsed = std::max(sum.elapsed, rank.elapsed);
  sum.batch = std::max(sum.batch, rank.batch);
  sum.readers = std::max(sum.readers, rank.readers);
  sum.threads = std::max(sum.threads, rank.threads);
}

double PrefetchSummary::rate() const { return per(static_cast<double>(sum.frames), sum.elapsed); }

double PrefetchSummary::host_rate() const {
  return per(static_cast<double>(sum.frames) * cores, sum.decode + sum.resize + sum.finish);
}

double PrefetchSummary::network_rate() const {
  const auto frames = static_cast<double>(sum.frames);
  return on_gpu ? per(frames * ranks, sum.network) : per(frames * cores, sum.network_cores);
}

double PrefetchSummary::network_busy() const { return per(sum.network, sum.elapsed * ranks); }

std::string PrefetchSummary::bound() const {
  if (network_rate() < host_rate() || host_rate() == 0) return "network";
  if (sum.finish > std::max(sum.decode, sum.resize)) return "post-processing";
  return sum.resize > sum.decode ? "resize" : "decode";
}

std::string PrefetchSummary::verdict() const {
  const bool network = bound() == "network";
  const std::string other = rate_text(network ? host_rate() : network_rate());
  const std::string on = counted(static_cast<std::int64_t>(cores + 0.5), "core");
  std::string text = fmt::format("{} bounds the job: {} frames/s",
                                 network ? "the network" : bound(), rate_text(rate()));
  if (!on_gpu || !network) text += " on " + on;
  text += network ? fmt::format("; decode, resize and post-processing could do {}", other)
                  : fmt::format("; the network could do {}", other);
  if (on_gpu && network) text += " on " + on;
  return text + fmt::format("; the network was at work {:.1f} % of the time", 100 * network_busy());
}

std::string PrefetchSummary::waits() const {
  std::string text =
      fmt::format("the network waited {} for frames, {} {} for the network",
                  seconds_text(sum.network_waited), "readers", seconds_text(sum.frames_waited));
  return text;
}

Json PrefetchSummary::json() const {
  Json j = {
      {"ranks", ranks},       {"cores", cores},         {"network_on", on_gpu ? "GPU" : "CPU"},
      {"frames", sum.frames}, {"seconds", sum.elapsed}, {"frames_a_second", rate()}};
  for (const auto& [name, member] : seconds_members) j["stages"][name] = sum.*member;
  j["host_frames_a_second"] = host_rate();
  j["network_frames_a_second"] = network_rate();
  j["network_busy_share"] = network_busy();
  j["threads"] = sum.readers;
  j["batch"] = sum.batch;
  j["bound"] = bound();
  j["verdict"] = verdict();
  j["waits"] = waits();
  return j;
}

Json as_share(const PrefetchTimes& t) {
  Json j = {{"frames", t.frames}, {"network_batches", t.batches}, {"elapsed", t.elapsed},
            {"batch", t.batch},   {"threads", t.readers},         {"budget", t.threads}};
  for (const auto& [name, member] : seconds_members) j[name] = t.*member;
  return j;
}

PrefetchTimes from_share(const Json& share) {
  PrefetchTimes t;
  t.frames = share.value("frames", std::int64_t{0});
  t.batches = share.value("network_batches", std::int64_t{0});
  t.elapsed = share.value("elapsed", 0.0);
  t.batch = share.value("batch", std::int64_t{0});
  t.readers = share.value("threads", 0);
  t.threads = share.value("budget", 0);
  for (const auto& [name, member] : seconds_members) t.*member = share.value(name, 0.0);
  return t;
}

std::int64_t ScoreSummary::with_text() const {
  std::int64_t all = 0;
  for (const auto& [count, many] : histogram) all += count > 0 ? many : 0;
  return all;
}

std::vector<std::pair<std::string, std::int64_t>> ScoreSummary::bins() const {
  std::vector<std::pair<std::string, std::int64_t>> bins;
  const std::int64_t most = histogram.empty() ? -1 : histogram.rbegin()->first;
  for (std::int64_t low = 0; low <= most;) {
    const std::int64_t high = low < 5 ? low : 2 * (low - 1);  // 5 to 8, 9 to 16, ...
    std::int64_t many = 0;
    for (auto at = histogram.lower_bound(low); at != histogram.end() && at->first <= high; ++at)
      many += at->second;
    bins.emplace_back(low == high ? fmt::format("{}", low) : fmt::format("{} to {}", low, high),
                      many);
    low = high + 1;
  }
  return bins;
}

std::string ScoreSummary::table() const {
  const std::int64_t scored = rows - without;
  std::string text = fmt::format("{}, {}\n", counted(rows, "row"), counted(files, "file"));
  text += fmt::format("  with text          {:>10}  {:.1f} %\n", with_text(),
                      100 * per(static_cast<double>(with_text()), static_cast<double>(scored)));
  text += fmt::format("  largest count      {:>10}\n",
                      histogram.empty() ? 0 : histogram.rbegin()->first);
  if (left_out > 0) text += fmt::format("  left out           {:>10}\n", left_out);
  if (without > 0) text += fmt::format("  without a count    {:>10}\n", without);
  if (!faults.empty()) text += fmt::format("  files with faults  {:>10}\n", std::ssize(faults));
  if (feed.empty()) return text;
  const double all = feed.sum.decode + feed.sum.resize + feed.sum.network + feed.sum.finish;
  text += fmt::format("stage              seconds   share  ms/frame\n");
  const auto row = [&](const char* name, double seconds) {
    text += fmt::format("  {:<15} {:>8.2f} {:>5.1f} % {:>9.2f}\n", name, seconds,
                        100 * per(seconds, all),
                        1000 * per(seconds, static_cast<double>(feed.sum.frames)));
  };
  row("decode", feed.sum.decode);
  row("resize", feed.sum.resize);
  row("network", feed.sum.network);
  row("post-processing", feed.sum.finish);
  text += feed.verdict() + "\n" + feed.waits() + "\n";
  return text;
}

}  // namespace weft
