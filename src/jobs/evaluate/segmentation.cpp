// `weft evaluate` of segmentation models: IoU of classes, accuracy of pixels.
#include <algorithm>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "data/images/label_pictures.h"
#include "data/images/labelled_images.h"
#include "data/synthetic.h"
#include "jobs/engine/pictures.h"
#include "jobs/evaluate/evaluate.h"
#include "models/segmentation/classes.h"
#include "models/segmentation/predictor.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

// All that decides the results, a line each.
std::string describe_segmentation(const Deck& deck, const std::string& weights) {
  return fmt::format("data {}\nweights {}\n{}predictions {}\n{}", data_identity(deck), weights,
                     describe_prediction(deck), deck.get<EvaluateDeck>().predictions,
                     describe_palette(deck));
}

// Item i is image i; its line holds its counts (put_counts) and seconds, and where they are wanted
// the files picture and prediction. `job`: all that decides the results.
std::vector<ListItem> segmentation_items(const LabelledImages& images, const Predictor& predictor,
                                         const EvaluateDeck& deck, const std::string& job) {
  const std::string key = to_hex(hash128(job)),
                    with_picture = to_hex(hash128(job + "picture of 4\n"));
  std::vector<ListItem> items;
  for (std::int64_t i = 0; i < images.count(); ++i)
    items.push_back({fmt::format("image{}", i), i < deck.pictures ? with_picture : key,
                     predictor.cost(images.size(i))});
  return items;
}

// ---- Images through the model ----

struct EvaluatedImage : PictureUnit {
  LabelledImage image;
  std::vector<ScaledPicture> scales;
  Prediction found;
};

class SegmentationWork : public PictureWork {
 public:
  SegmentationWork(const EvaluateDeck& deck, const LabelledImages& images,
                   const std::vector<Rgb>& palette, Predictor& predictor, ListEngine& engine)
      : PictureWork(engine),
        deck_(deck),
        images_(images),
        palette_(palette),
        predictor_(predictor) {}
  std::unique_ptr<PictureUnit> next(std::int64_t, std::int64_t number) override {
    return number == 0 ? std::make_unique<EvaluatedImage>() : nullptr;
  }
  FeedWork::Prepared read(PictureUnit& picture) override;
  void predict(std::span<PictureUnit* const> pictures) override;
  void finish(PictureUnit& picture) override;

 private:
  void write(std::int64_t item, const LabelledImage& image,
             const std::vector<std::uint8_t>& classes, Json& line) const;

  const EvaluateDeck& deck_;
  const LabelledImages& images_;
  const std::vector<Rgb>& palette_;
  Predictor& predictor_;
};

FeedWork::Prepared SegmentationWork::read(PictureUnit& picture) {
  auto& p = static_cast<EvaluatedImage&>(picture);
  const double begin = now_seconds();
  images_.read(p.item, p.image);
  const std::int64_t most = predictor_.num_classes();
  const std::uint8_t greatest =
      p.image.labels.empty() ? std::uint8_t{0} : *std::ranges::max_element(p.image.labels);
  WEFT_CHECK(greatest <= most, Exit::data,
             "set model.num_classes to what the data has, or evaluate other data",
             "{} has pixels of class {}, and the model knows 0 to {}", images_.name(p.item),
             greatest - 1, most - 1);
  const double decoded = now_seconds();
  p.scales = predictor_.scaled(p.image.rgb, p.image.size);
  std::size_t bytes = 2 * p.image.rgb.size();  // with labels, and what is drawn
  for (const ScaledPicture& s : p.scales) bytes += s.rgb.size();
  return {decoded - begin, now_seconds() - decoded, true, bytes};
}

void SegmentationWork::predict(std::span<PictureUnit* const> pictures) {
  auto& p = static_cast<EvaluatedImage&>(*pictures.front());
  predictor_.check_memory(p.image.size, true, Arena::current().capacity());
  p.found = predictor_.predict(p.scales, p.image.size, p.image.labels);
  p.scales.clear();
}

void SegmentationWork::finish(PictureUnit& picture) {
  auto& p = static_cast<EvaluatedImage&>(picture);
  Json line = engine_.line_of(p.item);
  line["seconds"] = p.found.seconds;
  put_counts(line, p.found.counts);
  if (p.item < deck_.pictures || deck_.predictions) write(p.item, p.image, p.found.classes, line);
  engine_.finished(line);
}

std::string file_of(const LabelledImages& images, std::int64_t i) {
  return fmt::format("{:05d}_{}.png", i, plain_stem(images.name(i)));
}

// What people look at.
void SegmentationWork::write(std::int64_t i, const LabelledImage& image,
                             const std::vector<std::uint8_t>& classes, Json& line) const {
  const std::filesystem::path& directory = engine_.settings().directory;
  const ImageSize size = image.size;
  const std::vector<std::uint8_t> labels = as_labels(classes);
  if (i < deck_.pictures) {
    const auto truth = coloured(image.labels, palette_), found = coloured(labels, palette_);
    const auto wrong = differences(image.rgb, image.labels, labels);
    const std::string file = "pictures/" + file_of(images_, i);
    write_png(result_path(directory, file).string(), size.height, 4 * size.width,
              side_by_side({image.rgb, truth, found, wrong}, size));
    add_file(line, directory, file, "picture");
  }
  if (deck_.predictions) {
    const std::string file = "predictions/" + file_of(images_, i);
    write_palette_png(result_path(directory, file).string(), size.height, size.width, labels,
                      palette_);
    add_file(line, directory, file, "prediction");
  }
}

// Evaluates the images that are missing. Returns this rank's share of the report.
Json segment_missing(const Deck& deck, const ListStart& start, const SegmentationSource& weights,
                     const LabelledImages& images, const std::vector<Rgb>& palette,
                     Predictor& predictor, ListEngine& engine) {
  weights.load(predictor.params());
  log::info("weights   {}", weights.describe());
  const ImageSize largest = images.size(engine.costliest());
  const std::size_t planned = predictor.plan(largest, true).bytes;
  SegmentationWork work(deck.get<EvaluateDeck>(), images, palette, predictor, engine);
  Json share = make_pictures(work, engine, deck, start, engine.ahead_of_others());
  log::info("memory    {} at the peak, {} planned for the costliest image",
            size_text(share.at("peak_bytes")), size_text(static_cast<double>(planned)));
  share["planned_bytes"] = planned;
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

int evaluate_segmentation(const Deck& deck, const ListStart& start, const SegmentationPage& page,
                          MPI_Comm world) {
  // 1. What is to be evaluated.
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  const std::string& data = evaluated_data(deck);
  WEFT_CHECK(!is_synthetic(data), Exit::usage,
             "name a store of labelled images in evaluate.data or data.path (weft ingest with "
             "ingest.images), or shapes:",
             "{} makes clips, not labelled images", data);
  Predictor predictor(deck);
  const HeldOutChoice choice = evaluated_samples(deck);
  const std::unique_ptr<LabelledImages> images =
      choice.share > 0 ? open_training_data(deck.data, deck.media, choice).held_out.images
                       : open_labelled_images(data, deck.data.verify);
  WEFT_CHECK(images != nullptr, Exit::usage, "name a store of labelled images in data.path",
             "{} holds no labelled images", data);
  WEFT_CHECK(images->num_classes() <= predictor.num_classes(), Exit::usage,
             fmt::format("set model.num_classes = {} if that is what the weights have",
                         images->num_classes()),
             "{} has {} classes, and model.num_classes = {}", data, images->num_classes(),
             predictor.num_classes());
  const SegmentationSource weights(deck, e.ema, world);
  weights.check_classes(images->class_names(), data);
  const std::vector<std::string> names = class_names(deck, images->class_names());
  SegmentationScores result(names);
  result.folder = e.output;
  result.palette = label_palette(deck, images->palette());
  check_results(deck, {});
  ListEngine engine(
      evaluation_settings(deck),
      segmentation_items(*images, predictor, e, describe_segmentation(deck, weights.identity())),
      world);
  log::info("evaluate  {} of {} at {}{}", counted(engine.items().size(), "image"), data,
            counted(std::ssize(deck.data.short_sides), "scale"), engine.made_before("evaluated"));

  // 2. Images through the model; a rank that is free takes the next one.
  ListEnd last;
  if (!engine.missing().empty())
    last.share = segment_missing(deck, start, weights, *images, result.palette, predictor, engine);

  // 3. Rank 0 adds up all lines.
  last.summarise = report_feed;
  last.finish = [&](const ListReport& report) {
    result.facts = facts_of(deck, weights.describe());
    add_results(
        result, deck, engine, report, [&](std::int64_t i) { return images->name(i); },
        [&](const Json& line) { result.add(get_counts(line, predictor.num_classes())); });
    replace_file(result.folder / legend_file, legend_svg(names, result.palette), Exit::data,
                 Durable::no);
    write_results(result, result.json(), result.table(),
                  [&](const std::filesystem::path& file) { page(result, file); });
  };
  return engine.end(last);
}

}  // namespace weft
