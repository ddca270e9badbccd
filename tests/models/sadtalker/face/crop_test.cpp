// The sums are those of cv2.resize of OpenCV 4.9 (x86).
#include <cmath>

#include "models/sadtalker/face/crop.h"
#include "tests/models/sadtalker/face/fixture.h"

namespace weft::test {
namespace {

TEST(ResizeBilinear, MakesThePixelsOfOpenCv) {
  const std::int64_t cases[][6] = {
      {29, 37, 15, 50, 289814, 327008828},
      {48, 64, 48, 31, 570851, 1280698417},
      {70, 50, 33, 50, 629865, 1556156969},
      {9, 1, 28, 3, 30972, 4117224},
      {3, 100, 7, 11, 28996, 3285366},
      {65, 97, 130, 194, 9656764, 365530911022},
      {211, 157, 12, 9, 40230, 6553486},
      {24, 24, 24, 24, 218768, 189209024},
      {40, 33, 1, 1, 372, 850},
      {2, 1, 37, 64, 699584, 3011682912},
      {48, 64, 24, 32, 294976, 341206528},
      {48, 64, 24, 64, 589952, 1364532224},
      {48, 64, 24, 33, 303093, 361145994},
      {512, 300, 256, 256, 25022868, 2460621293924},
      {200, 200, 64, 64, 1556823, 9584203126},
      {5, 7, 256, 256, 25927911, 2583787024942},
  };
  for (const auto& c : cases) {
    const ImageFile out = resize_bilinear(test::noisy_picture(c[0], c[1]), c[2], c[3]);
    EXPECT_EQ(out.height, c[2]);
    EXPECT_EQ(out.width, c[3]);
    EXPECT_EQ(test::sums(out), std::pair(c[4], c[5])) << c[0] << "x" << c[1];
  }
}

// Expected boxes are those of the original's arithmetic in numpy 1.26.

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
        large.values.push_back(half.values[((y / 2) * 2000 + x / 2) * 3 + c]);
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

// Scales, places and pixels are those of the original's arithmetic in numpy 1.26 and Pillow 9.5.

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
}  // namespace weft::test
