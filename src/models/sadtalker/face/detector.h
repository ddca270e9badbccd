// Faces of a picture: RetinaFace with a ResNet-50 (arXiv:1905.00641) under the names of the
// released detection_Resnet50_Final.pth, and what facexlib 0.3.0 does around it
// (docs/models/sadtalker.md): the network, its priors, what its numbers mean relative to them, and
// which faces remain.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/model_source.h"
#include "media/image_file.h"
#include "models/resnet/resnet.h"

namespace weft {

// Columns [x1, x2) and rows [y1, y2) of a picture.
struct PixelBox {
  std::int64_t x1 = 0, y1 = 0, x2 = 0, y2 = 0;
  std::int64_t width() const { return x2 - x1; }
  std::int64_t height() const { return y2 - y1; }
  bool empty() const { return x2 <= x1 || y2 <= y1; }
  bool operator==(const PixelBox&) const = default;
};

// In pixels of the picture; x counts from its left edge, y from its top.
struct Face {
  std::array<float, 4> box = {};  // x1, y1, x2, y2
  float score = 0;
  // The eyes, the nose and the corners of the mouth, x and y; of eyes and corners the one further
  // left in the picture of an upright face comes first.
  std::array<std::array<float, 2>, 5> marks = {};
};

// The pixels that its box covers: corners rounded towards zero, and moved to the picture's edge
// where they are beyond. (The original lets numpy count negative ones from the far edge, and then
// fails.)
PixelBox face_pixels(const Face& face, std::int64_t height, std::int64_t width);

// Levels of a picture: features 8, 16 and 32 pixels apart, two priors for each.
constexpr std::array<std::int64_t, 3> face_strides = {8, 16, 32};
std::int64_t face_priors(std::int64_t height, std::int64_t width);

// Priors cx, cy, w, h [P,4] in shares of the picture: level by level, row by row, the smaller of
// two first.
std::vector<float> make_face_priors(std::int64_t height, std::int64_t width);

// What the network says of P priors.
struct FaceScores {
  std::int64_t height = 0, width = 0;  // of the picture
  std::vector<float> offsets;          // [P,4], relative to the prior
  std::vector<float> probability;      // [P,2]: of no face, of a face
  std::vector<float> marks;            // [P,10], relative to the prior
  std::vector<float> priors;           // [P,4]
};

// Boxes x1, y1, x2, y2 [P,4] in pixels.
std::vector<float> decode_face_boxes(const FaceScores& scores);
// The faces with a score above `least`, greatest first (of equal ones the later prior), without
// those that overlap a greater one by more than `overlap`. Exit::data for a value that is not
// finite.
std::vector<Face> pick_faces(const FaceScores& scores, float least, double overlap);

// Area that both boxes cover, over the area that either does.
float intersection_over_union(const std::array<float, 4>& a, const std::array<float, 4>& b);
// Indices of the faces that remain of `faces`, in that order, which is by falling score.
std::vector<std::size_t> suppress_overlaps(std::span<const Face> faces, double overlap);

// The network: a ResNet-50, a feature pyramid, context modules and heads on three levels.
class RetinaFace {
 public:
  // Registers the layers under the released names, without "module.".
  RetinaFace();

  ParameterTable& params() { return params_; }
  void fold() { net_.fold(); }

  // A level's values for two priors at each feature: logits of no face and face, offsets of the box
  // and of the marks.
  struct Level {
    Tensor classes, boxes, marks;  // [1,1,h,w,4], [..,8], [..,20]
  };
  static constexpr int levels = 3;
  // image [1,1,H,W,3], less the means -> levels 8, 16 and 32 pixels apart, sizes rounded up.
  std::array<Level, levels> forward(const Tensor& image) const;

 private:
  // A 3x3 convolution beside chains of two and of three, joined.
  struct Context {
    const ConvLayer *one, *first, *two, *second, *three;
  };
  struct Head {
    const ConvLayer *classes, *boxes, *marks;
  };
  Context add_context(const std::string& name);
  static Tensor context(const Context& c, const Tensor& x);

  ParameterTable params_;
  ConvNet net_;
  ResNet body_;
  std::array<const ConvLayer*, levels> lateral_{};
  std::array<const ConvLayer*, levels - 1> merge_{};
  std::array<Context, levels> context_{};
  std::array<Head, levels> heads_{};
};

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
  // The levels of a picture u8 [1,H,W,3], in f32.
  std::array<RetinaFace::Level, RetinaFace::levels> run(const Tensor& picture,
                                                        ChannelOrder order) const;

  DType dtype_;
  RetinaFace net_;
};

}  // namespace weft
