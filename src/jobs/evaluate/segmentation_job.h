// Labelled images to counts of pixels, as a list job.
#pragma once

#include <future>
#include <map>

#include "data/images/labelled_images.h"
#include "jobs/engine/list_job.h"
#include "jobs/evaluate/background.h"
#include "jobs/evaluate/evaluate.h"
#include "jobs/evaluate/segmentation_scores.h"
#include "models/segmentation/predictor.h"

namespace weft {

// Item i is image i; its line holds its counts (put_counts) and seconds, and where they are wanted
// the files picture and prediction. `job`: all that decides the results.
std::vector<ListItem> segmentation_items(const LabelledImages& images, const Predictor& predictor,
                                         const EvaluateDeck& deck, const std::string& job);

// Evaluates images in the current arena. The next image is read and resized while one is evaluated.
class SegmentationJob : public ListJob {
 public:
  SegmentationJob(const EvaluateDeck& deck, const LabelledImages& images, Predictor& predictor,
                  const ListEngine& engine)
      : deck_(deck), images_(images), predictor_(predictor), engine_(engine) {}
  void prepare(const ItemBatch& items) override;
  void make(const ItemBatch& items, ItemResults& results) override;
  void flush(ItemResults&) override { writing_.wait(); }
  // For the report: seconds that the model took, and that it waited for images.
  nlohmann::ordered_json share() const {
    return {{"predicting", predicting_}, {"waited", waited_}};
  }

 private:
  struct Ready {
    LabelledImage image;
    std::vector<ScaledPicture> scales;
  };
  void write(std::int64_t item, const LabelledImage& image,
             const std::vector<std::uint8_t>& classes, nlohmann::ordered_json& line) const;

  const EvaluateDeck& deck_;
  const LabelledImages& images_;
  Predictor& predictor_;
  const ListEngine& engine_;
  std::map<std::int64_t, std::future<Ready>> reading_;
  Background writing_;
  double predicting_ = 0, waited_ = 0;
};

}  // namespace weft
