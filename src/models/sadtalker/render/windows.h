// The rows of coefficients that a clip's frames are rendered from (docs/models/sadtalker.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/sadtalker/options.h"

namespace weft {

// Degrees of `frames` frames along a list, at even speed, which ends a step before the last value.
// One value, one frame, and neighbours that are equal hold still. Empty: empty.
std::vector<double> camera_degrees(std::span<const std::int64_t> list, std::int64_t frames);

struct DrivingRows {
  std::int64_t frames = 0, columns = 0;
  std::vector<float> values;             // [frames, columns]
  std::vector<double> yaw, pitch, roll;  // degrees in place of the predicted ones; may be empty
};

// Of predicted rows [frames,70] and the source's row (70 columns, or deck.coefficients() of them):
// expressions scaled, the source's last columns behind where the network takes more than 70, the
// source's pose where the deck says `still`, and the deck's camera. Exit::data for other sizes, or
// a value that is not finite.
DrivingRows driving_rows(const SadtalkerDeck& deck, std::span<const float> rows,
                         std::span<const float> source);

// The windows [count,27,columns] of frames [first, first + count): the rows of 13 frames before and
// after, the first and the last repeated beyond the ends.
std::vector<float> driving_windows(const DrivingRows& rows, std::int64_t first, std::int64_t count);

}  // namespace weft
