#include "models/sadtalker/render/transform.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace weft {

double expected_degrees(std::span<const float> logits) {
  const double most = *std::ranges::max_element(logits);
  double sum = 0, weighted = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - most);
    sum += p;
    weighted += p * static_cast<double>(i);
  }
  return weighted / sum * 3 - 99;
}

std::array<double, 9> head_rotation(double yaw, double pitch, double roll) {
  const auto radians = [](double degrees) { return degrees / 180 * 3.14; };
  const double cx = std::cos(radians(pitch)), sx = std::sin(radians(pitch));
  const double cy = std::cos(radians(yaw)), sy = std::sin(radians(yaw));
  const double cz = std::cos(radians(roll)), sz = std::sin(radians(roll));
  return {cy * cz,
          -cy * sz,
          sy,
          sx * sy * cz + cx * sz,
          cx * cz - sx * sy * sz,
          -sx * cy,
          sx * sz - cx * sy * cz,
          cx * sy * sz + sx * cz,
          cx * cy};
}

std::vector<float> moved_keypoints(std::span<const float> canonical, const HeadMotion& m) {
  WEFT_ASSERT(canonical.size() == m.expression.size());
  const std::array<double, 9> R = head_rotation(m.yaw, m.pitch, m.roll);
  std::vector<float> moved(canonical.size());
  for (std::size_t i = 0; i < moved.size(); ++i) {
    const std::size_t axis = i % 3;
    const float* p = canonical.data() + (i - axis);
    const double turned = R[3 * axis] * p[0] + R[3 * axis + 1] * p[1] + R[3 * axis + 2] * p[2];
    moved[i] = static_cast<float>(turned + (axis == 1 ? m.t[1] : 0) + m.expression[i]);
  }
  return moved;
}

}  // namespace weft
