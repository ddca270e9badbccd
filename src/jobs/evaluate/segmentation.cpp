#include "jobs/evaluate/segmentation.h"

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "data/synthetic.h"
#include "jobs/evaluate/segmentation_job.h"
#include "models/segmentation/classes.h"
#include "models/segmentation/predictor.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

// All that decides the results, a line each.
std::string describe_job(const Deck& deck, const std::string& weights) {
  return fmt::format("data {}\nweights {}\n{}predictions {}\n", data_identity(deck), weights,
                     describe_prediction(deck), deck.get<EvaluateDeck>().predictions);
}

// Evaluates the images that are missing. Returns this rank's share of the report.
Json evaluate_missing(const Deck& deck, const RankDevice& device, const SegmentationSource& weights,
                      const LabelledImages& images, Predictor& predictor, ListEngine& engine) {
  weights.load(predictor.params());
  log::info("weights   {}", weights.describe());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, device));
  const ArenaScope scope(*arena);
  const ImageSize largest = images.size(engine.costliest());
  const std::size_t planned = predictor.plan(largest, true).bytes;
  SegmentationJob job(deck.get<EvaluateDeck>(), images, predictor, engine);
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
          {"data", evaluated_data(deck)},
          {"scales", fmt::format("short sides {}, longest side {}, multiples of {}",
                                 fmt::join(deck.data.short_sides, ", "), deck.data.max_side,
                                 deck.data.padding)},
          {"preprocessing", m.preprocessing}};
}

}  // namespace

int evaluate_segmentation(const Deck& deck, const RankDevice& device, const SegmentationPage& page,
                          MPI_Comm world) {
  // 1. What is to be evaluated.
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  const std::string& data = evaluated_data(deck);
  WEFT_CHECK(!is_synthetic(data), Exit::usage,
             "name a store of labelled images in evaluate.data or data.path (weft ingest with "
             "ingest.images), or shapes:",
             "{} makes clips, not labelled images", data);
  Predictor predictor(deck);
  const auto images = open_labelled_images(data, deck.data.verify);
  WEFT_CHECK(
      images->num_classes() <= predictor.num_classes(), Exit::usage,
      fmt::format("set model.num_classes = {}, if the weights have so many", images->num_classes()),
      "{} has {} classes, and model.num_classes = {}", data, images->num_classes(),
      predictor.num_classes());
  const SegmentationSource weights(deck, e.ema, world);
  SegmentationScores result(class_names(deck, images->class_names()));
  result.folder = e.output;
  result.palette = label_palette(predictor.num_classes(), images->palette());
  check_results(deck, {});
  ListEngine engine(
      evaluation_settings(deck),
      segmentation_items(*images, predictor, e, describe_job(deck, weights.identity())), world);
  const std::size_t missing = engine.missing().size(), all = engine.items().size();
  log::info("evaluate  {} of {} at {}{}", counted(all, "image"), data,
            counted(std::ssize(deck.data.short_sides), "scale"),
            missing < all ? fmt::format(", {} evaluated before", all - missing) : "");

  // 2. Images through the model; a rank that is free takes the next one.
  ListEnd last;
  if (missing > 0) last.share = evaluate_missing(deck, device, weights, *images, predictor, engine);

  // 3. Rank 0 adds up all lines.
  last.finish = [&](const ListReport& report) {
    const ManifestLines lines = engine.lines();
    for (std::int64_t i = 0; i < images->count(); ++i) {
      const Json line = lines.at(engine.items()[static_cast<std::size_t>(i)].name).parsed();
      result.add(get_counts(line, predictor.num_classes()));
      add_line(result, line, images->name(i));
    }
    result.facts = facts_of(deck, weights.describe());
    add_machine(result, deck);
    set_pace(result, report);
    remove_others(engine);
    write_results(result, result.json(), result.table(), page ? page(result) : "");
  };
  return engine.end(last);
}

}  // namespace weft
