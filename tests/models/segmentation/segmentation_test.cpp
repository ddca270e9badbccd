// The networks of semantic segmentation: sizes, pairs, shapes, statistics, memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "models/segmentation/classes.h"
#include "models/segmentation/options.h"
#include "models/segmentation/segmentation.h"
#include "nn/image_ops.h"
#include "tests/nn/fixture.h"

namespace weft::test {
namespace {

SegmentationDeck pair_of(const std::string& encoder, const std::string& decoder,
                         std::int64_t classes = 7) {
  SegmentationDeck deck;
  deck.encoder = encoder;
  deck.decoder = decoder;
  deck.num_classes = classes;
  deck.dropout = 0;
  return deck;
}

struct Net {
  enum How { f32, bf16, zeros, laid_out };  // laid_out: without memory for gradients, for plans
  explicit Net(const SegmentationDeck& deck, How how = f32) : net(deck) {
    net.params().allocate(1 << 20, how == bf16, how != laid_out);
    if (how == zeros || how == laid_out) return;
    start();
    net.params().refresh_working();
  }
  // As initialise(), from numbers that are cheaper: these networks have up to 66 million.
  void start() {
    for (const auto& p : net.params().all()) {
      const std::span<float> values = p->value.span<float>();
      const bool normal = p->init.kind == Init::Kind::normal;
      const float half = p->init.a * (normal ? 1.7320508f : 1.0f);
      std::uint32_t state = static_cast<std::uint32_t>(std::hash<std::string>()(p->name));
      for (float& v : values) {
        state = 1664525u * state + 1013904223u;
        v = p->init.kind == Init::Kind::constant
                ? p->init.a
                : half * (static_cast<float>(state >> 8) * 0x1p-23f - 1);
      }
    }
  }
  Segmentation net;
  nn::BatchNormGroup group;
};

// Labels u8 of a batch: classes and some unlabelled.
Tensor some_labels(std::int64_t n, std::int64_t h, std::int64_t w, int classes) {
  Vec v(static_cast<std::size_t>(n * h * w));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<double>(i * 7 % static_cast<std::size_t>(classes + 1));
  return to_tensor(v, {n, 1, h, w}, DType::u8);
}

struct StepResult {
  double loss = 0;
  std::size_t peak = 0;
};

// Forward and backward on N images of H x W in the current arena; loss = cross entropy + 0.4 that
// of the deep supervision.
StepResult run_step(Net& n, std::int64_t N, std::int64_t H, std::int64_t W,
                    std::int64_t recomputed = 0, DType dtype = DType::f32, int classes = 7) {
  Arena& arena = Arena::current();
  const Shape shape{N, 1, H, W, 3};
  const bool planning = arena.is_planning();
  const Tensor pixels = planning ? Tensor::empty(shape, dtype)
                                 : to_tensor(random_values(shape.numel(), 3), shape, dtype);
  const std::int64_t r = n.net.label_rate(), h = (H + r - 1) / r, w = (W + r - 1) / r;
  const Tensor labels =
      planning ? Tensor::empty({N, 1, h, w}, DType::u8) : some_labels(N, h, w, classes);
  n.net.params().begin_step([](int) {});
  const std::size_t before = arena.used();
  arena.reset_peak();
  StepResult result;
  {
    Tape tape;
    const nn::Context c{tape, n.net.params()};
    const auto logits =
        n.net.forward(c, make_var(pixels, false), n.group, {}, n.net.has_aux(), recomputed);
    const Tensor ones = planning ? Tensor::empty({classes}, DType::f32)
                                 : to_tensor(Vec(static_cast<std::size_t>(classes), 1), {classes});
    const Tensor main = nn::class_loss(c, logits.main, labels, ones, {}, 1.0f);
    Tensor aux;
    if (logits.aux) aux = nn::class_loss(c, logits.aux, labels, ones, {}, 0.4f);
    if (!planning) {
      const auto mean = [](const Tensor& s) {
        return s.data<double>()[ops::class_nll] / s.data<double>()[ops::class_weight];
      };
      result.loss = mean(main) + (aux.defined() ? 0.4 * mean(aux) : 0);
    }
    tape.backward();
  }
  EXPECT_EQ(arena.used(), before);
  result.peak = arena.peak() - before;
  return result;
}

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
      if (const Misfit misfit = segmentation_misfit(encoder, decoder); !misfit.what.empty()) {
        ++refused;
        EXPECT_THAT(misfit.what, testing::HasSubstr(encoder));
        EXPECT_FALSE(misfit.hint.empty());
        EXPECT_THROW(Segmentation{pair_of(encoder, decoder)}, Error);
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
  void progress(std::int64_t, Phase) override {}
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
      if (!p->trainable) p->set(0, std::vector<float>(p->shape.numel(), p->init.a));
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

// Weight files of segmentation: a pair, one file of both, ImageNet's encoders, and what is said of
// others.

using testing::HasSubstr;

class SegmentationWeights : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() /
           ("weft_segmentation_weights_" + std::to_string(::getpid()));
    std::filesystem::create_directories(dir_);
    for (const auto& p : net_.net.params().all())
      if (p->name.find("running") != std::string::npos)
        p->set(0, std::vector<float>(p->shape.numel(), 0.25f));
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  static bool is_tmp(const std::string& name) { return name.find("._") != std::string::npos; }

  // The parameters whose names begin with `prefix`, without it where `cut`; `older`: without the
  // buffers of training on several GPUs. `spare` names a tensor in addition, of f32; the
  // counts of batch norm of i64.
  std::string file(const std::string& prefix, bool cut, bool older, const std::string& spare,
                   const std::string& left_out = "") {
    std::vector<SafetensorWrite> list;
    for (const auto& p : net_.net.params().all()) {
      if (!p->name.starts_with(prefix) || (older && is_tmp(p->name)) || p->name == left_out)
        continue;
      list.push_back({cut ? p->name.substr(prefix.size()) : p->name,
                      DType::f32,
                      {p->shape.dims().begin(), p->shape.dims().end()},
                      std::as_bytes(p->value.span<float>())});
    }
    static const std::int64_t zero = 0;
    const bool counts = spare.ends_with("tracked");
    const auto bytes = std::as_bytes(std::span(&zero, 1)).first(counts ? 8 : 4);
    if (!spare.empty()) list.push_back({spare, counts ? DType::i64 : DType::f32, {}, bytes});
    const std::string path = dir_ / (std::to_string(files_++) + ".safetensors");
    write_safetensors(path, list);
    return path;
  }

  // What loading says; nothing if it works.
  static std::string complaint(const std::string& whole, const SegmentationDeck& deck,
                               Segmentation& into) {
    try {
      load_segmentation(whole, deck, into.params());
    } catch (const Error& e) {
      return std::string(e.what()) + " | " + e.hint();
    }
    return "";
  }

  void expect_loaded(Segmentation& other, const std::string& prefix, bool older) {
    for (const auto& p : net_.net.params().all()) {
      if (!p->name.starts_with(prefix)) continue;
      const Parameter& q = *other.params().find(p->name);
      if (older && is_tmp(p->name))
        EXPECT_EQ(floats(q.value)[0], p->init.a) << p->name;
      else
        EXPECT_TRUE(same_bits(p->value, q.value)) << p->name;
    }
  }

  const SegmentationDeck pair_ = pair_of("mobilenetv2dilated", "c1_deepsup");
  Net net_{pair_};
  std::filesystem::path dir_;
  int files_ = 0;
};

TEST_F(SegmentationWeights, OneFileOrTwoOldOrNew) {
  for (const bool older : {false, true}) {
    const std::string counted = "features.0.1.num_batches_tracked";
    Net one(pair_, Net::zeros), two(pair_, Net::zeros);
    EXPECT_EQ(complaint(file("", false, older, "encoder." + counted), pair_, one.net), "");
    expect_loaded(one.net, "", older);
    SegmentationDeck halves = pair_;
    halves.weights_encoder = file("encoder.", true, older, counted);
    halves.weights_decoder = file("decoder.", true, older, "cbr.1.num_batches_tracked");
    EXPECT_EQ(complaint("", halves, two.net), "");
    expect_loaded(two.net, "", older);
    EXPECT_THAT(complaint("x.safetensors", halves, two.net), HasSubstr("model.weights_encoder"));
  }
}

TEST_F(SegmentationWeights, EncoderOfImageNetAlone) {
  Net n(pair_, Net::zeros);
  SegmentationDeck deck = pair_;
  deck.weights_encoder = file("encoder.", true, true, "classifier.1.weight");
  EXPECT_EQ(complaint("", deck, n.net), "");
  expect_loaded(n.net, "encoder.", true);
  EXPECT_EQ(floats(n.net.params().find("decoder.conv_last.weight")->value)[0], 0);
}

TEST_F(SegmentationWeights, SaysWhatIsMissingAndWhatIsLeftOver) {
  Net n(pair_, Net::zeros);
  SegmentationDeck deck = pair_;
  deck.weights_decoder = file("decoder.", true, false, "", "decoder.cbr.1.running_var");
  EXPECT_THAT(complaint("", deck, n.net), HasSubstr("has no tensor cbr.1.running_var"));
  deck.weights_decoder = file("decoder.", true, false, "cbr.2.weight");
  EXPECT_THAT(complaint("", deck, n.net), HasSubstr("\"cbr.2.weight\" is not a parameter"));
  // A classifier of ImageNet has no place in a decoder.
  deck.weights_decoder = file("decoder.", true, false, "fc.weight");
  EXPECT_THAT(complaint("", deck, n.net), HasSubstr("\"fc.weight\" is not a parameter"));
  EXPECT_THAT(complaint(file("encoder.", false, false, ""), pair_, n.net),
              HasSubstr("has no tensor decoder."));
}

using ::testing::ElementsAre;

class ClassNames : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(file_); }
  std::filesystem::path file_ =
      std::filesystem::temp_directory_path() / fmt::format("weft_names_{}", getpid());
};

TEST_F(ClassNames, FromWhereTheyAreKnown) {
  Deck deck;
  deck.get<SegmentationDeck>().num_classes = 3;
  EXPECT_THAT(class_names(deck), ElementsAre("class 0", "class 1", "class 2"));
  EXPECT_THAT(class_names(deck, {"a", "b"}), ElementsAre("a", "b", "class 2"));
  std::ofstream(file_) << "x\ny\nz\n";
  deck.get<SegmentationDeck>().class_names = file_.string();
  EXPECT_THAT(class_names(deck), ElementsAre("x", "y", "z"));
  EXPECT_THAT(class_names(deck, {"a", "b", "c"}), ElementsAre("x", "y", "z"));
  deck.get<SegmentationDeck>().num_classes = 4;
  EXPECT_THROW(class_names(deck), Error);
  std::ofstream(file_) << "a\nb\nc\ncaf\xe9\n";
  EXPECT_THROW(class_names(deck), Error);
}

TEST(Palette, ColoursDiffer) {
  EXPECT_EQ(class_colour(-1), Rgb{});
  EXPECT_EQ(class_colour(0), (Rgb{120, 120, 120}));
  EXPECT_EQ(class_colour(149), (Rgb{0x5c, 0, 255}));
  const std::vector<Rgb> all = label_palette(255);
  ASSERT_EQ(all.size(), 256);
  std::set<int> different;
  for (const Rgb& c : all) different.insert(c.r << 16 | c.g << 8 | c.b);
  EXPECT_EQ(different.size(), 256) << "and black";
  EXPECT_EQ(label_palette(150)[1], class_colour(0)) << "ADE20K's";
}

// CIELAB of sRGB under D65.
std::array<double, 3> lab(Rgb c) {
  const auto linear = [](double v) {
    return v <= 0.04045 ? v / 12.92 : std::pow((v + 0.055) / 1.055, 2.4);
  };
  const double r = linear(c.r / 255.0), g = linear(c.g / 255.0), b = linear(c.b / 255.0);
  const auto root = [](double t) {
    return t > 216.0 / 24389 ? std::cbrt(t) : (24389.0 / 27 * t + 16) / 116;
  };
  const double x = root((0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047),
               y = root(0.2126729 * r + 0.7151522 * g + 0.0721750 * b),
               z = root((0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883);
  return {116 * y - 16, 500 * (x - y), 200 * (y - z)};
}

TEST(Palette, ColoursCanBeToldApart) {
  const auto closest = [](std::int64_t classes) {
    const std::vector<Rgb> all = label_palette(classes);
    double least = 1e9;
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) {
        const auto a = lab(all[i]), b = lab(all[j]);
        least = std::min(least, std::hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]));
      }
    return least;
  };
  EXPECT_GT(closest(11), 51);  // of ADE20K's first 11: 6.8
  EXPECT_GT(closest(21), 35);
  EXPECT_GT(closest(64), 22);
}

TEST(Palette, OfTheDataWhereItTellsTheClassesApart) {
  const std::vector<std::uint8_t> own = {0, 0, 0, 128, 0, 0, 0, 128, 0};
  const std::vector<Rgb> taken = label_palette(2, own);
  EXPECT_EQ(taken[1], (Rgb{128, 0, 0}));
  EXPECT_EQ(taken[2], (Rgb{0, 128, 0}));
  EXPECT_EQ(css_colour(taken[2]), "#008000");
  EXPECT_EQ(label_palette(3, own), label_palette(3)) << "a class too few";
  const std::vector<std::uint8_t> grey = {0, 0, 0, 1, 1, 1, 2, 2, 2}, same(9, 7);
  EXPECT_EQ(label_palette(2, grey), label_palette(2));
  EXPECT_EQ(label_palette(2, same), label_palette(2));
}

class OwnPalette : public ClassNames {
 protected:
  std::vector<Rgb> of(const std::vector<std::string>& key) {
    Deck deck;
    deck.get<SegmentationDeck>().num_classes = 2;
    deck.get<SegmentationDeck>().palette = key;
    return label_palette(deck, std::vector<std::uint8_t>{0, 0, 0, 128, 0, 0, 0, 128, 0});
  }
  std::string complaint(const std::vector<std::string>& key) {
    try {
      of(key);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      return e.what();
    }
    return "";
  }
};

TEST_F(OwnPalette, OfTheDeckComesFirst) {
  const std::vector<Rgb> wanted = {{}, {0x80, 0x40, 0x81}, {0xf4, 0x23, 0xe8}};
  EXPECT_EQ(of({}), (std::vector<Rgb>{{}, {128, 0, 0}, {0, 128, 0}}));
  EXPECT_EQ(of({"#804081", "#F423e8"}), wanted);
  std::ofstream(file_) << "#804081\n\n 244 35 232 \n";
  EXPECT_EQ(of({file_.string()}), wanted);
}

TEST_F(OwnPalette, WhatIsNoneIsNamed) {
  EXPECT_THAT(complaint({"#804081"}), HasSubstr("1 colours, and model.num_classes = 2"));
  for (const char* text : {"#80408", "#8040811", "#80408g", "red", "1 2", "1 2 300", "1 2 3 4"})
    EXPECT_THAT(complaint({"#804081", text}), HasSubstr(fmt::format("\"{}\" is no colour", text)));
  EXPECT_THROW(of({"no_such_file"}), Error);
}

TEST(Legend, HasEveryClass) {
  const std::vector<std::string> names = {"road", "a<b & c"};
  const std::vector<Rgb> palette = {{}, {1, 2, 3}, {255, 0, 16}};
  const std::string svg = legend_svg(names, palette);
  EXPECT_THAT(svg, HasSubstr("fill=\"#010203\""));
  EXPECT_THAT(svg, HasSubstr(">0 road</text>"));
  EXPECT_THAT(svg, HasSubstr(">1 a&lt;b &amp; c</text>"));
}

// Four labels: unlabelled and three classes, of which the last does not occur.
class Counted : public LabelledImages {
 public:
  Counted() {
    counts_.add(std::vector<std::uint8_t>{0, 1, 1, 1, 2, 2, 2, 2, 2, 2});
    counts_.add(std::vector<std::uint8_t>{0, 0, 0, 0, 0, 0, 2, 2, 2, 2});
  }
  std::int64_t count() const override { return 2; }
  ImageSize size(std::int64_t) const override { return {1, 10}; }
  std::string name(std::int64_t) const override { return ""; }
  void read(std::int64_t, LabelledImage&) const override {}
  std::int64_t num_classes() const override { return 3; }
  const std::vector<std::string>& class_names() const override { return names_; }
  LabelCounts label_counts() const override { return counts_; }

 private:
  LabelCounts counts_;
  std::vector<std::string> names_;
};

TEST(FrequencyWeights, AreTheFormulas) {
  // Class 0 has 3 of the 9 labelled pixels of its image, class 1 has 10 of 13; 13 in all.
  const double first = 3.0 / 9, second = 10.0 / 13, median = (first + second) / 2;
  EXPECT_THAT(frequency_weights(Counted(), 3, "median_frequency"),
              ElementsAre(testing::FloatNear(static_cast<float>(median / first), 1e-6f),
                          testing::FloatNear(static_cast<float>(median / second), 1e-6f), 1.0f));
  EXPECT_THAT(frequency_weights(Counted(), 3, "inverse_frequency"),
              ElementsAre(testing::FloatNear(13.0f / (2 * 3), 1e-6f),
                          testing::FloatNear(13.0f / (2 * 10), 1e-6f), 1.0f));
  EXPECT_THROW(frequency_weights(*make_shapes("shapes:images=2"), 6, "median_frequency"), Error);
}

}  // namespace
}  // namespace weft::test
