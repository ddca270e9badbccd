#include "jobs/evaluate/evaluate.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "config/deck_table.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/version.h"
#include "jobs/evaluate/evaluate_job.h"
#include "models/segmentation/class_names.h"
#include "models/segmentation/predictor.h"
#include "parallel/rank_device.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

const std::string& data_of(const Deck& deck) {
  const std::string& own = deck.get<EvaluateDeck>().data;
  return own.empty() ? deck.data.path : own;
}

// All that decides the results, a line each.
std::string describe_job(const Deck& deck, const std::string& weights) {
  const std::string& data = data_of(deck);
  return fmt::format("data {}\nweights {}\n{}predictions {}\n",
                     data.starts_with("shapes:") ? data : file_identity(data), weights,
                     describe_prediction(deck), deck.get<EvaluateDeck>().predictions);
}

ListSettings settings_of(const Deck& deck) {
  ListSettings s;
  s.directory = deck.get<EvaluateDeck>().output;
  s.stem = "images";
  s.report = "evaluate_report.json";
  s.noun = "image";
  s.key = "evaluate.output";
  s.stop_margin = deck.run.stop_margin;
  s.ahead = true;
  return s;
}

// Evaluates the images that are missing. Returns this rank's share of the report.
Json evaluate_missing(const Deck& deck, const RankDevice& device, const SegmentationSource& weights,
                      const LabelledImages& images, Predictor& predictor, ListEngine& engine) {
  weights.load(predictor.params());
  log::info("weights   {}", weights.describe());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, device));
  const ArenaScope scope(*arena);
  const ImageSize largest = images.size(engine.missing().front());
  const std::size_t planned = predictor.plan(largest, true).bytes;
  EvaluateJob job(deck.get<EvaluateDeck>(), images, predictor, engine);
  engine.run(job, engine.one_by_one());
  log::info("memory    {} at the peak, {} planned for the costliest image",
            size_text(static_cast<double>(arena->peak())), size_text(static_cast<double>(planned)));
  Json share = job.share();
  share["planned_bytes"] = planned;
  share["peak_bytes"] = arena->peak();
  return share;
}

std::vector<std::pair<std::string, std::string>> facts_of(const Deck& deck,
                                                          const std::string& weights) {
  const SegmentationDeck& m = deck.get<SegmentationDeck>();
  return {{"model", fmt::format("{} + {}, {} classes", m.encoder, m.decoder, m.num_classes)},
          {"weights", weights},
          {"data", data_of(deck)},
          {"scales", fmt::format("short sides {}, longest side {}, multiples of {}",
                                 fmt::join(deck.data.short_sides, ", "), deck.data.max_side,
                                 deck.data.padding)},
          {"preprocessing", m.preprocessing},
          {"number format", deck.model.dtype},
          {"hardware", on_cuda() ? device_runtime().describe() : describe_cpu()},
          {"build", version_line()}};
}

void write_text(const fs::path& path, const std::string& text) {
  replace_file(path, text, Exit::data, Durable::no);
}

// The pace of an earlier start, if nothing was evaluated in this one.
EvaluationPace earlier_pace(const fs::path& json) {
  std::ifstream in(json);
  std::stringstream text;
  text << in.rdbuf();
  const auto j = try_parse_json<Json>(text.str());
  try {
    const Json& p = j.at("pace");
    return {p.at("images"), p.at("ranks"), p.at("seconds")};
  } catch (const nlohmann::json::exception&) {
    return {};
  }
}

EvaluationPace pace_of(const ListReport& report, const fs::path& json) {
  if (report.made() == 0) return earlier_pace(json);
  EvaluationPace pace{report.made(), std::ssize(report.ranks), 0};
  for (const RankShare& r : report.ranks) pace.seconds = std::max(pace.seconds, r.last_end);
  return pace;
}

}  // namespace

int evaluate(const Deck& deck, const EvaluationPage& page, MPI_Comm world) {
  // 1. What is to be evaluated.
  watch_stop_signals();
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  WEFT_CHECK(!e.output.empty(), Exit::usage, "set evaluate.output = \"evaluation\"",
             "evaluate.output is empty");
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  WEFT_CHECK(!data_of(deck).starts_with("synthetic:"), Exit::usage,
             "name a store of labelled images in evaluate.data or data.path (weft ingest with "
             "ingest.images), or shapes:",
             "{} makes clips, not labelled images", data_of(deck));
  Predictor predictor(deck);
  const auto images = open_labelled_images(data_of(deck), deck.data.verify);
  WEFT_CHECK(
      images->num_classes() <= predictor.num_classes(), Exit::usage,
      fmt::format("set model.num_classes = {}, if the weights have so many", images->num_classes()),
      "{} has {} classes, and model.num_classes = {}", data_of(deck), images->num_classes(),
      predictor.num_classes());
  const SegmentationSource weights(deck, e.ema, world);
  Evaluation result(class_names(deck, images->class_names()));
  result.folder = e.output;
  ListEngine engine(settings_of(deck),
                    evaluation_items(*images, predictor, e, describe_job(deck, weights.identity())),
                    world);
  const std::size_t missing = engine.missing().size(), all = engine.items().size();
  log::info("evaluate  {} images of {} at {} scales{}", all, data_of(deck),
            deck.data.short_sides.size(),
            missing < all ? fmt::format(", {} evaluated before", all - missing) : "");

  // 2. Images through the model; a rank that is free takes the next one.
  ListEnd last;
  if (missing > 0) last.share = evaluate_missing(deck, device, weights, *images, predictor, engine);

  // 3. The coordinator adds up all lines.
  last.finish = [&](const ListReport& report) {
    const fs::path folder = e.output;
    const ManifestLines lines = engine.lines();
    for (std::int64_t i = 0; i < images->count(); ++i) {
      const Json line = lines.at(engine.items()[static_cast<std::size_t>(i)].name).parsed();
      result.add(get_counts(line, predictor.num_classes()));
      result.seconds.push_back(line.at("seconds"));
      if (line.contains("picture")) result.pictures.push_back({images->name(i), line["picture"]});
    }
    result.facts = facts_of(deck, weights.describe());
    result.pace = pace_of(report, folder / "evaluation.json");
    const std::string table = result.table();
    write_text(folder / "evaluation.json",
               result.json().dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    write_text(folder / "evaluation.txt", table);
    if (page) write_text(folder / "evaluation.html", page(result));
    fmt::print("{}", table);
    log::write_info(fmt::format("results   {}", (folder / "evaluation.json").string()));
  };
  return engine.end(last);
}

namespace {

void evaluate_rows(Rows& r, EvaluateDeck& d) {
  r.text("data", d.data,
         "Labelled images to evaluate: a store, or shapes:...; empty takes data.path.");
  r.text("output", d.output, "Folder of the results.");
  r.number("pictures", d.pictures, 0, 10000,
           "Of so many images, the first ones, the page shows picture, labels and prediction.");
  r.flag("predictions", d.predictions,
         "Write the predicted classes of every image, as a PNG of labels (class + 1).");
  r.flag("ema", d.ema, "Take the moving average of the weights from a checkpoint.");
}

}  // namespace

DeckTable evaluate_table() { return deck_table("evaluate", evaluate_rows); }

Command evaluate_command(EvaluationPage page) {
  Command c{"evaluate", "measure how well a segmentation model does: IoU of classes, accuracy",
            [page = std::move(page)](const Deck& deck, MPI_Comm world) {
              return evaluate(deck, page, world);
            }};
  c.heeds_stops = true;
  c.takes_deck();
  return c;
}

}  // namespace weft
