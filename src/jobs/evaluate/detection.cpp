// `weft evaluate` of text detectors: precision, recall and Hmean.
#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "data/images/label_pictures.h"
#include "data/text_images/polygon.h"
#include "jobs/engine/pictures.h"
#include "jobs/evaluate/evaluate.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/detector.h"
#include "tensor/tensor.h"
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
std::string describe_detection(const Deck& deck, const DetectorSource& weights) {
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  return fmt::format("data {}\nweights {}\nmodel {} {} {}\n{}\n{}\nboxes {}\n", data_identity(deck),
                     weights.identity(), describe_model(deck), weights.deformable(),
                     deck.model.dtype, describe_sizes(e), describe_postprocessing(deck),
                     e.predictions);
}

// Item i is picture i; its line holds its counts (put_matches) and seconds, and where they are
// wanted a file picture, or boxes and scores. `job`: all that decides the results but the picture.
// Keys and costs on the first rank alone, which reads the pictures' sizes.
std::vector<ListItem> detection_items(const TextImages& images, const EvaluateDeck& deck,
                                      const std::string& job, bool first_rank) {
  std::vector<ListItem> items;
  for (std::int64_t i = 0; i < images.count(); ++i) {
    ListItem& item = items.emplace_back();
    item.name = fmt::format("image{}", i);
    if (!first_rank) continue;
    item.key = to_hex(hash128(job + (i < deck.pictures ? "picture\n" : "") + images.identity(i)));
    try {
      const ImageSize size = view_size(images.size(i), deck.short_side, deck.long_side).padded;
      item.cost = static_cast<double>(size.height) * static_cast<double>(size.width);
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;  // a broken picture fails when its turn comes, alone
    }
  }
  return items;
}

// ---- Pictures through the network ----

struct SearchedImage : PictureUnit {
  TextImage image;
  ViewSize size;
  std::vector<std::uint8_t> view;
  std::vector<float> probability;  // [padded size]; empty: no text
  double seconds = 0;              // in the network
};

class DetectionWork : public PictureWork {
 public:
  DetectionWork(const Deck& deck, const TextImages& images, Detector& detector, ListEngine& engine)
      : PictureWork(engine),
        evaluate_(deck.get<EvaluateDeck>()),
        postprocess_(deck.get<PostprocessDeck>()),
        images_(images),
        detector_(detector) {}
  std::unique_ptr<PictureUnit> next(std::int64_t, std::int64_t number) override {
    return number == 0 ? std::make_unique<SearchedImage>() : nullptr;
  }
  FeedWork::Prepared read(PictureUnit& picture) override;
  void predict(std::span<PictureUnit* const> pictures) override;
  void finish(PictureUnit& picture) override;

 private:
  void check_memory(const ViewSize& size);
  void draw(std::int64_t item, const TextImage& image, std::span<const FoundText> boxes,
            const TextMatch& match, Json& line) const;

  const EvaluateDeck& evaluate_;
  const PostprocessDeck& postprocess_;
  const TextImages& images_;
  Detector& detector_;
  std::vector<ImageSize> known_;  // padded sizes that fit the memory
};

FeedWork::Prepared DetectionWork::read(PictureUnit& picture) {
  auto& p = static_cast<SearchedImage&>(picture);
  const double begin = now_seconds();
  images_.read(p.item, p.image);
  const double decoded = now_seconds();
  const ImageSize size = p.image.size;
  p.size = view_size(size, evaluate_.short_side, evaluate_.long_side);
  p.view = detector_view({p.image.rgb.data(), size.height, size.width, 3 * size.width}, p.size);
  // The map has a float a pixel.
  return {decoded - begin, now_seconds() - decoded, true, p.image.rgb.size() + 3 * p.view.size()};
}

void DetectionWork::check_memory(const ViewSize& size) {
  if (std::ranges::find(known_, size.padded) != known_.end()) return;
  const auto [height, width] = size.padded;
  const std::size_t capacity = Arena::current().capacity();
  WEFT_CHECK(detector_.plan(1, height, width, capacity).fits, Exit::data,
             "set a smaller evaluate.short_side and evaluate.long_side, or give the rank more "
             "memory (memory.arena_gib)",
             "a picture of {}x{} in the network needs {:.2f} GiB, this rank has {:.2f}", height,
             width, gib(detector_.plan(1, height, width).bytes), gib(capacity));
  known_.push_back(size.padded);
}

void DetectionWork::predict(std::span<PictureUnit* const> pictures) {
  auto& p = static_cast<SearchedImage&>(*pictures.front());
  check_memory(p.size);
  const double begin = now_seconds();
  p.probability =
      std::move(detector_.detect(p.view, 1, p.size.padded.height, p.size.padded.width).at(0));
  p.seconds = now_seconds() - begin;
  p.view.clear();
}

constexpr Rgb right{0, 210, 0}, wrong{240, 30, 30}, not_counted{160, 160, 160};

Rgb colour_of(int partner) {
  return partner == TextMatch::none ? wrong : partner < 0 ? not_counted : right;
}

// What is wanted on the left, what was found on the right.
void DetectionWork::draw(std::int64_t item, const TextImage& image,
                         std::span<const FoundText> boxes, const TextMatch& match,
                         Json& line) const {
  const std::filesystem::path& directory = engine_.settings().directory;
  const ImageSize size = image.size;
  const int thickness = 1 + static_cast<int>(std::max(size.height, size.width) / 500);
  std::vector<std::uint8_t> wanted = image.rgb, found = image.rgb;
  for (std::size_t i = 0; i < image.regions.size(); ++i)
    draw_outline(wanted, size, image.regions[i].polygon, colour_of(match.box_of[i]), thickness);
  for (std::size_t i = 0; i < boxes.size(); ++i)
    if (match.region_of[i] != TextMatch::left_out)
      draw_outline(found, size, boxes[i].polygon, colour_of(match.region_of[i]), thickness);
  const std::string file =
      fmt::format("pictures/{:05d}_{}.png", item, plain_stem(images_.name(item)));
  write_png(result_path(directory, file).string(), size.height, 2 * size.width,
            side_by_side({wanted, found}, size));
  add_file(line, directory, file, "picture");
}

void DetectionWork::finish(PictureUnit& picture) {
  auto& p = static_cast<SearchedImage&>(picture);
  const double begin = now_seconds();
  const std::vector<FoundText> boxes =
      found_text(p.probability, p.size, p.image.size, postprocess_);
  Json line = engine_.line_of(p.item);
  line["seconds"] = p.seconds + now_seconds() - begin;
  const TextMatcher matcher(p.image.regions, boxes);
  const std::vector<double> thresholds = score_thresholds(postprocess_.min_text_score);
  put_matches(line, matcher, thresholds);
  if (evaluate_.predictions) {
    line["boxes"] = line["scores"] = Json::array();
    for (const FoundText& f : boxes) {
      Json corners = Json::array();
      for (const Point& point : f.polygon) corners.insert(corners.end(), {point.x, point.y});
      line["boxes"].push_back(std::move(corners));
      line["scores"].push_back(f.score);
    }
  }
  if (p.item < evaluate_.pictures)
    draw(p.item, p.image, boxes, matcher.match(thresholds.front()), line);
  engine_.finished(line);
}

// Evaluates the pictures that are missing. Returns this rank's share of the report.
Json detect_missing(const Deck& deck, const ListStart& start, const DetectorSource& weights,
                    const TextImages& images, ListEngine& engine) {
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  Detector detector(deck, weights);
  log::info("weights   {}", weights.describe());
  const std::int64_t costliest = engine.costliest();
  std::size_t planned = 0;
  if (engine.items()[costliest].cost > 0) {
    const ImageSize largest = view_size(images.size(costliest), e.short_side, e.long_side).padded;
    planned = detector.plan(1, largest.height, largest.width).bytes;
  }
  DetectionWork work(deck, images, detector, engine);
  Json share = make_pictures(work, engine, deck, start, engine.ahead_of_others());
  log::info("memory    {} at the peak, {} planned for the largest picture",
            size_text(share.at("peak_bytes")), size_text(static_cast<double>(planned)));
  share["planned_bytes"] = planned;
  return share;
}

}  // namespace

int evaluate_detection(const Deck& deck, const ListStart& start, const DetectionPage& page,
                       MPI_Comm world) {
  // 1. What is to be evaluated.
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  const std::string& data = evaluated_data(deck);
  WEFT_CHECK(is_text_list(data), Exit::usage,
             "name a list of pictures with polygons in evaluate.data or data.path, or text:",
             "{} holds no pictures with text regions", data);
  const HeldOutChoice choice = evaluated_samples(deck);
  const std::unique_ptr<TextImages> images =
      choice.share > 0 ? open_training_data(deck.data, deck.media, choice).held_out.texts
                       : open_text_images(data, deck.media);
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
                    detection_items(*images, e, describe_detection(deck, weights), rank == 0),
                    world);
  log::info("evaluate  {} of {}{}", counted(engine.items().size(), "image"), data,
            engine.made_before("evaluated"));

  // 2. Pictures through the network; a rank that is free takes the next one.
  ListEnd last;
  if (!engine.missing().empty()) last.share = detect_missing(deck, start, weights, *images, engine);

  // 3. Rank 0 adds up all lines.
  last.summarise = report_feed;
  last.finish = [&](const ListReport& report) {
    result.facts = {{"model", describe_model(deck)},
                    {"weights", weights.describe()},
                    {"data", data},
                    {"sizes", describe_sizes(e)},
                    {"post-processing", describe_postprocessing(deck)}};
    add_results(
        result, deck, engine, report, [&](std::int64_t i) { return images->name(i); },
        [&](const Json& line) { result.add(line); });
    write_results(result, result.json(), result.table(),
                  [&](const std::filesystem::path& file) { page(result, file); });
  };
  return engine.end(last);
}

}  // namespace weft
