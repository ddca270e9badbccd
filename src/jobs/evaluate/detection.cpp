#include "jobs/evaluate/detection.h"

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/evaluate/detection_job.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

std::string describe_model(const Deck& deck) {
  const DbnetDeck& m = deck.get<DbnetDeck>();
  return fmt::format("{} of {}{}", m.asf ? "DBNet++" : "DBNet", m.backbone,
                     m.conv2_gain == 1 ? "" : fmt::format(", conv2_gain {}", m.conv2_gain));
}

std::string describe_postprocessing(const Deck& deck) {
  const PostprocessDeck& p = deck.get<PostprocessDeck>();
  return fmt::format(
      "mask_threshold {}, min_text_score {}, min_text_width {}, unclip_ratio {}, epsilon_ratio {}, "
      "max_candidates {}",
      p.mask_threshold, p.min_text_score, p.min_text_width, p.unclip_ratio, p.epsilon_ratio,
      p.max_candidates);
}

std::string describe_sizes(const EvaluateDeck& e) {
  return e.short_side > 0 ? fmt::format("short side {}, longest side {}", e.short_side, e.long_side)
                          : "as the pictures are";
}

// All that decides the results, a line each.
std::string describe_job(const Deck& deck, const DetectorSource& weights) {
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  return fmt::format("data {}\nweights {}\nmodel {} {} {}\n{}\n{}\nboxes {}\n", data_identity(deck),
                     weights.identity(), describe_model(deck), weights.deformable(),
                     deck.model.dtype, describe_sizes(e), describe_postprocessing(deck),
                     e.predictions);
}

// Evaluates the pictures that are missing. Returns this rank's share of the report.
Json evaluate_missing(const Deck& deck, const RankDevice& device, const DetectorSource& weights,
                      const TextImages& images, ListEngine& engine) {
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  Detector detector(deck, weights);
  log::info("weights   {}", weights.describe());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, device));
  const ArenaScope scope(*arena);
  const std::int64_t costliest = engine.costliest();
  std::size_t planned = 0;
  if (engine.items()[static_cast<std::size_t>(costliest)].cost > 0) {
    const ImageSize largest = view_size(images.size(costliest), e.short_side, e.long_side).padded;
    planned = detector.plan(1, largest.height, largest.width).bytes;
  }
  DetectionJob job(deck, images, detector, engine);
  engine.run(job, engine.one_by_one());
  log::info("memory    {} at the peak, {} planned for the largest picture",
            size_text(static_cast<double>(arena->peak())), size_text(static_cast<double>(planned)));
  Json share = job.share();
  share["planned_bytes"] = planned;
  share["peak_bytes"] = arena->peak();
  return share;
}

}  // namespace

int evaluate_detection(const Deck& deck, const RankDevice& device, const DetectionPage& page,
                       MPI_Comm world) {
  // 1. What is to be evaluated.
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  const std::string& data = evaluated_data(deck);
  WEFT_CHECK(is_text_list(data), Exit::usage,
             "name a list of pictures with polygons in evaluate.data or data.path, or text:",
             "{} holds no pictures with text regions", data);
  const auto images = open_text_images(data, deck.media);
  const DetectorSource weights(deck, "model.weights", deck.model.weights, e.ema, world);
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  DetectionScores result(deck.get<PostprocessDeck>().min_text_score);
  result.folder = e.output;
  std::vector<std::string> pictures;
  for (std::int64_t i = 0; rank == 0 && i < images->count(); ++i)
    pictures.push_back(images->name(i));
  check_results(deck, pictures);
  ListEngine engine(evaluation_settings(deck),
                    detection_items(*images, e, describe_job(deck, weights), rank == 0), world);
  const std::size_t missing = engine.missing().size(), all = engine.items().size();
  log::info("evaluate  {} of {}{}", counted(all, "image"), data,
            missing < all ? fmt::format(", {} evaluated before", all - missing) : "");

  // 2. Pictures through the network; a rank that is free takes the next one.
  ListEnd last;
  if (missing > 0) last.share = evaluate_missing(deck, device, weights, *images, engine);

  // 3. Rank 0 adds up all lines.
  last.finish = [&](const ListReport& report) {
    const ManifestLines lines = engine.lines();
    for (std::int64_t i = 0; i < images->count(); ++i) {
      const Json line = lines.at(engine.items()[static_cast<std::size_t>(i)].name).parsed();
      result.add(line);
      add_line(result, line, images->name(i));
    }
    result.facts = {{"model", describe_model(deck)},
                    {"weights", weights.describe()},
                    {"data", data},
                    {"sizes", describe_sizes(e)},
                    {"post-processing", describe_postprocessing(deck)}};
    add_machine(result, deck);
    set_pace(result, report);
    remove_others(engine);
    write_results(result, result.json(), result.table(), page ? page(result) : "");
  };
  return engine.end(last);
}

}  // namespace weft
