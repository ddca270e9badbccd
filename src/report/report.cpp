#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "core/log.h"
#include "report/html.h"
#include "report/plot.h"

namespace weft::report_page {

double last_loss(const Run& run) {
  const std::vector<double> v = finite(run.steps["loss"]);
  if (v.empty()) return NAN;
  const std::size_t n = std::clamp<std::size_t>(v.size() / 10, 1, 50);
  return std::accumulate(v.end() - static_cast<std::ptrdiff_t>(n), v.end(), 0.0) /
         static_cast<double>(n);
}

// A tile has room for no more.
std::string loss_text(double v) {
  if (!std::isfinite(v)) return "-";
  return std::abs(v) < 10 ? fmt::format("{:.4f}", v) : fmt::format("{:.5g}", v);
}

namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_columns = 140;
// Above this many steps a line is unreadable: a band shows their range instead.
constexpr std::size_t most_in_line = 3000;

// ---- Curves of one run or of several over one another ----

// The legend of runs; nothing for one.
std::string run_legend(std::span<const Run> runs) {
  if (runs.size() < 2) return "";
  std::string s = "<div class=\"legend\">";
  for (std::size_t i = 0; i < runs.size(); ++i) s += swatch(color_of(i), escape(runs[i].name));
  return s + "</div>\n";
}

// One curve a run of some quantity, averaged into few enough points to draw.
std::vector<Curve> plain_curves(std::span<const Run> runs, const char* column, double scale) {
  std::vector<Curve> curves;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    Binned b = bin(runs[i].steps.step, runs[i].steps[column], most_points);
    for (double& v : b.mean) v *= scale;
    curves.push_back({runs[i].name, b.x, b.mean, color_of(i), 1.8});
  }
  return curves;
}

bool has(std::span<const Run> runs, const char* column) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const Run& r) { return !finite(r.steps[column]).empty(); });
}

// Where its curve begins.
double first_loss(const Run& run) {
  const std::vector<double> v = finite(run.steps["loss"]);
  return v.empty() ? NAN : v.front();
}

std::vector<double> restarts_of(std::span<const Run> runs) {
  return runs.size() == 1 ? runs[0].restarts : std::vector<double>();
}

// ---- Loss ----

// A held-out curve's colour, which no other curve has: as many colours on as there are runs.
std::string held_out_color(std::span<const Run> runs, std::size_t i) {
  return color_of(runs.size() + i);
}

bool has_held_out(std::span<const Run> runs) {
  return std::any_of(runs.begin(), runs.end(),
                     [](const Run& r) { return !finite(r.held_out["loss"]).empty(); });
}

// The legend names both curves.
std::string loss_legend(std::span<const Run> runs) {
  if (!has_held_out(runs)) return run_legend(runs);
  std::string s = "<div class=\"legend\">";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::string name = runs.size() > 1 ? escape(runs[i].name) + ", " : "";
    s += swatch(color_of(i), name + "training");
    if (!finite(runs[i].held_out["loss"]).empty())
      s += swatch(held_out_color(runs, i), name + "held out");
  }
  return s + "</div>\n";
}

std::string loss_plot(std::span<const Run> runs) {
  std::vector<Curve> curves;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Series& s = runs[i].steps;
    const bool band = s.size() > most_in_line;
    const Binned b = bin(s.step, s["loss"], band ? most_points / 2 : most_in_line);
    Curve raw{"", b.x, b.mean, color_of(i), 1, runs.size() > 1 ? 0.25 : 0.38};
    if (band) {
      raw.width = 0;
      raw.low = b.low;
      raw.high = b.high;
    }
    curves.push_back(raw);
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Series& s = runs[i].steps;
    curves.push_back(averaged(runs[i].name, s.step, s["loss"], color_of(i), 2.4));
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (finite(runs[i].held_out["loss"]).empty()) continue;
    const auto& sets = runs[i].held_out_sets;
    std::vector<double> step = runs[i].held_out.step;
    std::vector<double> loss = runs[i].held_out.columns.at("loss");
    for (std::size_t set = sets.size(); set-- > 1;) {  // a gap before each other set
      step.insert(step.begin() + sets[set], step[sets[set]]);
      loss.insert(loss.begin() + sets[set], NAN);
    }
    const Binned b = bin(step, loss, most_points);
    curves.push_back({runs[i].name + " held out", b.x, b.mean, held_out_color(runs, i), 2.4});
  }
  PlotFrame frame{"step", "loss", 1040, 330, false, true};
  frame.restarts = restarts_of(runs);
  const bool bands = std::any_of(runs.begin(), runs.end(),
                                 [](const Run& r) { return r.steps.size() > most_in_line; });
  const std::string what =
      bands ? "Shaded: the range of all steps. Line: average over neighbouring steps."
            : "Thin: every step. Bold: average over neighbouring steps.";
  return section("Loss",
                 what + (frame.restarts.empty() ? "" : " Dotted: where the run was resumed."),
                 loss_legend(runs) + chart(frame, curves));
}

std::string loss_over_time(std::span<const Run> runs) {
  double longest = 0;
  for (const Run& r : runs) longest = std::max(longest, total(r.steps["seconds"]));
  if (!(longest > 0)) return "";
  const auto [unit, name] = longest > 3 * 3600 ? std::pair{3600.0, "hours"}
                            : longest > 180    ? std::pair{60.0, "minutes"}
                                               : std::pair{1.0, "seconds"};
  std::vector<Curve> curves;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::vector<double> at;
    double time = 0;
    for (const double s : runs[i].steps["seconds"]) {
      if (std::isfinite(s)) time += s;
      at.push_back(time / unit);
    }
    curves.push_back(averaged(runs[i].name, at, runs[i].steps["loss"], color_of(i), 2.4));
  }
  const PlotFrame frame{name, "loss", 1040, 280, false, true, false};
  return section("Loss over time", "Averaged over neighbouring steps; time in steps alone.",
                 run_legend(runs) + chart(frame, curves));
}

// The loss of each of several stores.
std::string loss_of_stores(std::span<const Run> runs) {
  if (runs.size() != 1) return "";
  const Series& s = runs[0].steps;
  double all = 0;
  const std::vector<std::string> stores = s.names("stores/", "/samples");
  if (stores.empty()) return "";
  for (const std::string& name : stores) all += total(s["stores/" + name + "/samples"]);
  std::vector<Curve> curves;
  std::string legend = "<div class=\"legend\">";
  for (const std::string& name : stores) {
    const std::string column = "stores/" + name;
    const std::string color = color_of(curves.size());
    legend += swatch(color, fmt::format("{} <em>{} of the samples</em>", escape(name),
                                        percent(total(s[column + "/samples"]), all)));
    curves.push_back(averaged(name, s.step, s[column + "/loss"], color, 1.8));
  }
  PlotFrame frame{"step", "loss", 1040, 280, false, true};
  frame.restarts = runs[0].restarts;
  return section("Loss of each store", "Averaged over neighbouring steps.",
                 legend + "</div>\n" + chart(frame, curves));
}

std::string loss_terms(std::span<const Run> runs) {
  const std::vector<std::string> terms = runs[0].steps.names("terms/", "");
  if (runs.size() != 1 || terms.empty()) return "";
  // A plot each: they differ by orders of magnitude, and there are more of them than colours.
  std::string plots, constant;
  for (const std::string& name : terms) {
    const auto values = runs[0].steps["terms/" + name];
    const std::vector<double> known = finite(values);
    if (known.empty()) continue;
    const auto [low, high] = std::ranges::minmax(known);
    if (low == high) {
      constant += fmt::format("{}{} = {}", constant.empty() ? " Constant: " : ", ", escape(name),
                              short_number(low));
      continue;
    }
    const std::vector<Curve> curve = {averaged(name, runs[0].steps.step, values, color_of(0), 1.8)};
    PlotFrame frame{"step", "value", 370, 220, false, true};
    frame.restarts = runs[0].restarts;
    plots += section(escape(name), "", chart(frame, curve));
  }
  const std::string note =
      "Other figures that the training reports, averaged over neighbouring steps.";
  return section("Terms", note + constant, "") +
         (plots.empty() ? "" : "<div class=\"small\">\n" + plots + "</div>\n");
}

// ---- Time ----

// The parts with their share of the whole run's time.
std::string split_legend(const Run& run) {
  const double whole = total(run.steps["seconds"]);
  std::string s = "<div class=\"legend\">";
  for (int p = 0; p < parts; ++p) {
    if (finite(run.steps[step_parts[p].column]).empty()) continue;  // metrics of an older version
    s += swatch(step_parts[p].color,
                fmt::format("{} <em>{}</em>", step_parts[p].name,
                            percent(total(run.steps[step_parts[p].column]), whole)),
                true);
  }
  return s + "</div>\n";
}

// Milliseconds where a step is short.
std::pair<double, const char*> time_unit(std::span<const Run> runs) {
  double most = 0;
  for (const Run& r : runs) most = std::max(most, median(r.steps["seconds"]));
  return most < 1 ? std::pair{1e3, "ms"} : std::pair{1.0, "s"};
}

// One run: stacked columns over the steps. Without a split in the metrics, the whole alone.
std::string one_split(const Run& run) {
  const auto [scale, unit] = time_unit({&run, 1});
  std::vector<Curve> layers;
  const bool split = !finite(run.steps[step_parts[0].column]).empty();
  for (int p = 0; p < parts; ++p) {
    if (split && finite(run.steps[step_parts[p].column]).empty()) continue;
    Binned b = bin(run.steps.step, split ? run.steps[step_parts[p].column] : run.steps["seconds"],
                   most_columns);
    for (double& v : b.mean) v *= scale;
    layers.push_back({split ? step_parts[p].name : "step", b.x, b.mean, step_parts[p].color});
    if (!split) break;
  }
  PlotFrame frame{"step", fmt::format("time a step ({})", unit), 1040, 300, true, false};
  frame.restarts = run.restarts;
  const std::size_t columns = std::min(run.steps.size(), most_columns);
  const std::string note =
      columns < run.steps.size()
          ? fmt::format(
                "Where the time of a step goes on rank 0; each column is the mean of {:.0f} "
                "steps.",
                static_cast<double>(run.steps.size()) / static_cast<double>(columns))
          : "Where the time of a step goes, on rank 0.";
  return section("Step time", note,
                 (split ? split_legend(run) : "") + chart(frame, stacked(std::move(layers))));
}

// Several runs: stacks cannot be overlaid, so curves of the whole and one bar a run.
std::string many_splits(std::span<const Run> runs) {
  const auto [scale, unit] = time_unit(runs);
  PlotFrame frame{"step", fmt::format("time a step ({})", unit), 1040, 280, true, true};
  std::string body = run_legend(runs) + chart(frame, plain_curves(runs, "seconds", scale)) +
                     "<div class=\"legend\" style=\"margin-top:14px\">";
  for (int p = 0; p < parts; ++p) body += swatch(step_parts[p].color, step_parts[p].name, true);
  body += "</div><div class=\"bars\">";
  double longest = 0;
  for (const Run& r : runs)
    longest = std::max(longest, total(r.steps["seconds"]) / static_cast<double>(r.steps.size()));
  for (const Run& r : runs) {
    const double steps = static_cast<double>(r.steps.size());
    const double mean = total(r.steps["seconds"]) / steps;
    std::vector<BarPiece> pieces;
    for (int p = 0; p < parts; ++p) {
      const double seconds = total(r.steps[step_parts[p].column]) / steps;
      pieces.push_back({seconds, step_parts[p].color,
                        fmt::format("{} {}", step_parts[p].name, percent(seconds, mean))});
    }
    body += bar(r.name, pieces, longest, seconds_text(mean) + " a step");
  }
  return section("Step time", "Above: every step. Below: the mean of all steps, by what took it.",
                 body + "</div>");
}

double clips_a_second(const Run& run) {
  const double seconds = total(run.steps["seconds"]);
  return seconds > 0 ? static_cast<double>(run.samples_seen) / seconds : NAN;
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
    std::string text = std::isfinite(speed) ? rate_text(speed) + " samples a second" : "-";
    if (r.ranks_number > 0) text += ", " + counted(r.ranks_number, "rank");
    if (differ && r.ranks_number > 0 && speed > 0)
      text += fmt::format(", efficiency {}", percent(speed / r.ranks_number,
                                                     clips_a_second(*base) / base->ranks_number));
    body += bar(r.name, {{std::isfinite(speed) ? speed : 0, color_of(i), ""}}, fastest, text);
  }
  return section(
      "Speed",
      differ ? fmt::format("Efficiency: samples a second for each rank, against the run {}.",
                           escape(base->name))
             : "Samples a second of time in steps.",
      body + "</div>");
}

// ---- Memory, gradients, rates, facts, samples ----

// From zero, so that growth shows in its true proportion.
std::string memory_plot(std::span<const Run> runs) {
  double most = 0;
  for (const Run& r : runs) most = std::max({most, greatest(r.steps["memory/resident_bytes"])});
  const bool gb = most >= 2e9;
  const double scale = gb ? 1e-9 : 1e-6;
  std::vector<Curve> curves = plain_curves(runs, "memory/resident_bytes", scale);
  std::string legend = run_legend(runs), note = "Resident.";
  if (runs.size() == 1 && has(runs, "memory/arena_peak_bytes")) {
    Curve arena = plain_curves(runs, "memory/arena_peak_bytes", scale)[0];
    arena.color = run_colors[1];
    curves[0].name = "resident";
    arena.name = "activations";
    curves.push_back(arena);
    legend = "<div class=\"legend\">" + swatch(run_colors[0], "resident") +
             swatch(run_colors[1], "activations") + "</div>";
    note = "";
  }
  PlotFrame frame{"step", gb ? "memory (GB)" : "memory (MB)", 370, 250, true, false};
  frame.restarts = restarts_of(runs);
  return section("Memory of rank 0", note, legend + chart(frame, curves));
}

std::string grad_plot(std::span<const Run> runs) {
  PlotFrame frame{"step", "norm", 370, 250, false, true};
  frame.restarts = restarts_of(runs);
  return section("Gradient norm", "",
                 run_legend(runs) + chart(frame, plain_curves(runs, "grad_norm", 1)));
}

// In units of its own power of ten: rates have no digits worth reading otherwise.
std::string rate_plot(std::span<const Run> runs) {
  double most = 0;
  for (const Run& r : runs) most = std::max(most, greatest(r.steps["lr"]));
  const int power = most > 0 ? static_cast<int>(std::floor(std::log10(most) + 1e-9)) : 0;
  PlotFrame frame{"step", fmt::format("rate (1e{})", power), 370, 250, true, false};
  frame.restarts = restarts_of(runs);
  return section("Learning rate", "",
                 run_legend(runs) + chart(frame, plain_curves(runs, "lr", std::pow(10.0, -power))));
}

// What the metrics say, then what the run said when it started.
std::vector<std::pair<std::string, std::string>> all_facts(const Run& r) {
  const Series& s = r.steps;
  const double time = total(s["seconds"]);
  std::vector<std::pair<std::string, std::string>> f = {
      {"steps",
       static_cast<double>(s.size()) == s.step.back()
           ? short_number(s.step.back())
           : fmt::format("{} recorded, to step {}", short_number(static_cast<double>(s.size())),
                         short_number(s.step.back()))},
      {"loss", loss_text(first_loss(r)) + " at the first step, " + loss_text(last_loss(r)) +
                   " at the end (mean of the last tenth, up to 50 steps)"},
      {"time in steps", seconds_text(time)},
      {"median step", seconds_text(median(s["seconds"]))},
  };
  if (r.samples_seen > 0)
    f.emplace_back("samples seen",
                   fmt::format("{}, {} different ones, {} a second",
                               short_number(static_cast<double>(r.samples_seen)),
                               short_number(static_cast<double>(r.distinct_samples)),
                               rate_text(static_cast<double>(r.samples_seen) / time)));
  if (!r.restarts.empty()) {
    std::string places;
    for (const double step : r.restarts)
      places += (places.empty() ? "" : ", ") + short_number(step);
    f.emplace_back("resumed after step", places);
  }
  if (r.repeated_steps > 0)
    f.emplace_back("steps done again", fmt::format("{}, after a restart", r.repeated_steps));
  if (r.broken_lines > 0)
    f.emplace_back("unreadable lines", fmt::format("{} of metrics.jsonl", r.broken_lines));
  f.insert(f.end(), r.facts.begin(), r.facts.end());
  return f;
}

std::string facts_table(std::span<const Run> runs) {
  // Rows in the order of the first run that has them.
  std::vector<std::string> keys;
  std::vector<std::vector<std::pair<std::string, std::string>>> facts;
  for (const Run& r : runs) {
    facts.push_back(all_facts(r));
    for (const auto& [key, value] : facts.back())
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  std::string t = "<div class=\"scroll\"><table>";
  if (runs.size() > 1) {
    t = "<div class=\"scroll\"><table class=\"beside\"><thead><tr><th></th>";
    for (const Run& r : runs) t += "<th>" + escape(r.name) + "</th>";
    t += "</tr></thead>";
  }
  t += "<tbody>\n";
  for (const std::string& key : keys) {
    t += "<tr><th>" + escape(key) + "</th>";
    for (const auto& of_run : facts) {
      const auto it = std::find_if(of_run.begin(), of_run.end(),
                                   [&](const auto& row) { return row.first == key; });
      t += "<td>" + (it == of_run.end() ? std::string("-") : escape(it->second)) + "</td>";
    }
    t += "</tr>\n";
  }
  return section("Facts", "", t + "</tbody></table></div>");
}

std::string samples(const fs::path& base, const Run& run, bool named, Embedder& embedder) {
  const auto title = [&](const char* what) {
    return named ? fmt::format("{} of {}", what, escape(run.name)) : what;
  };
  std::string body;
  if (!run.through_time.empty())
    body += section(title("Samples through time"), "From RUN/samples, a folder a checkpoint.",
                    clips_beside(base, run.through_time, embedder));
  if (!run.samples.clips.empty())
    body += section(title("Samples"), "", clip_figures(base, run.samples, embedder));
  return body;
}

// The ranks' mean wait; the median where there are more than the metrics list one by one.
std::string wait_tile(const Run& r) {
  const RankTimes& t = r.ranks;
  double step = 0;
  for (const std::size_t i : t.steps) step += r.steps["seconds"][i];
  step /= static_cast<double>(t.steps.size());
  const auto [least, most] = std::ranges::minmax(t.wait);
  const double wait = t.each ? total(t.wait) / static_cast<double>(t.wait.size()) : t.wait[1];
  return tile(percent(wait, step),
              fmt::format("waiting for the slowest, {} of the ranks ({} to {})",
                          t.each ? "mean" : "median", percent(least, step), percent(most, step)));
}

// The few numbers that a reader looks for first.
std::string tiles(const Run& r) {
  const Series& s = r.steps;
  std::string t = "<div class=\"tiles\">\n";
  t += tile(short_number(s.step.back()), "steps done");
  t += tile(loss_text(last_loss(r)), "loss, from " + loss_text(first_loss(r)));
  const std::size_t last_set = r.held_out_sets.empty() ? 0 : r.held_out_sets.back();
  if (const auto held = finite(r.held_out["loss"].subspan(last_set)); !held.empty())
    t += tile(loss_text(held.back()), "held-out loss, best " + loss_text(std::ranges::min(held)));
  t += tile(seconds_text(median(s["seconds"])), "median step");
  if (r.samples_seen > 0)
    t += tile(rate_text(static_cast<double>(r.samples_seen) / total(s["seconds"])),
              "samples a second");
  if (!finite(s["split/data_wait"]).empty())
    t += tile(percent(total(s["split/data_wait"]), total(s["seconds"])),
              "of the time waiting for data");
  if (r.ranks.busy.size() > 1) t += wait_tile(r);
  if (!finite(s["memory/resident_bytes"]).empty())
    t += tile(bytes_text(greatest(s["memory/resident_bytes"])), "resident at most, rank 0");
  return t + "</div>\n";
}

}  // namespace

std::string make_page(std::span<const Run> runs, std::span<const Scaling> scaling,
                      fs::path folder) {
  const Run& first = runs.front();
  std::string names, build;
  for (const Run& r : runs) names += (names.empty() ? "" : ", ") + escape(r.name);
  for (const auto& [key, value] : first.facts)
    if (key == "build") build = escape(value);
  std::string dirs;
  for (const Run& r : runs)
    if (r.dir.string() != r.name) dirs += (dirs.empty() ? "" : " · ") + escape(r.dir.string());

  std::string page = open_page(names, dirs + (dirs.empty() || build.empty() ? "" : " · ") + build,
                               runs.size() > 1);
  page += runs.size() == 1 ? tiles(first) : "<p></p>";
  for (const Run& r : runs)
    page += status_sections(r.status, runs.size() == 1 ? "" : " of " + escape(r.name));
  page += loss_plot(runs);
  const bool several = runs.size() > 1;
  if (several) page += loss_over_time(runs);
  page += loss_terms(runs);
  page += loss_of_stores(runs);
  page += several ? many_splits(runs) : one_split(first);
  if (several) page += speed_of_runs(runs);
  for (const Run& r : runs) page += rank_bars(r, several);
  std::vector<std::string> small;
  if (has(runs, "memory/resident_bytes")) small.push_back(memory_plot(runs));
  if (has(runs, "grad_norm")) small.push_back(grad_plot(runs));
  if (has(runs, "lr")) small.push_back(rate_plot(runs));
  page += "<div class=\"small\">\n";
  for (const std::string& s : small) page += s;
  page += "</div>\n";
  for (const Run& r : runs) page += memory_against_plan(r, several);
  std::vector<Scaling> results;
  for (const Run& r : runs) results.insert(results.end(), r.scaling.begin(), r.scaling.end());
  results.insert(results.end(), scaling.begin(), scaling.end());
  page += scaling_curves(results);
  Embedder embedder;
  if (folder.empty()) folder = first.dir;
  for (const Run& r : runs) page += samples(folder, r, several, embedder);
  page += facts_table(runs);
  for (const Run& r : runs)
    if (!r.deck.empty())
      page += fmt::format(
          "<section><details><summary>Deck{}</summary><pre>{}</pre></details>"
          "</section>\n",
          runs.size() > 1 ? " of " + escape(r.name) : "", escape(r.deck));
  return page + close_page();
}

}  // namespace weft::report_page
