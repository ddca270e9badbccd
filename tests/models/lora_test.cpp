// Adapters (LoRA) of STDiT3: what they change and what not, their gradients, and their files.
#include "models/lora.h"

#include <gmock/gmock.h>
#include <omp.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "checkpoint/adapter.h"
#include "checkpoint/weights.h"
#include "core/error.h"
#include "tests/models/stdit3/fixture.h"
#include "tests/models/stdit3/planned_step.h"

namespace weft::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

// 12: cross attention key by key; 48: with its projections absorbed.
constexpr std::int64_t widths[] = {12, 48};

// Of a size that moves the output and saturates no softmax.
LoraDeck everywhere() {
  LoraDeck d;
  d.rank = 3;
  d.alpha = 0.75;
  d.targets = {"*"};
  return d;
}

Stdit3Config of_width(std::int64_t width) {
  Stdit3Config d = tiny_model();
  d.hidden_size = width;
  return d;
}

// The weights of `from`, in the formats of both tables.
void copy_weights(const ParameterTable& from, ParameterTable& to) {
  for (const auto& p : from.all()) {
    Parameter& q = *to.find(p->name);
    const auto values = p->value.span<float>();
    q.set(0, std::vector<float>(values.begin(), values.end()));
  }
}

void set_to_zero(ParameterTable& table, const char* ending) {
  for (const auto& p : table.all())
    if (p->name.ends_with(ending))
      p->set(0, std::vector<float>(static_cast<std::size_t>(p->shape.numel())));
}

std::string refusal(const std::function<void()>& act, Exit code) {
  try {
    act();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    return std::string(e.what()) + " | " + e.hint();
  }
  return "";
}

class LoraTest : public OpTest {
 protected:
  void SetUp() override {
    dir_ =
        std::filesystem::temp_directory_path() / ("weft_lora_test_" + std::to_string(::getpid()));
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // The adapters that a model trains.
  static Adapter adapter_in(Model& model, const LoraDeck& lora) {
    Adapter adapter{"the model's", {lora.rank, lora.alpha, "base.safetensors", "00ff"}, {}};
    for (const nn::Linear* l : model.net.linears()) {
      if (!l->adapted()) continue;
      adapter.layers[layer_name(*l->weight)] = {lora.rank,
                                                l->weight->shape[1],
                                                l->weight->shape[0],
                                                floats(l->lora_a->value),
                                                floats(l->lora_b->value),
                                                lora.alpha / static_cast<double>(lora.rank)};
    }
    return adapter;
  }

  std::filesystem::path dir_;
};

TEST_F(LoraTest, TargetsGetAdaptersAndAllElseIsBase) {
  LoraDeck lora = everywhere();
  lora.targets = {"spatial_blocks.?.attn.qkv", "t_block.1"};
  Stdit3Config deck = tiny_model();
  deck.dtype = "bf16";
  Model model(deck, 4, lora);
  ParameterTable& table = model.net.params();
  std::vector<std::string> trained;
  for (const auto& p : table.all()) {
    EXPECT_EQ(p->trainable, p->role == Parameter::Role::adapter) << p->name;
    if (p->trainable) trained.push_back(p->name);
  }
  EXPECT_THAT(trained, testing::ElementsAre("t_block.1.lora_A.weight", "t_block.1.lora_B.weight",
                                            "spatial_blocks.0.attn.qkv.lora_A.weight",
                                            "spatial_blocks.0.attn.qkv.lora_B.weight",
                                            "spatial_blocks.1.attn.qkv.lora_A.weight",
                                            "spatial_blocks.1.attn.qkv.lora_B.weight"));
  EXPECT_EQ(table.find("t_block.1.lora_B.weight")->shape, (Shape{72, 3}));
  EXPECT_EQ(table.find("t_block.1.lora_A.weight")->shape, (Shape{3, 12}));
  EXPECT_EQ(table.fixed().numel(), 0) << "a checkpoint would hold the base";
  // In the format of the products that read it: bf16 of what tokens meet, f32 beside it of the
  // rest.
  EXPECT_TRUE(table.find("spatial_blocks.0.attn.qkv.lora_A.weight")->bf16_only);
  EXPECT_FALSE(table.find("t_block.1.lora_A.weight")->bf16_only);
  EXPECT_FALSE(table.find("spatial_blocks.0.attn.qkv.weight")->value.defined());
  EXPECT_TRUE(table.find("t_block.1.weight")->value.defined());
  std::size_t bytes = 0;
  for (const auto& p : table.all())
    if (p->role == Parameter::Role::base)
      bytes += (p->value.defined() ? p->value.bytes() : 0) + p->working.bytes();
  EXPECT_EQ(table.base_bytes(true), bytes);
}

TEST_F(LoraTest, StartsAsPeftDoes) {
  Model model(tiny_model(), 4, everywhere());
  model.net.params().initialise(1);
  for (const auto& p : model.net.params().all()) {
    if (p->name.ends_with(".lora_B.weight"))
      EXPECT_EQ(to_values(p->value), Vec(p->shape.numel(), 0.0)) << p->name;
    if (!p->name.ends_with(".lora_A.weight")) continue;
    // kaiming_uniform_(a=sqrt(5)): sqrt(6 / (1 + 5)) / sqrt(in).
    const double width = 1 / std::sqrt(static_cast<double>(p->shape[1]));
    double most = 0;
    for (const double v : to_values(p->value)) most = std::max(most, std::abs(v));
    EXPECT_LE(most, width * (1 + 1e-6)) << p->name;
    EXPECT_GT(most, width * 0.8) << p->name;
  }
}

TEST_F(LoraTest, ATargetWithoutALayerIsRefusedWithTheNearest) {
  const auto said = [](const std::string& target) {
    LoraDeck lora = everywhere();
    lora.targets = {"*.attn.qkv", target};
    return refusal([&] { Model(tiny_model(), 4, lora); }, Exit::usage);
  };
  EXPECT_THAT(said("*.attn.qvk"), AllOf(HasSubstr("\"*.attn.qvk\""), HasSubstr("\"*.attn.qkv\"")));
  EXPECT_THAT(said("spatial_block.*.mlp.fc1"), HasSubstr("\"spatial_blocks.*.mlp.fc1\""));
  EXPECT_THAT(said("spatial_blocks.0.attn.proj.weight"),
              HasSubstr("\"spatial_blocks.0.attn.proj\""));
  // A convolution in the files; a norm.
  EXPECT_THAT(said("x_embedder.proj"), HasSubstr("matches no linear layer"));
  EXPECT_THAT(said("*.q_norm"), HasSubstr("matches no linear layer"));
  EXPECT_EQ(said("final_layer.linear"), "");
}

TEST_F(LoraTest, ZeroAdaptersChangeNoBit) {
  for (const std::int64_t width : widths)
    for (const char* dtype : {"f32", "bf16"}) {
      SCOPED_TRACE(fmt::format("{} {}", width, dtype));
      Stdit3Config deck = of_width(width);
      deck.dtype = dtype;
      Model plain(deck), adapted(deck, 5, everywhere());
      copy_weights(plain.net.params(), adapted.net.params());
      set_to_zero(adapted.net.params(), ".lora_B.weight");
      const Stdit3Input in = make_input(deck, {.masked = true, .dropped = true});
      EXPECT_EQ(adapted(in), plain(in));
      const Vec g = random_values(plain.outputs(in), 55);
      const auto want = plain.backward(in, g), got = adapted.backward(in, g);
      EXPECT_EQ(got.x, want.x);
      EXPECT_EQ(got.y, want.y);
      // Not zero, so that equal bits say something.
      const Parameter& b =
          *adapted.net.params().find("spatial_blocks.0.cross_attn.proj.lora_B.weight");
      EXPECT_GT(dot(to_values(b.grad), to_values(b.grad)), 0);
    }
}

TEST_F(LoraTest, GradientsMatchDifferences) {
  omp_set_num_threads(1);
  for (const std::int64_t width : widths)
    for (const double recompute : {0.0, 0.75}) {
      SCOPED_TRACE(fmt::format("{} {}", width, recompute));
      Stdit3Config deck = of_width(width);
      deck.depth = width == 48 ? 1 : 2;
      deck.recompute = recompute;
      Model model(deck, 4, everywhere());
      const Stdit3Input in = make_input(deck, {.masked = true});
      const Vec g = random_values(model.outputs(in), 55);
      const std::size_t before = arena_->used();
      const auto inputs = model.backward(in, g);
      EXPECT_EQ(arena_->used(), before) << "something of the step stayed behind";
      const auto loss = [&] { return dot(model(in), g); };
      const Vec out = model(in);
      const double rounding = 4e-5 * std::sqrt(dot(out, out));
      std::int64_t trained = 0;
      for (const auto& p : model.net.params().all()) {
        EXPECT_EQ(p->grad.defined(), p->trainable) << p->name;
        if (!p->trainable) continue;
        ++trained;
        expect_slope(p->name, p->value, to_values(p->grad), loss, 2e-2, rounding);
      }
      EXPECT_EQ(trained, 2 * (8 + 14 * deck.depth));
      expect_slope("x", in.x, inputs.x, loss, 2e-2, rounding);
    }
}

TEST_F(LoraTest, MergedIsUnmerged) {
  for (const std::int64_t width : widths) {
    const Stdit3Config deck = of_width(width);
    // As a training starts, but with some B: weights as large as randomise() draws amplify the
    // rounding of each layer.
    Model adapted(deck, 4, everywhere()), merged(deck, 9);
    adapted.net.params().initialise(4);
    std::uint64_t stream = 0;
    for (const auto& p : adapted.net.params().all())
      if (p->name.ends_with(".lora_B.weight")) {
        const Vec v = random_values(p->shape.numel(), ++stream, 0.2);
        p->set(0, std::vector<float>(v.begin(), v.end()));
      }
    for (const auto& p : merged.net.params().all()) {
      const auto values = adapted.net.params().find(p->name)->value.span<float>();
      p->set(0, std::vector<float>(values.begin(), values.end()));
    }
    const Stdit3Input in = make_input(deck, {.masked = true});
    const Vec base = merged(in);
    const WeightedAdapter whole{adapter_in(adapted, everywhere()), 1};
    merge_adapters(merged.net.params(), std::span(&whole, 1));
    EXPECT_LT(relative_error(merged(in), adapted(in)), 1e-6);
    EXPECT_GT(relative_error(merged(in), base), 1e-2) << "the adapters change nothing";
  }
}

TEST_F(LoraTest, FilesHoldWhatWasTrained) {
  Model model(tiny_model(), 4, everywhere());
  const Adapter written = adapter_in(model, everywhere());
  write_adapter(dir_ / "a", written, AdapterNames::peft, DType::f32);
  for (const auto& path : {dir_ / "a", dir_ / "a" / "adapter_model.safetensors"}) {
    const Adapter read = read_adapter(path);
    EXPECT_EQ(read.facts.rank, 3);
    EXPECT_EQ(read.facts.alpha, 0.75);
    EXPECT_EQ(read.facts.base_hash, "00ff");
    ASSERT_EQ(read.layers.size(), written.layers.size());
    for (const auto& [name, layer] : written.layers) {
      EXPECT_EQ(read.layers.at(name).a, layer.a) << name;
      EXPECT_EQ(read.layers.at(name).b, layer.b) << name;
      EXPECT_EQ(read.layers.at(name).scale, layer.scale) << name;
    }
  }
  for (const auto& [names, layout] :
       {std::pair(AdapterNames::comfy, "ComfyUI"), std::pair(AdapterNames::kohya, "kohya")}) {
    write_adapter(dir_ / layout, written, names, DType::f32);
    Adapter read = read_adapter(dir_ / layout);
    EXPECT_EQ(read.layout, layout);
    EXPECT_EQ(read.facts.base_hash, "00ff");
    read = by_model(std::move(read), model.net.params(), {});
    ASSERT_EQ(read.layers.size(), written.layers.size());
    for (const auto& [name, layer] : written.layers) {
      EXPECT_EQ(read.layers.at(name).a, layer.a) << name;
      EXPECT_EQ(read.layers.at(name).b, layer.b) << name;
      EXPECT_EQ(read.layers.at(name).scale, layer.scale) << name;
    }
  }
  const SafetensorsFile file = SafetensorsFile::open(dir_ / "a" / "adapter_model.safetensors");
  EXPECT_NE(file.find("base_model.model.spatial_blocks.0.attn.qkv.lora_A.weight"), nullptr);
}

// diffusers notes PEFT's configuration with the tensors.
TEST_F(LoraTest, NotedConfigurationsCount) {
  const std::vector<float> half(8, 0.5f);
  const auto read = [&](const std::string& more) {
    const std::string layer = "transformer.blocks.0.attn1.to_q.lora_";
    const std::vector<SafetensorWrite> list = {
        {layer + "A.weight", DType::f32, {4, 2}, std::as_bytes(std::span(half))},
        {layer + "B.weight", DType::f32, {2, 4}, std::as_bytes(std::span(half))}};
    write_safetensors(dir_ / "noted.safetensors", list,
                      {{"lora_adapter_metadata",
                        R"({"transformer.r": 4, "transformer.lora_alpha": 8)" + more + "}"}});
    return read_adapter(dir_ / "noted.safetensors").layers.begin()->second.scale;
  };
  EXPECT_EQ(read(""), 2);
  EXPECT_EQ(read(R"(, "transformer.rank_pattern": {"attn1": 4})"), 2);
  EXPECT_EQ(read(R"(, "transformer.use_rslora": true)"), 4);
  EXPECT_THROW(read(R"(, "transformer.alpha_pattern": {"attn1": 1})"), Error);
  EXPECT_THROW(read(R"(, "transformer.use_dora": true)"), Error);
}

TEST_F(LoraTest, FilesThatDoNotFitAreRefused) {
  Model model(tiny_model(), 4, everywhere());
  const Adapter good = adapter_in(model, everywhere());
  const auto with_config = [&](const std::string& text) {
    write_adapter(dir_ / "a", good, AdapterNames::peft, DType::f32);
    std::ofstream(dir_ / "a" / "adapter_config.json") << text;
    return refusal([&] { read_adapter(dir_ / "a"); }, Exit::data);
  };
  EXPECT_EQ(with_config(R"({"peft_type": "LORA", "r": 3, "lora_alpha": 0.75})"), "");
  EXPECT_THAT(with_config(R"({"peft_type": "IA3", "r": 3, "lora_alpha": 5})"), HasSubstr("IA3"));
  EXPECT_THAT(with_config(R"({"peft_type": "LORA", "r": 3, "lora_alpha": 5, "use_dora": true})"),
              HasSubstr("use_dora"));
  EXPECT_THAT(
      with_config(R"({"peft_type": "LORA", "r": 3, "lora_alpha": 5, "rank_pattern": {"a": 1}})"),
      HasSubstr("rank_pattern"));
  // What weft noted with the tensors: rank and alpha.
  EXPECT_THAT(with_config(R"({"peft_type": "LORA", "r": 3, "lora_alpha": 5})"),
              AllOf(HasSubstr("rank 3, alpha 5"), HasSubstr("rank 3, alpha 0.75")));
  EXPECT_THAT(with_config("{"), HasSubstr("not the configuration"));
  EXPECT_THAT(with_config(R"({"peft_type": "LORA"})"), HasSubstr("not the configuration"));
  Adapter broken = good;
  broken.layers.begin()->second.a[0] = std::nanf("");
  write_adapter(dir_ / "a", broken, AdapterNames::peft, DType::f32);
  EXPECT_THAT(refusal([&] { read_adapter(dir_ / "a"); }, Exit::data), HasSubstr("not finite"));
  std::filesystem::remove(dir_ / "a" / "adapter_config.json");
  EXPECT_THAT(refusal([&] { read_adapter(dir_ / "a"); }, Exit::data),
              HasSubstr("adapter_config.json is missing"));
  // As PEFT writes it, without notes. Alpha over the root of the rank.
  const auto of_peft = [&](const std::string& entries) {
    write_adapter(dir_ / "a", good, AdapterNames::peft, DType::f32);
    const fs::path path = dir_ / "a" / "adapter_model.safetensors";
    const SafetensorsFile file = SafetensorsFile::open(path);
    std::vector<std::vector<float>> values;
    std::vector<SafetensorWrite> list;
    for (const SafetensorEntry& e : file.entries()) {
      values.push_back(file.read_f32(e));
      list.push_back({e.name, DType::f32, e.shape, std::as_bytes(std::span(values.back()))});
    }
    write_safetensors(path, list, {});
    std::ofstream(dir_ / "a" / "adapter_config.json")
        << R"({"peft_type": "LORA", "lora_alpha": 5, )" << entries << "}";
    return refusal([&] { read_adapter(dir_ / "a"); }, Exit::data);
  };
  for (const char* entry :
       {R"("bias": "all")", R"("layers_to_transform": [0])", R"("layer_replication": [[0, 1]])",
        R"("use_qalora": true)", R"("alpha_pattern": {"a": 1})", R"("modules_to_save": ["b"])",
        R"("init_lora_weights": "pissa_niter_4")", R"("fan_in_fan_out": true)", R"("use_dora": 1)",
        R"("use_rslora": 1)", R"("use_rslora": "true")", R"("lora_bias": "no")"})
    EXPECT_THAT(of_peft(fmt::format(R"("r": 3, {})", entry)),
                HasSubstr(std::string(entry + 1, std::strchr(entry + 1, '"'))))
        << entry;
  EXPECT_EQ(of_peft(R"("r": 3, "bias": "none", "layers_to_transform": null, "rank_pattern": {},
                       "modules_to_save": null, "use_dora": false, "layer_replication": null,
                       "loftq_config": {}, "init_lora_weights": true, "exclude_modules": null,
                       "use_rslora": null, "lora_dropout": 0.1, "target_modules": ["qkv"])"),
            "");
  EXPECT_THAT(of_peft(R"("r": 8)"), AllOf(HasSubstr("r is 8"), HasSubstr("has rank 3")));
  EXPECT_EQ(of_peft(R"("r": 3, "use_rslora": true)"), "");
  EXPECT_DOUBLE_EQ(read_adapter(dir_ / "a").layers.begin()->second.scale, 5 / std::sqrt(3.0));

  const auto merged = [&](const Adapter& adapter) {
    const WeightedAdapter whole{adapter, 1};
    return refusal([&] { merge_adapters(model.net.params(), std::span(&whole, 1)); }, Exit::data);
  };
  Adapter renamed = good, wide = good;
  renamed.layers["spatial_blocks.0.attn.qvk"] = renamed.layers.at("spatial_blocks.0.attn.qkv");
  EXPECT_THAT(merged(renamed), AllOf(HasSubstr("attn.qvk"), HasSubstr("attn.qkv")));
  wide.layers.at("t_block.1").out = 36;
  EXPECT_THAT(merged(wide), AllOf(HasSubstr("[36, 12]"), HasSubstr("[72, 12]")));
  AdapterFacts named = good.facts;
  named.base_hash = "values:00ff";
  EXPECT_THAT(
      refusal([&] { check_base("a", named, "other.safetensors", "values:01"); }, Exit::data),
      AllOf(HasSubstr("other.safetensors"), HasSubstr("00ff")));
  check_base("a", named, "base.safetensors", "values:00ff");
}

TEST_F(LoraTest, TheBaseIsTheSameHoweverItIsStored) {
  Model base(tiny_model(), 4), other(tiny_model(), 4);
  const std::string hash = hash_of_values(base.net.params());
  // Read from f32, from bf16, from shards; into f32, into bf16, and beside adapters.
  save_weights(dir_ / "f32.safetensors", base.net.params());
  save_weights(dir_ / "bf16.safetensors", base.net.params(), {.dtype = DType::bf16});
  save_weights(dir_ / "shards.safetensors", base.net.params(), {.shard_bytes = 4000});
  Stdit3Config narrow = tiny_model();
  narrow.dtype = "bf16";
  for (const char* file :
       {"f32.safetensors", "bf16.safetensors", "shards.safetensors.index.json"}) {
    Model f32(tiny_model(), 5), bf16(narrow, 5), adapted(narrow, 5, everywhere());
    for (Model* model : {&f32, &bf16, &adapted}) {
      EXPECT_NE(hash_of_values(model->net.params()), hash);
      load_weights(dir_ / file, model->net.params());
      EXPECT_EQ(hash_of_values(model->net.params()), hash) << file;
    }
  }
  Parameter& p = *other.net.params().find("t_block.1.weight");
  p.set(3, std::vector<float>{p.value.span<float>()[3] * 1.01f});
  EXPECT_NE(hash_of_values(other.net.params()), hash);
  // What older versions wrote names the files.
  const AdapterFacts old{3, 1, "base", hash_of(WeightFiles::open(dir_ / "f32.safetensors"))};
  check_base("a", old, dir_ / "f32.safetensors", hash);
  EXPECT_NE(refusal([&] { check_base("a", old, dir_ / "bf16.safetensors", hash); }, Exit::data),
            "");
}

TEST_F(LoraTest, TrainingGoesOnFromAnAdapterOfItsShape) {
  Model trained(tiny_model(), 4, everywhere()), next(tiny_model(), 5, everywhere());
  const Adapter adapter = adapter_in(trained, everywhere());
  start_from(everywhere(), next.net.params(), adapter, 0.5);
  for (const auto& p : trained.net.params().all())
    if (p->role == Parameter::Role::adapter) {
      Vec want = to_values(p->value);
      if (p->name.ends_with(".lora_B.weight"))
        for (double& v : want) v *= 0.5;
      EXPECT_EQ(to_values(next.net.params().find(p->name)->value), want) << p->name;
    }
  const auto said = [&](LoraDeck lora, Adapter from) {
    Model model(tiny_model(), 5, lora);
    return refusal([&] { start_from(lora, model.net.params(), from, 1); }, Exit::usage);
  };
  LoraDeck ranked = everywhere(), scaled = everywhere(), fewer = everywhere();
  ranked.rank = 2;
  scaled.alpha = 1;
  fewer.targets = {"*.attn.*"};
  EXPECT_THAT(said(ranked, adapter), AllOf(HasSubstr("rank 3"), HasSubstr("lora.rank = 2")));
  EXPECT_THAT(said(scaled, adapter), AllOf(HasSubstr("alpha 0.75"), HasSubstr("lora.alpha = 1")));
  EXPECT_THAT(said(fewer, adapter), AllOf(HasSubstr("*.attn.*"), HasSubstr("not among")));
  Adapter less = adapter;
  less.layers.erase("t_block.1");
  EXPECT_THAT(said(everywhere(), less), HasSubstr("no layer t_block.1"));
}

TEST_F(LoraTest, TheBaseIsReadFromFilesWithoutAdapters) {
  Model base(tiny_model(), 4), adapted(tiny_model(), 5, everywhere());
  save_weights(dir_ / "base.safetensors", base.net.params());
  const std::vector<float> a = floats(adapted.net.params().find("t_block.1.lora_A.weight")->value);
  load_weights(dir_ / "base.safetensors", adapted.net.params());
  for (const auto& p : base.net.params().all())
    EXPECT_TRUE(same_bits(p->value, adapted.net.params().find(p->name)->value)) << p->name;
  EXPECT_EQ(floats(adapted.net.params().find("t_block.1.lora_A.weight")->value), a);
}

TEST(LoraMemory, PlannedPeakIsTheRealPeak) {
  for (const std::int64_t width : widths) {
    Stdit3Config deck = of_width(width);
    deck.recompute = 0.5;
    Model model(deck, 4, everywhere());
    const Batch batch{.masked = true};
    const auto planning = Arena::planning(DeviceKind::cpu);
    const std::size_t planned = peak_of_step(*planning, model, batch);
    const auto real = Arena::reserve(std::size_t{1} << 28);
    EXPECT_EQ(peak_of_step(*real, model, batch), planned) << width;
  }
}

}  // namespace
}  // namespace weft::test
