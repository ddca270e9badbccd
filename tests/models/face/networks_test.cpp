// The networks with weights that are drawn: sizes, memory, errors. What they compute is held to the
// original's by tests/e2e/test_golden.py.
#include <cmath>

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

TEST(FaceNetworks, TakePicturesOfAnySizeAndSayThatThereIsNoFace) {
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

  // What it says it needs is what it takes.
  const MemoryNeed need = detector.plan(65, 33);
  const auto exact = Arena::reserve(need.bytes);
  {
    const ArenaScope within(*exact);
    detector.detect(noisy_picture(65, 33), ChannelOrder::bgr);
  }
  const auto small = Arena::reserve(need.bytes - Arena::alignment);
  const ArenaScope within(*small);
  EXPECT_THAT(
      complaint([&] { detector.detect(noisy_picture(65, 33), ChannelOrder::bgr); }, Exit::usage),
      HasSubstr("65x33 pixels takes"));
}

TEST(FaceNetworks, LandmarksLieInTheFace) {
  const Deck deck = small_deck();
  LandmarkNet net(deck, drawn());
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  const Landmarks l = net.landmarks(noisy_picture(60, 90));
  for (const auto& [x, y] : l) {
    EXPECT_TRUE(x >= 0 && x <= 91) << x;
    EXPECT_TRUE(y >= 0 && y <= 61) << y;
  }
  EXPECT_EQ(net.plan().bytes, arena->peak());
  EXPECT_GT(net.flops(), 1e9);
}

TEST(FaceNetworks, CoefficientsBecomeRows) {
  const Deck deck = small_deck();
  FaceCoefficients network(deck, drawn());
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  // Two multiply-adds of 4.1 G.
  EXPECT_NEAR(network.flops(), 8.2e9, 2e8);
  const ImageFile picture = noisy_picture(100, 120);
  const Landmarks l = test::face_at(60, 50, 30);
  const AlignedFace aligned = align_face(picture, l, "p.png");
  const std::vector<float> all = network.coefficients(aligned.image);
  ASSERT_EQ(std::ssize(all), FaceCoefficients::count);
  const FaceRow row = network.row(picture, l, "p.png");
  EXPECT_EQ(row[0], all[80]);
  EXPECT_EQ(row[63], all[143]);
  EXPECT_EQ(row[64], all[224]);
  EXPECT_EQ(row[67], all[254]);
  EXPECT_EQ(row[69], all[256]);
  EXPECT_EQ(row[70], static_cast<float>(aligned.trans[2]));
  EXPECT_EQ(row[72], static_cast<float>(aligned.trans[4]));
}

}  // namespace
}  // namespace weft
