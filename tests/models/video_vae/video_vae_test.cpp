// The VAE: its two networks, clips through both of them, and the discriminator of its training.
#include "models/video_vae/video_vae.h"

#include "models/video_vae/options.h"
#include "models/video_vae/vae_loss.h"
#include "nn/conv.h"
#include "tests/nn/fixture.h"
#include "vae_fixture.h"

namespace weft::test {
namespace {

// ---- The two networks

TEST(VaeParameters, ReleasedNamesAndCounts) {
  const VideoVae vae{VaeDeck()};
  ParameterTable& table = const_cast<VideoVae&>(vae).params();
  std::int64_t tensors[2] = {}, elements[2] = {};
  for (const auto& p : table.all()) {
    const int temporal = p->name.starts_with("temporal_vae.") ? 1 : 0;
    EXPECT_TRUE(temporal == 1 || p->name.starts_with("spatial_vae.module.")) << p->name;
    ++tensors[temporal];
    elements[temporal] += p->shape.numel();
  }
  // docs/models/video_vae.md, Parameters.
  EXPECT_EQ(tensors[0], 248);
  EXPECT_EQ(elements[0], 83653863);
  EXPECT_EQ(tensors[1], 267);
  EXPECT_EQ(elements[1], 309687144);
  const auto expect_shape = [&](const std::string& name, const Shape& shape) {
    const Parameter* p = table.find(name);
    ASSERT_NE(p, nullptr) << name;
    EXPECT_EQ(p->shape, shape) << name;
  };
  const std::string s = "spatial_vae.module.", t = "temporal_vae.";
  expect_shape(s + "encoder.down_blocks.1.resnets.0.conv_shortcut.weight", {256, 128, 1, 1});
  expect_shape(s + "encoder.down_blocks.2.downsamplers.0.conv.weight", {512, 512, 3, 3});
  expect_shape(s + "encoder.mid_block.attentions.0.to_out.0.weight", {512, 512});
  expect_shape(s + "decoder.up_blocks.2.resnets.0.conv_shortcut.weight", {256, 512, 1, 1});
  expect_shape(s + "decoder.up_blocks.0.upsamplers.0.conv.bias", {512});
  expect_shape(s + "decoder.up_blocks.3.resnets.2.norm2.weight", {128});
  expect_shape(s + "decoder.conv_out.weight", {3, 128, 3, 3});
  expect_shape(s + "post_quant_conv.weight", {4, 4, 1, 1});
  expect_shape(t + "encoder.block_res_blocks.1.0.conv3.conv.weight", {256, 128, 1, 1, 1});
  expect_shape(t + "encoder.conv_blocks.2.conv.bias", {256});
  expect_shape(t + "encoder.norm1.weight", {512});
  expect_shape(t + "decoder.conv_blocks.2.conv.weight", {1024, 512, 3, 3, 3});
  expect_shape(t + "decoder.block_res_blocks.0.0.conv3.conv.weight", {128, 256, 1, 1, 1});
  expect_shape(t + "quant_conv.conv.weight", {8, 8, 1, 1, 1});
  EXPECT_EQ(table.find(t + "encoder.conv_blocks.0.conv.weight"), nullptr);
  EXPECT_EQ(table.find(t + "encoder.conv_in.conv.bias"), nullptr);
}

TEST(VaeParameters, LatentFrames) {
  const VideoVae vae{VaeDeck()};
  for (const auto& [frames, latents] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {1, 1}, {4, 1}, {17, 5}, {18, 6}, {34, 10}, {51, 15}, {102, 30}, {204, 60}, {816, 240}})
    EXPECT_EQ(vae.latent_frames(frames), latents) << frames;
  VaeDeck whole;
  whole.micro_frame_size = 0;
  EXPECT_EQ(VideoVae(whole).latent_frames(33), 9);
  EXPECT_EQ(vae.pixels_a_latent(), 8);
}

TEST(VaeParameters, GroupsMustDivideChannels) {
  VaeDeck deck = tiny_vae();
  deck.num_groups = 3;
  try {
    const VideoVae vae(deck);
    FAIL() << "3 groups of 8 channels";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
  }
}

class Vae : public OpTest {
 protected:
  Var input(const Shape& shape, std::uint64_t stream) {
    return make_var(to_tensor(random_values(shape.numel(), stream), shape));
  }
  nn::Context infer() { return {tape_, model_.vae.params()}; }

  TinyVae model_{tiny_vae(), true};
  Tape tape_{Tape::Mode::infer};
};

TEST_F(Vae, OddSizesAreCutOff) {
  const Var moments = model_.vae.spatial().encode(infer(), input({1, 2, 7, 9, 3}, 1));
  EXPECT_EQ(moments->value.shape(), (Shape{1, 2, 3, 4, 8}));
  const Var frames = model_.vae.spatial().decode(infer(), input({1, 2, 3, 4, 4}, 2));
  EXPECT_EQ(frames->value.shape(), (Shape{1, 2, 6, 8, 3}));
}

TEST_F(Vae, FramesOfThe2dModelKnowNothingOfEachOther) {
  const Var both = input({1, 2, 6, 6, 3}, 1);
  const Vec together = to_values(model_.vae.spatial().encode(infer(), both)->value);
  const Tensor second = both->value.view({2, 6, 6, 3}).slice(1, 2).view({1, 1, 6, 6, 3});
  const Vec alone = to_values(model_.vae.spatial().encode(infer(), make_var(second))->value);
  EXPECT_LT(relative_error({together.end() - std::ssize(alone), together.end()}, alone), 1e-6);
}

TEST_F(Vae, FramesInFrontOfAChunkAreZero) {
  const Var three = input({2, 3, 4, 4, 4}, 1);
  Tensor four = Tensor::empty({2, 4, 4, 4, 4}, DType::f32);
  ops::fill_zero(four);
  const std::int64_t clip = 3 * 64;
  for (std::int64_t b = 0; b < 2; ++b)
    std::memcpy(four.data<float>() + b * 256 + 64, three->value.data<float>() + b * clip,
                static_cast<std::size_t>(clip) * sizeof(float));
  const TemporalVae& vae = model_.vae.temporal();
  const Vec padded = to_values(vae.encode(infer(), three)->value);
  EXPECT_LT(relative_error(padded, to_values(vae.encode(infer(), make_var(four))->value)), 1e-6);
  // And what answers to them is dropped in the end.
  const Var z = input({2, 1, 4, 4, 4}, 2);
  const Tensor all = vae.decode(infer(), z, 4)->value, last = vae.decode(infer(), z, 3)->value;
  for (std::int64_t b = 0; b < 2; ++b)
    EXPECT_EQ(std::memcmp(all.data<float>() + b * 256 + 64, last.data<float>() + b * clip,
                          static_cast<std::size_t>(clip) * sizeof(float)),
              0);
}

TEST_F(Vae, ParameterGradientsAreSlopes) {
  // Both models in one loss: the moments and the frames of a clip of three frames.
  ParameterTable& table = model_.vae.params();
  const Tensor clip = to_tensor(random_values(3 * 6 * 6 * 3, 1), {1, 3, 6, 6, 3});
  const Shape latent{1, 3, 3, 3, 4}, code{1, 1, 3, 3, 4};
  const Tensor noise_2d = to_tensor(random_values(latent.numel(), 2), latent);
  const Tensor noise = to_tensor(random_values(code.numel(), 3), code);
  const Vec g = random_values(clip.numel(), 4), gm = random_values(2 * code.numel(), 5);
  const Var x = make_var(clip);
  const auto forward = [&](Tape& tape) {
    const nn::Context c{tape, table};
    Var z = model_.vae.spatial().encode(c, x);
    z = nn::posterior_draw(c, z, noise_2d, model_.vae.scaled_2d());
    const Var moments = nn::clamp_log_variance(c, model_.vae.temporal().encode(c, z));
    z = nn::posterior_draw(c, moments, noise, Tensor());
    z = nn::channel_affine(c, model_.vae.temporal().decode(c, z, 3), model_.vae.unscaled_2d());
    return std::pair(moments, model_.vae.spatial().decode(c, z));
  };
  table.begin_step([](int) {});
  Tape tape;
  {
    const auto [moments, frames] = forward(tape);
    moments->grad = to_tensor(gm, moments->value.shape());
    frames->grad = to_tensor(g, frames->value.shape());
  }
  tape.backward();
  table.finish_step();
  const auto loss = [&] {
    Tape quiet(Tape::Mode::infer);
    const auto [moments, frames] = forward(quiet);
    return against(frames->value, g) + against(moments->value, gm);
  };
  expect_slope("x", x->value, to_values(x->grad), loss, 2e-2);
  // All tensors of the temporal model are held to the original's in the golden case, those of the
  // 2D one to diffusers' (validation/check_vae.py): here some, which takes a second. Biases of keys
  // have no gradient but rounding.
  for (std::size_t i = 3; i < table.all().size(); i += 13) {
    Parameter& p = *table.all()[i];
    if (!p.name.ends_with("to_k.bias"))
      expect_slope(p.name, p.value, to_values(p.grad), loss, 2e-2, 1e-3);
  }
}

TEST_F(Vae, AFrozen2dModelGetsNoGradient) {
  VideoVae vae(tiny_vae(), true);
  std::int64_t trained = 0;
  for (const auto& p : vae.params().all()) {
    EXPECT_EQ(p->trainable, p->name.starts_with("temporal_vae.")) << p->name;
    trained += p->trainable ? p->shape.numel() : 0;
  }
  EXPECT_EQ(trained, vae.params().trainable_elements());
}

// ---- The whole VAE

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

// ---- The discriminator

// One derivative by two ways: u . (tangent along v) forward is (gradient of u . logits) . v
// backward. Kinks do not matter.
TEST_F(OpTest, TangentsOfTheDiscriminatorAreItsGradients) {
  ParameterTable table;
  PatchGan gan(table, "discriminator.");
  table.allocate(1 << 16, false, true);
  table.initialise(3);
  const Shape shape{1, 2, 24, 32, 3};
  const Vec x = random_values(shape.numel(), 1), v = random_values(shape.numel(), 2);
  const Var frames = make_var(to_tensor(x, shape)), along = make_var(to_tensor(v, shape));
  Tape plain(Tape::Mode::infer), tape;
  const nn::Dual both = gan.forward({plain, table}, nn::Dual{make_var(to_tensor(x, shape)), along});
  const Var logits = gan.forward({tape, table}, frames);
  EXPECT_TRUE(same_bits(both.value->value, logits->value));
  const Vec u = random_values(logits->value.numel(), 3);
  logits->grad = to_tensor(u, logits->value.shape());
  table.begin_step([](int) {});
  tape.backward();
  const double backward = dot(to_values(frames->grad), v);
  EXPECT_NEAR(against(both.tangent->value, u) / backward, 1, 1e-4);
}

}  // namespace
}  // namespace weft::test
