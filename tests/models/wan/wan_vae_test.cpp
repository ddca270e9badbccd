// Wan's VAE: its parameters and their names, clips in chunks and whole, gradients, memory.
#include <cstring>
#include <set>

#include "core/error.h"
#include "models/wan/vae.h"
#include "ops/pointwise.h"
#include "tests/nn/fixture.h"

namespace weft::test {
namespace {

// ---- Parameters

TEST(WanVaeParameters, ReleasedNamesAndCounts) {
  WanVae vae{WanVaeDeck()};
  const ParameterTable& table = vae.params();
  std::int64_t tensors = 0;
  std::map<std::string, std::int64_t> elements;
  for (const auto& p : table.all()) {
    ++tensors;
    elements[p->name.substr(0, p->name.find('.'))] += p->shape.numel();
  }
  EXPECT_EQ(tensors, 194);
  EXPECT_EQ(table.total_elements(), 126892531);
  EXPECT_EQ(elements,
            (std::map<std::string, std::int64_t>{
                {"encoder", 53595872}, {"decoder", 73295331}, {"conv1", 1056}, {"conv2", 272}}));
  const auto expect_shape = [&](const std::string& name, const Shape& shape) {
    const Parameter* p = table.find(name);
    ASSERT_NE(p, nullptr) << name;
    EXPECT_EQ(p->shape, shape) << name;
  };
  expect_shape("encoder.conv1.weight", {96, 3, 3, 3, 3});
  expect_shape("encoder.downsamples.2.resample.1.weight", {96, 96, 3, 3});
  expect_shape("encoder.downsamples.3.shortcut.weight", {192, 96, 1, 1, 1});
  expect_shape("encoder.downsamples.5.time_conv.weight", {192, 192, 3, 1, 1});
  expect_shape("encoder.downsamples.6.residual.2.weight", {384, 192, 3, 3, 3});
  expect_shape("encoder.downsamples.10.residual.3.gamma", {384, 1, 1, 1});
  expect_shape("encoder.middle.1.norm.gamma", {384, 1, 1});
  expect_shape("encoder.middle.1.to_qkv.weight", {1152, 384, 1, 1});
  expect_shape("encoder.head.2.weight", {32, 384, 3, 3, 3});
  expect_shape("decoder.conv1.weight", {384, 16, 3, 3, 3});
  expect_shape("decoder.upsamples.3.time_conv.weight", {768, 384, 3, 1, 1});
  expect_shape("decoder.upsamples.3.resample.1.weight", {192, 384, 3, 3});
  expect_shape("decoder.upsamples.4.shortcut.weight", {384, 192, 1, 1, 1});
  expect_shape("decoder.upsamples.11.resample.1.bias", {96});
  expect_shape("decoder.upsamples.14.residual.6.weight", {96, 96, 3, 3, 3});
  expect_shape("decoder.head.0.gamma", {96, 1, 1, 1});
  EXPECT_EQ(table.find("encoder.downsamples.2.time_conv.weight"), nullptr);
  EXPECT_EQ(table.find("decoder.upsamples.11.time_conv.weight"), nullptr);
  EXPECT_EQ(table.find("decoder.upsamples.8.shortcut.weight"), nullptr);
}

WanVaeDeck released_22() {
  WanVaeDeck d;
  d.variant = "2.2";
  d.filters = 160;
  d.decoder_filters = 256;
  d.z_channels = 48;
  d.patch_size = 2;
  return d;
}

TEST(WanVaeParameters, OfWan22) {
  WanVae vae{released_22()};
  std::map<std::string, std::int64_t> elements, tensors;
  std::set<std::string> others;
  const auto names = vae.weight_names();
  for (const auto& p : vae.params().all()) {
    const std::string side = p->name.substr(0, p->name.find('.'));
    elements[side] += p->shape.numel(), ++tensors[side];
    EXPECT_TRUE(others.insert(names.others(p->name).front()).second) << p->name;
  }
  EXPECT_EQ(elements,
            (std::map<std::string, std::int64_t>{
                {"encoder", 149627776}, {"decoder", 555049228}, {"conv1", 9312}, {"conv2", 2352}}));
  EXPECT_EQ(tensors["encoder"], 84);
  EXPECT_EQ(tensors["decoder"], 108);
  EXPECT_EQ(vae.pixels_a_latent(), 16);
  EXPECT_EQ(vae.channels(), 48);
  for (const char* name : {"encoder.downsamples.1.downsamples.2.time_conv.weight",
                           "encoder.downsamples.3.downsamples.1.residual.6.bias",
                           "decoder.upsamples.0.upsamples.3.resample.1.weight",
                           "decoder.upsamples.2.upsamples.0.shortcut.weight"})
    EXPECT_NE(vae.params().find(name), nullptr) << name;
  for (const char* name : {"encoder.down_blocks.0.resnets.1.conv2.weight",
                           "encoder.down_blocks.2.downsampler.time_conv.bias",
                           "decoder.up_blocks.1.upsampler.resample.1.weight",
                           "decoder.up_blocks.3.resnets.0.conv_shortcut.weight",
                           "decoder.up_blocks.0.resnets.2.norm1.gamma"})
    EXPECT_TRUE(others.contains(name)) << name;
}

TEST(WanVaeParameters, NamesOfDiffusers) {
  WanVae vae{WanVaeDeck()};
  const auto names = vae.weight_names();
  std::set<std::string> all;
  for (const auto& p : vae.params().all()) {
    const std::vector<std::string> others = names.others(p->name);
    ASSERT_EQ(others.size(), 1u);
    EXPECT_TRUE(all.insert(others[0]).second) << others[0];
  }
  for (const char* name :
       {"encoder.conv_in.weight", "encoder.norm_out.gamma", "encoder.conv_out.bias",
        "encoder.down_blocks.0.norm1.gamma", "encoder.down_blocks.2.resample.1.weight",
        "encoder.down_blocks.3.conv_shortcut.weight", "encoder.down_blocks.5.time_conv.bias",
        "encoder.mid_block.resnets.0.conv1.weight", "encoder.mid_block.attentions.0.to_qkv.weight",
        "encoder.mid_block.resnets.1.norm2.gamma", "quant_conv.weight", "post_quant_conv.bias",
        "decoder.mid_block.attentions.0.norm.gamma", "decoder.up_blocks.0.resnets.2.conv2.weight",
        "decoder.up_blocks.0.upsamplers.0.time_conv.weight",
        "decoder.up_blocks.1.resnets.0.conv_shortcut.bias",
        "decoder.up_blocks.2.upsamplers.0.resample.1.weight",
        "decoder.up_blocks.3.resnets.2.conv1.weight", "decoder.norm_out.gamma"})
    EXPECT_TRUE(all.contains(name)) << name;
}

TEST(WanVaeParameters, LatentFrames) {
  const WanVae vae{WanVaeDeck()};
  for (const auto& [frames, latents, coded] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {4, 1, 1}, {5, 2, 5}, {7, 2, 5}, {17, 5, 17}, {80, 20, 77}, {81, 21, 81}}) {
    EXPECT_EQ(vae.latent_frames(frames), latents) << frames;
    EXPECT_EQ(vae.coded_frames(frames), coded) << frames;
  }
  EXPECT_EQ(vae.pixels_a_latent(), 8);
  EXPECT_EQ(vae.channels(), 16);
}

// ---- Clips

WanVaeDeck tiny() {
  WanVaeDeck d;
  d.filters = 4;
  d.num_res_blocks = 1;
  d.channel_multipliers = {1, 2, 2, 4};
  return d;
}

// Gains scatter around 1, convolutions keep the size of what goes through them.
struct TinyWanVae {
  explicit TinyWanVae(const WanVaeDeck& deck = tiny(), bool gradients = false) : vae(deck) {
    ParameterTable& table = vae.params();
    table.allocate(1 << 16, deck.dtype == "bf16", gradients);
    std::uint64_t stream = 300;
    for (const auto& p : table.all()) {
      const bool gain = p->name.ends_with("gamma");
      const double fan_in = static_cast<double>(p->shape.numel() / p->shape[0]);
      const Vec v = random_values(p->shape.numel(), ++stream,
                                  p->shape.rank() > 1 && !gain ? 1 / std::sqrt(fan_in) : 0.2);
      for (std::size_t i = 0; i < v.size(); ++i)
        p->value.data<float>()[i] = static_cast<float>((gain ? 1.0 : 0.0) + v[i]);
    }
    table.refresh_working();
  }
  WanVae vae;
};

// Frames of a clip whose frame t is the same whoever asks for it.
struct Clip {
  std::int64_t frames, height, width;
  Tensor operator()(std::int64_t first, std::int64_t count) const {
    EXPECT_LE(first + count, frames);
    Tensor t = Tensor::empty({count, height, width, 3}, DType::f32);
    if (Arena::current().is_planning()) return t;
    for (std::int64_t f = 0; f < count; ++f) {
      const Vec v =
          random_values(height * width * 3, 4000 + static_cast<std::uint64_t>(first + f), 0.5);
      for (std::size_t i = 0; i < v.size(); ++i)
        t.data<float>()[f * height * width * 3 + std::int64_t(i)] = static_cast<float>(v[i]);
    }
    return t;
  }
};

Tensor moments_of(WanVae& vae, const Clip& clip, const VideoCodec::Part& part) {
  return vae.encode_moments(part, clip.height, clip.width, clip, nullptr);
}

// Frames [T,H,W,3] in one tensor.
Tensor decode(WanVae& vae, const Tensor& latent, std::int64_t frames) {
  const std::int64_t side = vae.pixels_a_latent();
  Tensor all = Tensor::empty({frames, latent.dim(3) * side, latent.dim(4) * side, 3}, DType::f32);
  std::int64_t next = 0;
  vae.decode(latent, frames, [&](std::int64_t first, const Tensor& part) {
    EXPECT_EQ(first, next);
    next += part.dim(0);
    if (Arena::current().is_planning()) return;
    std::memcpy(all.slice(first, first + part.dim(0)).raw(), part.raw(), part.bytes());
  });
  EXPECT_EQ(next, frames);
  return all;
}

using WanVaeTest = OpTest;

WanVaeDeck tiny_22() {
  WanVaeDeck d = tiny();
  d.variant = "2.2";
  d.channel_multipliers = {1, 2, 4, 4};
  d.decoder_filters = 6;
  d.z_channels = 48;
  d.patch_size = 2;
  return d;
}

class WanVaes : public OpTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Variants, WanVaes, testing::Bool());

TEST_P(WanVaes, ChunksAreTheWhole) {
  TinyWanVae t(GetParam() ? tiny_22() : tiny());
  const std::int64_t C = t.vae.channels(), side = t.vae.pixels_a_latent();
  // Sides that are no multiples of 8: the convolutions of 2.1 leave the rest out by themselves.
  const std::int64_t height = GetParam() ? 32 : 19, width = GetParam() ? 48 : 29;
  for (const std::int64_t frames : {1, 5, 9, 17}) {
    const Clip clip{frames, height, width};
    // On the networks themselves, without a cache.
    Tape tape(Tape::Mode::infer);
    const nn::Context c{tape, t.vae.params()};
    const Var x = make_var(clip(0, frames).view({1, frames, height, width, 3}), false);
    const Var m = nn::channels_first(c, t.vae.networks().encode(c, x));
    ASSERT_EQ(m->value.shape(), (Shape{1, 2 * C, (frames - 1) / 4 + 1, 2, 3}));
    const Vec moments = to_values(m->value);
    const Tensor latent =
        to_tensor(random_values(m->value.numel() / 2, 7), {1, C, m->value.dim(2), 2, 3});
    Tensor z = to_tensor(to_values(latent), latent.shape());
    ops::channel_affine_forward(z, t.vae.denormalised(), ops::Channels::first, z);
    const Var y = t.vae.networks().decode(c, nn::channels_last(c, make_var(z, false)));
    ASSERT_EQ(y->value.shape(), (Shape{1, frames, 2 * side, 3 * side, 3}));
    const Vec pixels = to_values(y->value);
    // Frames at once: whole; in chunks of 1, 2 and 3 latents.
    for (const std::int64_t at_once : {0, 4, 8, 12}) {
      t.vae.set_micro_batch(at_once);
      const Vec got = to_values(moments_of(t.vae, clip, t.vae.whole(frames)));
      EXPECT_LT(relative_error(got, moments), 1e-6) << frames << " frames, " << at_once;
      EXPECT_LT(relative_error(to_values(decode(t.vae, latent, frames)), pixels), 1e-6)
          << frames << " frames, " << at_once;
    }
  }
}

TEST_F(WanVaeTest, WhatIsLeftOverOfTheSidesIsCutOff) {
  TinyWanVae t(tiny_22());
  const Clip clip{5, 35, 54};
  const auto inner = [&](std::int64_t first, std::int64_t count) {
    const Vec all = to_values(clip(first, count));
    Vec cut;
    for (std::int64_t i = 0; i < count * 32; ++i) {
      const auto row = all.begin() + (i / 32 * 35 + i % 32) * 54 * 3;
      cut.insert(cut.end(), row, row + 48 * 3);
    }
    return to_tensor(cut, {count, 32, 48, 3});
  };
  EXPECT_EQ(to_values(moments_of(t.vae, clip, t.vae.whole(5))),
            to_values(t.vae.encode_moments(t.vae.whole(5), 32, 48, inner, nullptr)));
}

TEST_F(WanVaeTest, FramesBehindTheLastGroupDoNotCount) {
  TinyWanVae t;
  const Tensor five = moments_of(t.vae, {5, 16, 16}, t.vae.whole(5));
  // The clip fails if more than five are asked for.
  const VideoCodec::Part seven = t.vae.whole(7);
  EXPECT_EQ(seven.frames, 5);
  EXPECT_TRUE(same_bits(moments_of(t.vae, {5, 16, 16}, seven), five));
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, t.vae.params()};
  const Var all = make_var(Clip{7, 16, 16}(0, 7).view({1, 7, 16, 16, 3}), false);
  EXPECT_LT(relative_error(to_values(nn::channels_first(c, t.vae.networks().encode(c, all))->value),
                           to_values(five)),
            1e-6);
  EXPECT_THROW(t.vae.decode(Tensor::empty({1, 16, 2, 2, 2}, DType::f32), 7,
                            [](std::int64_t, const Tensor&) {}),
               Error);
}

TEST_F(WanVaeTest, PartsAreThoseOfTheWhole) {
  TinyWanVae t;
  const Clip clip{17, 16, 24};
  const VideoCodec::Noise noise{11, 5};
  const Vec whole = to_values(t.vae.encode(t.vae.whole(17), 16, 24, clip, &noise));
  const VideoCodec::Part part = t.vae.part_with(17, 1, 3);
  EXPECT_EQ(part.first_frame, 0);
  EXPECT_EQ(part.frames, 9);
  EXPECT_EQ(part.first_latent, 0);
  EXPECT_EQ(part.latents, 3);
  const Tensor latent = t.vae.encode(part, 16, 24, Clip{9, 16, 24}, &noise);
  ASSERT_EQ(latent.dim(2), 3);
  const Vec here = to_values(latent);
  for (std::size_t channel = 0; channel < 16; ++channel)
    for (std::size_t i = 0; i < 3 * 6; ++i)
      EXPECT_NEAR(here[channel * 18 + i], whole[channel * 30 + i], 1e-5);
  // Chunks cannot be decoded by themselves.
  EXPECT_THROW(t.vae.chunk_pixels(), Error);
}

TEST_F(WanVaeTest, LatentsAreNormalised) {
  TinyWanVae t;
  const Clip clip{5, 16, 16};
  const Vec moments = to_values(moments_of(t.vae, clip, t.vae.whole(5)));
  const Vec means = to_values(t.vae.encode(t.vae.whole(5), 16, 16, clip, nullptr));
  const VideoCodec::Normalisation n = t.vae.normalisation();
  for (std::size_t c = 0; c < 16; ++c)
    for (std::size_t i = 0; i < 8; ++i)
      EXPECT_NEAR(means[8 * c + i], (moments[8 * c + i] - n.shift[c]) / n.scale[c], 1e-5);
  const VideoCodec::Noise noise{11, 5}, other{11, 6};
  const auto drawn = [&](const VideoCodec::Noise& from) {
    return to_values(t.vae.encode(t.vae.whole(5), 16, 16, clip, &from));
  };
  EXPECT_EQ(drawn(noise), drawn(noise));
  EXPECT_GT(relative_error(drawn(other), drawn(noise)), 0.1);
  EXPECT_GT(relative_error(means, drawn(noise)), 0.1);
}

TEST_F(WanVaeTest, GradientsAreSlopes) {
  TinyWanVae t(tiny(), true);
  ParameterTable& table = t.vae.params();
  // Two clips of 5 frames.
  const Shape shape{2, 5, 8, 16, 3};
  const Var x = make_var(to_tensor(random_values(shape.numel(), 1, 0.5), shape));
  const Vec g = random_values(shape.numel(), 4);
  const auto forward = [&](Tape& tape) {
    const nn::Context c{tape, table};
    const Var moments = t.vae.networks().encode(c, x);
    return t.vae.networks().decode(c, nn::posterior_draw(c, moments, Tensor(), Tensor()));
  };
  table.begin_step([](int) {});
  Tape tape;
  {
    const Var frames = forward(tape);
    ASSERT_EQ(frames->value.shape(), shape);
    frames->grad = to_tensor(g, shape);
  }
  tape.backward();
  table.finish_step();
  const auto loss = [&] {
    Tape quiet(Tape::Mode::infer);
    return against(forward(quiet)->value, g);
  };
  expect_slope("x", x->value, to_values(x->grad), loss, 2e-2);
  // All of them are held to the original's in the golden case.
  for (std::size_t i = 3; i < table.all().size(); i += 11) {
    Parameter& p = *table.all()[i];
    expect_slope(p.name, p.value, to_values(p.grad), loss, 2e-2, 1e-3);
  }
  for (const char* name : {"encoder.downsamples.3.time_conv.weight",
                           "decoder.upsamples.2.time_conv.weight", "decoder.conv1.weight"}) {
    Parameter& p = *table.find(name);
    expect_slope(p.name, p.value, to_values(p.grad), loss, 2e-2, 1e-3);
  }
}

TEST_F(WanVaeTest, Bf16IsClose) {
  WanVaeDeck deck = tiny();
  TinyWanVae exact(deck);
  deck.dtype = "bf16";
  TinyWanVae rounded(deck);
  const Clip clip{9, 16, 16};
  const Vec moments = to_values(moments_of(exact.vae, clip, exact.vae.whole(9)));
  EXPECT_LT(relative_error(to_values(moments_of(rounded.vae, clip, rounded.vae.whole(9))), moments),
            4e-2);
  const Tensor latent = to_tensor(random_values(16 * 3 * 4, 7), {1, 16, 3, 2, 2});
  EXPECT_LT(relative_error(to_values(decode(rounded.vae, latent, 9)),
                           to_values(decode(exact.vae, latent, 9))),
            4e-2);
}

// ---- Memory

TEST_F(WanVaeTest, PlannedPeaksAreRealAndIndependentOfTheLength) {
  TinyWanVae t;
  std::size_t encode_rest = 0, decode_rest = 0;
  for (const std::int64_t frames : {9, 17, 41}) {
    const Clip clip{frames, 16, 24};
    const auto arena = Arena::reserve(std::size_t{1} << 28);
    const ArenaScope scope(*arena);
    const VideoCodec::Noise noise;
    // As plan_encode() does.
    t.vae.encode(t.vae.whole(frames), 16, 24, clip, &noise);
    const std::size_t e = arena->peak();
    EXPECT_EQ(arena->used(), 0u);
    arena->reset_peak();
    Tensor latent = Tensor::empty({1, 16, t.vae.latent_frames(frames), 2, 3}, DType::f32);
    ops::fill_zero(latent);
    t.vae.decode(latent, frames, [](std::int64_t, const Tensor&) {});
    const std::size_t d = arena->peak();
    EXPECT_EQ(t.vae.plan_encode(frames, 16, 24, 4).bytes, e) << frames;
    EXPECT_EQ(t.vae.plan_decode(frames, 16, 24, 4).bytes, d) << frames;
    // What remains beside the result and the latent: the same for any number of chunks.
    const auto of_latent = [&](std::int64_t channels) {
      const auto bytes =
          static_cast<std::size_t>(channels * t.vae.latent_frames(frames) * 2 * 3 * 4);
      return (bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
    };
    if (encode_rest == 0) encode_rest = e - of_latent(32), decode_rest = d - of_latent(16);
    EXPECT_EQ(e - of_latent(32), encode_rest) << frames;
    EXPECT_EQ(d - of_latent(16), decode_rest) << frames;
  }
}

TEST_F(WanVaeTest, LargerChunksTakeMoreMemory) {
  WanVaeDeck deck = tiny();
  deck.chunk_latents = 0;
  TinyWanVae t(deck);
  const auto need = [&](std::int64_t n) {
    return std::max(t.vae.plan_encode(33, 32, 32, n).bytes, t.vae.plan_decode(33, 32, 32, n).bytes);
  };
  EXPECT_EQ(t.vae.fit_micro_batch(33, 32, 32, std::size_t{1} << 30), 33);
  EXPECT_EQ(need(1), need(4));
  EXPECT_LT(need(4), need(8));
  EXPECT_LT(need(8), need(12));
  const std::int64_t chosen = t.vae.fit_micro_batch(33, 32, 32, need(12));
  EXPECT_LE(chosen, 8);
  EXPECT_LE(need(chosen), need(12));
  EXPECT_EQ(t.vae.largest_micro_batch(33, 32, 32, need(1) / 2), 0);
  // An arena of that size takes a real clip.
  const auto arena = Arena::reserve(need(12));
  const ArenaScope scope(*arena);
  t.vae.set_micro_batch(chosen);
  const Tensor latent = t.vae.encode(t.vae.whole(33), 32, 32, Clip{33, 32, 32}, nullptr);
  t.vae.decode(latent, 33, [](std::int64_t, const Tensor&) {});
}

}  // namespace
}  // namespace weft::test
