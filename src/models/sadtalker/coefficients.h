// Coefficients of the 3D face model (Deng et al., arXiv:1903.08527) that a picture shows: a
// ResNet-50 under the prefix "face_3drecon." of SadTalker's file; and how all of SadTalker's
// networks find their weights.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "models/resnet/resnet.h"
#include "models/sadtalker/face/crop.h"

namespace weft {

// One safetensors file holds all networks, each under a prefix of its own ("kp_extractor.",
// "generator.", "audio2exp.", "audio2pose.", "face_3drecon."); the mapping network is a file of its
// own ("mapping."). For a table whose names begin with one of `prefixes`: every parameter must be
// in the file. The file may have nothing else under these prefixes but counts of batches
// (num_batches_tracked); other names belong to other networks and are passed over. Under a prefix
// of `unused`, such as "audio2pose.netD_motion.", anything may be there too.
WeightNames sadtalker_weight_names(std::vector<std::string> prefixes,
                                   std::vector<std::string> unused = {});

// For the mapping network: files may also have its names without "mapping.".
WeightNames mapping_weight_names();

// The row of a frame: expression 64, angle 3, translation 3, and the alignment's scale, tx, ty. The
// first 70 are what most of SadTalker takes.
constexpr std::int64_t face_row = 73;
using FaceRow = std::array<float, face_row>;

class FaceCoefficients {
 public:
  // Allocates and reads the weights. Exit::data if they are of another network.
  FaceCoefficients(const Deck& deck, const ModelSource& source);

  // identity 80, expression 64, texture 80, angle 3, light 27, translation 3.
  static constexpr std::int64_t count = 257;
  // Coefficients of an aligned face [224,224,3]. In the current arena. Exit::data if one is not
  // finite.
  std::vector<float> coefficients(const ImageFile& aligned);
  // The row of a picture of a face with its landmarks, aligned first. `name` is for messages.
  FaceRow row(const ImageFile& picture, const Landmarks& landmarks, const std::string& name);
  FaceRow row(const SourceFace& face, const std::string& name) {
    return row(face.crop, face.landmarks, name);
  }

  MemoryNeed plan(std::size_t capacity = 0);
  double flops();  // two a multiply-add

 private:
  // Each head's values, f32, of a picture u8 [1,224,224,3].
  std::vector<Tensor> run(const Tensor& picture) const;

  DType dtype_;
  ParameterTable params_;
  ConvNet net_;
  ResNet backbone_;
  std::array<const ConvLayer*, 7> heads_{};
};

FaceRow face_row_of(std::span<const float> coefficients, const std::array<double, 5>& trans);

// Rows of a video that lends its blinks or its pose. The first frame decides what is cut out of all
// of them; each frame's landmarks are its own.
class ReferenceRows {
 public:
  ReferenceRows(FaceFinder finder, FaceCoefficients& coefficients, Preprocess mode,
                std::string name)
      : finder_(finder), coefficients_(coefficients), mode_(mode), name_(std::move(name)) {}

  // Exit::data if the frame has no face; the message names it.
  FaceRow next(const ImageFile& frame);

  static constexpr std::int64_t side = 256;  // of the crops

 private:
  FaceFinder finder_;
  FaceCoefficients& coefficients_;
  Preprocess mode_;
  std::string name_;
  std::optional<FaceCut> cut_;
  std::int64_t frame_ = 0;
};

}  // namespace weft
