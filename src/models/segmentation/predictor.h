// What a segmentation model says of a picture: the classes of its pixels, from one or several
// scales of it (docs/models/segmentation.md, Evaluation). For the jobs that only run the model.
#pragma once

#include <mpi.h>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "data/images/labelled_images.h"
#include "models/segmentation/segmentation.h"
#include "nn/batch_norm.h"
#include "tensor/tensor.h"

namespace weft {

// Where its weights come from: model.weights, or the pair model.weights_encoder and
// model.weights_decoder, or else the newest checkpoint of run.dir.
class SegmentationSource {
 public:
  // Collective. Exit::usage for half a pair, or a pair beside model.weights; otherwise as
  // ModelSource.
  SegmentationSource(const Deck& deck, bool ema, MPI_Comm world);
  const std::string& identity() const { return identity_; }
  std::string describe() const;
  // Exit::data where `data` calls its classes otherwise than the data of the training.
  void check_classes(const std::vector<std::string>& names, const std::string& data) const;
  // Allocates the table for inference and fills it.
  void load(ParameterTable& table) const;

 private:
  SegmentationDeck pair_;
  bool bf16_;
  std::optional<ModelSource> source_;  // unless there is a pair
  std::string identity_;
};

// Lines with all of the deck that decides predictions, but for weights.
std::string describe_prediction(const Deck& deck);

// A picture at one scale.
struct ScaledPicture {
  ImageSize size;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
};

struct Prediction {
  std::vector<std::uint8_t> classes;  // [height, width]
  // [3, classes], if there were labels: how many of the labelled pixels of each class are predicted
  // rightly, are predicted, are labelled.
  std::vector<std::int64_t> counts;
  double seconds = 0;  // from pixels in host memory to classes there
};

class Predictor {
 public:
  // Takes pictures at the scales of data.short_sides, data.max_side, data.padding. Exit::usage for
  // a padding that is no multiple of the model's stride.
  explicit Predictor(const Deck& deck);
  // The same by a model that is elsewhere, and outlives it.
  Predictor(const Deck& deck, Segmentation& model) : Predictor(deck, &model, nullptr) {}

  ParameterTable& params() { return model_.params(); }
  std::int64_t num_classes() const { return classes_; }

  // The picture [height, width, 3] stretched to each scale as Pillow does. Thread-safe.
  std::vector<ScaledPicture> scaled(std::span<const std::uint8_t> rgb, ImageSize size) const;
  // The classes of a picture of that size, in the current arena. labels u8 [height, width], 0 for
  // none and v for class v - 1, or none at all.
  Prediction predict(const std::vector<ScaledPicture>& scales, ImageSize size,
                     std::span<const std::uint8_t> labels = {});
  // Operations of that, about.
  double cost(ImageSize size) const;
  // Dry run: its memory, in an arena of `capacity` bytes (0: no limit).
  MemoryNeed plan(ImageSize size, bool labelled, std::size_t capacity = 0);
  // That the picture fits an arena of `capacity` bytes. Exit::data if not, with both figures. Dry
  // runs are for sizes that were not asked for before.
  void check_memory(ImageSize size, bool labelled, std::size_t capacity);

 private:
  Predictor(const Deck& deck, Segmentation* model, std::unique_ptr<Segmentation> own);
  std::vector<ImageSize> sizes(ImageSize size) const;
  struct Tensors {
    Tensor classes, counts;
  };
  Tensors run(const std::vector<ScaledPicture>& scales, ImageSize size,
              std::span<const std::uint8_t> labels, bool labelled);

  const Deck& deck_;
  std::unique_ptr<Segmentation> own_;
  Segmentation& model_;
  nn::BatchNormGroup norm_;
  std::int64_t classes_;
  std::vector<ImageSize> known_;  // sizes that fit
};

}  // namespace weft
