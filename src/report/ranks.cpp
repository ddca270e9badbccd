#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "report/html.h"
#include "report/plot.h"

namespace weft::report_page {
namespace {

constexpr std::size_t most_rank_points = 400;

// The mean of a column of rank 0 over the steps that know of all ranks.
double mean_of(std::span<const double> column, const std::vector<std::size_t>& steps) {
  double sum = 0;
  for (const std::size_t i : steps)
    if (std::isfinite(column[i])) sum += column[i];
  return sum / static_cast<double>(steps.size());
}

// What each rank's mean step went into. Ranks report their work and their wait for the slowest;
// what is left of the step is divided as on rank 0, because all ranks communicate, update and save
// together.
struct RankSplit {
  double part[parts] = {};
};
std::vector<RankSplit> split_of_ranks(const Run& run) {
  const RankTimes& t = run.ranks;
  const double seconds = mean_of(run.steps["seconds"], t.steps);
  constexpr Part shared[] = {comm_exposed, optimizer, checkpoint, other};
  double own[parts] = {}, of_all = 0;
  for (const Part p : shared) of_all += own[p] = mean_of(run.steps[step_parts[p].column], t.steps);
  std::vector<RankSplit> split(t.busy.size());
  for (std::size_t r = 0; r < split.size(); ++r) {
    double* part = split[r].part;
    part[data_wait] = t.data_wait.empty() ? 0 : std::min(t.data_wait[r], t.busy[r]);
    part[compute] = t.busy[r] - part[data_wait];
    part[wait_slowest] = std::isfinite(t.wait[r]) ? t.wait[r] : 0;
    const double rest = std::max(0.0, seconds - t.busy[r] - part[wait_slowest]);
    for (const Part p : shared) part[p] = of_all > 0 ? rest * own[p] / of_all : 0;
  }
  return split;
}

// How far the ranks are apart, step by step, in per cent.
std::string spread_plot(const Run& run) {
  constexpr const char* name = "spread (%)";
  Binned b = bin(run.steps.step, run.steps["spread"], most_rank_points);
  for (auto* values : {&b.mean, &b.low, &b.high})
    for (double& v : *values) v *= 100;
  std::vector<Curve> curves;
  if (run.steps.size() > most_rank_points) {
    curves.push_back({name, b.x, b.mean, run_colors[0], 1.8, 1, b.low, b.high});
  } else {
    // Single steps jump: the average says whether placements get better.
    const double sigma = std::max(1.0, static_cast<double>(b.x.size()) / 100);
    curves.push_back({"", b.x, b.mean, run_colors[0], 1.2, 0.4});
    curves.push_back({name, b.x, smooth(b.mean, sigma), run_colors[0], 2.4});
  }
  PlotFrame frame{"step", "spread of ranks (%)", 1040, 210, true, false};
  frame.restarts = run.restarts;
  return chart(frame, curves);
}

// With many ranks only those most often slowest are named.
std::string most_often_slowest(const RankTimes& t) {
  std::vector<std::pair<std::size_t, int>> most;
  for (const auto& [rank, times] : t.was_slowest) most.emplace_back(times, rank);
  std::sort(most.rbegin(), most.rend());
  if (most.size() > 8) most.resize(8);
  std::string list;
  for (const auto& [times, rank] : most)
    list += fmt::format("{}rank {} in {}", list.empty() ? "" : ", ", rank,
                        percent(static_cast<double>(times), static_cast<double>(t.steps.size())));
  return "<p class=\"note\">Most often the slowest: " + list + " of the steps.</p>";
}

}  // namespace

std::string rank_bars(const Run& run, const std::string& of) {
  const RankTimes& t = run.ranks;
  if (t.busy.size() < 2) return "";
  const std::vector<RankSplit> splits = split_of_ranks(run);
  double whole = 0;
  RankSplit sums;
  for (const RankSplit& s : splits) {
    for (int p = 0; p < parts; ++p) sums.part[p] += s.part[p];
    whole = std::max(whole, total(s.part));
  }
  std::string swatches, list;
  for (int p = 0; p < parts; ++p)
    if (sums.part[p] > 0)
      swatches += swatch(step_parts[p].color,
                         p == compute && t.data_wait.empty() ? "compute, with the wait for clips"
                                                             : step_parts[p].name,
                         true);
  constexpr const char* of_many[] = {"fastest", "median", "slowest"};
  for (std::size_t r = 0; r < splits.size(); ++r) {
    std::vector<BarPiece> pieces;
    for (int p = 0; p < parts; ++p)
      pieces.push_back(
          {splits[r].part[p], step_parts[p].color,
           fmt::format("{}: {}", step_parts[p].name, seconds_text(splits[r].part[p]))});
    std::string text = "busy " + seconds_text(t.busy[r]);
    if (t.each) {
      const auto it = t.was_slowest.find(static_cast<int>(r));
      const double times = it == t.was_slowest.end() ? 0 : static_cast<double>(it->second);
      text += ", slowest in " + percent(times, static_cast<double>(t.steps.size())) + " of steps";
    }
    list += bar(t.each ? fmt::format("rank {}", r) : of_many[std::min<std::size_t>(r, 2)], pieces,
                whole, text);
  }
  return section(
      "Ranks" + of,
      fmt::format(
          "The mean of {} steps. What a rank shares with all others (communication, optimizer, "
          "checkpoint) is divided as on rank 0. Spread: how much longer the slowest rank was busy "
          "than the average.",
          short_number(static_cast<double>(t.steps.size()))),
      legend(swatches) + bars(list, splits.size() > 16) + (t.each ? "" : most_often_slowest(t)) +
          "<h3>Spread</h3>" + spread_plot(run));
}

std::string memory_against_plan(const Run& run, const std::string& of) {
  if (run.memory_plan.empty()) return "";
  double planned = 0, planned_activations = NAN;
  std::vector<BarPiece> pieces;
  std::string swatches;
  for (std::size_t i = 0; i < run.memory_plan.size(); ++i) {
    const auto& [kind, bytes] = run.memory_plan[i];
    const std::string text = kind + " " + bytes_text(bytes);
    pieces.push_back({bytes, color_of(i), text});
    swatches += swatch(color_of(i), escape(text), true);
    planned += bytes;
    if (kind == "activations") planned_activations = bytes;
  }
  const double resident = greatest(run.steps["memory/resident_bytes"]);
  const double arena = greatest(run.steps["memory/arena_peak_bytes"]);
  const double whole = greatest(std::vector{planned, resident, arena});
  const auto one = [&](const char* name, double bytes, const std::string& color,
                       const std::string& more = "") {
    return bar(name, {{bytes, color, ""}}, whole, bytes_text(bytes) + more);
  };
  std::string list = bar("planned, a rank", pieces, whole, bytes_text(planned));
  if (std::isfinite(planned_activations) && std::isfinite(arena))
    list += one("activations, planned", planned_activations, pieces.back().color) +
            one("activations, peak", arena, run_colors[7],
                fmt::format(" ({:+.1f} %)", 100 * (arena / planned_activations - 1)));
  if (std::isfinite(resident)) list += one("process, peak", resident, run_colors[7]);
  return section("Memory against its plan" + of,
                 "Rank 0. The process also holds the program, its libraries, clips read ahead and "
                 "the copy of a checkpoint that is being written; on a GPU it is what the host "
                 "holds.",
                 legend(swatches) + bars(list));
}

std::string scaling_curves(std::span<const Scaling> results) {
  if (results.empty()) return "";
  // Rank counts usually double, so their logarithms are evenly spaced.
  PlotFrame frame{"ranks", "efficiency (%)", 1040, 280, false, false};
  std::vector<Curve> curves;
  std::set<double> counts;
  std::string swatches;
  Rows rows;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Scaling& s = results[i];
    const std::string name = s.mode + (s.mode.empty() || s.mix.empty() ? "" : ", ") + s.mix;
    Curve c{name.empty() ? "efficiency" : name, {}, {}, color_of(i), 2.4};
    // Measured points as dots: a zero-length stroke each, with a gap after it.
    Curve dots{"", {}, {}, c.color, 7};
    for (const auto& p : s.points) {
      counts.insert(p.ranks);
      c.x.push_back(std::log2(p.ranks));
      c.y.push_back(100 * p.efficiency);
      dots.x.insert(dots.x.end(), {c.x.back(), c.x.back()});
      dots.y.insert(dots.y.end(), {c.y.back(), NAN});
      const auto share = [&](double seconds) {
        return std::isfinite(seconds) ? percent(seconds, p.seconds) : "-";
      };
      rows.push_back({escape(c.name), short_number(p.ranks), seconds_text(p.seconds),
                      fmt::format("{:.1f} %", 100 * p.efficiency), share(p.exposed),
                      share(p.wait)});
    }
    swatches += swatch(c.color, escape(c.name));
    curves.insert(curves.end(), {c, dots});
  }
  for (const double n : counts) frame.x_labels.emplace_back(std::log2(n), short_number(n));
  return section(
      "Scaling",
      "Efficiency against the smallest number of ranks, as weft bench scaling measured it. The "
      "axis does not begin at 0.",
      legend(swatches) + chart(frame, curves) +
          table({"case", "ranks", "a step", "efficiency", "exposed communication",
                 "wait for the slowest"},
                rows));
}

}  // namespace weft::report_page
