// Validation of a text detector in training: the network that is trained, as `weft evaluate` runs
// it.
#include <algorithm>

#include "core/error.h"
#include "models/dbnet/detector.h"
#include "models/dbnet/task.h"
#include "models/dbnet/text_match.h"
#include "train/validation.h"

namespace weft {
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
