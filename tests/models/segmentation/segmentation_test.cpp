// The networks of semantic segmentation: sizes, pairs, shapes, statistics, memory.
#include "tests/models/segmentation/fixture.h"

#include <gmock/gmock.h>

#include "core/error.h"

namespace weft::test {
namespace {

std::int64_t trainable(Segmentation& net, std::string_view prefix) {
  std::int64_t n = 0;
  for (const auto& p : net.params().all())
    if (p->trainable && p->name.starts_with(prefix)) n += p->shape.numel();
  return n;
}
std::int64_t count(Segmentation& net, const std::function<bool(const Parameter&)>& what) {
  return std::ranges::count_if(net.params().all(), [&](const auto& p) { return what(*p); });
}

// Figures of the original modules.
struct Sizes {
  const char *encoder, *decoder;
  std::int64_t encoder_values, decoder_values;
  int norms;
  double gmac_infer, gmac_train;  // of both at 512 x 512
};
class SegmentationSizes : public testing::TestWithParam<Sizes> {};

TEST_P(SegmentationSizes, AreTheOriginals) {
  const Sizes& s = GetParam();
  Segmentation net(pair_of(s.encoder, s.decoder, 150));
  EXPECT_EQ(trainable(net, "encoder."), s.encoder_values);
  EXPECT_EQ(trainable(net, "decoder."), s.decoder_values);
  EXPECT_EQ(count(net, [](const Parameter& p) { return p.name.ends_with("._running_iter"); }),
            s.norms);
  EXPECT_NEAR(net.flops(512, 512) / 2e9, s.gmac_infer,
              0.16);  // figures are sums of two rounded ones
  EXPECT_NEAR(net.flops(512, 512, true) / 2e9, s.gmac_train, 0.16);
}
INSTANTIATE_TEST_SUITE_P(
    Pairs, SegmentationSizes,
    testing::Values(
        Sizes{"resnet50dilated", "ppm_deepsup", 23'631'808, 27'947'308, 61, 184.4, 204.0},
        Sizes{"resnet18dilated", "ppm_deepsup", 11'324'992, 13'241'644, 29, 104.2, 105.5},
        Sizes{"resnet101dilated", "ppm_deepsup", 42'623'936, 27'947'308, 112, 262.1, 281.8},
        Sizes{"mobilenetv2dilated", "c1_deepsup", 1'811'712, 370'220, 53, 8.7, 9.2},
        Sizes{"hrnetv2", "c1", 65'325'120, 1'193'910, 306, 104.3, 104.3}),
    [](const auto& one) { return std::string(one.param.encoder); });

TEST(SegmentationTest, WeightDecayIsForConvolutionsAlone) {
  Segmentation net(pair_of("resnet50dilated", "ppm_deepsup", 150));
  const auto in = [&](int group) {
    return count(net, [&](const Parameter& p) { return p.trainable && p.group == group; });
  };
  EXPECT_EQ(in(Segmentation::encoder_matrices) + in(Segmentation::decoder_matrices), 63);
  EXPECT_EQ(in(Segmentation::encoder_vectors) + in(Segmentation::decoder_vectors), 187 - 63);
  for (const auto& p : net.params().all()) {
    if (!p->trainable) continue;
    const bool matrix =
        p->group == Segmentation::encoder_matrices || p->group == Segmentation::decoder_matrices;
    EXPECT_EQ(matrix, p->shape.rank() == 4) << p->name;
    const bool encoder =
        p->group == Segmentation::encoder_matrices || p->group == Segmentation::encoder_vectors;
    EXPECT_EQ(encoder, p->name.starts_with("encoder.")) << p->name;
  }
}

TEST(SegmentationTest, ResNeXtHasTheWidthsOfTheOriginal) {
  Segmentation net(pair_of("resnext101", "upernet"));
  const auto shape = [&](const char* name) { return net.params().find(name)->shape; };
  EXPECT_EQ(shape("encoder.layer1.0.conv1.weight"), (Shape{128, 128, 1, 1}));
  EXPECT_EQ(shape("encoder.layer1.0.conv2.weight"), (Shape{128, 4, 3, 3}));
  EXPECT_EQ(shape("encoder.layer4.2.conv2.weight"), (Shape{1024, 32, 3, 3}));
  EXPECT_EQ(shape("encoder.layer4.2.conv3.weight"), (Shape{2048, 1024, 1, 1}));
  EXPECT_EQ(shape("encoder.layer4.0.downsample.0.weight"), (Shape{2048, 1024, 1, 1}));
}

// Every pair: what the original allows gives logits of the promised size, the rest is refused with
// a hint.
TEST(SegmentationTest, EveryPairHasTheSizeThatItPromises) {
  const auto arena = Arena::planning();
  const ArenaScope scope(*arena);
  int refused = 0;
  for (const std::string& encoder : segmentation_encoders())
    for (const std::string& decoder : segmentation_decoders()) {
      SCOPED_TRACE(encoder + " + " + decoder);
      if (!segmentation_misfit(encoder, decoder).what.empty()) {
        ++refused;
        try {
          Segmentation net(pair_of(encoder, decoder));
          ADD_FAILURE() << "accepted";
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), Exit::usage);
          EXPECT_THAT(e.what(), testing::HasSubstr(encoder));
          EXPECT_THAT(e.hint(), testing::HasSubstr("take "));
        }
        continue;
      }
      Net n(pair_of(encoder, decoder), Net::laid_out);
      const std::int64_t rate = n.net.label_rate(), side = n.net.stride();
      EXPECT_EQ(64 % side, 0);
      const bool dilated = encoder.ends_with("dilated");
      EXPECT_EQ(rate, encoder == "hrnetv2" || decoder.starts_with("upernet") ? 4
                      : dilated                                              ? 8
                                                                             : 32);
      const bool aux = n.net.has_aux() && dilated;
      Tape tape(Tape::Mode::infer);
      const nn::Context c{tape, n.net.params()};
      const Var image = make_var(Tensor::empty({2, 1, 64, 96, 3}, DType::f32), false);
      const auto logits = n.net.forward(c, image, n.group, {}, aux);
      const Shape expected{2, 1, 64 / rate, 96 / rate, 7};
      EXPECT_EQ(logits.main->value.shape(), expected);
      ASSERT_EQ(logits.aux != nullptr, aux);
      if (aux) {
        EXPECT_EQ(logits.aux->value.shape(), expected);
      }
      if (n.net.has_aux() && !dilated) {
        EXPECT_THROW(n.net.forward(c, image, n.group, {}, true), Error);
      }
    }
  EXPECT_EQ(refused, 2 * 4 + 2);  // upernet on R18 twice, MobileNet, HRNet; deepsup on HRNet
}

// As if another rank had the same images: sums double.
class Twin : public Communicator {
 public:
  int exchanges = 0;
  int rank() const override { return 0; }
  int size() const override { return 2; }
  Ticket all_reduce_sum(Tensor t, CommDtype) override {
    for (double& v : t.span<double>()) v *= 2;
    return static_cast<Ticket>(++exchanges);
  }
  Ticket reduce_scatter_sum(Tensor, CommDtype) override { return 0; }
  Ticket all_gather(Tensor) override { return 0; }
  Ticket all_to_all(Tensor, std::span<const std::int64_t>, Tensor,
                    std::span<const std::int64_t>) override {
    return 0;
  }
  double wait(Ticket) override { return 0; }
  double busy_seconds() const override { return 0; }
  void progress(std::int64_t, const char*) override {}
  void set_timeout(double) override {}
  void check() override {}
  std::string describe() const override { return "twin"; }
};

// Norms that do not depend on each other share an exchange.
class Exchanges : public OpTest,
                  public testing::WithParamInterface<std::tuple<const char*, const char*, int>> {};
TEST_P(Exchanges, OnePerLayerOfTheCriticalPath) {
  const auto [encoder, decoder, exchanges] = GetParam();
  Net n(pair_of(encoder, decoder), Net::zeros);
  Twin twin;
  n.group.ranks = &twin;
  n.group.size = 2;
  run_step(n, 1, 64, 64);
  EXPECT_EQ(twin.exchanges, 2 * exchanges);
}
INSTANTIATE_TEST_SUITE_P(
    Pairs, Exchanges,
    testing::Values(
        // 23 norms of the encoder, 4 of them beside another; the branches and the second head
        // together; the last.
        std::tuple("resnet18dilated", "ppm_deepsup", 23 - 4 + 2),
        std::tuple("mobilenetv2dilated", "c1_deepsup", 51 + 1),
        // Stem 2, layer1 12; a stage 1, a module 8 and as many as its longest chain; the decoder.
        std::tuple("hrnetv2", "c1", 2 + 12 + (1 + 9) + (1 + 4 * 10) + (1 + 3 * 11) + 1)),
    [](const auto& one) { return std::string(std::get<0>(one.param)); });

// A twin with the same images changes neither the mean nor the variance. The two forms differ by
// where eps stands alone.
TEST_F(OpTest, SegmentationOnTwoEqualRanksHasTheLossOfOne) {
  Net one(pair_of("mobilenetv2dilated", "c1_deepsup")),
      two(pair_of("mobilenetv2dilated", "c1_deepsup"));
  Twin twin;
  two.group.ranks = &twin;
  two.group.size = 2;
  one.group.eps = two.group.eps = 1e-12f;
  const double a = run_step(one, 2, 64, 64).loss, b = run_step(two, 2, 64, 64).loss;
  EXPECT_NEAR(a, b, 1e-5 * a);
  EXPECT_GT(twin.exchanges, 0);
}

class Recompute : public OpTest,
                  public testing::WithParamInterface<std::pair<const char*, const char*>> {};
TEST_P(Recompute, KeepsTheBitsAndThePlansPeak) {
  const auto [encoder, decoder] = GetParam();
  Net n(pair_of(encoder, decoder));
  std::vector<std::vector<float>> first;
  StepResult whole;
  for (const std::int64_t recomputed : {std::int64_t{0}, n.net.blocks() / 2}) {
    const StepResult r = run_step(n, 2, 32, 64, recomputed);
    {
      const auto planning = Arena::planning();
      const ArenaScope scope(*planning);
      EXPECT_EQ(run_step(n, 2, 32, 64, recomputed).peak, r.peak) << recomputed;
    }
    if (recomputed == 0) whole = r;
    EXPECT_EQ(r.loss, whole.loss);
    EXPECT_TRUE(recomputed == 0 || r.peak < whole.peak);
    std::size_t i = 0;
    for (const auto& p : n.net.params().all()) {
      EXPECT_TRUE(!p->trainable || p->grad_written) << p->name;
      const std::vector<float> now = floats(p->trainable ? p->grad : p->value);
      if (recomputed == 0)
        first.push_back(now);
      else
        EXPECT_EQ(now, first[i++]) << p->name;
      // Running statistics as they were, for the second time.
      if (!p->trainable)
        p->set(0, std::vector<float>(static_cast<std::size_t>(p->shape.numel()), p->init.a));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Pairs, Recompute,
                         testing::Values(std::pair("resnet18dilated", "ppm_deepsup"),
                                         std::pair("mobilenetv2dilated", "c1_deepsup"),
                                         std::pair("resnet50dilated", "upernet_lite"),
                                         std::pair("hrnetv2", "c1")),
                         [](const auto& one) { return std::string(one.param.first); });

TEST_F(OpTest, SegmentationTrainsInBf16) {
  Net n(pair_of("mobilenetv2dilated", "c1_deepsup"));
  Net low(pair_of("mobilenetv2dilated", "c1_deepsup"), Net::bf16);
  EXPECT_NEAR(run_step(low, 2, 64, 64, 0, DType::bf16).loss, run_step(n, 2, 64, 64).loss, 0.1);
}

}  // namespace
}  // namespace weft::test
