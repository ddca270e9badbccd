// The sums are those of cv2.resize of OpenCV 4.9 (x86).
#include "models/face/crop.h"
#include "tests/models/face/fixture.h"

namespace weft {
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

}  // namespace
}  // namespace weft
