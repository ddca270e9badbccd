#include "jobs/score/score.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "tensor/device.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

void check_deck(const Deck& deck) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  WEFT_CHECK(deck.model.name == "dbnet", Exit::usage, "set model.name = \"dbnet\"",
             "model.name = \"{}\" is not a text detector, which weft score needs", deck.model.name);
  WEFT_CHECK(!s.input.empty(), Exit::usage, "set score.input = \"meta.csv\"",
             "score.input is empty");
  WEFT_CHECK(!s.output.empty(), Exit::usage, "set score.output = \"meta_ocr.csv\"",
             "score.output is empty");
  WEFT_CHECK(
      s.side % Dbnet::stride == 0, Exit::usage,
      fmt::format("set score.side = {}, or another multiple of {}",
                  std::max<std::int64_t>(1, s.side / Dbnet::stride) * Dbnet::stride, Dbnet::stride),
      "score.side = {}", s.side);
  for (const std::string& c : s.columns) {
    WEFT_CHECK(std::ranges::find(extra_columns, c) != extra_columns.end(), Exit::usage,
               fmt::format("the columns are {}", fmt::join(extra_columns, ", ")),
               "score.columns: unknown column \"{}\"", c);
    WEFT_CHECK(std::ranges::count(s.columns, c) == 1, Exit::usage, "name each column once",
               "score.columns has \"{}\" more than once", c);
  }
  std::error_code none;
  const fs::file_status there = fs::status(s.output, none);
  WEFT_CHECK(!fs::is_directory(there) && !fs::is_other(there), Exit::usage,
             "name a file, such as score.output = \"meta_ocr.csv\"", "score.output = {} is a {}",
             s.output, fs::is_directory(there) ? "folder" : "pipe or device");
  WEFT_CHECK(!fs::is_directory(page_file(s), none), Exit::usage, "choose another score.output",
             "the page {} would replace a folder", page_file(s).string());
}

// No result may replace an input.
void check_results(const Deck& deck, const ScoreRows& rows) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  const fs::path table = absolute_path(s.output), page = absolute_path(page_file(s)),
                 pictures = absolute_path(parts_folder(s) / "pictures");
  std::vector<std::string> paths;
  for (const ScoreFile& f : rows.files) paths.push_back(f.path);
  keep_inputs(deck, "score.output", paths, [&](const fs::path& path) {
    return path == table || path == page || path.parent_path() == pictures;
  });
}

// All that decides a file's line but the file itself, a line each.
std::string describe_job(const Deck& deck, const std::string& weights) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  const DbnetDeck& m = deck.get<DbnetDeck>();
  const PostprocessDeck& p = deck.get<PostprocessDeck>();
  return fmt::format(
      "weights {}\nmodel {} {} {} {} {}\npostprocess {} {} {} {} {} {}\nframes {}\nside {}\n"
      "wait 0\norientation {}\n",  // results of earlier versions stay
      weights, m.backbone, m.asf, m.conv2_gain, m.deformable, deck.model.dtype, p.mask_threshold,
      p.min_text_score, p.min_text_width, p.unclip_ratio, p.epsilon_ratio, p.max_candidates,
      fmt::join(frames_of(s), " "), s.side, deck.media.orientation);
}

std::vector<std::pair<std::string, std::string>> facts_of(const Deck& deck,
                                                          const std::string& weights) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  const DbnetDeck& m = deck.get<DbnetDeck>();
  return {{"model", fmt::format("{}{}, conv2_gain {}", m.asf ? "DBNet++, " : "DBNet, ", m.backbone,
                                m.conv2_gain)},
          {"weights", weights},
          {"frame of a video", fmt::format("{}", fmt::join(frames_of(s), ", "))},
          {"side", fmt::format("{} pixels", s.side)},
          {"number format", deck.model.dtype},
          {"hardware", on_cuda() ? device_runtime().describe() : describe_cpu()},
          {"build", version_line()}};
}

// The times of all ranks; if this start scored nothing, of the one that wrote the report.
void add_feeds(const ListReport& report, const fs::path& file, FeedSummary& feed) {
  if (report.made > 0) {
    for (const Json& share : report.ranks) feed.add(share);
    return;
  }
  const auto before = try_parse_json<Json>(content_of(file));
  try {
    for (const Json& rank : before.at("ranks")) feed.add(rank);
  } catch (const nlohmann::json::exception&) {
    feed.sum = {};  // nothing was measured, or it is of another weft
  }
}

}  // namespace

int score(const Deck& deck, const ScorePage& page, MPI_Comm world) {
  // 1. What is to be scored.
  const ScoreDeck& s = deck.get<ScoreDeck>();
  check_deck(deck);
  const ListStart start = start_list_job(deck, world, s.threads);
  const ScoreRows rows = read_rows(deck, world);
  if (log::rank() == 0) check_results(deck, rows);
  const DetectorSource source(deck, "score.weights", s.weights, s.ema, world);
  const std::string job = describe_job(deck, source.identity());
  if (log::rank() == 0) make_own_folder(parts_folder(s), Exit::data);
  ListEngine engine(list_settings(deck, "score", parts_folder(s), "file"),
                    score_items(rows.files, job, log::rank() == 0), world);
  log::info("score     {} of {}{}, {}{}", counted(rows.end - rows.begin, "row"), s.input,
            s.shard.empty() ? "" : ", shard " + s.shard, counted(std::ssize(rows.files), "file"),
            engine.made_before("scored"));
  log::info("threads   {} a rank", start.threads);

  // 2. Files through the network; a rank that is free takes the next one.
  ListEnd last;
  if (!engine.missing().empty())
    last.share = score_missing(deck, start, source, rows.files, engine);

  // 3. Rank 0 writes the table, also where files failed.
  ScoreSummary summary;
  summary.facts = facts_of(deck, source.describe());
  summary.feed.on_gpu = on_cuda();
  last.finish_with_failures = true;
  last.summarise = [&](const ListReport& report) {
    // Before the engine writes this report.
    add_feeds(report, engine.settings().directory / engine.settings().report, summary.feed);
    ListSummary said;
    if (!summary.feed.empty()) said.header["feed"] = summary.feed.json();
    return said;
  };
  last.finish = [&](const ListReport& report) {
    write_output(deck, rows, engine, report, summary);
    fmt::print("{}", summary.table());
    const fs::path html = page_file(s);
    page(summary, html);
    log::write_info(fmt::format("results   {}, {}", s.output, html.string()));
  };
  return engine.end(last);
}

// ---- What was found, for people ----

std::int64_t ScoreSummary::with_text() const {
  std::int64_t all = 0;
  for (const auto& [count, n] : histogram) all += count > 0 ? n : 0;
  return all;
}

std::vector<std::pair<std::string, std::int64_t>> ScoreSummary::bins() const {
  std::vector<std::pair<std::string, std::int64_t>> bins;
  const std::int64_t most = histogram.empty() ? -1 : histogram.rbegin()->first;
  for (std::int64_t low = 0; low <= most;) {
    const std::int64_t high = low < 5 ? low : 2 * (low - 1);  // 5 to 8, 9 to 16, ...
    std::int64_t n = 0;
    for (auto at = histogram.lower_bound(low); at != histogram.end() && at->first <= high; ++at)
      n += at->second;
    bins.emplace_back(low == high ? fmt::format("{}", low) : fmt::format("{} to {}", low, high), n);
    low = high + 1;
  }
  return bins;
}

std::string ScoreSummary::table() const {
  const std::int64_t scored = rows - without;
  const auto per = [](double count, double all) { return all > 0 ? count / all : 0; };
  std::string text = fmt::format("{}, {}\n", counted(rows, "row"), counted(files, "file"));
  text += fmt::format("  with text          {:>10}  {:.1f} %\n", with_text(),
                      100 * per(static_cast<double>(with_text()), static_cast<double>(scored)));
  text += fmt::format("  largest count      {:>10}\n",
                      histogram.empty() ? 0 : histogram.rbegin()->first);
  if (left_out > 0) text += fmt::format("  left out           {:>10}\n", left_out);
  if (without > 0) text += fmt::format("  without a count    {:>10}\n", without);
  if (!faults.empty()) text += fmt::format("  files with faults  {:>10}\n", std::ssize(faults));
  if (feed.empty()) return text;
  const double all =
      feed.sum.decode + feed.sum.resize + feed.sum.network + feed.sum.post_processing;
  text += fmt::format("stage              seconds   share  ms/frame\n");
  const auto row = [&](const char* name, double seconds) {
    text += fmt::format("  {:<15} {:>8.2f} {:>5.1f} % {:>9.2f}\n", name, seconds,
                        100 * per(seconds, all),
                        1000 * per(seconds, static_cast<double>(feed.sum.frames)));
  };
  row("decode", feed.sum.decode);
  row("resize", feed.sum.resize);
  row("network", feed.sum.network);
  row("post-processing", feed.sum.post_processing);
  text += feed.verdict() + "\n" + feed.waits() + "\n";
  return text;
}

namespace {

void score_rows(Rows& r, ScoreDeck& d) {
  r.path("input", d.input,
         "Table of files: CSV with a column `path`, or JSON lines (.jsonl) with a text `path`; "
         "relative paths begin in its folder. Or a folder, a glob, a shard (.tar), a file, as "
         "ingest.inputs takes them.");
  r.path("output", d.output,
         "Table that is written: the input's rows and columns, and `ocr`, the number of text "
         "regions; OUTPUT.parts/ holds what is finished.");
  r.path("weights", d.weights,
         "Weights of the text detector: a safetensors file, a run directory, or random:SEED.");
  r.flag("ema", d.ema, "Take the moving average of the weights from a checkpoint.");
  r.text("columns", d.columns,
         "Further columns: area (ocr_area, the share of the frame that regions cover), boxes "
         "(ocr_boxes, x and y of four corners in pixels of the picture), scores (ocr_scores), "
         "fault (ocr_fault, why a file could not be read).");
  r.number("frame", d.frame, 0, many,
           "Frame of a video that is scored, from 0; a shorter video's last frame.");
  r.number("frames", d.frames, 0, many,
           "Several frames of a video instead: `ocr` is the largest of their counts.");
  r.number("side", d.side, 32, 8192,
           "Pixels of a frame's sides in the network, a multiple of 32; Open-Sora takes 1024.");
  r.number("maximum", d.maximum, -1, many,
           "Rows with more text regions are left out of the output; -1 keeps all.");
  r.text("shard", d.shard,
         "\"K/N\": only the K-th of N parts of the rows, K from 1, for several jobs at once with "
         "an output each.");
  r.number("pictures", d.pictures, 0, 1e6,
           "Number of rows, the first ones, for which a PNG shows the frame with its boxes.");
  r.number("threads", d.threads, 0, 4096,
           "Threads of a rank; 0: run.threads, or else its share of the host's cores.");
}

}  // namespace

DeckTable score_table() { return deck_table("score", score_rows); }

Command score_command(ScorePage page) {
  Command c{"score", "count text regions in the pictures and videos of a table",
            [page = std::move(page)](const Deck& deck, MPI_Comm world) {
              return score(deck, page, world);
            }};
  c.handles_stop_signals = true;
  takes_list_job(c);
  return c;
}

}  // namespace weft
