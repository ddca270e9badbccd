// References, of which only the chunks that a clip takes are read and encoded.
#include "jobs/generate/references.h"

#include "tests/models/video_vae/vae_fixture.h"

namespace weft::test {
namespace {

using ReferencesTest = OpTest;

// 22 frames: chunks of 5 with 2 latents each, and one of 2 frames with 1 latent.
const std::string video = "lavfi:testsrc2=duration=1:rate=22:size=24x16";
constexpr VideoVae::Noise noise{3, 8};

LatentReference take(VideoVae& vae, const std::string& file, LatentRange range) {
  return encode_reference({file, MediaTrust::deck}, {}, 16, 20, vae, noise,
                          [&](std::int64_t latents) {
                            EXPECT_EQ(latents, vae.latent_frames(22));
                            return range;
                          });
}

TEST_F(ReferencesTest, APartIsThatOfTheWhole) {
  TinyVae tiny;
  const LatentReference all = take(tiny.vae, video, {0, 9});
  EXPECT_EQ(all.frames, 9);
  EXPECT_EQ(all.latents, 9);
  const std::size_t latent = 8 * 10;  // values of a frame and channel
  for (const LatentRange range : {LatentRange{0, 1}, {3, 5}, {8, 9}}) {
    const LatentReference part = take(tiny.vae, video, range);
    EXPECT_EQ(part.frames, 9);
    EXPECT_EQ(part.first, range.first / 2 * 2);
    EXPECT_EQ(part.first + part.latents, std::min<std::int64_t>(9, (range.last + 1) / 2 * 2));
    for (std::int64_t c = 0; c < 4; ++c) {
      const auto from = all.values.begin() + (c * 9 + part.first) * std::int64_t(latent);
      const auto to = part.values.begin() + c * part.latents * std::int64_t(latent);
      EXPECT_TRUE(std::equal(to, to + part.latents * std::int64_t(latent), from)) << c;
    }
  }
}

}  // namespace
}  // namespace weft::test
