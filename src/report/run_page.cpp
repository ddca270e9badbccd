// The page of training runs: what page.js is told of them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "report/report.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_points = 800;  // that a curve has

// In as many digits as a reader can tell apart; NaN becomes null.
Json numbers(std::span<const double> values) {
  Json list = Json::array();
  for (const double v : values)
    list.push_back(std::strtod(fmt::format("{:.7g}", v).c_str(), nullptr));
  return list;
}

// Each column that has numbers: its curve, and figures over all of its steps.
Json json_of(const Series& s) {
  Json columns = Json::object();
  for (const auto& [name, values] : s.columns) {
    const std::vector<double> known = finite(values);
    if (known.empty()) continue;
    const Binned b = bin(s.step, values, most_points);
    const auto [least, greatest] = std::ranges::minmax(known);
    Json& c = columns[name];
    c = {{"y", numbers(b.mean)},   {"known", known.size()},   {"total", total(known)},
         {"first", known.front()}, {"median", median(known)}, {"least", least},
         {"greatest", greatest}};
    if (s.size() > most_points) c.update({{"low", numbers(b.low)}, {"high", numbers(b.high)}});
  }
  return {{"count", s.size()},
          {"last", s.size() > 0 ? s.step.back() : 0},
          {"x", numbers(bin(s.step, s.step, most_points).mean)},
          {"columns", columns}};
}

// The losses of held-out samples, with a gap before each other set of samples, of which the last
// has the best.
Json held_out(const Run& run) {
  std::vector<double> step = run.held_out.step;
  const std::span<const double> given = run.held_out["loss"];
  if (finite(given).empty()) return nullptr;
  const std::vector<double> known = finite(given.subspan(run.held_out_sets.back()));
  std::vector<double> loss(given.begin(), given.end());
  for (std::size_t set = run.held_out_sets.size(); set-- > 1;) {
    const std::ptrdiff_t at = run.held_out_sets[set];
    step.insert(step.begin() + at, step[at]);
    loss.insert(loss.begin() + at, NAN);
  }
  const Binned b = bin(step, loss, most_points);
  Json j = {{"x", numbers(b.x)}, {"y", numbers(b.mean)}};
  if (!known.empty()) j.update({{"last", known.back()}, {"best", std::ranges::min(known)}});
  return j;
}

// Seconds of each rank, and the means of rank 0's columns over the same steps.
Json json_of(const RankTimes& t, const Series& steps) {
  if (t.busy.size() < 2) return nullptr;
  Json own = Json::object(), slowest = Json::object();
  for (const char* column :
       {"seconds", "split/comm_exposed", "split/optimizer", "split/checkpoint", other_part}) {
    std::vector<double> values;
    for (const std::size_t i : t.steps) values.push_back(steps[column][i]);
    own[column] = total(values) / static_cast<double>(t.steps.size());
  }
  for (const auto& [rank, times] : t.was_slowest) slowest[std::to_string(rank)] = times;
  return {{"each", t.each},           {"busy", t.busy},          {"wait", t.wait},
          {"data_wait", t.data_wait}, {"steps", t.steps.size()}, {"own", own},
          {"slowest", slowest}};
}

Json json_of(const Run& r, Embedder& embedder) {
  Json through_time = Json::array();
  for (const Gallery& g : r.through_time) through_time.push_back(json_of(g, embedder));
  return {{"name", r.name},
          {"steps", json_of(r.steps)},
          {"last_loss", last_loss(r)},
          {"held_out", held_out(r)},
          {"ranks", json_of(r.ranks, r.steps)},
          {"ranks_number", r.ranks_number},
          {"samples_seen", r.samples_seen},
          {"distinct_samples", r.distinct_samples},
          {"restarts", r.restarts},
          {"repeated_steps", r.repeated_steps},
          {"broken_lines", r.broken_lines},
          {"facts", r.facts},
          {"deck", r.deck},
          {"status", json_of(known(r.dir, r.status), r.status.updated)},
          {"samples", json_of(r.samples, embedder)},
          {"through_time", through_time}};
}

}  // namespace

std::string make_page(std::span<const Run> runs, std::span<const Json> scaling, fs::path folder) {
  if (folder.empty() && !runs.empty()) folder = runs.front().dir;
  Embedder embedder(folder);
  std::string title, note, text;
  Json page = {{"kind", "training"},
               {"several", runs.size() > 1},
               {"runs", Json::array()},
               {"scaling", Json::array()}};
  for (const Run& r : runs) {
    title += (title.empty() ? "" : ", ") + r.name;
    if (r.dir.string() != r.name) note += (note.empty() ? "" : " · ") + r.dir.string();
    text += fmt::format("{}: {:.0f} steps done, loss {:.5g}\n", r.name, r.steps.step.back(),
                        last_loss(r));
    if (!r.status.command.empty()) text += describe_job(known(r.dir, r.status), r.status.updated);
    page["runs"].push_back(json_of(r, embedder));
    if (r.scaling.is_object()) page["scaling"].push_back(r.scaling);
  }
  for (const Json& result : scaling) page["scaling"].push_back(result);
  if (!runs.empty())
    if (const auto build = runs.front().facts.find("build");
        build != runs.front().facts.end() && build->is_string())
      note += " · " + build->get<std::string>();
  page["title"] = runs.empty() ? "Scaling" : title;
  page["note"] = note;
  return page_html(page, text);
}

}  // namespace weft::report_page
