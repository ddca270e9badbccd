// The networks with weights that are drawn: sizes, memory, errors. What they compute is held to the
// original's by tests/e2e/test_golden.py.
#include "models/face/source_face.h"
#include "models/sadtalker/options.h"
#include "models/sadtalker/recon.h"
#include "tests/models/face/fixture.h"

namespace weft {
namespace {

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
}  // namespace weft
