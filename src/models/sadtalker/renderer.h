// SadTalker's face renderer: one picture of a face, and rows of coefficients, to the frames of a
// clip (docs/models/sadtalker.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "media/image_file.h"
#include "models/sadtalker/generator.h"
#include "models/sadtalker/keypoints.h"
#include "tensor/tensor.h"

namespace weft {

class Renderer {
 public:
  // Collective where the sources are: allocates and reads the weights. `sadtalker` has
  // kp_extractor. and generator., `mapping` the mapping network. In a bf16 model the generator is
  // bf16; what finds and moves keypoints stays f32. Exit::data if the weights are of another
  // network, Exit::usage if the deck's sizes contradict each other.
  Renderer(const Deck& deck, const ModelSource& sadtalker, const ModelSource& mapping);

  // What is computed of a picture once. Its tensors are in the arena that was current then.
  struct Source {
    std::vector<float> canonical;  // [K,3], keypoints of the face apart from pose and expression
    Tensor keypoints;              // f32 [1,K,3], of the picture
    FaceGenerator::Features features;
  };
  // The source from a picture and its face's coefficients (deck.coefficients() of them). Sides are
  // multiples of stride(), or Exit::usage.
  Source prepare(const ImageFile& picture, std::span<const float> coefficients) const;

  // Frames [first, first + count) of a clip: u8 [count,H,W,3], RGB, at the size of the source's
  // picture. On the CPU a frame does not depend on those it is rendered with. Exit::data if a frame
  // is not finite.
  std::vector<std::uint8_t> render(const Source& source, const DrivingRows& rows,
                                   std::int64_t first, std::int64_t count) const;
  // The same in steps, f32 on this rank's device: keypoints [count,K,3], and pictures [N,H,W,3] in
  // 0 to 1 of some of them.
  Tensor keypoints(const Source& source, const DrivingRows& rows, std::int64_t first,
                   std::int64_t count) const;
  Tensor pictures(const Source& source, const Tensor& keypoints) const;

  std::int64_t stride() const;
  // Bytes of the arena that a source and `batch` frames of it take, of `capacity` (0: unlimited).
  MemoryNeed plan(std::int64_t height, std::int64_t width, std::int64_t batch,
                  std::size_t capacity = 0) const;
  // Operations, two a multiply-add: of a source, and of each frame.
  struct Cost {
    double source = 0, frame = 0;
  };
  Cost flops(std::int64_t height, std::int64_t width) const;

 private:
  void check_size(std::int64_t height, std::int64_t width) const;

  const SadtalkerDeck& deck_;
  DType dtype_;
  KeypointNet keypoints_;
  MappingNet mapping_;
  FaceGenerator generator_;
};

}  // namespace weft
