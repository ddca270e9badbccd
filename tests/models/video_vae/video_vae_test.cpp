// The VAE over whole clips: chunks, micro-batches, noise, and memory that does not grow with the
// length.
#include "models/video_vae/options.h"
#include "vae_fixture.h"

namespace weft::test {
namespace {

using VideoVaeTest = OpTest;

TEST_F(VideoVaeTest, ChunksAreClipsOfTheirOwn) {
  TinyVae tiny;
  // 5 + 5 + 2 frames, 2 + 2 + 1 latents.
  const Clip clip{12, 6, 8};
  const Tensor moments = encode(tiny.vae, clip);
  ASSERT_EQ(moments.shape(), (Shape{1, 8, 5, 3, 4}));
  const std::int64_t first_frame[] = {0, 5, 10, 12}, first_latent[] = {0, 2, 4, 5};
  const Tensor latent = tiny.vae.draw_latent(moments, nullptr);
  const Tensor frames = decode(tiny.vae, latent, 12);
  ASSERT_EQ(frames.shape(), (Shape{12, 6, 8, 3}));
  for (int k = 0; k < 3; ++k) {
    const std::int64_t count = first_frame[k + 1] - first_frame[k];
    const Tensor alone = tiny.vae.encode_moments(
        count, 6, 8,
        [&](std::int64_t first, std::int64_t n) { return clip(first_frame[k] + first, n); },
        nullptr);
    EXPECT_TRUE(same_bits(frames_of(moments, first_latent[k], first_latent[k + 1]), alone)) << k;
    const Tensor part =
        decode(tiny.vae, frames_of(latent, first_latent[k], first_latent[k + 1]), count);
    EXPECT_TRUE(same_bits(frames.slice(first_frame[k], first_frame[k + 1]), part)) << k;
  }
  // A clip as one chunk is another matter: norms see all of it.
  VaeDeck deck = tiny_vae();
  deck.micro_frame_size = 0;
  TinyVae whole(deck);
  EXPECT_EQ(encode(whole.vae, clip).dim(2), 3);
}

TEST_F(VideoVaeTest, PartsAreThoseOfTheWhole) {
  TinyVae tiny;
  const Clip clip{12, 6, 8};
  const VideoVae::Noise noise{11, 5};
  const Tensor moments = encode(tiny.vae, clip, &noise);
  const Tensor latent = tiny.vae.draw_latent(moments, &noise);
  for (const auto& [first, last, frame, frames] : std::vector<std::array<std::int64_t, 4>>{
           {0, 1, 0, 5}, {1, 3, 0, 10}, {3, 5, 5, 7}, {4, 5, 10, 2}}) {
    const VideoVae::Part part = tiny.vae.part_with(12, first, last);
    EXPECT_EQ(part.first_frame, frame);
    EXPECT_EQ(part.frames, frames);
    const Tensor here = tiny.vae.encode_moments(
        part, 6, 8, [&](std::int64_t f, std::int64_t n) { return clip(f, n); }, &noise);
    const std::int64_t end = part.first_latent + part.latents;
    EXPECT_TRUE(same_bits(here, frames_of(moments, part.first_latent, end))) << first;
    EXPECT_TRUE(same_bits(tiny.vae.draw_latent(part, here, &noise),
                          frames_of(latent, part.first_latent, end)))
        << first;
  }
}

TEST_F(VideoVaeTest, MomentsAndLatentsAreTheModels) {
  TinyVae tiny;
  const Clip clip{3, 4, 4};
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, tiny.vae.params()};
  const Tensor moments = encode(tiny.vae, clip);
  // By hand: the means of the 2D posterior, scaled, through the temporal encoder.
  const Tensor m2 = tiny.vae.spatial().encode(c, make_var(clip(0, 3).view({1, 3, 4, 4, 3})))->value;
  Tensor z = Tensor::empty({1, 3, 2, 2, 4}, DType::f32);
  for (std::int64_t i = 0; i < 12; ++i)
    for (std::int64_t k = 0; k < 4; ++k)
      z.data<float>()[4 * i + k] = 0.18215f * m2.data<float>()[8 * i + k];
  const Vec wanted =
      to_values(nn::channels_first(c, tiny.vae.temporal().encode(c, make_var(z)))->value);
  EXPECT_LT(relative_error(to_values(moments), wanted), 1e-6);
  const Tensor latent = tiny.vae.draw_latent(moments, nullptr);
  const VaeDeck deck = tiny_vae();
  for (std::int64_t k = 0; k < 4; ++k)
    for (std::int64_t i = 0; i < 4; ++i) {
      const auto at = static_cast<std::size_t>(k);
      EXPECT_NEAR(latent.data<float>()[4 * k + i],
                  (moments.data<float>()[4 * k + i] - deck.shift[at]) / deck.scale[at], 1e-6);
    }
}

TEST_F(VideoVaeTest, NoiseIsAFunctionOfSeedSampleAndFrame) {
  TinyVae tiny;
  const Clip clip{7, 4, 6};
  const VideoVae::Noise noise{11, 5}, other{11, 6};
  const auto latent = [&](const VideoVae::Noise* n) {
    return to_values(tiny.vae.draw_latent(encode(tiny.vae, clip, n), n));
  };
  const Vec drawn = latent(&noise);
  EXPECT_EQ(drawn, latent(&noise));
  EXPECT_GT(relative_error(latent(&other), drawn), 0.1);
  EXPECT_GT(relative_error(latent(nullptr), drawn), 0.1);
  for (const std::int64_t micro_batch : {0, 1, 3}) {
    tiny.vae.set_micro_batch(micro_batch);
    EXPECT_LT(relative_error(latent(&noise), drawn), 1e-6) << micro_batch;
  }
}

TEST_F(VideoVaeTest, ALatentOfAnotherLengthIsRefused) {
  TinyVae tiny;
  const Tensor latent = Tensor::empty({1, 4, 3, 2, 2}, DType::f32);
  try {
    tiny.vae.decode(latent, 20, [](std::int64_t, const Tensor&) {});
    FAIL() << "20 frames have 8 latents";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
  }
}

TEST_F(VideoVaeTest, Bf16IsClose) {
  VaeDeck deck = tiny_vae();
  TinyVae exact;
  deck.dtype = "bf16";
  TinyVae rounded(deck);
  const Clip clip{5, 6, 6};
  const Tensor moments = encode(exact.vae, clip);
  EXPECT_LT(relative_error(to_values(encode(rounded.vae, clip)), to_values(moments)), 4e-2);
  const Tensor latent = exact.vae.draw_latent(moments, nullptr);
  EXPECT_LT(relative_error(to_values(decode(rounded.vae, latent, 5)),
                           to_values(decode(exact.vae, latent, 5))),
            4e-2);
  // docs/models/video_vae.md, Scaling and normalisation: the buffers of a bf16 model.
  const float* scale = rounded.vae.denormalised().data<float>();
  EXPECT_EQ(scale[0], 3.84375f);
  EXPECT_EQ(scale[3], 3.0625f);
  EXPECT_NEAR(scale[4 + 1], 0.33984f, 1e-5);
}

// Peaks of encoding and decoding in a real arena.
std::pair<std::size_t, std::size_t> real_peaks(VideoVae& vae, const Clip& clip) {
  const auto arena = Arena::reserve(std::size_t{1} << 28);
  const ArenaScope scope(*arena);
  std::pair<std::size_t, std::size_t> peaks;
  const VideoVae::Noise noise;
  encode(vae, clip, &noise);
  peaks.first = arena->peak();
  EXPECT_EQ(arena->used(), 0u);
  arena->reset_peak();
  Tensor latent = Tensor::empty(
      {1, 4, vae.latent_frames(clip.frames), clip.height / 2, clip.width / 2}, DType::f32);
  ops::fill_zero(latent);
  vae.decode(latent, clip.frames, [](std::int64_t, const Tensor&) {});
  peaks.second = arena->peak();
  return peaks;
}

TEST_F(VideoVaeTest, PlannedPeaksAreRealAndIndependentOfTheLength) {
  TinyVae tiny;
  std::size_t encode_rest = 0, decode_rest = 0;
  for (const std::int64_t frames : {10, 20, 40}) {
    const Clip clip{frames, 12, 16};
    const auto [e, d] = real_peaks(tiny.vae, clip);
    EXPECT_EQ(tiny.vae.plan_encode(frames, 12, 16, 2).bytes, e);
    EXPECT_EQ(tiny.vae.plan_decode(frames, 12, 16, 2).bytes, d);
    // What remains beside the result and the latent: the same for any number of chunks.
    const auto of_latent = [&](std::int64_t channels) {
      const auto bytes =
          static_cast<std::size_t>(channels * tiny.vae.latent_frames(frames) * 48 * 4);
      return (bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
    };
    if (encode_rest == 0) encode_rest = e - of_latent(8), decode_rest = d - of_latent(4);
    EXPECT_EQ(e - of_latent(8), encode_rest) << frames;
    EXPECT_EQ(d - of_latent(4), decode_rest) << frames;
  }
}

TEST_F(VideoVaeTest, MicroBatchesFitTheMemory) {
  VaeDeck deck = tiny_vae();
  deck.micro_batch_size = 0;
  TinyVae tiny(deck);
  const auto need = [&](std::int64_t n) {
    return std::max(tiny.vae.plan_encode(10, 32, 32, n).bytes,
                    tiny.vae.plan_decode(10, 32, 32, n).bytes);
  };
  EXPECT_EQ(tiny.vae.fit_micro_batch(10, 32, 32, std::size_t{1} << 30), 5);
  const std::size_t capacity = need(3) + need(3) / 16;
  const std::int64_t chosen = tiny.vae.fit_micro_batch(10, 32, 32, capacity);
  EXPECT_LT(chosen, 5);
  EXPECT_LE(need(chosen), capacity);
  // The arena of that size takes a real clip.
  const auto arena = Arena::reserve(capacity);
  const ArenaScope scope(*arena);
  tiny.vae.set_micro_batch(chosen);
  const Tensor latent = tiny.vae.draw_latent(encode(tiny.vae, {10, 32, 32}), nullptr);
  tiny.vae.decode(latent, 10, [](std::int64_t, const Tensor&) {});
  EXPECT_EQ(tiny.vae.largest_micro_batch(10, 32, 32, need(1) / 2), 0);
  try {
    tiny.vae.fit_micro_batch(10, 32, 32, need(1) / 2);
    FAIL() << "half of what one frame needs";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
  }
}

}  // namespace
}  // namespace weft::test
