// Validation of a segmentation in training: the model that is trained, as `weft evaluate` runs it.
#include <algorithm>

#include "core/error.h"
#include "data/images/labelled_images.h"
#include "models/segmentation/predictor.h"
#include "models/segmentation/task.h"
#include "train/validation.h"

namespace weft {
namespace {

// Figures of an image: [3, classes] pixels predicted rightly, predicted, labelled.
class SegmentationValidation : public ValidationSet {
 public:
  SegmentationValidation(const Deck& deck, Segmentation& model, const LabelledImages& images)
      : predictor_(deck, model), images_(images) {
    static constexpr const char* names[] = {"landscape", "portrait"};
    for (std::int64_t i = 0; i < images.count(); ++i)
      items_.push_back({names[orientation_of(images.size(i))], predictor_.cost(images.size(i))});
  }

  std::size_t figures() const override {
    return static_cast<std::size_t>(3 * predictor_.num_classes());
  }

  void measure(std::size_t item, std::span<double> figures) override {
    const auto i = static_cast<std::int64_t>(item);
    LabelledImage image;
    images_.read(i, image);
    check_classes(i, image);
    const Prediction p =
        predictor_.predict(predictor_.scaled(image.rgb, image.size), image.size, image.labels);
    std::ranges::transform(p.counts, figures.begin(),
                           [](std::int64_t n) { return static_cast<double>(n); });
  }

  std::size_t plan(std::size_t capacity) override {
    std::size_t most = 0;
    std::vector<ImageSize> known;
    for (std::int64_t i = 0; i < images_.count(); ++i) {
      const ImageSize size = images_.size(i);
      if (std::ranges::find(known, size) != known.end()) continue;
      known.push_back(size);
      const MemoryNeed need = predictor_.plan(size, true, capacity);
      check_validation_fits(need, capacity,
                            fmt::format("{}, of {}x{},", images_.name(i), size.height, size.width));
      most = std::max(most, need.bytes);
    }
    return most;
  }

  ValidationScore score(std::span<const double> sums, std::int64_t) const override {
    const auto classes = static_cast<std::size_t>(predictor_.num_classes());
    double iou = 0, right = 0, pixels = 0;
    for (std::size_t c = 0; c < classes; ++c) {
      const double joined = sums[classes + c] + sums[2 * classes + c] - sums[c];
      iou += sums[c] / (joined + 1e-10);
      right += sums[c];
      pixels += sums[2 * classes + c];
    }
    iou /= static_cast<double>(classes);
    return {1 - iou, {{"mean_iou", iou}, {"accuracy", pixels > 0 ? right / pixels : 0}}};
  }

 private:
  void check_classes(std::int64_t i, const LabelledImage& image) const {
    const std::int64_t most = predictor_.num_classes();
    const std::uint8_t greatest =
        image.labels.empty() ? std::uint8_t{0} : *std::ranges::max_element(image.labels);
    WEFT_CHECK(greatest <= most, Exit::data,
               "set model.num_classes to what the data has, or hold out other images",
               "{} has pixels of class {}, and the model knows 0 to {}", images_.name(i),
               greatest - 1, most - 1);
  }

  Predictor predictor_;
  const LabelledImages& images_;
};

}  // namespace

std::unique_ptr<ValidationSet> SegmentationTask::validation_set(const HeldOut& data) {
  WEFT_CHECK(data.images != nullptr, Exit::usage,
             "name a store of labelled images in validation.path, or shapes:",
             "validation.path = {} holds no labelled images", deck_.get<ValidationDeck>().path);
  return std::make_unique<SegmentationValidation>(deck_, model_, *data.images);
}

}  // namespace weft
