// Which keypoints a frame of SadTalker has (docs/models/sadtalker.md): those of the picture's face
// (KeypointNet), moved by what the mapping network makes of rows of coefficients.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "models/resnet/conv_net.h"
#include "models/sadtalker/options.h"

namespace weft {

// Where in space the points of a face are, apart from its pose and expression.
class KeypointNet {
 public:
  // Registers kp_extractor.*. Exit::usage if the deck's sizes contradict each other.
  explicit KeypointNet(const SadtalkerDeck& deck);

  ParameterTable& params() { return table_; }
  void fold() { net_.fold(); }  // once the table is loaded

  // Sides of pictures are multiples of this.
  std::int64_t stride() const;

  // f32 [N,K,3], x, y, z in -1 to 1, of pictures f32 [N,1,H,W,3] in 0 to 1.
  Tensor forward(const Tensor& image) const;

 private:
  std::int64_t every_, depth_, num_kp_;
  float temperature_;
  ParameterTable table_;
  ConvNet net_;
  const ConvLayer *smooth_ = nullptr, *to_depth_, *logits_;
  std::vector<const ConvLayer*> down_, up_;
};

// What moves the keypoints of a frame.
struct HeadMotion {
  double yaw = 0, pitch = 0, roll = 0;  // degrees
  std::array<double, 3> t{};            // the network's, of which only y is used
  std::vector<double> expression;       // [K,3], x, y, z of each keypoint
};

// The mapping network: from the coefficients of a frame and its neighbours to the pose and the
// expression that its keypoints take.
class MappingNet {
 public:
  // Registers mapping.*.
  explicit MappingNet(const SadtalkerDeck& deck);

  ParameterTable& params() { return table_; }
  void fold() { net_.fold(); }  // once the table is loaded

  // Frames of a window, the one in question in the middle.
  static constexpr std::int64_t window = 27;

  // The head motion of each of N windows, f32 [N,27,C] on the device. Zeros in a planning arena. On
  // the CPU a window's result does not depend on the others.
  std::vector<HeadMotion> forward(const Tensor& windows) const;

 private:
  // f32 [N, 3 * 66 + 3 + 3K], on the host.
  Tensor heads(const Tensor& windows) const;

  std::int64_t num_kp_;
  ParameterTable table_;
  ConvNet net_;
  const ConvLayer* first_;
  std::vector<const ConvLayer*> layers_, heads_;
};

// The expectation of 3 i - 99 degrees over bins i under the softmax of `logits`.
double expected_degrees(std::span<const float> logits);

// Row-major Rx(pitch) Ry(yaw) Rz(roll) of angles in degrees, which become radians by / 180 * 3.14:
// the networks were trained with that figure.
std::array<double, 9> head_rotation(double yaw, double pitch, double roll);

// [K,3]: R p + (0, t_y, 0) + expression of each point p of canonical [K,3].
std::vector<float> moved_keypoints(std::span<const float> canonical, const HeadMotion& motion);

// Degrees of `frames` frames along a list, at even speed, which ends a step before the last value.
// One value, one frame, and neighbours that are equal hold still. Empty: empty.
std::vector<double> camera_degrees(std::span<const std::int64_t> list, std::int64_t frames);

// The rows of coefficients that a clip's frames are rendered from.
struct DrivingRows {
  std::int64_t frames = 0, columns = 0;
  std::vector<float> values;             // [frames, columns]
  std::vector<double> yaw, pitch, roll;  // degrees in place of the predicted ones; may be empty
};

// The driving rows from predicted rows [frames,70] and the source's row (70 columns, or
// deck.coefficients() of them): expressions scaled, the source's last columns behind where the
// network takes more than 70, the source's pose where the deck says `still`, and the deck's camera.
// Exit::data for other sizes, or a value that is not finite.
DrivingRows driving_rows(const SadtalkerDeck& deck, std::span<const float> rows,
                         std::span<const float> source);

// The windows [count,27,columns] of frames [first, first + count): the rows of 13 frames before and
// after, the first and the last repeated beyond the ends.
std::vector<float> driving_windows(const DrivingRows& rows, std::int64_t first, std::int64_t count);

}  // namespace weft
