#include "report/data.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/progress.h"
#include "media/video_reader.h"
#include "media/writers.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t most_terms = 32;

// NaN for what is absent, null (a loss that was not finite) or of another type.
double number(const json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_number() ? it->get<double>() : nan;
}

const json& object(const json& j, const char* key) {
  static const json none = json::object();
  const auto it = j.find(key);
  return it != j.end() && it->is_object() ? *it : none;
}

void add_step(Steps& s, std::int64_t step, const json& j) {
  // metrics.jsonl counts steps from 0, the page from 1.
  s.step.push_back(static_cast<double>(step) + 1);
  s.loss.push_back(number(j, "loss"));
  s.grad_norm.push_back(number(j, "grad_norm"));
  s.lr.push_back(number(j, "lr"));
  s.seconds.push_back(number(j, "seconds"));
  const json& memory = object(j, "memory");
  s.resident.push_back(number(memory, "resident_bytes"));
  s.arena.push_back(number(memory, "arena_peak_bytes"));
  const json& split = object(j, "split");
  const char* keys[] = {"compute",   "wait_slowest", "comm_exposed",
                        "optimizer", "data_wait",    "checkpoint"};
  double rest = s.seconds.back();
  for (int p = 0; p < parts - 1; ++p) {
    const double v = number(split, keys[p]);
    s.part[p].push_back(v);
    if (std::isfinite(v)) rest -= v;
  }
  for (const auto& [name, value] : object(j, "terms").items()) {
    if (!s.terms.contains(name) && s.terms.size() >= most_terms) continue;
    std::vector<double>& values = s.terms[name];
    values.resize(s.step.size() - 1, nan);
    values.push_back(value.is_number() ? value.get<double>() : nan);
  }
  for (const auto& [name, store] : object(j, "stores").items()) {
    if (!store.is_object() || (!s.stores.contains(name) && s.stores.size() >= most_terms)) continue;
    Steps::Store& values = s.stores[name];
    for (auto* v : {&values.samples, &values.loss}) v->resize(s.step.size() - 1, nan);
    values.samples.push_back(number(store, "samples"));
    values.loss.push_back(number(store, "loss"));
  }
  s.slowest.push_back(number(j, "slowest_rank"));
  s.spread.push_back(number(j, "spread"));
  // Clocks of the parts and of the whole are read at different moments: no negative rest.
  s.part[parts - 1].push_back(split.empty() ? nan : std::max(0.0, rest));
  if (const auto it = j.find("samples"); it != j.end() && it->is_array())
    for (const json& id : *it)
      if (id.is_number_integer()) s.samples.push_back(id.get<std::int64_t>());
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
    for (const char* of : {"min", "median", "max"}) v.push_back(number(*it, of));
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
  if (const double slowest = number(j, "slowest_rank"); slowest >= 0 && slowest < 1 << 30)
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
  std::map<std::int64_t, json> last;
  std::size_t complete = 0;
  for (std::string line; std::getline(in, line);) {
    const bool torn = in.eof();  // no line end: a crash cut it short, or it is being written
    json j = try_parse_json(line);
    const auto step = j.is_object() ? j.find("step") : j.end();
    if (!j.is_object() || step == j.end() || !step->is_number_integer() || !seal_holds(line)) {
      if (!is_cut_off(line, torn) && !line.empty()) ++run.broken_lines;
      continue;
    }
    ++complete;
    const std::int64_t n = step->get<std::int64_t>();
    last[n] = std::move(j);
  }
  WEFT_CHECK(!last.empty(), Exit::data, "wait for the run's first step",
             "{} has no complete line yet", path.string());
  run.repeated_steps = complete - last.size();
  for (const auto& [step, j] : last) {
    const auto start = j.find("start");
    if (start != j.end() && *start == true && step != last.begin()->first)
      run.restarts.push_back(static_cast<double>(step));
    add_ranks(run.ranks, run.steps.size(), j);
    add_step(run.steps, step, j);
  }
  for (auto* sums : {&run.ranks.busy, &run.ranks.wait, &run.ranks.data_wait})
    for (double& s : *sums) s /= static_cast<double>(run.ranks.steps.size());
  const std::set<std::int64_t> ids(run.steps.samples.begin(), run.steps.samples.end());
  run.distinct_samples = ids.size();
}

// Optional. The last line of a step and a set of samples counts.
void load_held_out(Run& run) {
  std::ifstream in = open_regular(run.dir / "validation.jsonl");
  std::map<std::pair<std::int64_t, int>, json> last;
  int sets = 0;
  std::string set;
  for (std::string line; std::getline(in, line);) {
    const bool torn = in.eof();
    json j = try_parse_json(line);
    const auto step = j.is_object() ? j.find("step") : j.end();
    if (j.is_object() && step != j.end() && step->is_number_integer() && seal_holds(line)) {
      // Lines of older versions name no set.
      const std::string of_line = j.contains("set") ? dump_json(j["set"]) : set;
      if (!set.empty() && of_line != set) ++sets;
      set = of_line;
      const std::pair key(step->get<std::int64_t>(), sets);
      last[key] = std::move(j);
    } else if (!is_cut_off(line, torn) && !line.empty()) {
      ++run.broken_lines;
    }
  }
  HeldOutSteps& h = run.held_out;
  int before = -1;
  for (const auto& [key, j] : last) {
    if (std::exchange(before, key.second) != key.second) h.sets.push_back(std::ssize(h.step));
    h.step.push_back(static_cast<double>(key.first));
    h.loss.push_back(number(j, "loss"));
    for (const auto& [name_of, series] :
         {std::pair{"buckets", &h.buckets}, std::pair{"terms", &h.terms}})
      for (const auto& [name, value] : object(j, name_of).items()) {
        if (!series->contains(name) && series->size() >= most_terms) continue;
        std::vector<double>& values = (*series)[name];
        values.resize(h.step.size() - 1, nan);
        values.push_back(value.is_number() ? value.get<double>() : nan);
      }
  }
}

// Optional: of runs with train.layer_norms_every.
void load_layer_norms(Run& run) {
  std::ifstream in = open_regular(run.dir / "layer_norms.jsonl");
  for (std::string line; std::getline(in, line);) {
    const json j = try_parse_json(line);
    if (!j.is_object() || !std::isfinite(number(j, "step")) || !seal_holds(line)) continue;
    auto& norms = run.layer_norms[number(j, "step") + 1];
    norms.clear();  // a restart repeats steps: the last of each counts
    for (const auto& [layer, norm] : object(j, "norms").items())
      if (norm.is_number()) norms.emplace_back(layer, norm.get<double>());
  }
}

// Optional: an older run, or one that died before its first step, has none.
void load_facts(Run& run) {
  const auto j = try_parse_json<nlohmann::ordered_json>(read_text(run.dir / "run.json"));
  if (!j.is_object()) return;
  for (const auto& [key, value] : j.items()) {
    if (key == "memory_plan" && value.is_object()) {
      for (const auto& [kind, bytes] : value.items())
        if (bytes.is_number()) run.memory_plan.emplace_back(kind, bytes.get<double>());
      continue;  // a picture of its own
    }
    if (key == "xxh3" || key == "id") continue;  // for weft itself
    if (key == "ranks" && value.is_string())
      run.ranks_number = std::strtod(value.get<std::string>().c_str(), nullptr);
    run.facts.emplace_back(key, value.is_string() ? value.get<std::string>() : dump_json(value));
  }
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

Run load_run(const fs::path& dir) {
  Run run;
  run.dir = dir;
  std::error_code ec;
  WEFT_CHECK(fs::is_directory(dir, ec), Exit::data,
             "give the directory of a run (deck key run.dir), or a folder of runs",
             "{} is not a directory", dir.string());
  // "runs/demo/" and "runs/demo" are the same run.
  const fs::path plain = fs::absolute(dir).lexically_normal();
  run.name = (plain.has_filename() ? plain : plain.parent_path()).filename().string();
  load_metrics(run);
  load_held_out(run);
  load_layer_norms(run);
  load_facts(run);
  run.deck = read_text(dir / "deck.toml");
  run.status = read_status(dir / "status.json").value_or(JobStatus());
  load_samples(run);
  if (fs::exists(dir / "scaling.json", ec))
    run.scaling.push_back(load_scaling(dir / "scaling.json"));
  return run;
}

Scaling load_scaling(const fs::path& file) {
  const char* hint = "give a file that weft bench scaling --json has written";
  std::error_code ec;
  WEFT_CHECK(fs::is_regular_file(file, ec), Exit::data, hint, "cannot open {}", file.string());
  const json j = try_parse_json(read_text(file));
  const auto points = j.is_object() ? j.find("points") : j.end();
  WEFT_CHECK(j.is_object() && points != j.end() && points->is_array(), Exit::data, hint,
             "{} has no list of points", file.string());
  Scaling s;
  if (const auto it = j.find("mode"); it != j.end() && it->is_string()) s.mode = *it;
  if (const auto it = j.find("mix"); it != j.end() && it->is_string()) s.mix = *it;
  for (const json& p : *points) {
    if (!p.is_object()) continue;
    const Scaling::Point point{number(p, "ranks"), number(p, "seconds"), number(p, "efficiency"),
                               number(p, "exposed"), number(p, "wait")};
    if (point.ranks >= 1 && point.seconds > 0 && std::isfinite(point.efficiency))
      s.points.push_back(point);
  }
  WEFT_CHECK(!s.points.empty(), Exit::data, hint,
             "no point of {} has ranks, seconds and an efficiency", file.string());
  std::sort(s.points.begin(), s.points.end(),
            [](const auto& a, const auto& b) { return a.ranks < b.ranks; });
  return s;
}

// ---- TensorBoard ----

namespace {

std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? c >> 1 ^ 0x82F63B78u : c >> 1;
    table[i] = c;
  }
  return table;
}

// TFRecord stores checksums rotated and shifted, since sums of data that holds sums are weak.
std::uint32_t masked(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u; }

template <class T>
void put_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> 8 * i & 0xFF);
}

// Fields of protobuf messages: a tag of number and kind, then the value.
enum class Kind : std::uint64_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
void put_tag(std::string& out, std::uint64_t field, Kind kind) {
  put_varint(out, field << 3 | static_cast<std::uint64_t>(kind));
}
void put_double(std::string& out, std::uint64_t field, double value) {
  put_tag(out, field, Kind::fixed64);
  put_little_endian(out, std::bit_cast<std::uint64_t>(value));
}
void put_float(std::string& out, std::uint64_t field, float value) {
  put_tag(out, field, Kind::fixed32);
  put_little_endian(out, std::bit_cast<std::uint32_t>(value));
}
void put_bytes(std::string& out, std::uint64_t field, std::string_view value) {
  put_tag(out, field, Kind::bytes);
  put_varint(out, value.size());
  out += value;
}

// The middle frame of a clip, or a still picture.
struct Picture {
  std::int64_t height = 0, width = 0;
  std::string png;
};
// Empty for a file that cannot be read. `scratch`: a file that may be written.
Picture picture_of(const fs::path& clip, const fs::path& scratch) {
  Picture p;
  try {
    const Footage all = read_frames({clip.string()});
    p = {all.height, all.width, ""};
    const auto bytes = static_cast<std::size_t>(3 * p.height * p.width);
    write_png(scratch.string(), p.height, p.width,
              std::span(all.rgb).subspan(static_cast<std::size_t>(all.frames / 2) * bytes, bytes));
    p.png = read_text(scratch);
  } catch (const Error&) {
    p = {};
  }
  std::error_code none;
  fs::remove(scratch, none);
  return p;
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }
std::string event(double time) {
  std::string out;
  put_double(out, 1, time);
  return out;
}

// Summary { repeated Value value = 1 }, Value { string tag = 1; float simple_value = 2 }
void put_scalar(std::string& summary, std::string_view tag, double value) {
  std::string one;
  put_bytes(one, 1, tag);
  put_float(one, 2, static_cast<float>(value));
  put_bytes(summary, 1, one);
}

// Value { string tag = 1; Image image = 4 }, Image { int32 height = 1, width = 2, colorspace = 3;
// bytes encoded_image_string = 4 }
void put_picture(std::string& summary, std::string_view tag, const Picture& p) {
  std::string image, one;
  for (const auto& [field, value] : {std::pair{1, p.height}, std::pair{2, p.width}}) {
    put_tag(image, static_cast<std::uint64_t>(field), Kind::varint);
    put_varint(image, static_cast<std::uint64_t>(value));
  }
  put_tag(image, 3, Kind::varint);
  put_varint(image, 3);  // RGB
  put_bytes(image, 4, p.png);
  put_bytes(one, 1, tag);
  put_bytes(one, 4, image);
  put_bytes(summary, 1, one);
}

void put_record(std::string& out, std::string_view data) {
  std::string length;
  put_little_endian(length, static_cast<std::uint64_t>(data.size()));
  out += length;
  put_little_endian(out, masked(length));
  out += data;
  put_little_endian(out, masked(data));
}

struct Series {
  std::string tag;
  const std::vector<double>* values;
};

std::vector<Series> series_of(const Steps& s) {
  std::vector<Series> all = {{"loss", &s.loss},
                             {"grad_norm", &s.grad_norm},
                             {"lr", &s.lr},
                             {"seconds", &s.seconds},
                             {"memory/resident_bytes", &s.resident},
                             {"memory/arena_peak_bytes", &s.arena},
                             {"ranks/spread", &s.spread}};
  constexpr const char* tags[parts] = {"compute",   "wait_slowest", "comm_exposed", "optimizer",
                                       "data_wait", "checkpoint",   "other"};
  for (int p = 0; p < parts; ++p) all.push_back({fmt::format("split/{}", tags[p]), &s.part[p]});
  for (const auto& [name, values] : s.terms) all.push_back({"terms/" + name, &values});
  for (const auto& [name, values] : s.stores) {
    all.push_back({"stores/" + name + "/loss", &values.loss});
    all.push_back({"stores/" + name + "/samples", &values.samples});
  }
  return all;
}

std::vector<Series> series_of(const HeldOutSteps& h) {
  std::vector<Series> all = {{"validation/loss", &h.loss}};
  for (const auto& [name, values] : h.buckets) all.push_back({"validation/" + name, &values});
  for (const auto& [name, values] : h.terms) all.push_back({"validation/terms/" + name, &values});
  return all;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = crc_table();
  std::uint32_t c = ~0u;
  for (const char b : bytes) c = table[(c ^ static_cast<unsigned char>(b)) & 0xFF] ^ c >> 8;
  return ~c;
}

std::string event_file(const Run& run, const fs::path& scratch) {
  const Steps& s = run.steps;
  const std::vector<Series> all = series_of(s);
  // The metrics have no times of day: the file's last change is the last step's.
  double time = run.ended;
  for (const double seconds : s.seconds)
    if (std::isfinite(seconds)) time -= seconds;
  std::string out, version = event(time);
  put_bytes(version, 3, "brain.Event:2");
  put_record(out, version);
  const auto put_event = [&](double step, const std::string& summary) {
    std::string one = event(time);
    put_tag(one, 2, Kind::varint);
    put_varint(one, static_cast<std::uint64_t>(step));
    put_bytes(one, 5, summary);
    put_record(out, one);
  };
  const auto summary_of = [](const std::vector<Series>& series, std::size_t i) {
    std::string summary;
    for (const auto& [tag, values] : series)
      // A loss that is not finite is kept: TensorBoard marks it.
      if (i < values->size() && (std::isfinite((*values)[i]) || tag.ends_with("loss")))
        put_scalar(summary, tag, (*values)[i]);
    return summary;
  };
  const auto put_clips = [&](const Gallery& g) {
    std::string summary;
    for (const GalleryClip& clip : g.clips)
      if (const Picture p = picture_of(g.folder / clip.file, scratch); !p.png.empty())
        put_picture(summary, "samples/" + clip.name, p);
    if (!summary.empty()) put_event(static_cast<double>(g.step), summary);
  };
  // What was measured and sampled until this step, which may be more than the metrics know of.
  const HeldOutSteps& h = run.held_out;
  const std::vector<Series> held_out = series_of(h);
  std::size_t measured = 0, sampled = 0;
  const auto put_until = [&](double step) {
    for (; measured < h.step.size() && h.step[measured] <= step; ++measured)
      put_event(h.step[measured], summary_of(held_out, measured));
    for (; sampled < run.through_time.size() &&
           static_cast<double>(run.through_time[sampled].step) <= step;
         ++sampled)
      put_clips(run.through_time[sampled]);
  };
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (std::isfinite(s.seconds[i])) time += s.seconds[i];
    std::string summary = summary_of(all, i);
    if (const auto norms = run.layer_norms.find(s.step[i]); norms != run.layer_norms.end())
      for (const auto& [layer, norm] : norms->second)
        put_scalar(summary, "layer_norms/" + layer, norm);
    put_event(s.step[i], summary);
    put_until(s.step[i]);
  }
  put_until(std::numeric_limits<double>::infinity());
  return out;
}

std::vector<fs::path> write_event_files(const fs::path& dir, std::span<const Run> runs) {
  std::vector<fs::path> files;
  std::set<std::string> names;
  for (const Run& run : runs) {
    std::string name = run.name;
    for (int n = 2; !names.insert(name).second; ++n) name = fmt::format("{}_{}", run.name, n);
    const fs::path folder = dir / name;
    make_own_folder(folder, Exit::data);
    // TensorBoard knows event files by "tfevents" in their names.
    files.push_back(folder / "events.out.tfevents.weft");
    replace_file(files.back(), event_file(run, folder / ".frame.png"), Exit::data, Durable::no);
  }
  return files;
}

}  // namespace weft::report_page
