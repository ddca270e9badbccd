#include "report/against.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "config/deck.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/table.h"
#include "media/similarity.h"
#include "media/video_reader.h"
#include "report/data.h"
#include "report/gallery.h"
#include "report/page.h"
#include "train/metrics/metrics.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using report_page::Gallery;
using report_page::GalleryClip;
using report_page::Json;
using report_page::read_text;

constexpr double most_digits = std::numeric_limits<double>::infinity();  // the same bits
constexpr double digits_of_evaluations = 1;
constexpr double least_ssim = 0.95, least_psnr = 30;

// ---- What is compared ----

bool is_manifest(std::string_view name) {
  return name == "generated.jsonl" || name == "animate.jsonl" || name == "segment.jsonl";
}

bool is_result(const std::string& name) {
  constexpr std::string_view names[] = {"metrics.jsonl", "validation.jsonl", "evaluation.json",
                                        "scores.json", "reconstruct.json"};
  return is_manifest(name) || name.ends_with(".csv") ||
         std::ranges::find(names, name) != std::end(names);
}

// Files of results by their path in the folder.
std::map<std::string, fs::path> results_of(const fs::path& input) {
  std::error_code failed;
  std::map<std::string, fs::path> files;
  if (fs::is_regular_file(input, failed)) {
    const std::string name = input.filename().string();  // tables of any name are compared
    if (is_result(name)) files[name.ends_with(".csv") ? ".csv" : name] = input;
  } else {
    for (fs::recursive_directory_iterator it(input, failed), end; !failed && it != end;
         it.increment(failed))
      if (is_result(it->path().filename().string()))
        files[it->path().lexically_relative(input).generic_string()] = it->path();
  }
  WEFT_CHECK(
      !files.empty(), Exit::data,
      "give the folder of a training, an evaluation or of clips, or a table of scores (.csv)",
      "{} has no results that can be compared", input.string());
  return files;
}

// Numbers that the machine decides, not the model; and a threshold that a tie decides.
bool is_compared(const std::string& column) {
  for (const char* other : {"step", "seconds", "split", "memory", "pace", "rank", "slowest_rank",
                            "spread", "best_score", "bytes"})
    for (std::size_t at = column.find(other); at != column.npos; at = column.find(other, at + 1))
      if (at == 0 || column[at - 1] == '/') return false;
  return true;
}

struct NumberRow {
  double steps_before = 0;
  std::vector<std::pair<std::string, double>> numbers;
};

NumberRow row_of(const nlohmann::json& object) {
  NumberRow row;
  report_page::each_number(object, "", [&](const std::string& column, double value) {
    if (is_compared(column)) row.numbers.emplace_back(column, value);
  });
  return row;
}

// The rows of a file by their names, in its order.
using NumberRows = std::vector<std::pair<std::string, NumberRow>>;

// `whole`: its last line, too, for nobody writes it now.
NumberRows steps_of(const fs::path& file, bool whole) {
  // A restart repeats steps: the last line of each counts. metrics.jsonl counts from 0, the log
  // from 1.
  const bool from_zero = file.filename() == "metrics.jsonl";
  std::map<std::pair<std::string, std::int64_t>, NumberRow> last;
  std::ifstream lines = report_page::open_regular(file);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json j = parse_step_line(line);
    if (j.is_discarded() && !whole && is_cut_off(line, lines.eof())) continue;
    WEFT_CHECK(!j.is_discarded(), Exit::data, "copy it again, or leave the line out",
               "{} has a damaged line: {}", file.string(), printable(line));
    const std::int64_t step = j.at("step").get<std::int64_t>() + (from_zero ? 1 : 0);
    NumberRow row = row_of(j);
    row.steps_before = static_cast<double>(step - 1);
    last[{j.contains("set") ? dump_json(j["set"]) : "", step}] = std::move(row);
  }
  NumberRows rows;
  const bool several = !last.empty() && last.begin()->first.first != last.rbegin()->first.first;
  for (auto& [key, row] : last)
    rows.emplace_back(
        fmt::format("step {}{}", key.second, several ? " of held-out set " + key.first : ""), row);
  return rows;
}

NumberRows table_rows(const fs::path& file) {
  NumberRows rows;
  TableReader table(file, "");
  for (TableRow line; table.next(line);) {
    NumberRow row;
    for (const std::string& column : table.columns()) {
      const auto cell = table.value(line, column);
      if (!cell.is_string() || !is_compared(column)) continue;
      const std::string text = cell.get<std::string>();
      char* end = nullptr;
      const double value = std::strtod(text.c_str(), &end);
      if (!text.empty() && *end == 0) row.numbers.emplace_back(column, value);
    }
    rows.emplace_back(fmt::format("row {}", rows.size() + 1), std::move(row));
  }
  return rows;
}

NumberRows rows_of(const fs::path& file, bool whole) {
  if (file.extension() == ".jsonl") return steps_of(file, whole);
  if (file.extension() == ".csv") return table_rows(file);
  const nlohmann::json j = try_parse_json(read_text(file));
  WEFT_CHECK(j.is_object(), Exit::data, "copy it again", "{} is damaged", file.string());
  return {{"", row_of(j)}};
}

// ---- How far two numbers agree ----

double digits(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return most_digits;
  const double apart = std::abs(a - b) / std::max(std::abs(a), std::abs(b));
  return std::isfinite(apart) ? std::max(0.0, -std::log10(apart)) : 0;
}

double digits_wanted(const std::string& column, double steps_before, bool rounded) {
  const double of_loss = std::max(2.0, 5 - steps_before);
  const double digits = column.ends_with("loss") ? of_loss
                        : column == "grad_norm"  ? of_loss - 1
                                                 : of_loss / 2;
  return rounded ? digits / 2 : digits;
}

// A column, or another number, over all rows: the worst row is the one that comes nearest to too
// few digits, or has them.
struct SharedColumn {
  std::size_t rows = 0, missing = 0;
  double digits = most_digits, wanted = 0;
  std::string row;
  double got = 0, expected = 0;

  void add(const std::string& name, double run, double reference, double enough) {
    const double agree = weft::digits(run, reference);
    if (rows++ > 0 && agree - enough >= digits - wanted) return;
    digits = agree;
    wanted = enough;
    row = name;
    got = run;
    expected = reference;
  }
  bool agrees() const { return digits >= wanted && missing == 0; }
};

std::string describe(const std::string& name, const SharedColumn& c, const std::string& unit) {
  std::string text = name + ": ";
  const std::string rows =
      unit.empty() ? "" : counted(static_cast<std::int64_t>(c.rows), unit) + ", ";
  if (c.rows > 0 && c.digits == most_digits)
    text += rows + (unit.empty() ? fmt::format("{:.7g}, equal", c.got) : "all equal");
  else if (c.rows > 0)
    text += fmt::format("{}agree to {:.1f} digits{} ({}{:.7g}, reference {:.7g}){}", rows, c.digits,
                        unit.empty() ? "" : " at the worst", c.row.empty() ? "" : c.row + ": ",
                        c.got, c.expected,
                        c.digits < c.wanted ? fmt::format("; {:.1f} are expected", c.wanted) : "");
  if (c.missing > 0)
    text += fmt::format(
        "{}missing in the run{}", c.rows > 0 ? "; " : "",
        unit.empty() ? ""
                     : fmt::format(" in {}", counted(static_cast<std::int64_t>(c.missing), unit)));
  return text;
}

// ---- The comparison ----

class Comparer {
 public:
  Comparer(fs::path run, fs::path reference)
      : run_(std::move(run)), reference_(std::move(reference)) {}

  Comparison compare() {
    const auto run = results_of(run_), reference = results_of(reference_);
    decks();
    for (const auto& [name, file] : reference)
      if (const auto found = run.find(name); found == run.end())
        tell(false, name + " is missing in the run");
      else if (is_manifest(file.filename().string()))
        clips(name, found->second.parent_path(), file.parent_path());
      else
        numbers(name, rows_of(found->second, false), rows_of(file, true));
    for (const auto& [name, file] : run)
      if (!reference.contains(name)) unknown_.push_back(name);
    WEFT_CHECK(said_.compared > 0, Exit::data, "compare results of the same kind of job",
               "{} and {} have no results in common", run_.string(), reference_.string());
    if (!unknown_.empty())
      said_.lines.push_back(
          fmt::format("      only in the run, not compared: {}", fmt::join(unknown_, ", ")));
    return std::move(said_);
  }

 private:
  void tell(bool agrees, const std::string& text) {
    said_.lines.push_back((agrees ? "OK    " : "FAIL  ") + text);
    if (!agrees) said_.wrong.push_back(text);
  }

  void decks() {
    const std::string run = read_text(run_ / "deck.toml");
    const std::string reference = read_text(reference_ / "deck.toml");
    if (run.empty() && reference.empty()) return;  // no training
    if (run.empty() || reference.empty()) {
      said_.lines.push_back(fmt::format("      {} has no deck.toml: decks are not compared",
                                        (run.empty() ? run_ : reference_).string()));
      return;
    }
    const auto parsed = [](const std::string& text, const fs::path& folder) {
      try {
        return parse_deck(text, (folder / "deck.toml").string(), {});
      } catch (const Error& e) {
        throw Error(Exit::data, e.what(), e.hint());
      }
    };
    const Deck is = parsed(run, run_), was = parsed(reference, reference_);
    rounded_ = holds_bf16(is.model.dtype) || is.parallel.wire != "f32" || is.device.tf32;
    std::set<std::string> decisive;
    for (const ChangedKey& k : changed_keys(was, is, true)) {
      decisive.insert(k.key);
      tell(false, fmt::format("deck: {} = {}, reference {}", k.key, k.is, k.was));
    }
    std::vector<std::string> others;
    for (const ChangedKey& k : changed_keys(was, is))
      if (!decisive.contains(k.key)) others.push_back(k.key);
    if (decisive.empty())
      tell(true, "deck: alike" +
                     (others.empty() ? "" : fmt::format(", but for {}", fmt::join(others, ", "))));
  }

  void numbers(const std::string& file, const NumberRows& run, const NumberRows& reference) {
    WEFT_CHECK(!reference.empty(), Exit::data, "copy it again", "{} is empty",
               (reference_ / file).string());
    std::map<std::string, const NumberRow*> of_run;
    for (const auto& [name, row] : run) of_run[name] = &row;
    const std::string unit = file.ends_with(".jsonl") ? "step"
                             : file.ends_with(".csv") ? "row"
                                                      : "";
    std::vector<std::string> order, missing;
    std::map<std::string, SharedColumn> columns;
    for (const auto& [name, row] : reference) {
      const auto found = of_run.find(name);
      if (found == of_run.end()) {
        missing.push_back(name);
        continue;
      }
      const auto& got = found->second->numbers;
      for (const auto& [column, value] : row.numbers) {
        if (!columns.contains(column)) order.push_back(column);
        SharedColumn& c = columns[column];
        const auto same = std::ranges::find(got, column, &std::pair<std::string, double>::first);
        if (same == got.end())
          ++c.missing;
        else
          c.add(name, same->second, value,
                unit == "step" ? digits_wanted(column, row.steps_before, rounded_)
                               : digits_of_evaluations);
      }
      of_run.erase(found);
    }
    for (const std::string& column : order) {
      tell(columns[column].agrees(), describe(file + " " + column, columns[column], unit));
      said_.compared += columns[column].rows;
    }
    if (!missing.empty())
      tell(false, fmt::format("{}: {} missing in the run: {}", file,
                              missing.size() == 1 ? "1 is" : fmt::format("{} are", missing.size()),
                              named(missing)));
    if (!of_run.empty())
      unknown_.push_back(
          fmt::format("{} of {}", counted(static_cast<std::int64_t>(of_run.size()), unit), file));
  }

  static std::string named(const std::vector<std::string>& names) {
    return names.size() < 4 ? fmt::format("{}", fmt::join(names, ", "))
                            : fmt::format("{} ... {}", names.front(), names.back());
  }

  // Whether the clip's file is what its line says; a manifest outlives files.
  bool whole(const std::string& manifest, const fs::path& folder, const GalleryClip& clip) {
    const fs::path path = folder / clip.file;
    std::string fault;
    try {
      const Json hash = clip.line.value("file_xxh3", Json());
      if (!hash.is_null() && Json(to_hex(hash_of_file(path).hash)) != hash)
        fault = path.string() + " is damaged or was changed";
    } catch (const Error& e) {
      fault = e.what();
    }
    if (!fault.empty()) tell(false, fmt::format("{}: {}: {}", manifest, clip.name, fault));
    return fault.empty();
  }

  // Why two clips do not agree, or how far they do: in how many dB and what SSIM, where the hashes
  // of their pixels differ.
  void clips(const std::string& file, const fs::path& run, const fs::path& reference) {
    const Gallery is = report_page::load_gallery(run), was = report_page::load_gallery(reference);
    std::size_t equal = 0, close = 0;
    double worst_psnr = most_digits, worst_ssim = 1;
    for (const GalleryClip& clip : was.clips) {
      const auto other = std::ranges::find(is.clips, clip.name, &GalleryClip::name);
      if (other == is.clips.end()) {
        tell(false, fmt::format("{}: {} is missing in the run", file, clip.name));
        continue;
      }
      ++said_.compared;
      if (!whole(file, run, *other) || !whole(file, reference, clip)) continue;
      const char* hash = clip.line.contains("pixels") ? "pixels" : "file_xxh3";
      if (clip.line.value(hash, Json()) == other->line.value(hash, Json())) {
        ++equal;
        continue;
      }
      try {
        const Footage a = read_frames({(run / other->file).string()});
        const Footage b = read_frames({(reference / clip.file).string()});
        if (a.frames != b.frames || a.height != b.height || a.width != b.width) {
          tell(false,
               fmt::format("{}: {} has {} frames of {}x{}, reference {} of {}x{}", file, clip.name,
                           a.frames, a.height, a.width, b.frames, b.height, b.width));
          continue;
        }
        const auto [decibel, similar] = closeness(a, b);
        worst_psnr = std::min(worst_psnr, decibel);
        worst_ssim = std::min(worst_ssim, similar);
        if (decibel >= least_psnr && similar >= least_ssim)
          ++close;
        else
          tell(false, fmt::format(
                          "{}: {} is apart: PSNR {:.1f} dB, SSIM {:.3f}; {} dB and {} are expected",
                          file, clip.name, decibel, similar, least_psnr, least_ssim));
      } catch (const Error& e) {
        tell(false, fmt::format("{}: {} has another hash, and cannot be compared: {}", file,
                                clip.name, e.what()));
      }
    }
    if (equal > 0)
      tell(true, fmt::format("{}: {} equal to the bit", file,
                             counted(static_cast<std::int64_t>(equal), "clip")));
    if (close > 0)
      tell(true,
           fmt::format("{}: {} alike, at the worst PSNR {:.1f} dB and SSIM {:.3f}", file,
                       counted(static_cast<std::int64_t>(close), "clip"), worst_psnr, worst_ssim));
    for (const GalleryClip& clip : is.clips)
      if (std::ranges::find(was.clips, clip.name, &GalleryClip::name) == was.clips.end())
        unknown_.push_back(clip.name + " of " + file);
  }

  // Of the worst frame. Frames have at least 7 rows and columns.
  static std::pair<double, double> closeness(const Footage& a, const Footage& b) {
    std::pair worst(most_digits, 1.0);
    const std::int64_t size = a.height * a.width * 3;
    for (std::int64_t t = 0; t < a.frames; ++t) {
      const std::uint8_t *x = a.rgb.data() + t * size, *y = b.rgb.data() + t * size;
      worst.first = std::min(worst.first, psnr(x, y, a.height, a.width));
      if (a.height >= 7 && a.width >= 7)
        worst.second = std::min(worst.second, ssim(x, y, a.height, a.width));
    }
    return worst;
  }

  fs::path run_, reference_;
  bool rounded_ = false;  // products or gradients to fewer bits than f32 has
  Comparison said_;
  std::vector<std::string> unknown_;  // what the reference lacks
};

// Build, ranks and machine that results are from, where they say so.
std::string origin_of(const fs::path& folder) {
  Json facts = try_parse_json<Json>(read_text(folder / "run.json"));
  if (!facts.is_object()) {
    const Json evaluation = try_parse_json<Json>(read_text(folder / "evaluation.json"));
    facts = evaluation.is_object() ? evaluation.value("facts", Json::object()) : Json::object();
  }
  std::string text = folder.string();
  for (const char* name : {"build", "ranks", "device", "hardware", "kernels"})
    if (const auto it = facts.find(name); it != facts.end() && it->is_string())
      text += "; " + it->get<std::string>();
  return text;
}

}  // namespace

Comparison compare_results(const fs::path& run, const fs::path& reference) {
  return Comparer(run, reference).compare();
}

int report_against(const std::string& run, const std::string& reference) {
  const Comparison c = compare_results(run, reference);
  fmt::print("run        {}\nreference  {}\n", printable(origin_of(run), 2000),
             printable(origin_of(reference), 2000));
  for (const std::string& line : c.lines) fmt::print("{}\n", printable(line, 2000));
  if (c.wrong.empty())
    fmt::print("against: all agree\n");
  else
    fmt::print("against: {} not agree\n",
               counted(std::ssize(c.wrong), "result does", "results do"));
  return c.wrong.empty() ? 0 : static_cast<int>(Exit::hardware);
}

}  // namespace weft
