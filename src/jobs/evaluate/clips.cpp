// The job and its tables: what is read, what is written.
#include "jobs/evaluate/clips.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/model_source.h"
#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/lists.h"
#include "jobs/engine/pictures.h"
#include "jobs/evaluate/evaluate.h"
#include "models/clip/clip.h"
#include "models/clip/clip_tokenizer.h"
#include "tensor/device.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- Input ----

const std::string& clips_of(const Deck& deck) { return deck.get<EvaluateClipsDeck>().clips; }

// Distinguishes rows by what decides their values.
std::string key_of(const EvaluatedClip& clip) {
  return clip.path + '\0' + clip.reference + '\0' + clip.text;
}

// The clip that a row names.
EvaluatedClip clip_of_row(const Deck& deck, const FileTable& files, const TableReader& table,
                          const TableRow& row) {
  const EvaluateClipsDeck& c = deck.get<EvaluateClipsDeck>();
  EvaluatedClip clip;
  clip.path = files.path(row.path);
  clip.media = files.media(clip.path);
  clip.text = caption_of(table, row);
  const Json reference = table.value(row, "reference");
  WEFT_CHECK(reference.is_null() || reference.is_string(), Exit::data, "name a file",
             "{}, column reference: {} is not a path", table.where(row), dump_json(reference));
  if (reference.is_string()) {
    clip.reference = beside_list(c.clips, reference.get<std::string>());
  } else if (!c.references.empty() && !clip.path.empty()) {
    // In a folder, clips of subfolders have their references in such subfolders.
    std::error_code none;
    const fs::path path = clip.path;
    clip.reference =
        (fs::path(c.references) /
         (fs::is_directory(c.clips, none) ? path.lexically_relative(c.clips) : path.filename()))
            .string();
  }
  return clip;
}

ClipRows read_rows_of(const Deck& deck) {
  const std::string& clips = clips_of(deck);
  ClipRows rows;
  rows.table = FileTable(clips, "evaluate.clips", deck.media, Described::yes,
                         deck.get<EvaluateDeck>().output, TableForm::csv);
  TableReader table = rows.table.open();
  std::unordered_set<std::string> known;
  std::vector<std::string> missing;
  std::size_t looked_for = 0;
  const auto look_for = [&](const std::string& path) {
    if (path.empty()) return;
    ++looked_for;
    if (std::string why = missing_file(path); !why.empty()) missing.push_back(std::move(why));
  };
  for (TableRow row; table.next(row);) {
    EvaluatedClip clip = clip_of_row(deck, rows.table, table, row);
    if (!known.insert(key_of(clip)).second) continue;
    look_for(clip.media.path);
    look_for(clip.reference);
    rows.clips.push_back(std::move(clip));
  }
  WEFT_CHECK(!rows.clips.empty(), Exit::data, "name a table with a row for each clip",
             "evaluate.clips = {} has no rows", clips);
  report_missing(missing, looked_for, "file", rows.table.path_hint("evaluate.clips"));
  return rows;
}

// ---- Checks of the deck ----

void check_clips_deck(const Deck& deck) {
  const EvaluateClipsDeck& c = deck.get<EvaluateClipsDeck>();
  const ClipDeck& clip = deck.get<ClipDeck>();
  for (const std::string& m : c.measures) {
    WEFT_CHECK(std::ranges::find(clip_measures, m) != clip_measures.end(), Exit::usage,
               fmt::format("there are {}", fmt::join(clip_measures, ", ")),
               "evaluate.measures has \"{}\"", m);
    WEFT_CHECK(std::ranges::count(c.measures, m) == 1, Exit::usage, "name each measure once",
               "evaluate.measures has \"{}\" more than once", m);
  }
  const std::vector<std::pair<std::string, std::string>> weights = {
      {"clip.weights", clip.weights},
      {"clip.aesthetic", clip.aesthetic},
      {"evaluate.lpips_weights", c.lpips_weights}};
  for (const auto& [key, path] : weights)
    if (!path.empty()) check_weights_exist(key, path);
  std::error_code none;
  WEFT_CHECK(c.references.empty() || fs::is_directory(c.references, none), Exit::usage,
             "name the folder with the references, whose files have the clips' names; or give the "
             "table a column reference",
             "evaluate.references = {} is not a folder", c.references);
}

// No result may replace an input.
void check_clip_results(const Deck& deck, const ClipRows& rows) {
  const fs::path folder =
      absolute_path(fs::path(deck.get<EvaluateDeck>().output) / "").parent_path();
  std::vector<std::string> paths;
  for (const EvaluatedClip& c : rows.clips) {
    paths.push_back(c.media.path);
    if (!c.reference.empty()) paths.push_back(c.reference);
  }
  keep_inputs(deck, "evaluate.output", paths, [&](const fs::path& path) {
    return path.parent_path() == folder && path.stem() == "scores";
  });
}

// All that decides a clip's line but its files and its caption, a line each.
std::string describe_clip_job(const Deck& deck, const ClipMeasures& m) {
  const ClipDeck& clip = deck.get<ClipDeck>();
  std::string job = fmt::format("clips 1\nmeasures {}\norientation {}\n",
                                fmt::join(m.columns(), " "), deck.media.orientation);
  if (m.lpips)
    job += fmt::format("lpips {}\n", file_identity(deck.get<EvaluateClipsDeck>().lpips_weights));
  if (m.clip()) job += fmt::format("clip {}\n", folder_identity(clip.weights));
  if (m.match)
    job += fmt::format("merges {}\n",
                       file_identity(clip_merges_file(clip.merges, clip.weights).string()));
  if (m.aes) job += fmt::format("aesthetic {}\n", file_identity(clip.aesthetic));
  return job;
}

// Item i is clip i; long files first. Keys and costs on the first rank alone.
std::vector<ListItem> clip_items(const ClipRows& rows, const std::string& job, bool first_rank) {
  std::vector<ListItem> items;
  for (const EvaluatedClip& clip : rows.clips) {
    ListItem& item = items.emplace_back();
    item.name = clip.name();
    item.cost = 1;
    if (!first_rank) continue;
    const std::string reference = clip.reference.empty() ? "" : file_identity(clip.reference);
    item.key = to_hex(hash128(
        fmt::format("{}{}\n{}\n{}", job, file_identity(clip.media.path), reference, clip.text)));
    std::error_code none;
    const auto bytes = clip.media.member.empty() ? fs::file_size(clip.media.path, none)
                                                 : static_cast<std::uintmax_t>(clip.media.bytes);
    if (!none) item.cost += static_cast<double>(bytes);
  }
  return items;
}

// ---- Output ----

std::string output_table(const Deck& deck) {
  const bool lines = form_of_name(clips_of(deck)) == TableForm::json_lines;
  return (fs::path(deck.get<EvaluateDeck>().output) / (lines ? "scores.jsonl" : "scores.csv"))
      .string();
}

struct ClipSummary {
  std::int64_t rows = 0, differing = 0;  // differing: clips of another length than their reference
  std::int64_t without = 0;              // rows that were measured without a reference
  std::vector<ColumnSummary> columns;
  std::vector<std::pair<std::string, std::string>> facts;
};

void write_clip_table(const Deck& deck, const ClipRows& rows, const ClipMeasures& measures,
                      const ListEngine& engine, ClipSummary& summary) {
  const std::string output = output_table(deck);
  const ManifestLines lines = engine.lines();
  std::unordered_map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < rows.clips.size(); ++i) {
    places.emplace(key_of(rows.clips[i]), i);
    const auto line = lines.find(engine.items()[i].name);
    if (line == lines.end()) continue;
    const Json j = line->second.parsed();
    summary.differing += j.value("lengths_differ", false) ? 1 : 0;
  }
  std::vector<std::string> columns = measures.columns();
  const std::size_t own = columns.size();
  for (std::size_t i = 0; i + 1 < own; ++i) summary.columns.push_back({columns[i]});
  const bool moved = rows.table.moved(output), moves_references = moved && measures.references;
  if (moved) columns.push_back("path");
  if (moves_references) columns.push_back("reference");

  rows.table.write(output, columns, [&](const TableReader& table, const TableRow& row) {
    const EvaluatedClip clip = clip_of_row(deck, rows.table, table, row);
    std::vector<Json> values(columns.size());
    if (moved) values[own] = FileTable::absolute(clip.path);
    if (moves_references && !clip.reference.empty())
      values.back() = FileTable::absolute(clip.reference);
    const ListItem& item = engine.items()[places.at(key_of(clip))];
    const auto found = lines.find(item.name);
    if (found != lines.end() && found->second.key == item.key) {
      const Json line = found->second.parsed();
      for (std::size_t i = 0; i < own; ++i) values[i] = line.value(columns[i], Json());
      for (std::size_t i = 0; i + 1 < own; ++i) {
        // A mean and that of the references are over the same rows.
        const bool pair = columns[i + 1] == "reference_" + columns[i];
        const std::size_t other = pair ? i + 1 : columns[i].starts_with("reference_") ? i - 1 : i;
        if (values[i].is_number() && values[other].is_number())
          summary.columns[i].add(values[i].get<double>());
      }
      if (line.contains("fault"))
        values[own - 1] = line["fault"];
      else if (measures.references && measures.in_order() && !line.contains("lengths_differ"))
        ++summary.without;
    }
    ++summary.rows;
    return values;
  });
}

Json as_json(const ClipSummary& s) {
  Json j = {{"rows", s.rows}, {"lengths_differ", s.differing}, {"without_reference", s.without}};
  for (const ColumnSummary& c : s.columns) {
    j["columns"][c.name] = {{"rows", c.rows}};
    if (c.rows > 0)
      j["columns"][c.name].update({{"mean", c.mean()}, {"least", c.least}, {"most", c.most}});
  }
  for (const auto& [name, value] : s.facts) j["facts"][name] = value;
  return j;
}

std::string as_text(const ClipSummary& s) {
  std::string text =
      fmt::format("{}\n  {:<18} {:>10} {:>10} {:>10} {:>8}\n", counted(s.rows, "row"), "measure",
                  "mean", "least", "most", "rows");
  for (const ColumnSummary& c : s.columns)
    text += c.rows > 0
                ? fmt::format("  {:<18} {:>10.4f} {:>10.4f} {:>10.4f} {:>8}\n", c.name, c.mean(),
                              c.least, c.most, c.rows)
                : fmt::format("  {:<18} {:>10} {:>10} {:>10} {:>8}\n", c.name, "-", "-", "-", 0);
  if (s.without > 0)
    text += fmt::format(
        "  {} without a reference: left out of the means that are compared with references\n",
        counted(s.without, "row"));
  if (s.differing > 0)
    text += fmt::format("  {} not as long as {}: the frames that both have were compared\n",
                        counted(s.differing, "clip is", "clips are"),
                        s.differing == 1 ? "its reference" : "their references");
  return text;
}

std::vector<std::pair<std::string, std::string>> facts_of_clips(const Deck& deck,
                                                                const ClipMeasures& m) {
  std::vector<std::pair<std::string, std::string>> facts{{"clips", clips_of(deck)}};
  const ClipDeck& clip = deck.get<ClipDeck>();
  if (m.lpips) facts.emplace_back("LPIPS", deck.get<EvaluateClipsDeck>().lpips_weights);
  if (m.clip()) facts.emplace_back("CLIP", clip.weights);
  if (m.aes) facts.emplace_back("aesthetic predictor", clip.aesthetic);
  facts.emplace_back("hardware", on_cuda() ? device_runtime().describe() : describe_cpu());
  facts.emplace_back("build", version_line());
  return facts;
}

}  // namespace

std::string EvaluatedClip::name() const {
  std::string name = item_name(path);
  if (!reference.empty() || !text.empty()) name += " #" + to_hex(hash128(key_of(*this)));
  return name;
}

bool& ClipMeasures::of(std::string_view name) {
  const std::array<bool*, clip_measures.size()> all = {&psnr,   &ssim,  &lpips, &flicker,
                                                       &motion, &match, &aes};
  const auto at = std::ranges::find(clip_measures, name) - clip_measures.begin();
  WEFT_ASSERT(at < std::ssize(all));
  return *all[static_cast<std::size_t>(at)];
}

std::vector<std::string> ClipMeasures::columns() const {
  std::vector<std::string> names;
  ClipMeasures self = *this;
  for (const std::string_view m : clip_measures) {
    if (!self.of(m)) continue;
    names.emplace_back(m);
    if (references && (m == "flicker" || m == "motion"))
      names.push_back("reference_" + std::string(m));
  }
  names.emplace_back("evaluation_fault");
  return names;
}

void ColumnSummary::add(double value) {
  least = rows == 0 ? value : std::min(least, value);
  most = rows == 0 ? value : std::max(most, value);
  sum += value;
  ++rows;
}

ClipRows read_clip_rows(const Deck& deck, MPI_Comm world) {
  ClipRows rows;
  const Json j = from_first_rank(world, [&] {
    rows = read_rows_of(deck);
    Json clips = Json::array();
    for (const EvaluatedClip& c : rows.clips)
      clips.push_back({c.path, c.media.path, c.media.member, c.media.begin, c.media.bytes,
                       c.reference, c.text});
    return clips;
  });
  if (log::rank() == 0) return rows;
  for (const Json& c : j)
    rows.clips.push_back(
        {c.at(0), {c.at(1), MediaTrust::untrusted, c.at(2), c.at(3), c.at(4)}, c.at(5), c.at(6)});
  return rows;
}

ClipMeasures choose_measures(const Deck& deck, const ClipRows& rows) {
  const EvaluateClipsDeck& c = deck.get<EvaluateClipsDeck>();
  const ClipDeck& clip = deck.get<ClipDeck>();
  const auto any = [&](std::string EvaluatedClip::*member) {
    return std::ranges::any_of(rows.clips,
                               [&](const EvaluatedClip& e) { return !(e.*member).empty(); });
  };
  const bool references = any(&EvaluatedClip::reference);
  // What a measure lacks.
  const auto lack = [&](std::string_view m) -> std::string {
    if ((m == "psnr" || m == "ssim" || m == "lpips") && !references)
      return "give the table a column reference, or set evaluate.references=FOLDER";
    if (m == "lpips" && c.lpips_weights.empty())
      return "name the weights of LPIPS with evaluate.lpips_weights=FILE.safetensors";
    if ((m == "match" || m == "aes") && clip.weights.empty())
      return "name CLIP's weights with clip.weights=FOLDER";
    if (m == "match" && !any(&EvaluatedClip::text))
      return "give the table a column text, or each clip its caption in NAME.txt";
    if (m == "aes" && clip.aesthetic.empty())
      return "name the aesthetic predictor with clip.aesthetic=FILE.safetensors";
    return "";
  };
  ClipMeasures chosen;
  chosen.references = references;
  for (const std::string_view m : clip_measures)
    if (c.measures.empty()) chosen.of(m) = lack(m).empty();
  for (const std::string& m : c.measures) {
    const std::string hint = lack(m);
    WEFT_CHECK(hint.empty(), Exit::usage, hint, "evaluate.measures has \"{}\", which needs more",
               m);
    chosen.of(m) = true;
  }
  return chosen;
}

int evaluate_clips(const Deck& deck, const ListStart& start, MPI_Comm world) {
  // 1. What is to be evaluated.
  check_clips_deck(deck);
  const ClipRows rows = read_clip_rows(deck, world);
  const ClipMeasures measures = choose_measures(deck, rows);
  if (log::rank() == 0) check_clip_results(deck, rows);
  ListSettings settings = list_settings(deck, "evaluate", deck.get<EvaluateDeck>().output, "clip");
  settings.stem = "clips";
  std::vector<std::string> names = measures.columns();
  names.pop_back();
  std::set<std::string> cited(names.begin(), names.end());
  if (measures.clip()) cited.insert("clip");
  settings.cite = citations("evaluate", cited);
  ListEngine engine(settings, clip_items(rows, describe_clip_job(deck, measures), log::rank() == 0),
                    world);
  log::info("evaluate  {} of {}: {}{}", counted(std::ssize(rows.clips), "clip"), clips_of(deck),
            fmt::join(names, ", "), engine.made_before("evaluated"));

  // 2. Clips are read and measured; a rank that is free takes the next one.
  ListEnd last;
  if (!engine.missing().empty())
    last.share = evaluate_missing_clips(deck, start, rows, measures, engine);

  // 3. Rank 0 writes the table, also where clips failed.
  last.finish_with_failures = true;
  last.summarise = report_feed;
  last.finish = [&](const ListReport&) {
    ClipSummary summary;
    summary.facts = facts_of_clips(deck, measures);
    write_clip_table(deck, rows, measures, engine, summary);
    const fs::path folder = engine.settings().directory;
    replace_file(folder / "scores.json",
                 dump_json(as_json(summary), 2, ' ', false, Json::error_handler_t::replace) + "\n",
                 Exit::data, Durable::no);
    fmt::print("{}", as_text(summary));
    log::write_info(fmt::format("results   {}", output_table(deck)));
  };
  return engine.end(last);
}

namespace {

void clips_rows(Rows& r, EvaluateClipsDeck& d) {
  r.path(
      "clips", d.clips,
      "Clips whose quality is measured: a table (CSV or JSON lines) with a column path and maybe "
      "reference and text, or a folder, a glob, a shard (.tar), a file; empty evaluates a model.");
  r.path("references", d.references,
         "Folder with a reference of the same name for each clip, where the table has no column "
         "reference.");
  r.text("measures", d.measures,
         "Columns to compute: psnr, ssim, lpips (against references), flicker, motion, match, aes "
         "(by CLIP); none: all for which there is what they need.");
  r.path("lpips_weights", d.lpips_weights,
         "Safetensors file with VGG16 and LPIPS's own weights, as vae_train.lpips_weights.");
}

}  // namespace

DeckTable evaluate_clips_table() { return deck_table("evaluate", clips_rows); }

}  // namespace weft
