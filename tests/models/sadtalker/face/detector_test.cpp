#include <cmath>
#include <limits>

#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/face/detector.h"
#include "models/sadtalker/options.h"
#include "tests/models/sadtalker/face/fixture.h"

namespace weft::test {
namespace {

using testing::HasSubstr;

Face face(float x1, float y1, float x2, float y2) { return {{x1, y1, x2, y2}, 1, {}}; }

TEST(FacePriors, RunOverRowsColumnsAndSizes) {
  // 3 x 2 features, 2 x 1, and one.
  EXPECT_EQ(face_priors(17, 15), 2 * (3 * 2 + 2 * 1 + 1));
  const std::vector<float> p = make_face_priors(17, 15);
  ASSERT_EQ(p.size(), 4u * 18);
  const auto prior = [&](std::size_t i) {
    return std::vector<float>(p.begin() + static_cast<std::ptrdiff_t>(4 * i),
                              p.begin() + static_cast<std::ptrdiff_t>(4 * i + 4));
  };
  EXPECT_EQ(prior(0), (std::vector<float>{4.0f / 15, 4.0f / 17, 16.0f / 15, 16.0f / 17}));
  EXPECT_EQ(prior(1), (std::vector<float>{4.0f / 15, 4.0f / 17, 32.0f / 15, 32.0f / 17}));
  EXPECT_EQ(prior(2)[0], 12.0f / 15);
  EXPECT_EQ(prior(4)[1], 12.0f / 17);
  EXPECT_EQ(prior(12)[2], 64.0f / 15);
  EXPECT_EQ(prior(17), (std::vector<float>{16.0f / 15, 16.0f / 17, 512.0f / 15, 512.0f / 17}));
}

TEST(FaceSuppression, DropsWhatOverlapsByMoreThanTheLimit) {
  EXPECT_FLOAT_EQ(intersection_over_union({0, 0, 2, 1}, {1, 0, 3, 1}), 1.0f / 3);
  EXPECT_EQ(intersection_over_union({0, 0, 1, 1}, {2, 2, 3, 3}), 0);
  const std::vector<Face> faces = {face(0, 0, 10, 10), face(1, 0, 11, 10), face(5, 0, 15, 10),
                                   face(20, 0, 30, 10), face(20, 0, 25, 10)};
  // The last overlaps by a half exactly.
  EXPECT_EQ(suppress_overlaps(faces, 0.5), (std::vector<std::size_t>{0, 2, 3, 4}));
  // What is dropped drops nothing: 5 to 15 overlaps 1 to 11 by 6/14.
  EXPECT_EQ(suppress_overlaps(faces, 0.4), (std::vector<std::size_t>{0, 2, 3}));
  EXPECT_EQ(suppress_overlaps(faces, 0.3), (std::vector<std::size_t>{0, 3}));
  EXPECT_TRUE(suppress_overlaps({}, 0.4).empty());
}

TEST(FacePixels, AreWholeAndWithinThePicture) {
  EXPECT_EQ(face_pixels(face(3.9f, 4.2f, 10.99f, 11.0f), 50, 40), (PixelBox{3, 4, 10, 11}));
  EXPECT_EQ(face_pixels(face(-0.5f, -7, 40.5f, 1e20f), 50, 40), (PixelBox{0, 0, 40, 50}));
  EXPECT_TRUE(face_pixels(face(-9, 5, -2, 12), 50, 40).empty());
  EXPECT_TRUE(face_pixels(face(45, 5, 60, 12), 50, 40).empty());
  EXPECT_TRUE(face_pixels(face(5.1f, 5, 5.9f, 12), 50, 40).empty());
}

FaceScores scores_of(std::int64_t height, std::int64_t width) {
  FaceScores s;
  s.height = height;
  s.width = width;
  s.priors = make_face_priors(height, width);
  const std::size_t count = s.priors.size() / 4;
  s.offsets.assign(4 * count, 0);
  s.marks.assign(10 * count, 0);
  for (std::size_t i = 0; i < count; ++i) s.probability.insert(s.probability.end(), {1, 0});
  return s;
}

TEST(FacePick, TakesWhatIsAboveTheLimitByFallingScore) {
  FaceScores s = scores_of(64, 128);
  const auto set = [&](std::size_t i, float score) { s.probability[2 * i + 1] = score; };
  set(0, 0.98f);
  set(20, 0.97f);  // not above
  set(60, 0.99f);
  set(124, 0.98f);  // equal to the first: comes before it
  // Twice the size, a whole width to the right.
  s.offsets[4 * 60] = 10;
  s.offsets[4 * 60 + 2] = std::log(2.0f) / 0.2f;
  s.marks[10 * 60 + 3] = 5;
  const std::vector<Face> faces = pick_faces(s, 0.97f, 0.4);
  ASSERT_EQ(faces.size(), 3u);
  EXPECT_EQ(faces[0].score, 0.99f);
  // Prior 60: row 1, column 14, 16 pixels large.
  EXPECT_NEAR(faces[0].box[0], 14.5 * 8 + 16 - 16, 1e-3);
  EXPECT_NEAR(faces[0].box[2], 14.5 * 8 + 16 + 16, 1e-3);
  EXPECT_NEAR(faces[0].box[1], 1.5 * 8 - 8, 1e-4);
  EXPECT_NEAR(faces[0].box[3], 1.5 * 8 + 8, 1e-4);
  EXPECT_NEAR(faces[0].marks[1][0], 14.5 * 8, 1e-4);
  EXPECT_NEAR(faces[0].marks[1][1], 1.5 * 8 + 0.5 * 16, 1e-4);
  EXPECT_GT(faces[1].box[1], faces[2].box[1]);
  EXPECT_EQ(decode_face_boxes(s).size(), s.offsets.size());
}

TEST(FacePick, RefusesWhatIsNotFinite) {
  FaceScores s = scores_of(32, 32);
  s.marks[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(test::complaint([&] { pick_faces(s, 0.97f, 0.4); }), HasSubstr("not finite"));
  s.marks[7] = 0;
  s.offsets[2] = 1000;  // e to the power of 200
  EXPECT_TRUE(pick_faces(s, 0.97f, 0.4).empty());
  s.probability[1] = 1;
  EXPECT_THAT(test::complaint([&] { pick_faces(s, 0.97f, 0.4); }), HasSubstr("not finite"));
}

// The networks with weights that are drawn: sizes, memory, errors. What they compute is held to the
// original's by tests/e2e/test_golden.py.

using test::complaint;
using test::noisy_picture;
using testing::HasSubstr;

Deck small_deck() {
  Deck deck;
  deck.get<SadtalkerDeck>().fan_num_modules = 1;
  return deck;
}

ModelSource drawn() { return {"detector_weights", "random:5", "", false, MPI_COMM_SELF}; }

constexpr std::size_t room = std::size_t{1} << 30;

TEST(FaceNetworks, TakePicturesOfAnySize) {
  const Deck deck = small_deck();
  FaceDetector detector(deck, drawn());
  LandmarkNet landmarks(deck, drawn());
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  for (const auto& [height, width] : {std::pair{1, 1}, {7, 50}, {65, 33}}) {
    const FaceScores s = detector.scores(noisy_picture(height, width), ChannelOrder::rgb);
    EXPECT_EQ(std::ssize(s.probability), 2 * face_priors(height, width));
    EXPECT_EQ(std::ssize(s.marks), 10 * face_priors(height, width));
    for (std::size_t i = 0; i < s.probability.size(); i += 2)
      ASSERT_NEAR(s.probability[i] + s.probability[i + 1], 1, 1e-6);
  }
  EXPECT_EQ(arena->used(), 0u);
  // The order of the channels matters, but for grey pictures.
  const ImageFile picture = noisy_picture(33, 40);
  EXPECT_NE(detector.scores(picture, ChannelOrder::rgb).offsets,
            detector.scores(picture, ChannelOrder::bgr).offsets);

  EXPECT_TRUE(detector.detect(picture, ChannelOrder::bgr).empty());
  const FaceFinder finder{&detector, &landmarks};
  EXPECT_THAT(
      complaint([&] { find_source_face(finder, picture, Preprocess::crop, 64, "her.png"); }),
      HasSubstr("no face was found in her.png"));
  EXPECT_THAT(complaint([&] {
                find_source_face(finder, picture, Preprocess::crop, 64, "her.png",
                                 test::face_at(20, 16, 8));
              }),
              HasSubstr("no face was found in her.png (cut to its face)"));

  const Landmarks l = landmarks.landmarks(noisy_picture(60, 90));
  for (const auto& [x, y] : l) {
    EXPECT_TRUE(x >= 0 && x <= 91) << x;
    EXPECT_TRUE(y >= 0 && y <= 61) << y;
  }

  // An arena that is too small is noticed before the network runs.
  arena->reset_peak();
  detector.detect(noisy_picture(65, 33), ChannelOrder::bgr);
  const MemoryNeed need = detector.plan(65, 33);
  EXPECT_EQ(need.bytes, arena->peak());
  const auto small = Arena::reserve(need.bytes - Arena::alignment);
  const ArenaScope within(*small);
  EXPECT_THAT(
      complaint([&] { detector.detect(noisy_picture(65, 33), ChannelOrder::bgr); }, Exit::usage),
      HasSubstr("65x33 pixels takes"));
}

TEST(FaceRow, IsPickedFromAllCoefficients) {
  std::vector<float> all;
  for (int i = 0; i < FaceCoefficients::count; ++i) all.push_back(static_cast<float>(i));
  const FaceRow row = face_row_of(all, {100, 120, 2.5, 48, 52});
  EXPECT_EQ(row[0], 80);
  EXPECT_EQ(row[63], 143);
  EXPECT_EQ(row[64], 224);
  EXPECT_EQ(row[66], 226);
  EXPECT_EQ(row[67], 254);
  EXPECT_EQ(row[69], 256);
  EXPECT_EQ(row[70], 2.5f);
  EXPECT_EQ(row[71], 48);
  EXPECT_EQ(row[72], 52);
}

}  // namespace
}  // namespace weft::test
