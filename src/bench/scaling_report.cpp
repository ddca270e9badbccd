#include "bench/scaling_report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>

#include "core/clock.h"
#include "core/host.h"
#include "core/log.h"
#include "report/plot.h"

namespace weft {
namespace {

template <class F>
double median_of(const std::vector<ScalingRound>& rounds, F&& value) {
  std::vector<double> v;
  for (const ScalingRound& r : rounds) v.push_back(value(r));
  return median(v);
}

std::string commit() {
  const std::string line = version_line(), mark = "commit ";
  const std::size_t at = line.find(mark);
  if (at == std::string::npos) return "unknown";
  return line.substr(at + mark.size(), line.find_first_of(",)", at) - at - mark.size());
}

std::string or_dash(bool there, const std::string& text) { return there ? text : "-"; }

std::string share(double part, double whole) {
  return fmt::format("{:.1f} ms {:>4.1f} %", 1e3 * part, whole > 0 ? 100 * part / whole : 0);
}

nlohmann::ordered_json rounds_json(const std::vector<ScalingRound>& rounds) {
  auto list = nlohmann::ordered_json::array();
  for (const ScalingRound& r : rounds)
    list.push_back({{"seconds", r.seconds}, {"exposed", r.exposed}, {"wait", r.wait}});
  return list;
}

}  // namespace

void summarise(ScalingResult& result) {
  const ScalingPoint& first = result.points.front();
  for (ScalingPoint& p : result.points) {
    const auto seconds = [](const ScalingRound& r) { return r.seconds; };
    const auto exposed = [](const ScalingRound& r) { return r.exposed; };
    p.seconds = median_of(p.rounds, seconds);
    p.exposed = median_of(p.rounds, exposed);
    p.wait = median_of(p.rounds, [](const ScalingRound& r) { return r.wait; });
    p.seconds_without_overlap = median_of(p.without_overlap, seconds);
    p.exposed_without_overlap = median_of(p.without_overlap, exposed);
    const double more = static_cast<double>(p.ranks) / first.ranks;
    std::vector<double> ratios, ceilings;
    for (std::size_t r = 0; r < p.rounds.size(); ++r) {
      const double base = first.rounds[r].seconds;
      ratios.push_back(base / p.rounds[r].seconds);
      if (r < p.side_by_side.size()) ceilings.push_back(base / p.side_by_side[r]);
    }
    p.speedup = median(ratios) * (result.mode == "weak" ? more : 1);
    p.efficiency = p.speedup / more;
    p.ceiling = median(ceilings);
  }
}

std::string scaling_table(const ScalingResult& result) {
  std::string text = fmt::format("{}\n{}, {} a rank; {} scaling, {} ({}), {} a step{}\n",
                                 version_line(), result.hardware, counted(result.threads, "thread"),
                                 result.mode, result.mix, fmt::join(result.buckets, ", "),
                                 counted(result.micro_batches, "micro-batch", "micro-batches"),
                                 result.mode == "weak" ? " and rank" : "");
  text += fmt::format(
      "all rank counts compute the same: over {} steps losses differ by {:.1e}, weights by {:.1e} "
      "of "
      "the update\n",
      result.checked_steps, result.loss_difference, result.weight_difference);
  text += fmt::format("{:>6} {:>11} {:>9} {:>11} {:>9} {:>19} {:>19}\n", "ranks", "s a step",
                      "speed-up", "efficiency", "ceiling", "exposed", "for the slowest");
  for (const ScalingPoint& p : result.points) {
    text += fmt::format("{:>6} {:>11.4f} {:>9.3f} {:>9.1f} % {:>9} {:>19} {:>19}\n", p.ranks,
                        p.seconds, p.speedup, 100 * p.efficiency,
                        or_dash(p.ceiling > 0, fmt::format("{:.1f} %", 100 * p.ceiling)),
                        share(p.exposed, p.seconds), share(p.wait, p.seconds));
    if (!p.without_overlap.empty())
      text += fmt::format("{:>6} {:>11.4f} {:>9} {:>11} {:>9} {:>19}   without overlap: {}\n",
                          p.ranks, p.seconds_without_overlap, "", "", "",
                          share(p.exposed_without_overlap, p.seconds_without_overlap),
                          p.exposed_without_overlap > 0
                              ? fmt::format("with it {:.0f} % of that is exposed",
                                            100 * p.exposed / p.exposed_without_overlap)
                              : "nothing exposed");
  }
  return text;
}

std::string scaling_json(const ScalingResult& result) {
  nlohmann::ordered_json j{
      {"schema", "weft-scaling-1"},
      {"mode", result.mode},
      {"mix", result.mix},
      {"build", version_line()},
      {"commit", commit()},
      {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
      {"hardware", result.hardware},
      {"threads", result.threads},
      {"steps", result.steps},
      {"warmup", result.warmup},
      {"micro_batches", result.micro_batches},
      {"buckets", result.buckets}};
  j["agreement"] = {{"steps", result.checked_steps},
                    {"loss", result.loss_difference},
                    {"weights", result.weight_difference}};
  j["points"] = nlohmann::ordered_json::array();
  for (const ScalingPoint& p : result.points) {
    nlohmann::ordered_json point{{"ranks", p.ranks},
                                 {"seconds", p.seconds},
                                 {"speedup", p.speedup},
                                 {"efficiency", p.efficiency},
                                 {"exposed", p.exposed},
                                 {"wait", p.wait},
                                 {"rounds", rounds_json(p.rounds)}};
    if (p.ceiling > 0) {
      point["ceiling"] = p.ceiling;
      point["side_by_side"] = p.side_by_side;
    }
    if (!p.without_overlap.empty())
      point["without_overlap"] = {{"seconds", p.seconds_without_overlap},
                                  {"exposed", p.exposed_without_overlap},
                                  {"rounds", rounds_json(p.without_overlap)}};
    j["points"].push_back(std::move(point));
  }
  j["deck"] = result.deck;
  return j.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string scaling_plot(const ScalingResult& result) {
  using namespace report_page;
  const bool weak = result.mode == "weak";
  const ScalingPoint& first = result.points.front();
  Curve ideal{"", {}, {}, "#9aa4b1", 1.2, 1, {}, {}};
  Curve machine{"machine", {}, {}, "#c9822b", 1.6, 1, {}, {}};
  Curve ours{"weft", {}, {}, "#2f6fb2", 2.4, 1, {}, {}};
  bool ceiling = false;
  for (const ScalingPoint& p : result.points) {
    const double more = static_cast<double>(p.ranks) / first.ranks;
    const double unit = weak ? 100 : more;  // what perfect scaling is drawn as
    ideal.x.push_back(p.ranks);
    ideal.y.push_back(unit);
    ours.x.push_back(p.ranks);
    ours.y.push_back(unit * p.efficiency);
    // Every round's own ratio, as a band.
    double low = 1e300, high = 0;
    for (std::size_t r = 0; r < p.rounds.size(); ++r) {
      double e = first.rounds[r].seconds / p.rounds[r].seconds;
      if (!weak) e /= more;
      low = std::min(low, e);
      high = std::max(high, e);
    }
    ours.low.push_back(unit * low);
    ours.high.push_back(unit * high);
    ceiling = ceiling || p.ceiling > 0;
    machine.x.push_back(p.ranks);
    machine.y.push_back(p.ceiling > 0 ? unit * p.ceiling : p.ranks == first.ranks ? unit : NAN);
  }
  std::vector<Curve> curves = {ideal};
  if (ceiling) curves.push_back(machine);
  curves.push_back(ours);
  PlotFrame frame;
  frame.x_label = "ranks";
  frame.y_label = weak ? "efficiency (%)" : "speed-up";
  frame.from_zero = true;
  std::vector<LegendEntry> legend = {
      {ours.color, fmt::format("{} scaling, {} clips", result.mode, result.mix)}};
  if (ceiling) legend.push_back({machine.color, "independent trainings side by side"});
  legend.push_back({ideal.color, "perfect"});
  return standalone_svg(line_plot(frame, curves), frame, legend, frame.height - 92);
}

}  // namespace weft
