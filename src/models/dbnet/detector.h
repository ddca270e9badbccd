// A text detector that is run on pictures, and what it is shown of them.
#pragma once

#include <mpi.h>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "data/images/labelled_images.h"
#include "media/resize.h"
#include "models/dbnet/dbnet.h"
#include "tensor/tensor.h"

namespace weft {

// What it sees of a picture when it is scored (docs/models/dbnet.md, Frames): pixels
// [side, side, 3], the picture with its shorter side at `side`, bilinear as Pillow, and the
// middle of its longer one. What lies beside the middle is not computed.
std::vector<std::uint8_t> detector_frame(const RgbView& picture, std::int64_t side = 1024);

// How a picture of any size is shown to it (docs/models/dbnet.md, Evaluation): sides in pixels. The
// picture, scaled, is in the top left corner of the network's input.
struct ViewSize {
  ImageSize scaled, padded;
  bool operator==(const ViewSize&) const = default;
};
// Both sides times min(short_side / the shorter, long_side / the longer), halves up; a short_side
// of 0 keeps them. Padded to multiples of Dbnet::stride.
ViewSize view_size(ImageSize picture, std::int64_t short_side, std::int64_t long_side);

// The picture at that size: u8 [padded.height, padded.width, 3], bilinear by OpenCV; the padding is
// the mean colour, which the network sees as 0.
std::vector<std::uint8_t> detector_view(const RgbView& picture, const ViewSize& size);

// Where its weights come from, and what they are.
class DetectorSource {
 public:
  // Collective. `weights`: as ModelSource takes them; `key`: the deck's key for them.
  DetectorSource(const Deck& deck, const std::string& key, const std::string& weights, bool ema,
                 MPI_Comm world);
  const std::string& identity() const { return source_.identity(); }
  std::string describe() const { return source_.describe(); }
  // Whether the weights have offsets for deformable convolutions.
  bool deformable() const { return deformable_; }
  const ModelSource& model() const { return source_; }

 private:
  ModelSource source_;
  bool deformable_ = false;
};

class Detector {
 public:
  // Collective: allocates and reads the weights. Exit::data if they are of another network.
  Detector(const Deck& deck, const DetectorSource& source);
  // The same by a model that is elsewhere, and outlives it.
  Detector(const Deck& deck, Dbnet& model) : deck_(deck), model_(model) {}

  // Probability of text in each pixel of pictures u8 [count, height, width, 3], RGB, one after the
  // other; sides are multiples of 32. maps[i] is f32 [height, width], or empty where no pixel is
  // above postprocess.mask_threshold: those are not copied from the device. On the CPU a
  // picture's map does not depend on the others. In the current arena.
  std::vector<std::vector<float>> detect(std::span<const std::uint8_t> pictures, std::int64_t count,
                                         std::int64_t height, std::int64_t width);
  // Bytes of the arena that this takes.
  MemoryNeed plan(std::int64_t count, std::int64_t height, std::int64_t width,
                  std::size_t capacity = 0);
  // Operations, two a multiply-add, of a picture.
  double flops(std::int64_t height, std::int64_t width) const;

 private:
  // How many of `count` pictures the network takes together.
  static std::int64_t at_once(std::int64_t count);
  // Probabilities f32 [N,H,W] of pictures u8 [N,H,W,3].
  Tensor run(const Tensor& pictures);
  // Those with text, on the host.
  std::vector<std::vector<float>> maps_of(const Tensor& probability) const;

  const Deck& deck_;
  std::unique_ptr<Dbnet> own_;
  Dbnet& model_;
};

}  // namespace weft
