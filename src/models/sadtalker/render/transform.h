// From a head's motion to its keypoints (docs/models/sadtalker.md).
#pragma once

#include <array>
#include <span>
#include <vector>

#include "models/sadtalker/render/mapping.h"

namespace weft {

// The expectation of 3 i - 99 degrees over bins i under the softmax of `logits`.
double expected_degrees(std::span<const float> logits);

// Row-major Rx(pitch) Ry(yaw) Rz(roll) of angles in degrees, which become radians by / 180 * 3.14:
// the networks were trained with that figure.
std::array<double, 9> head_rotation(double yaw, double pitch, double roll);

// [K,3]: R p + (0, t_y, 0) + expression of each point p of canonical [K,3].
std::vector<float> moved_keypoints(std::span<const float> canonical, const HeadMotion& motion);

}  // namespace weft
