// Faces of a picture: RetinaFace with a ResNet-50 (arXiv:1905.00641) under the names of the
// released detection_Resnet50_Final.pth, and what facexlib 0.3.0 does around it
// (docs/models/sadtalker.md).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "checkpoint/model_source.h"
#include "media/image_file.h"
#include "models/face/anchors.h"
#include "models/face/retina_face.h"
#include "tensor/tensor.h"

namespace weft {

// Which byte of an RGB pixel meets which of the network's means, 104, 117 and 123. The network was
// trained on bgr; SadTalker's crop shows it rgb, which moves boxes by fractions of a pixel.
enum class ChannelOrder { rgb, bgr };

class FaceDetector {
 public:
  // Allocates and reads the weights, whose names may begin with "module.". Exit::data if they are
  // of another network. Activations are of deck.model.dtype.
  FaceDetector(const Deck& deck, const ModelSource& source);

  static constexpr float least_score = 0.97f;  // faces are above it
  static constexpr double overlap = 0.4;       // of lesser faces with greater ones, at most

  // The faces, greatest score first, in pixels of the picture, which is taken at its own size. In
  // the current arena. Exit::usage if that is too small for the picture; Exit::data if the network
  // gives a value that is not finite.
  std::vector<Face> detect(const ImageFile& picture, ChannelOrder order);
  // What the network says of every prior, for weft_probe.
  FaceScores scores(const ImageFile& picture, ChannelOrder order);

  // Bytes of the arena that a picture of that size takes.
  MemoryNeed plan(std::int64_t height, std::int64_t width, std::size_t capacity = 0);
  // Bytes of host memory beside the arena.
  static std::size_t host_bytes(std::int64_t height, std::int64_t width);
  // Operations, two a multiply-add.
  double flops(std::int64_t height, std::int64_t width);

 private:
  // Of a picture u8 [1,H,W,3], in f32.
  std::array<RetinaFace::Level, RetinaFace::levels> run(const Tensor& picture,
                                                        ChannelOrder order) const;

  DType dtype_;
  RetinaFace net_;
};

}  // namespace weft
