#include "models/pixels.h"

#include <gtest/gtest.h>

#include <vector>

#include "tensor/tensor.h"

namespace weft {
namespace {

TEST(PixelCodec, LatentsAreFrames) {
  PixelCodec codec;
  EXPECT_EQ(codec.latent_frames(7), 7);
  EXPECT_EQ(codec.pixels_a_latent(), 1);
  EXPECT_EQ(codec.chunk_pixels(), codec.latent_frames(codec.chunk_pixels()));
  EXPECT_TRUE(codec.params().all().empty());
  const VideoCodec::Part part = codec.part_with(9, 2, 5);
  EXPECT_EQ(part.first_frame, 2);
  EXPECT_EQ(part.frames, 3);
  EXPECT_EQ(part.first_latent, 2);
  EXPECT_EQ(part.latents, 3);
}

// More frames than are converted at once, a part of a clip, and back to the same values to the bit.
TEST(PixelCodec, FramesToLatentAndBack) {
  const auto arena = Arena::reserve(std::size_t{64} << 20);
  const ArenaScope scope(*arena);
  PixelCodec codec;
  constexpr std::int64_t clip = 40, height = 2, width = 3, frame = height * width * 3;
  const auto value = [](std::int64_t t, std::int64_t i) {
    return static_cast<float>(t * frame + i) / (clip * frame) * 2 - 1;
  };
  const auto part = codec.part_with(clip, 3, 38);
  const Tensor latent = codec.encode(
      part, height, width,
      [&](std::int64_t first, std::int64_t count) {
        std::vector<float> frames;
        for (std::int64_t t = first; t < first + count; ++t)
          for (std::int64_t i = 0; i < frame; ++i) frames.push_back(value(t, i));
        return Tensor::from_host(std::span<const float>(frames), {count, height, width, 3});
      },
      nullptr);
  EXPECT_EQ(latent.shape(), (Shape{1, 3, 35, height, width}));
  // Channel 1 of the second frame of the part, first pixel.
  EXPECT_EQ(latent.data<float>()[(1 * 35 + 1) * height * width], value(4, 1));
  std::int64_t seen = 0;
  codec.decode(latent, 35, [&](std::int64_t first, const Tensor& frames) {
    EXPECT_EQ(first, seen);
    const auto values = frames.span<float>();
    for (std::int64_t i = 0; i < frames.numel(); ++i)
      ASSERT_EQ(values[i], value(3 + first + i / frame, i % frame));
    seen += frames.dim(0);
  });
  EXPECT_EQ(seen, 35);
}

}  // namespace
}  // namespace weft
