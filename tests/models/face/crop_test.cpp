// Expected boxes are those of the original's arithmetic in numpy 1.26.
#include "models/face/crop.h"

#include <cmath>

#include "models/face/source_face.h"
#include "tests/models/face/fixture.h"

namespace weft {
namespace {

using test::complaint;
using test::face_at;
using testing::HasSubstr;

std::array<std::int64_t, 4> whole(const FaceQuad& q) {
  std::array<std::int64_t, 4> v{};
  for (std::size_t i = 0; i < 4; ++i) v[i] = static_cast<std::int64_t>(q.inner[i]);
  return v;
}

TEST(FaceQuad, IsThatOfTheOriginal) {
  const struct {
    float x, y, size, slant;
    std::int64_t width, height, small_width, small_height;
    PixelBox outer;
    std::array<std::int64_t, 4> inner;
  } cases[] = {
      {300, 220, 60, 0, 640, 480, 640, 480, {155, 65, 447, 357}, {25, 25, 268, 267}},
      {20, 30, 60, 0, 640, 480, 640, 480, {0, 0, 167, 167}, {0, 0, 143, 142}},
      {630, 470, 60, 0.2f, 640, 480, 640, 480, {462, 293, 640, 480}, {25, 25, 310, 311}},
      // Taller than wide: the bottom is held to the width.
      {50, 300, 40, 0, 100, 600, 100, 600, {0, 197, 100, 391}, {0, 16, 100, 100}},
      {8, 8, 4, 0, 16, 16, 16, 16, {0, 0, 16, 16}, {0, 0, 16, 15}},
      // So large that the picture is made smaller.
      {2000, 1500, 700, -0.1f, 4000, 3000, 2000, 1500, {94, 0, 1932, 1500}, {141, 0, 1697, 1476}},
      {2000, 1500, 1100, 0, 4000, 3000, 1000, 750, {0, 0, 1000, 750}, {0, 0, 1000, 891}},
  };
  for (const auto& c : cases) {
    const FaceQuad q = face_quad(face_at(c.x, c.y, c.size, c.slant), c.height, c.width, "p.png");
    EXPECT_EQ(q.width, c.small_width) << c.x;
    EXPECT_EQ(q.height, c.small_height) << c.x;
    EXPECT_EQ(q.outer, c.outer) << c.x;
    EXPECT_EQ(whole(q), c.inner) << c.x;
  }
}

TEST(FaceQuad, RefusesLandmarksOfNoFace) {
  Landmarks one_point;
  one_point.fill({5, 5});
  EXPECT_THAT(complaint([&] { face_quad(one_point, 50, 50, "p.png"); }),
              HasSubstr("p.png: the landmarks do not span a face"));
  Landmarks lost = face_at(20, 20, 10);
  lost[3][1] = std::nanf("");
  EXPECT_THAT(complaint([&] { face_quad(lost, 50, 50, "p.png"); }), HasSubstr("a landmark is at"));
  lost[3][1] = 1e20f;
  EXPECT_THAT(complaint([&] { face_quad(lost, 50, 50, "p.png"); }), HasSubstr("a landmark is at"));
}

TEST(FaceCut, RefusesAFaceOutsideOfThePicture) {
  for (const auto& [x, y] : {std::pair{-500.0f, 200.0f}, {2000.0f, 200.0f}, {300.0f, 900.0f}}) {
    const Landmarks l = face_at(x, y, 60);
    EXPECT_THAT(complaint([&] {
                  make_cut(face_quad(l, 480, 640, "p.png"), Preprocess::crop, 480, 640, "p.png");
                }),
                HasSubstr("p.png: nothing is left of its 480x640 pixels"))
        << x;
  }
  // Larger than the picture by so much that nothing of the picture remains.
  const Landmarks huge = face_at(2, 2, 60000);
  EXPECT_THAT(complaint([&] {
                make_cut(face_quad(huge, 5, 5, "p.png"), Preprocess::extcrop, 5, 5, "p.png");
              }),
              HasSubstr("nothing is left"));
}

TEST(SourceFace, InAllModesOfGivenLandmarks) {
  const ImageFile picture = test::noisy_picture(480, 640);
  const Landmarks given = face_at(300, 220, 60);
  const PixelBox inner{155 + 25, 65 + 25, 155 + 268, 65 + 267}, outer{155, 65, 447, 357},
      all{0, 0, 640, 480};
  const struct {
    const char* name;
    PixelBox box;
    std::int64_t frame_width, frame_height;
  } cases[] = {{"crop", inner, 243, 242},
               {"full", inner, 243, 242},
               // Frames have the aspect of the inner box all the same.
               {"extcrop", outer, 243, 242},
               {"extfull", outer, 243, 242},
               {"resize", all, 640, 480}};
  for (const auto& c : cases) {
    const SourceFace s = find_source_face({}, picture, preprocess_of(c.name), 128, "p.png", given);
    EXPECT_EQ(s.cut.box, c.box) << c.name;
    EXPECT_EQ(s.cut.place, c.box) << c.name;
    EXPECT_EQ(s.cut.frame_width, c.frame_width) << c.name;
    EXPECT_EQ(s.cut.frame_height, c.frame_height) << c.name;
    EXPECT_EQ(s.faces, 0);
    EXPECT_EQ(s.crop.values, resize_bilinear(cut_box(picture, c.box), 128, 128).values) << c.name;
    const auto along = [&](float v, std::int64_t first, std::int64_t length) {
      return (v - static_cast<float>(first)) * 128 / static_cast<float>(length);
    };
    EXPECT_NEAR(s.landmarks[30][0], along(given[30][0], c.box.x1, c.box.width()), 1e-4) << c.name;
    EXPECT_NEAR(s.landmarks[30][1], along(given[30][1], c.box.y1, c.box.height()), 1e-4) << c.name;
  }
}

TEST(SourceFace, OfALargePictureIsPastedWhereItCameFrom) {
  const FaceQuad q = face_quad(face_at(2000, 1500, 700, -0.1f), 3000, 4000, "p.png");
  const FaceCut cut = make_cut(q, Preprocess::full, 3000, 4000, "p.png");
  EXPECT_EQ(cut.box, (PixelBox{94 + 141, 0, 94 + 1697, 1476}));
  EXPECT_EQ(cut.place, (PixelBox{470, 0, 3582, 2952}));
  // The cut of a frame is made of the smaller picture.
  ImageFile half = test::noisy_picture(1500, 2000), large{3000, 4000, {}};
  for (std::int64_t y = 0; y < 3000; ++y)
    for (std::int64_t x = 0; x < 4000; ++x)
      for (std::int64_t c = 0; c < 3; ++c)
        large.values.push_back(
            half.values[static_cast<std::size_t>(((y / 2) * 2000 + x / 2) * 3 + c)]);
  EXPECT_EQ(cut_face(large, cut, 64).values,
            resize_bilinear(cut_box(half, cut.box), 64, 64).values);
}

TEST(SourceFace, AtTheBorderIsCutOff) {
  const FaceQuad q = face_quad(face_at(630, 470, 60, 0.2f), 480, 640, "p.png");
  const FaceCut cut = make_cut(q, Preprocess::crop, 480, 640, "p.png");
  EXPECT_EQ(cut.box, (PixelBox{487, 318, 640, 480}));
  EXPECT_EQ(cut.frame_width, 310 - 25);
  EXPECT_EQ(cut.frame_height, 311 - 25);
  const SourceFace tiny = find_source_face({}, test::noisy_picture(16, 16), Preprocess::crop, 256,
                                           "p.png", face_at(8, 8, 4));
  EXPECT_EQ(tiny.cut.box, (PixelBox{0, 0, 16, 15}));
  EXPECT_EQ(tiny.crop.width, 256);
}

}  // namespace
}  // namespace weft
