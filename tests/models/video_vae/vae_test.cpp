// The VAE's two models: names, counts, shapes, padding facts, gradients.
#include "models/video_vae/options.h"
#include "vae_fixture.h"

#include "nn/conv.h"

namespace weft::test {
namespace {

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

}  // namespace
}  // namespace weft::test
