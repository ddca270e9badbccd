// The networks with few channels and weights that are drawn: sizes, memory, noise. What they
// compute is held to the originals by validation/check_gfpgan.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/sadtalker/gfpgan/enhancer.h"

namespace weft {
namespace {

constexpr std::size_t room = std::size_t{1} << 30;

ModelSource drawn(int seed) {
  return {"weights", fmt::format("random:{}", seed), "", false, MPI_COMM_SELF};
}

Tensor picture(std::int64_t side, DType dtype = DType::f32) {
  Tensor x = Tensor::empty({1, 1, side, side, 3}, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const float v = std::sin(0.013f * static_cast<float>(i)) * 0.8f;
    if (dtype == DType::f32)
      x.data<float>()[i] = v;
    else
      x.data<bf16>()[i] = bf16(v);
  }
  return x;
}

std::vector<float> values(const Tensor& t) {
  const auto s = t.span<float>();
  return {s.begin(), s.end()};
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double off = 0, all = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    off += std::pow(static_cast<double>(a[i]) - b[i], 2);
    all += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(off / all);
}

constexpr RestorerSize small{.side = 32, .features = 12, .most_channels = 16};

struct SmallRestorer {
  explicit SmallRestorer(bool bf16 = false, const RestorerSize& size = small) : net(size) {
    drawn(3).load(net.params(), restorer_names(), bf16);
    net.prepare();
  }
  Restorer net;
};

TEST(Restorer, HasTheReleasedShapes) {
  // 86.4 million parameters with what is not read here: the layers of a style, the U-Net's colours.
  Restorer net;
  std::int64_t count = 0;
  for (const auto& p : net.params().all()) count += p->shape.numel();
  EXPECT_NEAR(static_cast<double>(count), 86.44e6 - 8 * (512 * 512 + 512), 1e4);
  EXPECT_NEAR(net.flops(), 2 * 197.7e9, 12e9);
  EXPECT_EQ(net.noise_sides(), (std::vector<std::int64_t>{4, 8, 8, 16, 16, 32, 32, 64, 64, 128, 128,
                                                          256, 256, 512, 512}));
  const auto shape = [&](const char* name) { return net.params().find(name)->shape; };
  EXPECT_EQ(shape("stylegan_decoder.style_convs.13.modulated_conv.weight"),
            (Shape{1, 64, 64, 3, 3}));
  EXPECT_EQ(shape("stylegan_decoder.to_rgbs.6.modulated_conv.modulation.weight"), (Shape{64, 512}));
  EXPECT_EQ(shape("conv_body_down.6.skip.weight"), (Shape{256, 256, 1, 1}));
  EXPECT_EQ(shape("condition_shift.6.2.bias"), (Shape{32}));
}

TEST(Restorer, TheSameKeyGivesTheSameFace) {
  const SmallRestorer r;
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  const Tensor image = picture(32);
  const std::vector<float> face = values(r.net.run(image, r.net.draw_noise(7, 0)));
  EXPECT_EQ(std::ssize(face), 32 * 32 * 3);
  EXPECT_TRUE(std::ranges::all_of(face, [](float v) { return std::isfinite(v); }));
  EXPECT_EQ(values(r.net.run(image, r.net.draw_noise(7, 0))), face);
  // Another key, and another face of the frame, differ, though not by much.
  for (const auto& [key, number] : {std::pair{8, 0}, {7, 1}}) {
    const double off = distance(values(r.net.run(image, r.net.draw_noise(key, number))), face);
    EXPECT_GT(off, 1e-3);
    EXPECT_LT(off, 1);
  }
  // No layer has another's noise.
  const std::vector<Tensor> noise = r.net.draw_noise(7, 0);
  EXPECT_NE(values(noise[1]), values(noise[2]));
  double square = 0;
  for (const float v : values(noise.back())) square += v * v / 1024;
  EXPECT_NEAR(square, 1, 0.15);
}

TEST(Restorer, Bf16IsNear) {
  const SmallRestorer exact, rough(true);
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  const std::vector<Tensor> noise = exact.net.draw_noise(1, 0);
  const std::vector<float> face = values(exact.net.run(picture(32), noise));
  EXPECT_LT(distance(values(rough.net.run(picture(32, DType::bf16), noise)), face), 0.05);
}

TEST(Restorer, DryRunTakesWhatARunTakes) {
  const SmallRestorer r;
  const auto peak = [&](Arena& arena) {
    const ArenaScope scope(arena);
    r.net.run(Tensor::empty({1, 1, 32, 32, 3}, DType::f32), r.net.draw_noise(0, 0));
    return arena.peak();
  };
  const auto real = Arena::reserve(room), planning = Arena::planning();
  EXPECT_EQ(peak(*planning), peak(*real));
  EXPECT_EQ(real->used(), 0u);
}

TEST(ParseNet, GivesTheClassOfTheGreatestLogit) {
  ParseNet net(8);
  drawn(4).load(net.params(), parse_net_names(), false);
  net.fold();
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  const Tensor image = picture(64), logits = net.logits(image), found = net.parse(image);
  ASSERT_EQ(logits.shape(), (Shape{1, 1, 64, 64, 19}));
  for (std::int64_t p = 0; p < 64 * 64; ++p) {
    const auto scores = logits.span<float>().subspan(p * 19, 19);
    ASSERT_EQ(found.data<std::uint8_t>()[p], std::ranges::max_element(scores) - scores.begin());
  }
  EXPECT_NEAR(ParseNet(64).params().total_elements() / 1e6, 21.30, 0.05);
}

// A bright disc with two eyes and a mouth, on grey.
ImageFile drawn_frame(std::int64_t height, std::int64_t width) {
  ImageFile frame{height, width, {}};
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x) {
      const auto near = [&](double cx, double cy, double r) {
        return std::hypot(static_cast<double>(x) - cx, static_cast<double>(y) - cy) < r;
      };
      const bool dark = near(70, 60, 5) || near(100, 60, 5) || near(85, 90, 8);
      const std::uint8_t level = dark ? 30 : near(85, 70, 40) ? 220 : 128;
      frame.values.insert(frame.values.end(), {level, level, static_cast<std::uint8_t>(level / 2)});
    }
  return frame;
}

TEST(Enhancer, RestoresFacesAndNothingElse) {
  const Deck deck;
  FaceDetector detector(deck, drawn(1));
  Enhancer enhancer(deck, drawn(2), drawn(3), detector, {.restorer = 32, .parser = 4});
  const auto arena = Arena::reserve(room);
  const ArenaScope scope(*arena);
  const ImageFile frame = drawn_frame(150, 180);
  FacePoints face{{{70, 60}, {100, 60}, {85, 76}, {74, 90}, {96, 90}}};
  for (const int scale : {1, 2}) {
    const ImageFile plain = enhancer.enhance(frame, {}, scale, 5);
    ASSERT_EQ(plain.height, 150 * scale);
    ASSERT_EQ(plain.width, 180 * scale);
    if (scale == 1) {
      EXPECT_EQ(plain.values, frame.values);
    }
    const ImageFile restored = enhancer.enhance(frame, std::vector{face}, scale, 5);
    // The square of the face is about 122 pixels wide, its border left out: 117.
    std::int64_t changed = 0, far = 0;
    for (std::int64_t i = 0; i < restored.height * restored.width; ++i) {
      const std::int64_t x = i % restored.width / scale, y = i / restored.width / scale;
      const auto k = static_cast<std::size_t>(3 * i);
      if (restored.values[k] == plain.values[k]) continue;
      ++changed;
      far += x < 20 || x > 150 || y < 2 || y > 130;
    }
    EXPECT_GT(changed, 100) << scale;
    EXPECT_EQ(far, 0) << scale;
  }
  EXPECT_EQ(arena->used(), 0u);
  EXPECT_LE(arena->peak(), enhancer.plan(150, 180).bytes);
  EXPECT_GE(enhancer.plan(150, 180).bytes, detector.plan(150, 180).bytes);

  // Eyes that are 4.9 pixels apart; points that make no face; a face outside of the frame.
  FacePoints near = face, same, outside = face;
  near[1] = {74.9f, 60};
  same.fill({50, 50});
  same[1] = {std::nanf(""), 50};
  for (auto& p : outside) p[0] += 5000;
  EXPECT_EQ(enhancer.enhance(frame, std::vector{near, same, outside}, 1, 5).values, frame.values);
  // Random weights find no face.
  EXPECT_EQ(enhancer.enhance(frame, 1, 5).values, frame.values);
  EXPECT_GT(enhancer.flops(3), 2.9 * enhancer.flops(1));
}

}  // namespace
}  // namespace weft
