#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/html.h"
#include "report/plot.h"

namespace weft::report_page {
namespace {

constexpr std::size_t most_rank_points = 400;

std::string title_of(const std::string& what, const Run& run, bool named) {
  return named ? what + " of " + escape(run.name) : what;
}

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
  Binned b = bin(run.steps.step, run.steps["spread"], most_rank_points);
  for (auto* values : {&b.mean, &b.low, &b.high})
    for (double& v : *values) v *= 100;
  const bool band = run.steps.size() > most_rank_points;
  std::vector<Curve> curves = {{"spread (%)", b.x, b.mean, run_colors[0], band ? 1.8 : 1.2}};
  if (band) {
    curves[0].low = b.low;
    curves[0].high = b.high;
  } else {
    // Single steps jump: the average says whether placements get better.
    curves[0].opacity = 0.4;
    curves[0].name = "";
    curves.push_back({"spread (%)", b.x,
                      smooth(b.mean, std::max(1.0, static_cast<double>(b.x.size()) / 100)),
                      run_colors[0], 2.4});
  }
  PlotFrame frame{"step", "spread of ranks (%)", 1040, 210, true, false};
  frame.restarts = run.restarts;
  return chart(frame, curves);
}

}  // namespace

std::string rank_bars(const Run& run, bool named) {
  const RankTimes& t = run.ranks;
  if (t.busy.size() < 2) return "";
  const std::vector<RankSplit> splits = split_of_ranks(run);
  double whole = 0;
  bool there[parts] = {};
  for (const RankSplit& s : splits) {
    double sum = 0;
    for (int p = 0; p < parts; ++p) {
      sum += s.part[p];
      there[p] = there[p] || s.part[p] > 0;
    }
    whole = std::max(whole, sum);
  }
  std::string body = "<div class=\"legend\">";
  for (int p = 0; p < parts; ++p)
    if (there[p])
      body += swatch(step_parts[p].color,
                     p == compute && t.data_wait.empty() ? "compute, with the wait for clips"
                                                         : step_parts[p].name,
                     true);
  body += fmt::format("</div><div class=\"bars{}\">\n", splits.size() > 16 ? " many" : "");
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
    body += bar(t.each ? fmt::format("rank {}", r) : of_many[std::min<std::size_t>(r, 2)], pieces,
                whole, text);
  }
  body += "</div>\n";
  if (!t.each) {
    // With this many ranks only those most often slowest are named.
    std::vector<std::pair<std::size_t, int>> most;
    for (const auto& [rank, times] : t.was_slowest) most.emplace_back(times, rank);
    std::sort(most.rbegin(), most.rend());
    if (most.size() > 8) most.resize(8);
    std::string list;
    for (const auto& [times, rank] : most)
      list += fmt::format("{}rank {} in {}", list.empty() ? "" : ", ", rank,
                          percent(static_cast<double>(times), static_cast<double>(t.steps.size())));
    body += "<p class=\"note\" style=\"margin-top:10px\">Most often the slowest: " + list +
            " of the steps.</p>";
  }
  body += "<h3>Spread</h3>" + spread_plot(run);
  const std::string steps = short_number(static_cast<double>(t.steps.size()));
  return section(
      title_of("Ranks", run, named),
      fmt::format(
          "The mean of {} steps. What a rank shares with all others (communication, optimizer, "
          "checkpoint) is divided as on rank 0. Spread: how much longer the slowest rank was busy "
          "than the average.",
          steps),
      body);
}

std::string memory_against_plan(const Run& run, bool named) {
  if (run.memory_plan.empty()) return "";
  double planned = 0, planned_activations = NAN;
  std::vector<BarPiece> pieces;
  std::string legend = "<div class=\"legend\">";
  for (std::size_t i = 0; i < run.memory_plan.size(); ++i) {
    const auto& [kind, bytes] = run.memory_plan[i];
    const std::string text = kind + " " + bytes_text(bytes);
    pieces.push_back({bytes, color_of(i), text});
    legend += swatch(color_of(i), escape(text), true);
    planned += bytes;
    if (kind == "activations") planned_activations = bytes;
  }
  const double resident = greatest(run.steps["memory/resident_bytes"]),
               arena = greatest(run.steps["memory/arena_peak_bytes"]);
  const double whole = std::max(
      {planned, std::isfinite(resident) ? resident : 0.0, std::isfinite(arena) ? arena : 0.0});
  std::string body = legend + "</div><div class=\"bars\">\n" +
                     bar("planned, a rank", pieces, whole, bytes_text(planned));
  const char* plain = run_colors[7];
  if (std::isfinite(planned_activations) && std::isfinite(arena)) {
    body += bar("activations, planned", {{planned_activations, pieces.back().color, ""}}, whole,
                bytes_text(planned_activations));
    body += bar(
        "activations, peak", {{arena, plain, ""}}, whole,
        fmt::format("{} ({:+.1f} %)", bytes_text(arena), 100 * (arena / planned_activations - 1)));
  }
  if (std::isfinite(resident))
    body += bar("process, peak", {{resident, plain, ""}}, whole, bytes_text(resident));
  return section(title_of("Memory against its plan", run, named),
                 "Rank 0. The process also holds the program, its libraries, clips read ahead and "
                 "the copy of a "
                 "checkpoint that is being written; on a GPU it is what the host holds.",
                 body + "</div>");
}

std::string scaling_curves(std::span<const Scaling> results) {
  if (results.empty()) return "";
  // Rank counts usually double, so their logarithms are evenly spaced.
  PlotFrame frame{"ranks", "efficiency (%)", 1040, 280, false, false};
  std::vector<Curve> curves;
  std::vector<double> counts;
  for (const Scaling& s : results)
    for (const auto& p : s.points) counts.push_back(p.ranks);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  for (const double n : counts) frame.x_labels.emplace_back(std::log2(n), short_number(n));
  std::string legend = "<div class=\"legend\">", table;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Scaling& s = results[i];
    const std::string name = s.mode + (s.mode.empty() || s.mix.empty() ? "" : ", ") + s.mix;
    Curve c{name.empty() ? "efficiency" : name, {}, {}, color_of(i), 2.4};
    for (const auto& p : s.points) {
      c.x.push_back(std::log2(p.ranks));
      c.y.push_back(100 * p.efficiency);
      const auto cell = [](double v, const std::string& text) {
        return std::isfinite(v) ? text : "-";
      };
      table += fmt::format(
          "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.1f} %</td><td>{}</td><td>{}</td></tr>\n",
          escape(c.name), short_number(p.ranks), seconds_text(p.seconds), 100 * p.efficiency,
          cell(p.exposed, percent(p.exposed, p.seconds)), cell(p.wait, percent(p.wait, p.seconds)));
    }
    legend += swatch(c.color, escape(c.name));
    curves.push_back(c);
    // Measured points as dots: a zero-length stroke each, with a gap after it.
    Curve dots{"", {}, {}, c.color, 7};
    for (std::size_t k = 0; k < c.x.size(); ++k) {
      dots.x.insert(dots.x.end(), {c.x[k], c.x[k]});
      dots.y.insert(dots.y.end(), {c.y[k], NAN});
    }
    curves.push_back(dots);
  }
  return section(
      "Scaling",
      "Efficiency against the smallest number of ranks, as weft bench scaling measured it. The "
      "axis does not begin at 0.",
      legend + "</div>\n" + chart(frame, curves) +
          "<div class=\"scroll\"><table><thead><tr><th>case</th><th>ranks</th><th>a step</th>"
          "<th>efficiency</th><th>exposed communication</th><th>wait for the "
          "slowest</th></tr></thead>"
          "<tbody>\n" +
          table + "</tbody></table></div>");
}

}  // namespace weft::report_page
