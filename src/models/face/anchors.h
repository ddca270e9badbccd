// RetinaFace's priors, what its numbers mean relative to them, and which faces remain.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

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

}  // namespace weft
