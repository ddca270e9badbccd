// CLIP's encoders against transformers' numbers for weights that both make by one formula
// (validation/check_clip.py --numbers, which also holds them to transformers on random weights),
// its tokenizer against transformers' ids, and what a file of weights must be.
#include "models/clip/clip.h"

#include <gmock/gmock.h>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "models/clip/clip_tokenizer.h"
#include "ops/dispatch.h"
#include "tests/folder.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// In -0.5 to 0.5, by a hash of name and place.
double formula(const std::string& name, std::uint32_t i) {
  std::uint32_t x = 2166136261u;
  for (const char c : name) x = (x ^ static_cast<unsigned char>(c)) * 16777619u;
  x += i * 2654435761u;
  x = (x ^ (x >> 16)) * 0x45d9f3bu;
  x ^= x >> 16;
  return x / 4294967296.0 - 0.5;
}

struct NamedShape {
  std::string name;
  std::vector<std::int64_t> shape;
};

// Pictures of 12x12 in patches of 4x4, 128 channels; captions of 16 tokens out of 600, 64 channels.
std::vector<NamedShape> small_model() {
  std::vector<NamedShape> all;
  const auto tower = [&](const std::string& prefix, std::int64_t C, std::int64_t F) {
    for (int i = 0; i < 2; ++i) {
      const std::string layer = prefix + "encoder.layers." + std::to_string(i) + ".";
      for (const char* p : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
        all.push_back({layer + "self_attn." + p + ".weight", {C, C}});
        all.push_back({layer + "self_attn." + p + ".bias", {C}});
      }
      for (const char* n : {"layer_norm1", "layer_norm2"})
        for (const char* p : {".weight", ".bias"}) all.push_back({layer + n + p, {C}});
      all.push_back({layer + "mlp.fc1.weight", {F, C}});
      all.push_back({layer + "mlp.fc1.bias", {F}});
      all.push_back({layer + "mlp.fc2.weight", {C, F}});
      all.push_back({layer + "mlp.fc2.bias", {C}});
    }
  };
  const std::string v = "vision_model.", t = "text_model.";
  all.push_back({v + "embeddings.class_embedding", {128}});
  all.push_back({v + "embeddings.patch_embedding.weight", {128, 3, 4, 4}});
  all.push_back({v + "embeddings.position_embedding.weight", {10, 128}});
  for (const char* n : {"pre_layrnorm", "post_layernorm"})
    for (const char* p : {".weight", ".bias"}) all.push_back({v + n + p, {128}});
  tower(v, 128, 192);
  all.push_back({"visual_projection.weight", {24, 128}});
  all.push_back({t + "embeddings.token_embedding.weight", {600, 64}});
  all.push_back({t + "embeddings.position_embedding.weight", {16, 64}});
  for (const char* p : {".weight", ".bias"}) all.push_back({t + "final_layer_norm" + p, {64}});
  tower(t, 64, 96);
  all.push_back({"text_projection.weight", {24, 64}});
  all.push_back({"logit_scale", {1}});
  return all;
}

void write_model(const std::string& path, const std::vector<NamedShape>& model) {
  std::vector<std::vector<float>> values;
  std::vector<SafetensorWrite> tensors;
  for (const auto& [name, shape] : model) {
    std::int64_t count = 1, inner = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      count *= shape[i];
      if (i > 0) inner *= shape[i];
    }
    std::vector<float>& v = values.emplace_back();
    const bool norm = name.find("norm") != name.npos;
    const double base = norm && name.ends_with("weight") ? 1 : 0;
    const double scale =
        norm || shape.size() < 2 ? 0.4 : 3.0 / std::sqrt(static_cast<double>(inner));
    for (std::int64_t i = 0; i < count; ++i)
      v.push_back(static_cast<float>(base + scale * formula(name, static_cast<std::uint32_t>(i))));
  }
  for (std::size_t i = 0; i < model.size(); ++i)
    tensors.push_back(
        {model[i].name, DType::f32, model[i].shape, std::as_bytes(std::span(values[i]))});
  write_safetensors(path, tensors);
}

const std::vector<Vec> picture_features = {
    {-1.03015497, 0.82107363,  0.80985384,  -0.54505462, -0.58792185, 0.18509160,
     1.02027752,  0.62539561,  -0.26550363, 1.07228502,  -0.58805741, 0.46201696,
     -0.62536958, -0.89775637, 0.95521331,  0.11957921,  0.08075911,  -0.50660612,
     0.46663526,  0.84891119,  -1.15166634, -0.00471732, -0.31868018, 0.16039055},
    {-0.84234415, 0.87331632,  0.68574700,  -0.46488764, -0.81434164, 0.13256427,
     0.61961432,  0.13397806,  0.32856730,  1.21863775,  -0.69210840, 0.34390622,
     -0.62682496, -0.90603440, 0.53570818,  0.71504699,  0.24786594,  0.02448897,
     -0.03203495, 1.26288753,  -1.16921815, -0.30710632, -0.23722989, 0.60897003},
};
const std::vector<Vec> caption_features = {
    {-1.38938962, -1.73658006, -0.48972616, 1.86433548,  -1.34144610, -1.32656279,
     -1.22002688, 1.17319807,  0.88629007,  -0.11706154, 0.01755416,  0.08764517,
     -0.94347448, 0.92437325,  -0.26490694, 0.65120727,  -0.00944523, 0.39809875,
     0.85157012,  1.82066263,  -1.03367196, -0.22736170, 1.51429501,  -0.32828706},
    {-1.46433105, -0.93062093, -0.87785956, 1.70520411,  -0.22440606, -1.41325120,
     -1.27987017, 1.16794611,  1.57878701,  -0.36305281, 0.52916183,  -0.61087977,
     -0.41604439, 1.62182129,  -0.37188534, 0.87349536,  -0.17388960, 0.18909632,
     1.32913251,  1.12241001,  -0.41329314, -0.06627195, 0.44758648,  -0.51003080},
};

class ClipTest : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    write_model(path("clip.safetensors"), small_model());
  }
  WeightFiles files() const { return WeightFiles::open(path("clip.safetensors")); }
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 28);
  ArenaScope scope_{*arena_};
};

Vec row(const Vec& all, std::size_t i) {
  return {all.begin() + static_cast<std::ptrdiff_t>(24 * i),
          all.begin() + static_cast<std::ptrdiff_t>(24 * (i + 1))};
}

TEST_F(ClipTest, ShapeFollowsFromTheWeights) {
  WeightFiles weights = files();
  const ClipShape s = clip_shape(weights);
  EXPECT_EQ(s.side(), 12);
  EXPECT_EQ(s.vision.heads(), 2);
  EXPECT_EQ(s.vision.layers, 2);
  EXPECT_EQ(s.text.heads(), 1);
  EXPECT_EQ(s.text.mlp, 96);
  EXPECT_EQ(s.positions, 16);
  EXPECT_EQ(s.vocabulary, 600);
  EXPECT_EQ(s.channels, 24);
}

TEST_F(ClipTest, PicturesAsTransformers) {
  WeightFiles weights = files();
  const ClipImageEncoder encoder(weights, clip_shape(weights));
  std::vector<std::uint8_t> pixels;
  for (std::uint32_t i = 0; i < 2 * 12 * 12 * 3; ++i)
    pixels.push_back(static_cast<std::uint8_t>((formula("pixels", i) + 0.5) * 256));
  const std::vector<float> features = encoder.encode(pixels);
  const Vec one_by_one(features.begin(), features.end());
  const Vec together = to_values(
      encoder.forward(Tensor::from_host(std::span<const std::uint8_t>(pixels), {2, 12, 12, 3})));
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_LT(relative_error(row(one_by_one, i), picture_features[i]), 1e-5);
    EXPECT_LT(relative_error(row(together, i), picture_features[i]), 1e-5);
  }
}

TEST_F(ClipTest, CaptionsAsTransformers) {
  WeightFiles weights = files();
  const ClipTextEncoder encoder(weights, clip_shape(weights));
  // What stands behind the mark of the end does not count.
  const Vec found =
      to_values(encoder.forward({{598, 5, 77, 300, 599}, {598, 599}, {598, 599, 3, 599}}));
  EXPECT_LT(relative_error(row(found, 0), caption_features[0]), 1e-5);
  EXPECT_LT(relative_error(row(found, 1), caption_features[1]), 1e-5);
  EXPECT_LT(relative_error(row(found, 2), caption_features[1]), 1e-5);
}

TEST_F(ClipTest, OtherFilesAreRefused) {
  const auto said = [&](std::vector<NamedShape> model) -> std::string {
    write_model(path("other.safetensors"), model);
    try {
      WeightFiles other = WeightFiles::open(path("other.safetensors"));
      const ClipShape shape = clip_shape(other);
      const ClipImageEncoder image(other, shape);
      const ClipTextEncoder text(other, shape);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return e.what();
    }
    return "";
  };
  std::vector<NamedShape> model = small_model();
  EXPECT_EQ(said(model), "");
  std::erase_if(model, [](const NamedShape& t) { return t.name.starts_with("text"); });
  EXPECT_THAT(said(model), HasSubstr("no text encoder"));
  model = small_model();
  std::erase_if(model, [](const NamedShape& t) { return t.name.ends_with("1.mlp.fc2.bias"); });
  EXPECT_THAT(said(model), HasSubstr("1.mlp.fc2.bias"));
  model = small_model();
  model[2].shape = {12, 128};
  EXPECT_THAT(said(model), HasSubstr("no square"));
  EXPECT_THAT(said({{"conv1.weight", {8, 3, 3, 3}}}), HasSubstr("vision_model.encoder.layers.0"));
}

TEST_F(ClipTest, PredictorIsItsLayers) {
  const std::vector<std::int64_t> widths = {24, 1024, 128, 64, 16, 1};
  const std::vector<std::string> names = {"layers.0", "layers.2", "layers.4", "layers.6",
                                          "layers.7"};
  std::vector<NamedShape> model;
  Vec x(24);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.1 * static_cast<double>(i) - 1;
  Tensor features = to_tensor(x, {1, 24});
  for (std::size_t l = 0; l < names.size(); ++l) {
    model.push_back({names[l] + ".weight", {widths[l + 1], widths[l]}});
    model.push_back({names[l] + ".bias", {widths[l + 1]}});
    Vec y;
    for (std::int64_t o = 0; o < widths[l + 1]; ++o) {
      y.push_back(0.4 * formula(names[l] + ".bias", static_cast<std::uint32_t>(o)));
      for (std::int64_t i = 0; i < widths[l]; ++i)
        y.back() += x[static_cast<std::size_t>(i)] * 3 / std::sqrt(static_cast<double>(widths[l])) *
                    formula(names[l] + ".weight", static_cast<std::uint32_t>(o * widths[l] + i));
    }
    x = y;
  }
  const std::string file = path("aesthetic.safetensors");
  write_model(file, model);
  const AestheticPredictor predictor(file, 24);
  EXPECT_NEAR(static_cast<double>(predictor.score(features).at(0)), x[0], 1e-5);
  EXPECT_THROW(AestheticPredictor(file, 25), Error);
}

TEST(ClipScore, IsTheCosine) {
  const std::vector<float> a = {3, 0, 4}, b = {0, 0, 2}, zero = {0, 0, 0};
  EXPECT_NEAR(clip_score(a, b), 80, 1e-9);
  EXPECT_EQ(clip_score(a, zero), 0);
  EXPECT_THAT(unit_length(a), ElementsAre(0.6f, 0, 0.8f));
}

TEST(ClipPixels, ShorterSideThenTheMiddle) {
  std::vector<std::uint8_t> wide(static_cast<std::size_t>(2 * 6 * 3), 9);
  for (std::size_t y = 0; y < 2; ++y)
    for (std::size_t c = 0; c < 3; ++c) wide[(y * 6 + 2) * 3 + c] = wide[(y * 6 + 3) * 3 + c] = 200;
  EXPECT_EQ(clip_pixels({wide.data(), 2, 6, 18}, 2), std::vector<std::uint8_t>(12, 200));
}

// ---- Tokens ----

class ClipTokens : public FolderTest {
 protected:
  std::string merges(const std::string& text) const { return write("merges.txt", text); }
};

// transformers' CLIPTokenizer gives the same ids with these merges.
TEST_F(ClipTokens, KnownIds) {
  const ClipTokenizer t(merges("#version: 0.2\nl o\nlo w</w>\nlo w\ne r</w>\nlow er</w>\n"),
                        512 + 5 + 2);
  EXPECT_EQ(t.begin_mark(), 517);
  EXPECT_EQ(t.end_mark(), 518);
  const auto ids = [&](const std::string& text, std::int64_t most = 77) {
    return t.encode(text, most);
  };
  EXPECT_THAT(ids("low"), ElementsAre(517, 513, 518));
  EXPECT_THAT(ids("  LOWER\tlow\n"), ElementsAre(517, 516, 513, 518));
  EXPECT_THAT(ids("lot"), ElementsAre(517, 512, 't' - '!' + 256, 518));
  EXPECT_THAT(ids(""), ElementsAre(517, 518));
  // Contractions, digits one by one, runs of signs, references of HTML.
  EXPECT_THAT(ids("i'm 42 &amp;&amp;!"),
              ElementsAre(517, 'i' - '!' + 256, '\'' - '!', 'm' - '!' + 256, '4' - '!' + 256,
                          '2' - '!' + 256, '&' - '!', '&' - '!', 256, 518));
  // Bytes of UTF-8; U+00E9 is C3 A9.
  EXPECT_THAT(ids("\u00e9"), ElementsAre(517, 0xc3 - 0xae + 94 + 12, 0xa9 - 0xa1 + 94 + 256, 518));
  EXPECT_THAT(ids("low low low low", 4), ElementsAre(517, 513, 513, 518));
  EXPECT_THAT(ids("low<|endoftext|>low"), ElementsAre(517, 513, 518, 513, 518));
}

TEST_F(ClipTokens, MergesThatDoNotFit) {
  const auto said = [&](const std::string& text, std::int64_t size) -> std::string {
    try {
      const ClipTokenizer t(merges(text), size);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.hint(), HasSubstr("clip."));
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(said("#version: 0.2\nl o\n", 516), HasSubstr("has 1 merges"));
  EXPECT_THAT(said("#version: 0.2\nl o\nlo wx\n", 516), HasSubstr("line 3: \"lo wx\""));
  EXPECT_THAT(said("#version: 0.2\n", 100), HasSubstr("100 tokens"));
  EXPECT_EQ(said("#version: 0.2\nl o\nq u\n", 515), "");  // longer than the vocabulary
  try {
    open_clip_tokenizer("", path("none.safetensors"), 515);
  } catch (const Error& e) {
    ADD_FAILURE() << "merges.txt lies beside the weights: " << e.what();
  }
  EXPECT_THROW(open_clip_tokenizer("none.txt", "", 515), Error);
}

}  // namespace
}  // namespace weft::test
