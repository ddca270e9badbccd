#include "report/data.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/progress.h"
#include "train/metrics/metrics.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t column_limit = 128;

// The lines of a file, in its order; the damaged ones are counted. None of a file that is not
// there.
std::vector<json> lines_of(const fs::path& path, std::size_t& broken) {
  std::ifstream in = open_regular(path);
  std::vector<json> lines;
  for (std::string line; std::getline(in, line);) {
    json j = parse_step_line(line);
    // No line end: a crash cut it short, or it is being written.
    if (!j.is_discarded())
      lines.push_back(std::move(j));
    else if (!is_cut_off(line, in.eof()) && !line.empty())
      ++broken;
  }
  return lines;
}

// The values of "rank_busy" and the like; with many ranks the file has an object of min, median and
// max.
std::vector<double> of_ranks(const json& j, const char* key, bool& each) {
  const auto it = j.find(key);
  std::vector<double> v;
  if (it == j.end()) return v;
  each = it->is_array();
  if (each)
    for (const json& x : *it) v.push_back(x.is_number() ? x.get<double>() : 0);
  else if (it->is_object())
    for (const char* of : {"min", "median", "max"}) v.push_back(number_of(*it, of));
  return v;
}

void add_ranks(RankTimes& t, std::size_t at, const json& j) {
  bool each = true;
  const std::vector<double> busy = of_ranks(j, "rank_busy", each);
  if (busy.empty()) return;
  std::vector<double> wait = of_ranks(j, "rank_wait", each);
  std::vector<double> data = of_ranks(j, "rank_data_wait", each);
  wait.resize(busy.size());
  // The fastest of many ranks waits longest for the slowest.
  if (!each) std::reverse(wait.begin(), wait.end());
  if (busy.size() != t.busy.size() || each != t.each) {  // a restart on another number of ranks
    t = {};
    t.each = each;
    t.busy.resize(busy.size());
    t.wait.resize(busy.size());
    if (each && data.size() == busy.size()) t.data_wait.resize(busy.size());
  }
  t.steps.push_back(at);
  for (std::size_t r = 0; r < busy.size(); ++r) {
    t.busy[r] += busy[r];
    t.wait[r] += wait[r];
    if (!t.data_wait.empty() && r < data.size()) t.data_wait[r] += data[r];
  }
  if (const double slowest = number_of(j, "slowest_rank"); slowest >= 0 && slowest < 1 << 30)
    ++t.was_slowest[static_cast<int>(slowest)];
}

void load_metrics(Run& run) {
  const fs::path path = run.dir / "metrics.jsonl";
  std::ifstream in = open_regular(path);
  WEFT_CHECK(in.is_open(), Exit::data,
             "give the directory of a run (deck key run.dir), or a folder of runs",
             "cannot open {}", path.string());
  std::error_code none;
  run.ended =
      std::chrono::duration<double>(
          std::chrono::file_clock::to_sys(fs::last_write_time(path, none)).time_since_epoch())
          .count();
  // A restart repeats steps: the last of each counts. Sorted by step, whatever the order of lines.
  const std::vector<json> lines = lines_of(path, run.broken_lines);
  std::map<std::int64_t, const json*> last;
  for (const json& line : lines) last[line.at("step")] = &line;
  WEFT_CHECK(!last.empty(), Exit::data, "wait for the run's first step",
             "{} has no complete line yet", path.string());
  run.repeated_steps = lines.size() - last.size();
  std::set<std::int64_t> samples;
  for (const auto& [step, j] : last) {
    const auto start = j->find("start");
    if (start != j->end() && *start == true && step != last.begin()->first)
      run.restarts.push_back(static_cast<double>(step));
    add_ranks(run.ranks, run.steps.size(), *j);
    // metrics.jsonl counts steps from 0, the page from 1.
    run.steps.add(static_cast<double>(step) + 1, *j);
    if (!std::isnan(run.steps["split/compute"].back())) {
      double rest = run.steps["seconds"].back();
      for (const char* part : step_parts)
        if (const double v = run.steps[part].back(); std::isfinite(v)) rest -= v;
      // Clocks of the parts and of the whole are read at different moments: no negative rest.
      run.steps.add(other_part, std::max(0.0, rest));
    }
    for (const json& id : list_of(*j, "samples"))
      if (id.is_number_integer()) {
        ++run.samples_seen;
        samples.insert(id.get<std::int64_t>());
      }
  }
  for (auto* sums : {&run.ranks.busy, &run.ranks.wait, &run.ranks.data_wait})
    for (double& s : *sums) s /= static_cast<double>(run.ranks.steps.size());
  run.distinct_samples = samples.size();
}

// Optional. The last line of a step and a set of samples counts.
void load_held_out(Run& run) {
  const std::vector<json> lines = lines_of(run.dir / "validation.jsonl", run.broken_lines);
  std::map<std::pair<int, std::int64_t>, const json*> last;
  int sets = 0;
  std::string set;
  for (const json& line : lines) {
    // Lines of older versions name no set.
    const std::string of_line = line.contains("set") ? dump_json(line["set"]) : set;
    if (!set.empty() && of_line != set) ++sets;
    set = of_line;
    last[{sets, line.at("step")}] = &line;
  }
  int before = -1;
  for (const auto& [key, line] : last) {
    if (std::exchange(before, key.first) != key.first)
      run.held_out_sets.push_back(std::ssize(run.held_out.step));
    run.held_out.add(static_cast<double>(key.second), *line);
  }
}

// Optional: of runs with train.layer_norms_every.
void load_layer_norms(Run& run) {
  for (json& line : lines_of(run.dir / "layer_norms.jsonl", run.broken_lines))
    if (const auto norms = line.find("norms"); norms != line.end())
      run.layer_norms[number_of(line, "step") + 1] = std::move(*norms);
}

// Optional: a run that died before its first step has none.
void load_facts(Run& run) {
  Json facts = try_parse_json<Json>(read_text(run.dir / "run.json"));
  if (!facts.is_object()) return;
  for (const char* for_weft : {"xxh3", "id", "more_steps"}) facts.erase(for_weft);
  run.facts = std::move(facts);
  // A string, for people.
  const auto ranks = run.facts.find("ranks");
  if (ranks != run.facts.end() && ranks->is_string())
    run.ranks_number = std::strtod(ranks->get_ref<const std::string&>().c_str(), nullptr);
}

// A folder of clips for each of several checkpoints: RUN/samples/200, RUN/samples/step_400 ...
void load_samples(Run& run) {
  run.samples = load_gallery(run.dir / "generated");
  std::vector<std::pair<std::int64_t, fs::path>> folders;
  std::error_code ec;
  for (fs::directory_iterator it(run.dir / "samples", ec), end; !ec && it != end;
       it.increment(ec)) {
    const std::string name = it->path().filename().string();
    const std::size_t last = name.find_last_not_of("0123456789");
    const std::string digits = last == std::string::npos ? name : name.substr(last + 1);
    if (it->is_directory(ec) && !digits.empty() && digits.size() < 16)
      folders.emplace_back(std::stoll(digits), it->path());
  }
  std::sort(folders.begin(), folders.end());
  for (const auto& [step, folder] : folders) {
    Gallery g = load_gallery(folder);
    g.name = fmt::format("step {}", step);
    g.step = step;
    if (!g.clips.empty()) run.through_time.push_back(std::move(g));
  }
}

}  // namespace

std::vector<double> finite(std::span<const double> values) {
  std::vector<double> v;
  std::ranges::copy_if(values, std::back_inserter(v), [](double x) { return std::isfinite(x); });
  return v;
}
double median(std::span<const double> values) {
  const std::vector<double> v = finite(values);
  return v.empty() ? nan : upper_median(v);
}
double total(std::span<const double> values) {
  const std::vector<double> v = finite(values);
  return std::accumulate(v.begin(), v.end(), 0.0);
}

Binned bin(std::span<const double> x, std::span<const double> y, std::size_t most) {
  Binned b;
  const std::size_t n = x.size(), bins = std::min(n, most);
  for (std::size_t k = 0; k < bins; ++k) {
    const std::size_t begin = n * k / bins, count = n * (k + 1) / bins - begin;
    const std::vector<double> known = finite(y.subspan(begin, count));
    b.x.push_back(total(x.subspan(begin, count)) / static_cast<double>(count));
    b.mean.push_back(known.empty() ? nan : total(known) / static_cast<double>(known.size()));
    b.low.push_back(known.empty() ? nan : std::ranges::min(known));
    b.high.push_back(known.empty() ? nan : std::ranges::max(known));
  }
  return b;
}

std::span<const double> Series::operator[](const std::string& column) const {
  const auto it = columns.find(column);
  return it == columns.end() ? absent_ : it->second;
}

void Series::add(double at, const json& line) {
  step.push_back(at);
  absent_.push_back(nan);
  for (auto& [name, values] : columns) values.push_back(nan);
  each_number(line, "", [&](const std::string& name, double value) {
    if (name != "step") add(name, value);
  });
}

void Series::add(const std::string& column, double value) {
  if (columns.size() >= column_limit && !columns.contains(column)) return;
  columns.try_emplace(column, absent_).first->second.back() = value;
}

void each_number(const json& object, const std::string& prefix,
                 const std::function<void(const std::string&, double)>& take) {
  if (!object.is_object()) return;
  for (const auto& [name, value] : object.items()) {
    if (value.is_object()) each_number(value, prefix + name + "/", take);
    if (value.is_number() || value.is_null())
      take(prefix + name, value.is_null() ? nan : value.get<double>());
  }
}

Run load_run(const fs::path& dir) {
  Run run;
  run.dir = dir;
  std::error_code ec;
  WEFT_CHECK(fs::is_directory(dir, ec), Exit::data,
             "give the directory of a run (deck key run.dir), or a folder of runs",
             "{} is not a directory", dir.string());
  run.name = name_of(dir);
  load_metrics(run);
  load_held_out(run);
  load_layer_norms(run);
  load_facts(run);
  run.deck = read_text(dir / "deck.toml");
  run.status = read_status(dir / "status.json").value_or(JobStatus());
  load_samples(run);
  if (fs::exists(dir / "scaling.json", ec)) run.scaling = load_scaling(dir / "scaling.json");
  return run;
}

double last_loss(const Run& run) {
  const std::vector<double> v = finite(run.steps["loss"]);
  if (v.empty()) return nan;
  const std::size_t n = std::clamp<std::size_t>(v.size() / 10, 1, 50);
  return total(std::span(v).last(n)) / static_cast<double>(n);
}

Json load_scaling(const fs::path& file) {
  const char* hint = "give a file that weft bench scaling --json has written";
  std::error_code ec;
  WEFT_CHECK(fs::is_regular_file(file, ec), Exit::data, hint, "cannot open {}", file.string());
  const Json j = try_parse_json<Json>(read_text(file));
  WEFT_CHECK(j.is_object() && j.contains("points") && j["points"].is_array(), Exit::data, hint,
             "{} has no list of points", file.string());
  std::vector<Json> points;
  for (const Json& p : j["points"])
    if (p.is_object() && number_of(p, "ranks") >= 1 && number_of(p, "seconds") > 0 &&
        std::isfinite(number_of(p, "efficiency")))
      points.push_back(p);
  WEFT_CHECK(!points.empty(), Exit::data, hint,
             "no point of {} has ranks, seconds and an efficiency", file.string());
  std::ranges::sort(points, {}, [](const Json& p) { return number_of(p, "ranks"); });
  const auto text = [&](const char* key) {
    const auto it = j.find(key);
    return it != j.end() && it->is_string() ? *it : Json("");
  };
  return {{"mode", text("mode")}, {"mix", text("mix")}, {"points", points}};
}

}  // namespace weft::report_page
