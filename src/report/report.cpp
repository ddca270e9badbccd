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
  std::string swatches;
  for (std::size_t i = 0; i < runs.size() && runs.size() > 1; ++i)
    swatches += swatch(color_of(i), escape(runs[i].name));
  return legend(swatches);
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

bool has(const Run& run, const char* column) { return !finite(run.steps[column]).empty(); }
bool has(std::span<const Run> runs, const char* column) {
  return std::ranges::any_of(runs, [&](const Run& r) { return has(r, column); });
}
bool has_held_out(const Run& run) { return !finite(run.held_out["loss"]).empty(); }

// The greatest value of any run.
double greatest_of(std::span<const Run> runs, const char* column) {
  double most = 0;
  for (const Run& r : runs) most = std::max(most, greatest(r.steps[column]));
  return most;
}

// A section of a chart over steps, with dotted lines where the one run was resumed.
std::string step_section(std::span<const Run> runs, const std::string& title,
                         const std::string& note, const std::string& legend, PlotFrame frame,
                         std::span<const Curve> curves) {
  if (runs.size() == 1) frame.restarts = runs[0].restarts;
  return section(title, note, legend + chart(frame, curves));
}

// ---- Loss ----

// Where its curve begins.
double first_loss(const Run& run) {
  const std::vector<double> v = finite(run.steps["loss"]);
  return v.empty() ? NAN : v.front();
}

// A held-out curve's colour, which no other curve has: as many colours on as there are runs.
std::string held_out_color(std::span<const Run> runs, std::size_t i) {
  return color_of(runs.size() + i);
}

// The legend names both curves.
std::string loss_legend(std::span<const Run> runs) {
  if (std::ranges::none_of(runs, has_held_out)) return run_legend(runs);
  std::string swatches;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::string name = runs.size() > 1 ? escape(runs[i].name) + ", " : "";
    swatches += swatch(color_of(i), name + "training");
    if (has_held_out(runs[i])) swatches += swatch(held_out_color(runs, i), name + "held out");
  }
  return legend(swatches);
}

// With a gap before each other set of samples.
Curve held_out_curve(const Run& run, const std::string& color) {
  std::vector<double> step = run.held_out.step, loss = run.held_out.columns.at("loss");
  for (std::size_t set = run.held_out_sets.size(); set-- > 1;) {
    const std::ptrdiff_t at = run.held_out_sets[set];
    step.insert(step.begin() + at, step[at]);
    loss.insert(loss.begin() + at, NAN);
  }
  const Binned b = bin(step, loss, most_points);
  return {run.name + " held out", b.x, b.mean, color, 2.4};
}

std::string loss_plot(std::span<const Run> runs) {
  std::vector<Curve> curves, averages, held_out;
  bool bands = false;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Series& s = runs[i].steps;
    const bool band = s.size() > most_in_line;
    const Binned b = bin(s.step, s["loss"], band ? most_points / 2 : most_in_line);
    Curve& raw =
        curves.emplace_back(Curve{"", b.x, b.mean, color_of(i), 1, runs.size() > 1 ? 0.25 : 0.38});
    if (band) {
      raw.width = 0;
      raw.low = b.low;
      raw.high = b.high;
    }
    bands = bands || band;
    averages.push_back(averaged(runs[i].name, s.step, s["loss"], color_of(i), 2.4));
    if (has_held_out(runs[i])) held_out.push_back(held_out_curve(runs[i], held_out_color(runs, i)));
  }
  curves.insert(curves.end(), averages.begin(), averages.end());
  curves.insert(curves.end(), held_out.begin(), held_out.end());
  std::string note = bands
                         ? "Shaded: the range of all steps. Line: average over neighbouring steps."
                         : "Thin: every step. Bold: average over neighbouring steps.";
  if (runs.size() == 1 && !runs[0].restarts.empty()) note += " Dotted: where the run was resumed.";
  return step_section(runs, "Loss", note, loss_legend(runs),
                      {"step", "loss", 1040, 330, false, true}, curves);
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
  const Series& s = runs[0].steps;
  const std::vector<std::string> stores = s.names("stores/", "/samples");
  if (runs.size() != 1 || stores.empty()) return "";
  double all = 0;
  for (const std::string& name : stores) all += total(s["stores/" + name + "/samples"]);
  std::vector<Curve> curves;
  std::string swatches;
  for (const std::string& name : stores) {
    const std::string column = "stores/" + name, color = color_of(curves.size());
    swatches += swatch(color, fmt::format("{} <em>{} of the samples</em>", escape(name),
                                          percent(total(s[column + "/samples"]), all)));
    curves.push_back(averaged(name, s.step, s[column + "/loss"], color, 1.8));
  }
  return step_section(runs, "Loss of each store", "Averaged over neighbouring steps.",
                      legend(swatches), {"step", "loss", 1040, 280, false, true}, curves);
}

std::string in_small(const std::string& sections) {
  return "<div class=\"small\">\n" + sections + "</div>\n";
}

std::string loss_terms(std::span<const Run> runs) {
  const Series& s = runs[0].steps;
  const std::vector<std::string> terms = s.names("terms/", "");
  if (runs.size() != 1 || terms.empty()) return "";
  // A plot each: they differ by orders of magnitude, and there are more of them than colours.
  std::string plots, constant;
  for (const std::string& name : terms) {
    const auto values = s["terms/" + name];
    const std::vector<double> known = finite(values);
    if (known.empty()) continue;
    const auto [low, high] = std::ranges::minmax(known);
    if (low == high) {
      constant += fmt::format("{}{} = {}", constant.empty() ? " Constant: " : ", ", escape(name),
                              short_number(low));
      continue;
    }
    const Curve curve = averaged(name, s.step, values, color_of(0), 1.8);
    plots += step_section(runs, escape(name), "", "", {"step", "value", 370, 220, false, true},
                          {&curve, 1});
  }
  const std::string note =
      "Other figures that the training reports, averaged over neighbouring steps.";
  return section("Terms", note + constant, "") + (plots.empty() ? "" : in_small(plots));
}

// ---- Time ----

// Milliseconds where a step is short.
std::pair<double, const char*> time_unit(std::span<const Run> runs) {
  double most = 0;
  for (const Run& r : runs) most = std::max(most, median(r.steps["seconds"]));
  return most < 1 ? std::pair{1e3, "ms"} : std::pair{1.0, "s"};
}

// One run: stacked columns over the steps. Without a split in the metrics, the whole alone.
std::string one_split(const Run& run) {
  const auto [scale, unit] = time_unit({&run, 1});
  const double whole = total(run.steps["seconds"]);
  std::vector<Curve> layers;
  std::string swatches;  // the parts with their share of the whole run's time
  const auto add = [&, scale = scale](const char* column, const char* name, const char* color) {
    Binned b = bin(run.steps.step, run.steps[column], most_columns);
    for (double& v : b.mean) v *= scale;
    layers.push_back({name, b.x, b.mean, color});
  };
  for (const StepPart& p : step_parts) {
    if (!has(run, p.column)) continue;  // metrics of an older version
    add(p.column, p.name, p.color);
    const std::string share = percent(total(run.steps[p.column]), whole);
    swatches += swatch(p.color, fmt::format("{} <em>{}</em>", p.name, share), true);
  }
  if (layers.empty()) add("seconds", "step", step_parts[0].color);
  std::string note = "Where the time of a step goes, on rank 0.";
  if (run.steps.size() > most_columns)
    note = fmt::format(
        "Where the time of a step goes on rank 0; each column is the mean of {:.0f} steps.",
        static_cast<double>(run.steps.size()) / static_cast<double>(most_columns));
  return step_section({&run, 1}, "Step time", note, legend(swatches),
                      {"step", fmt::format("time a step ({})", unit), 1040, 300, true, false},
                      stacked(std::move(layers)));
}

// Several runs: stacks cannot be overlaid, so curves of the whole and one bar a run.
std::string many_splits(std::span<const Run> runs) {
  const auto [scale, unit] = time_unit(runs);
  const PlotFrame frame{"step", fmt::format("time a step ({})", unit), 1040, 280, true, true};
  std::string swatches, list;
  for (const StepPart& p : step_parts) swatches += swatch(p.color, p.name, true);
  const auto mean = [](const Run& r, const char* column) {
    return total(r.steps[column]) / static_cast<double>(r.steps.size());
  };
  double longest = 0;
  for (const Run& r : runs) longest = std::max(longest, mean(r, "seconds"));
  for (const Run& r : runs) {
    std::vector<BarPiece> pieces;
    for (const StepPart& p : step_parts) {
      const double seconds = mean(r, p.column);
      const std::string share = percent(seconds, mean(r, "seconds"));
      pieces.push_back({seconds, p.color, fmt::format("{} {}", p.name, share)});
    }
    list += bar(r.name, pieces, longest, seconds_text(mean(r, "seconds")) + " a step");
  }
  return section("Step time", "Above: every step. Below: the mean of all steps, by what took it.",
                 run_legend(runs) + chart(frame, plain_curves(runs, "seconds", scale)) +
                     legend(swatches) + bars(list));
}

double samples_a_second(const Run& run) {
  const double seconds = total(run.steps["seconds"]);
  return seconds > 0 ? static_cast<double>(run.samples_seen) / seconds : NAN;
}

std::string speed_of_runs(std::span<const Run> runs) {
  // Efficiency against the run with the fewest ranks, if numbers of ranks differ.
  const Run* base = nullptr;
  bool differ = false;
  double fastest = 0;
  for (const Run& r : runs) {
    const double speed = samples_a_second(r);
    if (speed > fastest) fastest = speed;
    if (!(r.ranks_number > 0) || !(speed > 0)) continue;
    differ = differ || (base != nullptr && r.ranks_number != base->ranks_number);
    if (base == nullptr || r.ranks_number < base->ranks_number) base = &r;
  }
  if (!(fastest > 0)) return "";
  std::string list;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Run& r = runs[i];
    const double speed = samples_a_second(r);
    std::string text = std::isfinite(speed) ? rate_text(speed) + " samples a second" : "-";
    if (r.ranks_number > 0) text += ", " + counted(r.ranks_number, "rank");
    if (differ && r.ranks_number > 0 && speed > 0)
      text += fmt::format(", efficiency {}", percent(speed / r.ranks_number,
                                                     samples_a_second(*base) / base->ranks_number));
    list += bar(r.name, {{std::isfinite(speed) ? speed : 0, color_of(i), ""}}, fastest, text);
  }
  return section(
      "Speed",
      differ ? fmt::format("Efficiency: samples a second for each rank, against the run {}.",
                           escape(base->name))
             : "Samples a second of time in steps.",
      bars(list));
}

// ---- Memory, gradients, rates, facts, samples ----

// From zero, so that growth shows in its true proportion.
std::string memory_plot(std::span<const Run> runs) {
  const bool gb = greatest_of(runs, "memory/resident_bytes") >= 2e9;
  const double scale = gb ? 1e-9 : 1e-6;
  std::vector<Curve> curves = plain_curves(runs, "memory/resident_bytes", scale);
  std::string swatches = run_legend(runs), note = "Resident.";
  if (runs.size() == 1 && has(runs, "memory/arena_peak_bytes")) {
    curves.push_back(plain_curves(runs, "memory/arena_peak_bytes", scale)[0]);
    curves[0].name = "resident";
    curves[1].name = "activations";
    curves[1].color = run_colors[1];
    swatches = legend(swatch(run_colors[0], "resident") + swatch(run_colors[1], "activations"));
    note = "";
  }
  return step_section(runs, "Memory of rank 0", note, swatches,
                      {"step", gb ? "memory (GB)" : "memory (MB)", 370, 250, true, false}, curves);
}

// What fits three in a row.
std::string small_plots(std::span<const Run> runs) {
  std::string plots;
  if (has(runs, "memory/resident_bytes")) plots += memory_plot(runs);
  if (has(runs, "grad_norm"))
    plots +=
        step_section(runs, "Gradient norm", "", run_legend(runs),
                     {"step", "norm", 370, 250, false, true}, plain_curves(runs, "grad_norm", 1));
  if (has(runs, "lr")) {
    // In units of its own power of ten: rates have no digits worth reading otherwise.
    const double most = greatest_of(runs, "lr");
    const int power = most > 0 ? static_cast<int>(std::floor(std::log10(most) + 1e-9)) : 0;
    plots += step_section(runs, "Learning rate", "", run_legend(runs),
                          {"step", fmt::format("rate (1e{})", power), 370, 250, true, false},
                          plain_curves(runs, "lr", std::pow(10.0, -power)));
  }
  return in_small(plots);
}

// What the metrics say, then what the run said when it started.
std::vector<Named> all_facts(const Run& r) {
  const Series& s = r.steps;
  std::vector<Named> f = {
      {"steps",
       static_cast<double>(s.size()) == s.step.back()
           ? short_number(s.step.back())
           : fmt::format("{} recorded, to step {}", short_number(static_cast<double>(s.size())),
                         short_number(s.step.back()))},
      {"loss", loss_text(first_loss(r)) + " at the first step, " + loss_text(last_loss(r)) +
                   " at the end (mean of the last tenth, up to 50 steps)"},
      {"time in steps", seconds_text(total(s["seconds"]))},
      {"median step", seconds_text(median(s["seconds"]))},
  };
  if (r.samples_seen > 0)
    f.emplace_back("samples seen",
                   fmt::format("{}, {} different ones, {} a second",
                               short_number(static_cast<double>(r.samples_seen)),
                               short_number(static_cast<double>(r.distinct_samples)),
                               rate_text(samples_a_second(r))));
  std::string places;
  for (const double step : r.restarts) places += (places.empty() ? "" : ", ") + short_number(step);
  if (!places.empty()) f.emplace_back("resumed after step", places);
  if (r.repeated_steps > 0)
    f.emplace_back("steps done again", fmt::format("{}, after a restart", r.repeated_steps));
  if (r.broken_lines > 0)
    f.emplace_back("unreadable lines", fmt::format("{} of metrics.jsonl", r.broken_lines));
  f.insert(f.end(), r.facts.begin(), r.facts.end());
  return f;
}

// A column a run.
std::string facts_table(std::span<const Run> runs) {
  if (runs.size() == 1) return facts_section("Facts", all_facts(runs[0]));
  std::vector<std::string> head = {""};
  Rows rows;  // in the order of the first run that has them
  for (const Run& r : runs) {
    head.push_back(escape(r.name));
    for (const auto& [key, value] : all_facts(r)) {
      auto row = std::ranges::find(rows, escape(key), [](const auto& cells) { return cells[0]; });
      if (row == rows.end()) row = rows.insert(row, {escape(key)});
      row->resize(head.size() - 1, "-");
      row->push_back(escape(value));
    }
  }
  for (auto& row : rows) row.resize(head.size(), "-");
  return section("Facts", "", "<div class=\"beside\">" + table(head, rows, true) + "</div>");
}

std::string samples(const fs::path& base, const Run& run, const std::string& of,
                    Embedder& embedder) {
  std::string body;
  if (!run.through_time.empty())
    body += section("Samples through time" + of, "From RUN/samples, a folder a checkpoint.",
                    clips_beside(base, run.through_time, embedder));
  if (!run.samples.clips.empty())
    body += section("Samples" + of, "", clip_figures(base, run.samples, embedder));
  return body;
}

// The ranks' mean wait; the median where there are more than the metrics list one by one.
Named wait_tile(const Run& r) {
  const RankTimes& t = r.ranks;
  double step = 0;
  for (const std::size_t i : t.steps) step += r.steps["seconds"][i];
  step /= static_cast<double>(t.steps.size());
  const auto [least, most] = std::ranges::minmax(t.wait);
  const double wait = t.each ? total(t.wait) / static_cast<double>(t.wait.size()) : t.wait[1];
  return {percent(wait, step),
          fmt::format("waiting for the slowest, {} of the ranks ({} to {})",
                      t.each ? "mean" : "median", percent(least, step), percent(most, step))};
}

// The few numbers that a reader looks for first.
std::string run_tiles(const Run& r) {
  const Series& s = r.steps;
  std::vector<Named> t = {{short_number(s.step.back()), "steps done"},
                          {loss_text(last_loss(r)), "loss, from " + loss_text(first_loss(r))}};
  const std::size_t last_set = r.held_out_sets.empty() ? 0 : r.held_out_sets.back();
  if (const auto held = finite(r.held_out["loss"].subspan(last_set)); !held.empty())
    t.emplace_back(loss_text(held.back()),
                   "held-out loss, best " + loss_text(std::ranges::min(held)));
  t.emplace_back(seconds_text(median(s["seconds"])), "median step");
  if (r.samples_seen > 0) t.emplace_back(rate_text(samples_a_second(r)), "samples a second");
  if (has(r, "split/data_wait"))
    t.emplace_back(percent(total(s["split/data_wait"]), total(s["seconds"])),
                   "of the time waiting for data");
  if (r.ranks.busy.size() > 1) t.push_back(wait_tile(r));
  if (has(r, "memory/resident_bytes"))
    t.emplace_back(bytes_text(greatest(s["memory/resident_bytes"])), "resident at most, rank 0");
  return tiles(t);
}

}  // namespace

std::string make_page(std::span<const Run> runs, std::span<const Scaling> scaling,
                      fs::path folder) {
  const Run& first = runs.front();
  const bool several = runs.size() > 1;
  const auto of = [&](const Run& r) { return several ? " of " + escape(r.name) : ""; };
  std::string names, note;
  std::vector<Scaling> results;
  for (const Run& r : runs) {
    names += (names.empty() ? "" : ", ") + escape(r.name);
    if (r.dir.string() != r.name) note += (note.empty() ? "" : " · ") + escape(r.dir.string());
    results.insert(results.end(), r.scaling.begin(), r.scaling.end());
  }
  results.insert(results.end(), scaling.begin(), scaling.end());
  for (const auto& [key, value] : first.facts)
    if (key == "build") note += (note.empty() ? "" : " · ") + escape(value);
  if (folder.empty()) folder = first.dir;

  std::string page = open_page(names, note, several);
  page += several ? "<p></p>" : run_tiles(first);
  for (const Run& r : runs) page += status_sections(r.status, of(r));
  page += loss_plot(runs);
  if (several) page += loss_over_time(runs);
  page += loss_terms(runs) + loss_of_stores(runs);
  page += several ? many_splits(runs) + speed_of_runs(runs) : one_split(first);
  for (const Run& r : runs) page += rank_bars(r, of(r));
  page += small_plots(runs);
  for (const Run& r : runs) page += memory_against_plan(r, of(r));
  page += scaling_curves(results);
  Embedder embedder;
  for (const Run& r : runs) page += samples(folder, r, of(r), embedder);
  page += facts_table(runs);
  for (const Run& r : runs)
    if (!r.deck.empty())
      page += fmt::format(
          "<section><details><summary>Deck{}</summary><pre>{}</pre></details></section>\n", of(r),
          escape(r.deck));
  return page + close_page();
}

}  // namespace weft::report_page
