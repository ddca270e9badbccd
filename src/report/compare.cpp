#include "report/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/log.h"
#include "report/html.h"

namespace weft::report_page {
namespace {

double clips_a_second(const Run& run) {
  const double seconds = total(run.steps.seconds);
  return seconds > 0 ? static_cast<double>(run.steps.samples.size()) / seconds : NAN;
}

}  // namespace

std::string run_legend(std::span<const Run> runs) {
  if (runs.size() < 2) return "";
  std::string s = "<div class=\"legend\">";
  for (std::size_t i = 0; i < runs.size(); ++i) s += swatch(color_of(i), escape(runs[i].name));
  return s + "</div>\n";
}

std::vector<Curve> plain_curves(std::span<const Run> runs, Column column, double scale) {
  std::vector<Curve> curves;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    Binned b = bin(runs[i].steps.step, runs[i].steps.*column, most_points);
    for (double& v : b.mean) v *= scale;
    curves.push_back({runs[i].name, b.x, b.mean, color_of(i), 1.8, 1, {}, {}});
  }
  return curves;
}

bool has(std::span<const Run> runs, Column column) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const Run& r) { return !finite(r.steps.*column).empty(); });
}

std::string loss_over_time(std::span<const Run> runs) {
  double longest = 0;
  for (const Run& r : runs) longest = std::max(longest, total(r.steps.seconds));
  if (!(longest > 0)) return "";
  const auto [unit, name] = longest > 3 * 3600 ? std::pair{3600.0, "hours"}
                            : longest > 180    ? std::pair{60.0, "minutes"}
                                               : std::pair{1.0, "seconds"};
  std::vector<Curve> curves;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::vector<double> at;
    double time = 0;
    for (const double s : runs[i].steps.seconds) {
      if (std::isfinite(s)) time += s;
      at.push_back(time / unit);
    }
    const Binned b = bin(at, runs[i].steps.loss, most_points);
    const double sigma = std::max(1.0, static_cast<double>(b.x.size()) / 60);
    curves.push_back({runs[i].name, b.x, smooth(b.mean, sigma), color_of(i), 2.4, 1, {}, {}});
  }
  const PlotFrame frame{name, "loss", 1040, 280, false, true, false};
  return section("Loss over time", "Averaged over neighbouring steps; time in steps alone.",
                 run_legend(runs) + line_plot(frame, curves));
}

std::string loss_terms(std::span<const Run> runs) {
  if (runs.size() != 1 || runs[0].steps.terms.empty()) return "";
  // A plot each: they differ by orders of magnitude, and there are more of them than colours.
  std::string plots, constant;
  for (const auto& [name, values] : runs[0].steps.terms) {
    const std::vector<double> known = finite(values);
    if (known.empty()) continue;
    const auto [low, high] = std::ranges::minmax(known);
    if (low == high) {
      constant += fmt::format("{}{} = {}", constant.empty() ? " Constant: " : ", ", escape(name),
                              short_number(low));
      continue;
    }
    std::vector<double> whole = values;
    whole.resize(runs[0].steps.size(), NAN);
    const Binned b = bin(runs[0].steps.step, whole, most_points);
    const double sigma = std::max(1.0, static_cast<double>(b.x.size()) / 60);
    const std::vector<Curve> curve = {
        {name, b.x, smooth(b.mean, sigma), color_of(0), 1.8, 1, {}, {}}};
    PlotFrame frame{"step", "value", 370, 220, false, true};
    frame.restarts = runs[0].restarts;
    plots += section(escape(name), "", line_plot(frame, curve));
  }
  const std::string note =
      "What the training reports beside the loss, averaged over neighbouring steps.";
  return section("Terms", note + constant, "") +
         (plots.empty() ? "" : "<div class=\"small\">\n" + plots + "</div>\n");
}

std::string speed_of_runs(std::span<const Run> runs) {
  // Efficiency against the run with the fewest ranks, if numbers of ranks differ.
  const Run* base = nullptr;
  bool differ = false;
  double fastest = 0;
  for (const Run& r : runs) {
    const double speed = clips_a_second(r);
    if (speed > fastest) fastest = speed;
    if (!(r.ranks_number > 0) || !(speed > 0)) continue;
    differ = differ || (base != nullptr && r.ranks_number != base->ranks_number);
    if (base == nullptr || r.ranks_number < base->ranks_number) base = &r;
  }
  if (!(fastest > 0)) return "";
  std::string body = "<div class=\"bars\">\n";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& r = runs[i];
    const double speed = clips_a_second(r);
    std::string text = std::isfinite(speed) ? rate_text(speed) + " clips a second" : "-";
    if (r.ranks_number > 0) text += ", " + counted(r.ranks_number, "rank");
    if (differ && r.ranks_number > 0 && speed > 0)
      text += fmt::format(", efficiency {}", percent(speed / r.ranks_number,
                                                     clips_a_second(*base) / base->ranks_number));
    body += bar(r.name, {{std::isfinite(speed) ? speed : 0, color_of(i), ""}}, fastest, text);
  }
  return section("Speed",
                 differ
                     ? fmt::format("Efficiency: clips a second for each rank, against the run {}.",
                                   escape(base->name))
                     : "Clips a second of time in steps.",
                 body + "</div>");
}

}  // namespace weft::report_page
