// Face restoration of video frames: GFPGAN v1.4 (arXiv:2101.04061) on every face that the detector
// finds, pasted back through a mask from ParseNet (docs/models/gfpgan.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/model_source.h"
#include "media/image_file.h"
#include "models/sadtalker/face/detector.h"
#include "models/sadtalker/gfpgan/networks.h"
#include "models/sadtalker/gfpgan/paste.h"
#include "tensor/tensor.h"

namespace weft {

// Channels of both networks. Released: these; tests take fewer.
struct EnhancerSize {
  std::int64_t restorer = RestorerSize().most_channels, parser = 64;
};

class Enhancer {
 public:
  // Faces whose eyes are nearer to each other, in pixels of the frame, stay as they are.
  static constexpr double least_eye_distance = 5;

  // Allocates and reads the weights: `gfpgan` under the names of GFPGANv1.4.pth's params_ema,
  // `parsenet` under those of parsing_parsenet.pth. Exit::data if they are of other networks.
  // `detector` must outlive the enhancer. Activations are of deck.model.dtype.
  Enhancer(const Deck& deck, const ModelSource& gfpgan, const ModelSource& parsenet,
           FaceDetector& detector, const EnhancerSize& size = {});

  // The frame at `scale` (1 or 2) times its height and width with all its faces restored. Scale 1
  // leaves pixels outside of the faces untouched; scale 2 resizes the frame by Lanczos (8x8
  // neighbours). The restorer adds noise, which the original draws anew for each face of each
  // frame: here it is a function of `noise_key` and the face's place in the detector's order, so
  // that a frame can be made again alone. The same key for all frames of a clip keeps fine texture
  // from flickering; a key that differs by frame is the original's behaviour. Takes the current
  // arena, the detector included. Exit::data if a network gives a value that is not finite.
  ImageFile enhance(const ImageFile& frame, int scale, std::uint64_t noise_key);
  // The same with faces that are known, in pixels of the frame.
  ImageFile enhance(const ImageFile& frame, std::span<const FacePoints> faces, int scale,
                    std::uint64_t noise_key);

  // Bytes of the arena that a frame of that size takes, however many faces it has.
  MemoryNeed plan(std::int64_t height, std::int64_t width, std::size_t capacity = 0);
  // Bytes of host memory that a frame takes beside the arena, its result included.
  static std::size_t host_bytes(std::int64_t height, std::int64_t width, int scale);
  // Frames so far, and those of them in which a face was restored.
  struct Counts {
    std::int64_t frames = 0, restored = 0;
  };
  const Counts& counts() const { return counts_; }
  // Operations, two a multiply-add, for that many faces, without their detection.
  double flops(std::int64_t faces) const;

 private:
  // Face number `face` of a frame, as it will lie over it; nullopt where nothing of it would show.
  std::optional<FacePatch> restore(const ImageFile& frame, const FacePoints& points, int scale,
                                   std::uint64_t noise_key, std::uint64_t face);

  DType dtype_;
  FaceDetector& detector_;
  Restorer restorer_;
  ParseNet parse_net_;
  Counts counts_;
};

}  // namespace weft
