#include "models/dbnet/task.h"

#include <algorithm>

#include "core/error.h"
#include "data/text_images/text_images.h"
#include "models/dbnet/detector.h"
#include "models/dbnet/text_match.h"
#include "nn/image_ops.h"
#include "ops/loss.h"
#include "train/data_parallel.h"
#include "train/validation.h"

namespace weft {
namespace {

// What the data says and what the loss reads.
static_assert(text_bit == ops::TextPixel::text && counts_bit == ops::TextPixel::counts &&
              threshold_bit == ops::TextPixel::threshold);

}  // namespace

DbnetTask::DbnetTask(const Deck& deck)
    : ImageTask(deck), model_(deck.get<DbnetDeck>(), deck.get<DbnetDeck>().deformable == "on") {
  const double gain = deck.get<DbnetDeck>().conv2_gain;
  WEFT_CHECK(
      gain == 1, Exit::usage,
      "set it to 1 to train; set it for weft score to count as Open-Sora does",
      "model.conv2_gain = {}: it imitates what scoring with Open-Sora loses of a released network, "
      "and training would undo it",
      gain);
}

std::string DbnetTask::describe() const {
  const DbnetDeck& m = deck_.get<DbnetDeck>();
  return fmt::format("text detection: {} + {}{}, {}, batch norm by rank", m.backbone,
                     m.asf ? "DBNet++" : "DBNet",
                     m.deformable == "on" ? ", deformable convolutions" : "", deck_.model.dtype);
}

std::vector<std::string> DbnetTask::terms() const {
  return {"probability_loss", "threshold_loss", "binary_loss"};
}

// The original decays every parameter, norms and biases too.
std::vector<TrainDeck> DbnetTask::optimizers() const {
  TrainDeck own = optimizer_of(deck_.train, "sgd", 0.9, 1e-4, 0);
  own.lr = deck_.get<DbnetTrainDeck>().lr_detector;
  return {own};
}

void DbnetTask::check(std::span<const Bucket> buckets) {
  for (const Bucket& b : buckets) {
    WEFT_CHECK(b.holds_text(), Exit::usage,
               "name a list of pictures with polygons in data.path, or text:",
               "{} holds no pictures with text regions, and a text detector trains on them",
               deck_.data.path);
    WEFT_CHECK(b.height % Dbnet::stride == 0 && b.width % Dbnet::stride == 0, Exit::usage,
               fmt::format("set data.crop to a multiple of {}", Dbnet::stride),
               "pictures of {}x{}, and the network takes sides that are multiples of {}", b.height,
               b.width, Dbnet::stride);
  }
}

std::string DbnetTask::load_start() {
  return load_dbnet(deck_.model, deck_.get<DbnetDeck>(), params());
}

TrainingWork DbnetTask::prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                                double recompute, float weight) {
  const Batch batch = unpack(bucket, clips, bytes, dbnet_pixel_scale(), 2, 1);
  const Tensor flags = batch.maps[0], thresholds = batch.maps[1];
  TrainingWork work;
  work.key = fmt::format("pictures at {} {} {} weight {}", batch.images.raw(), flags.raw(),
                         thresholds.raw(), weight);
  work.parts.push_back([=, this, images = batch.images](Tape& tape) {
    return loss(tape, images, flags, thresholds, recompute, weight);
  });
  return work;
}

TrainingLoss DbnetTask::loss(Tape& tape, const Tensor& images, const Tensor& flags,
                             const Tensor& thresholds, double recompute, float weight) {
  const nn::Context c{tape, params()};
  const std::int64_t N = images.dim(0);
  const Dbnet::Maps maps = model_.forward(c, make_var(images, false), norm_, true,
                                          recomputed_blocks(recompute, model_.blocks()));
  // The loss is a mean over the micro-batch; each picture counts it as its own.
  const Tensor stats = nn::text_loss(c, maps.probability, maps.threshold, flags, thresholds,
                                     weight * static_cast<float>(N));
  TrainingLoss loss{Tensor::empty({N}, DType::f32), Tensor::empty({3}, DType::f32)};
  ops::text_summary(stats, loss.clips, loss.terms);
  return loss;
}

// Validation of a text detector in training: the network that is trained, as `weft evaluate` runs
// it.
namespace {

// Figures of a picture: regions that count, boxes that count, pairs of both.
class DetectionValidation : public ValidationSet {
 public:
  DetectionValidation(const Deck& deck, Dbnet& model, const TextImages& images)
      : deck_(deck), detector_(deck, model), images_(images) {
    for (std::int64_t i = 0; i < images.count(); ++i) {
      const ImageSize padded = view(images.size(i)).padded;
      items_.push_back({"text", detector_.flops(padded.height, padded.width)});
    }
  }

  std::size_t figures() const override { return 3; }

  void measure(std::size_t item, std::span<double> figures) override {
    TextImage image;
    images_.read(static_cast<std::int64_t>(item), image);
    const ViewSize size = view(image.size);
    const std::vector<std::uint8_t> seen = detector_view(
        {image.rgb.data(), image.size.height, image.size.width, 3 * image.size.width}, size);
    const std::vector<float> probability =
        detector_.detect(seen, 1, size.padded.height, size.padded.width).at(0);
    const auto& postprocess = deck_.get<PostprocessDeck>();
    const std::vector<FoundText> boxes = found_text(probability, size, image.size, postprocess);
    const DetectionCounts counts =
        TextMatcher(image.regions, boxes).match(postprocess.min_text_score).counts;
    figures[0] = static_cast<double>(counts.wanted);
    figures[1] = static_cast<double>(counts.found);
    figures[2] = static_cast<double>(counts.matched);
  }

  std::size_t plan(std::size_t capacity) override {
    std::size_t most = 0;
    std::vector<ImageSize> known;
    for (std::int64_t i = 0; i < images_.count(); ++i) {
      const ImageSize padded = view(images_.size(i)).padded;
      if (std::ranges::find(known, padded) != known.end()) continue;
      known.push_back(padded);
      const MemoryNeed need = detector_.plan(1, padded.height, padded.width, capacity);
      check_validation_fits(
          need, capacity,
          fmt::format("{}, shown as {}x{},", images_.name(i), padded.height, padded.width));
      most = std::max(most, need.bytes);
    }
    return most;
  }

  ValidationScore score(std::span<const double> sums, std::int64_t) const override {
    const DetectionCounts counts{static_cast<std::int64_t>(sums[0]),
                                 static_cast<std::int64_t>(sums[1]),
                                 static_cast<std::int64_t>(sums[2])};
    return {1 - counts.hmean(),
            {{"hmean", counts.hmean()},
             {"precision", counts.precision()},
             {"recall", counts.recall()}}};
  }

 private:
  ViewSize view(ImageSize picture) const {
    const auto& e = deck_.get<EvaluateDeck>();
    return view_size(picture, e.short_side, e.long_side);
  }

  const Deck& deck_;
  Detector detector_;
  const TextImages& images_;
};

}  // namespace

std::unique_ptr<ValidationSet> DbnetTask::validation_set(const HeldOut& data) {
  WEFT_CHECK(data.texts != nullptr, Exit::usage,
             "name a list of pictures with polygons in validation.path, or text:",
             "validation.path = {} holds no pictures with text regions",
             deck_.get<ValidationDeck>().path);
  return std::make_unique<DetectionValidation>(deck_, model_, *data.texts);
}

}  // namespace weft
