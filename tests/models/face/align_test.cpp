// Scales, places and pixels are those of the original's arithmetic in numpy 1.26 and Pillow 9.5.
#include "models/face/align.h"

#include <cmath>

#include "tests/models/face/fixture.h"

namespace weft {
namespace {

using test::complaint;
using test::face_at;
using testing::HasSubstr;

TEST(AlignFace, IsThatOfTheOriginal) {
  const struct {
    float x, y, size, slant;
    std::int64_t width, height;
    double scale, tx, ty;
    std::int64_t sum, weighted, black;
  } cases[] = {
      {100, 80, 40, 0, 200, 160, 1.6476805247555015, 100.6959953736654, 71.70423182977555, 19184407,
       1441364411301, 0},
      // In the corner: black on the left and above.
      {20, 20, 30, 0.1f, 120, 150, 2.185869413341116, 21.069180474902264, 123.58037214054545,
       10280898, 960869306968, 23316},
      {300, 260, 150, 0, 600, 500, 0.43938147304454145, 302.6099872123457, 211.64086936165822,
       17543912, 1208401084322, 4256},
  };
  for (const auto& c : cases) {
    const Landmarks l = face_at(c.x, c.y, c.size, c.slant);
    const AlignedFace a = align_face(test::noisy_picture(c.height, c.width), l, "p.png");
    EXPECT_EQ(a.trans[0], static_cast<double>(c.width));
    EXPECT_EQ(a.trans[1], static_cast<double>(c.height));
    EXPECT_NEAR(a.trans[2], c.scale, 1e-10) << c.x;
    EXPECT_NEAR(a.trans[3], c.tx, 1e-8) << c.x;
    EXPECT_NEAR(a.trans[4], c.ty, 1e-8) << c.x;
    EXPECT_EQ(test::sums(a.image), std::pair(c.sum, c.weighted)) << c.x;
    std::int64_t black = 0;
    for (std::size_t i = 0; i < a.image.values.size(); i += 3)
      black += a.image.values[i] + a.image.values[i + 1] + a.image.values[i + 2] == 0;
    EXPECT_EQ(black, c.black) << c.x;
  }
}

TEST(AlignFace, PutsTheMeanFaceInTheMiddle) {
  // The mean face itself, seen 50 pixels a unit, y up: its origin becomes the image's middle.
  const ImageFile picture = test::noisy_picture(200, 160);
  Landmarks l;
  l.fill({80, 100});
  const auto put = [&](std::size_t i, std::size_t of) {
    l[i] = {static_cast<float>(90 + 50 * mean_face[of][0]),
            static_cast<float>(199 - (110 + 50 * mean_face[of][1]))};
  };
  for (const std::size_t i : {36, 39}) put(i, 0);
  for (const std::size_t i : {42, 45}) put(i, 1);
  put(30, 2);
  put(48, 3);
  put(54, 4);
  const AlignedFace a = align_face(picture, l, "p.png");
  EXPECT_NEAR(a.trans[2], 102.0 / 50, 1e-4);
  EXPECT_NEAR(a.trans[3], 90, 1e-3);
  EXPECT_NEAR(a.trans[4], 110, 1e-3);
  // But for the scaled picture's size, which is cut to whole pixels.
  EXPECT_NEAR(a.landmarks[30][0], 112 + 102 * mean_face[2][0], 0.5);
  EXPECT_NEAR(a.landmarks[30][1], 112 + 102 * mean_face[2][1], 0.5);
}

TEST(AlignFace, RefusesWhatHasNoScale) {
  const ImageFile picture = test::noisy_picture(40, 40);
  Landmarks one_point;
  one_point.fill({5, 5});
  EXPECT_THAT(complaint([&] { align_face(picture, one_point, "p.png"); }),
              HasSubstr("p.png: the landmarks' face cannot be brought to 224 pixels"));
  // So small that the picture would have millions of pixels a side; so large that none is left.
  for (const float size : {0.001f, 1e6f})
    EXPECT_THAT(complaint([&] { align_face(picture, face_at(20, 20, size), "p.png"); }),
                HasSubstr("cannot be brought"));
  Landmarks lost = face_at(20, 20, 10);
  lost[30][0] = std::nanf("");
  EXPECT_THAT(complaint([&] { align_face(picture, lost, "p.png"); }),
              HasSubstr("cannot be brought"));
}

}  // namespace
}  // namespace weft
