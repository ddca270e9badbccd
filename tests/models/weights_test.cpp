// Weights to and from safetensors, and what is said about files that do not fit.
#include "checkpoint/weights.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "models/stdit3/options.h"
#include "models/t5/t5.h"
#include "models/video_vae/video_vae.h"
#include "tests/models/stdit3/fixture.h"

namespace weft::test {
namespace {

using testing::HasSubstr;

class WeightsTest : public OpTest {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() /
           ("weft_weights_test_" + std::to_string(::getpid()));
    std::filesystem::create_directories(dir_);
    path_ = dir_ / "w.safetensors";
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Saves `model`, lets `change` edit the list of tensors, and returns what loading says.
  std::string load_changed(Model& model,
                           const std::function<void(std::vector<SafetensorWrite>&)>& change) {
    std::vector<SafetensorWrite> list;
    for (const auto& p : model.net.params().all())
      list.push_back({p->name,
                      DType::f32,
                      {p->shape.dims().begin(), p->shape.dims().end()},
                      std::as_bytes(p->value.span<float>())});
    change(list);
    write_safetensors(path_, list);
    Model other(model.net.config(), 9);
    try {
      load_weights(path_, other.net.params());
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), HasSubstr(path_.string()));
      return std::string(e.what()) + " | " + e.hint();
    }
    return "";
  }

  std::filesystem::path dir_, path_;
};

TEST_F(WeightsTest, RoundTrip) {
  Stdit3Config deck = tiny_model();
  deck.dtype = "bf16";
  Model saved(deck, 4), loaded(deck, 5);
  save_weights(path_, saved.net.params());
  load_weights(path_, loaded.net.params());
  for (const auto& p : saved.net.params().all()) {
    const Parameter* q = loaded.net.params().find(p->name);
    EXPECT_TRUE(same_bits(p->value, q->value)) << p->name;
    EXPECT_TRUE(same_bits(p->working, q->working)) << p->name;
  }
  const SafetensorsFile file = SafetensorsFile::open(path_);
  EXPECT_EQ(file.entries().size(), saved.net.params().all().size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
}

// model.weights_partial = "matching": temporal blocks that a file lacks, a caption table of another
// width, and a tensor of some other model.
TEST_F(WeightsTest, MatchingTakesWhatFitsAndLeavesTheRest) {
  Model saved(tiny_model(), 4);
  std::vector<SafetensorWrite> list;
  const std::vector<float> other(7 * 12);
  for (const auto& p : saved.net.params().all()) {
    if (p->name.starts_with("temporal_blocks.")) continue;
    if (p->name == "y_embedder.y_proj.fc1.weight")
      list.push_back({p->name, DType::f32, {12, 7}, std::as_bytes(std::span(other))});
    else
      list.push_back({p->name,
                      DType::f32,
                      {p->shape.dims().begin(), p->shape.dims().end()},
                      std::as_bytes(p->value.span<float>())});
  }
  list.push_back({"pos_embed", DType::f32, {7, 12}, std::as_bytes(std::span(other))});
  write_safetensors(path_, list);
  Model loaded(tiny_model(), 5), untouched(tiny_model(), 5);
  EXPECT_THROW(load_weights(path_, loaded.net.params()), Error) << "strict by default";
  ModelDeck deck;
  EXPECT_THROW(load_weights(path_, loaded.net.params(), to_start_from(deck)), Error);
  deck.weights_partial = "matching";
  const std::string said = load_weights(path_, loaded.net.params(), to_start_from(deck));
  EXPECT_THAT(said, HasSubstr("xxh3 " + hash_of(WeightFiles::open(path_))));
  EXPECT_THAT(said, HasSubstr(std::to_string(list.size()) + " tensors"));
  for (const auto& p : saved.net.params().all()) {
    const bool fits =
        !p->name.starts_with("temporal_blocks.") && p->name != "y_embedder.y_proj.fc1.weight";
    const Model& from = fits ? saved : untouched;
    EXPECT_TRUE(
        same_bits(loaded.net.params().find(p->name)->value, from.net.params().find(p->name)->value))
        << p->name;
  }
  EXPECT_TRUE(std::ranges::none_of(
      log::warnings(), [](const auto& w) { return w.find("of the model's") != w.npos; }));
  // Less than half of the model: said loudly.
  write_safetensors(path_, std::span(list).first(2));
  load_weights(path_, loaded.net.params(), to_start_from(deck));
  EXPECT_THAT(log::warnings().back(), testing::AllOf(HasSubstr("only 2 of the model's"),
                                                     HasSubstr("\"" + list[2].name + "\"")));
  // Nothing at all fits: another model.
  write_safetensors(path_,
                    std::vector<SafetensorWrite>{
                        {"pos_embed", DType::f32, {7, 12}, std::as_bytes(std::span(other))}});
  try {
    load_weights(path_, loaded.net.params(), to_start_from(deck));
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr("not one tensor fits"));
    EXPECT_THAT(e.hint(), HasSubstr("pos_embed"));
  }
}

TEST_F(WeightsTest, TheHashIsThatOfTheFileOrOfItsShards) {
  Model saved(tiny_model(), 4), changed(tiny_model(), 5);
  const auto hash = [&](const std::filesystem::path& path) {
    return hash_of(WeightFiles::open(path));
  };
  save_weights(path_, saved.net.params());
  const std::string first = hash(path_);
  EXPECT_EQ(first, to_hex(hash_of_file(path_).hash));
  EXPECT_EQ(hash(dir_), first) << "the folder of one file";
  save_weights(path_, changed.net.params());
  EXPECT_NE(hash(path_), first);
  std::filesystem::remove(path_);
  save_weights(path_, saved.net.params(), {.shard_bytes = 20000});
  const std::string shards = hash(dir_);
  EXPECT_EQ(shards.size(), 32u);
  EXPECT_EQ(hash(path_.string() + ".index.json"), shards);
  save_weights(path_, changed.net.params(), {.shard_bytes = 20000});
  EXPECT_NE(hash(dir_), shards);
}

TEST_F(WeightsTest, OtherValuesReplaceTheTrainableOnes) {
  Model model(tiny_model(), 4), loaded(tiny_model(), 5);
  Tensor ema = Tensor::persistent(model.net.params().values().shape(), DType::f32);
  for (std::int64_t i = 0; i < ema.numel(); ++i) ema.data<float>()[i] = static_cast<float>(i);
  save_weights(path_, model.net.params(), {.values = ema});
  load_weights(path_, loaded.net.params());
  for (const auto& p : model.net.params().all()) {
    const Tensor& got = loaded.net.params().find(p->name)->value;
    if (p->trainable)
      EXPECT_EQ(got.data<float>()[1], static_cast<float>(p->offset + 1)) << p->name;
    else
      EXPECT_TRUE(same_bits(got, p->value)) << p->name;
  }
}

TEST_F(WeightsTest, ShardsWithTheirIndexLoadAsOneFileDoes) {
  Model saved(tiny_model(), 4), loaded(tiny_model(), 5);
  save_weights(path_, saved.net.params(), {.shard_bytes = 20000});
  EXPECT_FALSE(std::filesystem::exists(path_)) << "no file beside the shards";
  const auto last = [&] {
    std::filesystem::path greatest;
    for (const auto& e : std::filesystem::directory_iterator(dir_))
      if (e.path().extension() == ".safetensors") greatest = std::max(greatest, e.path());
    return greatest;
  }();
  const std::string of = last.stem().string().substr(last.stem().string().size() - 5);
  EXPECT_EQ(last.filename(), "w-" + of + "-of-" + of + ".safetensors");
  load_weights(dir_, loaded.net.params());
  for (const auto& p : saved.net.params().all())
    EXPECT_TRUE(same_bits(p->value, loaded.net.params().find(p->name)->value)) << p->name;
}

TEST_F(WeightsTest, OtherFormatsAreRoundedOnceAndBuffersAdded) {
  Model model(tiny_model(), 4);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    SaveWeights how;
    how.dtype = dtype;
    how.buffers["scale"] = {3.85f, 2.32f};
    how.skip = [](const Parameter& p) { return p.name == "t_block.1.bias"; };
    save_weights(path_, model.net.params(), how);
    const SafetensorsFile file = SafetensorsFile::open(path_);
    EXPECT_EQ(file.entries().size(), model.net.params().all().size());
    EXPECT_EQ(file.find("t_block.1.bias"), nullptr);
    EXPECT_EQ(file.at("scale").shape, (std::vector<std::int64_t>{1, 2, 1, 1, 1}));
    const Tensor& exact = model.net.params().find("t_block.1.weight")->value;
    const std::vector<float> got = file.read_f32(file.at("t_block.1.weight"));
    EXPECT_EQ(file.at("t_block.1.weight").dtype, dtype);
    for (std::int64_t i = 0; i < exact.numel(); ++i) {
      const float v = exact.data<float>()[i];
      ASSERT_EQ(got[std::size_t(i)], dtype == DType::bf16 ? float(bf16(v)) : float(f16(v)));
    }
  }
}

TEST_F(WeightsTest, HalfPrecisionFilesAreWidened) {
  Model model(tiny_model(), 4);
  std::vector<bf16> low(12);
  for (int i = 0; i < 12; ++i) low[i] = bf16(0.1f * static_cast<float>(i));
  std::vector<SafetensorWrite> list;
  for (const auto& p : model.net.params().all())
    list.push_back({p->name,
                    DType::f32,
                    {p->shape.dims().begin(), p->shape.dims().end()},
                    std::as_bytes(p->value.span<float>())});
  for (auto& w : list)
    if (w.name == "t_embedder.mlp.0.bias") {
      w.dtype = DType::bf16;
      w.bytes = std::as_bytes(std::span(low));
    }
  write_safetensors(path_, list);
  load_weights(path_, model.net.params());
  const Tensor& bias = model.net.params().find("t_embedder.mlp.0.bias")->value;
  for (int i = 0; i < 12; ++i) EXPECT_EQ(bias.data<float>()[i], static_cast<float>(low[i]));
}

TEST_F(WeightsTest, AModelThatIsOnlyRunKeepsBf16Alone) {
  Model saved(tiny_model(), 4);
  save_weights(path_, saved.net.params());
  Stdit3Config deck = tiny_model();
  deck.dtype = "bf16";
  Stdit3 net(deck);
  net.params().allocate_for_inference(true);
  load_weights(path_, net.params());
  int dropped = 0;
  for (const auto& p : net.params().all()) {
    const Tensor& exact = saved.net.params().find(p->name)->value;
    dropped += p->value.defined() ? 0 : 1;
    if (p->value.defined()) {
      EXPECT_TRUE(same_bits(p->value, exact)) << p->name;
    }
    for (std::int64_t i = 0; i < exact.numel(); ++i)
      ASSERT_EQ(p->working.data<bf16>()[i].bits, bf16(exact.data<float>()[i]).bits) << p->name;
  }
  EXPECT_GT(dropped, 10);
}

// A model of parameters alone, under names of the VAE and of T5.
struct Table : ParameterTable {
  explicit Table(const std::vector<std::string>& names) {
    for (const std::string& n : names) add(n, {2}, {Init::Kind::constant, 0}, false);
    allocate_for_inference(false);
  }
  float first(const std::string& name) const { return find(name)->value.data<float>()[0]; }
};

TEST_F(WeightsTest, OldNamesAndSpareTensorsOfReleasedFiles) {
  const std::vector<std::vector<float>> v = {{1, 1}, {2, 2}, {3, 3}, {4, 4}};
  const auto write = [&](const std::vector<std::string>& names) {
    std::vector<SafetensorWrite> list;
    for (std::size_t i = 0; i < names.size(); ++i)
      list.push_back({names[i], DType::f32, {2}, std::as_bytes(std::span(v[i]))});
    write_safetensors(path_, list);
  };
  Table vae({"mid.attentions.0.to_q.weight", "mid.attentions.0.to_out.0.bias"});
  write({"mid.attentions.0.query.weight", "mid.attentions.0.proj_attn.bias", "scale", "shift"});
  load_weights(path_, vae, vae_weight_names());
  EXPECT_EQ(vae.first("mid.attentions.0.to_q.weight"), 1);
  EXPECT_EQ(vae.first("mid.attentions.0.to_out.0.bias"), 2);
  EXPECT_THROW(load_weights(path_, vae, t5_weight_names()), Error) << "names of another model";

  Table spatial({"spatial_vae.module.mid.to_k.bias", "spatial_vae.module.conv_in.bias"});
  write({"mid.key.bias", "conv_in.bias"});
  load_weights(path_, spatial, vae_weight_names());
  EXPECT_EQ(spatial.first("spatial_vae.module.mid.to_k.bias"), 1);
  EXPECT_EQ(spatial.first("spatial_vae.module.conv_in.bias"), 2);

  Table t5({"shared.weight", "encoder.final_layer_norm.weight"});
  write({"encoder.embed_tokens.weight", "encoder.final_layer_norm.weight", "lm_head.weight",
         "decoder.block.0.x"});
  load_weights(path_, t5, t5_weight_names());
  EXPECT_EQ(t5.first("shared.weight"), 1);
  write({"encoder.embed_tokens.weight", "encoder.final_layer_norm.weight", "shared.weight"});
  load_weights(path_, t5, t5_weight_names());
  EXPECT_EQ(t5.first("shared.weight"), 3) << "the table's own name goes before the other";
  write({"shared.weight", "encoder.final_layer_norm.weight", "encoder.blok.0"});
  EXPECT_THROW(load_weights(path_, t5, t5_weight_names()), Error);
}

// Names and tensors of training programs, of which a model's own are a part.
TEST_F(WeightsTest, OneCommonPrefixIsTakenOffAndWrappersInside) {
  const std::vector<float> one = {1, 1};
  const auto load = [&](const std::vector<std::string>& in_file, WeightNames names = {}) {
    std::vector<SafetensorWrite> list;
    for (const std::string& n : in_file)
      list.push_back({n, DType::f32, {2}, std::as_bytes(std::span(one))});
    write_safetensors(path_, list);
    Table table({"blocks.0.w", "blocks.1.w", "head.w"});
    try {
      load_weights(path_, table, names);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return std::string(e.what()) + " | " + e.hint();
    }
    return std::string(table.first("head.w") == 1 ? "" : "not read");
  };
  for (const std::string& p :
       {"module.", "_orig_mod.", "pipe.dit.", "generator_ema.model.", "any.other."})
    EXPECT_EQ(load({p + "blocks.0.w", p + "blocks.1._checkpoint_wrapped_module.w", p + "head.w"}),
              "")
        << p;
  EXPECT_THAT(load({"m.blocks.0.w", "m.blocks.1.w", "m.head.w", "vae.x", "vae.y"}),
              testing::AllOf(HasSubstr("\"vae.x\" is not a parameter"), HasSubstr("\"vae.y\""),
                             HasSubstr("--only m.")));
  EXPECT_THAT(load({"m.blocks.0.w", "blocks.1.w", "blocks.0.w", "head.w"}),
              HasSubstr("\"m.blocks.0.w\" is not a parameter"));
  EXPECT_THAT(load({"blocks.0.w", "_orig_mod.blocks.0.w"}), HasSubstr("twice"));
  EXPECT_EQ(load({"a.head.w", "a.blocks.0.w"}, {.matching = true}), "");
}

TEST_F(WeightsTest, TensorsThatAreNoWeightsAreLeftUnread) {
  const std::vector<float> one = {1, 1};
  const std::vector<std::int64_t> positions = {0, 1};
  const auto load = [&](const std::string& name) {
    write_safetensors(path_, std::vector<SafetensorWrite>{
                                 {"head.w", DType::f32, {2}, std::as_bytes(std::span(one))},
                                 {name, DType::i64, {2}, std::as_bytes(std::span(positions))}});
    Table table({"head.w"});
    load_weights(path_, table);
    return table.first("head.w");
  };
  EXPECT_EQ(load("position_ids"), 1);
  EXPECT_EQ(load("bn.num_batches_tracked"), 1);
}

TEST_F(WeightsTest, ValuesThatAreNotFiniteAreTheFiles) {
  Model model(tiny_model());
  const std::vector<float> bad = {0, 1, 2, 3, 4, 5, std::nanf(""), 7, 8, 9, 10, 11};
  const std::string said = load_changed(model, [&](auto& list) {
    for (auto& w : list)
      if (w.name == "t_embedder.mlp.0.bias") w.bytes = std::as_bytes(std::span(bad));
  });
  EXPECT_THAT(said, HasSubstr("t_embedder.mlp.0.bias has values that are not finite"));
}

TEST_F(WeightsTest, AValueBeyondTheRangeOfATypeIsNamedAndNothingIsWritten) {
  Model model(tiny_model(), 4);
  model.net.params().find("t_block.1.bias")->value.data<float>()[3] = 1e5f;
  for (const std::uint64_t shard : {0, 20000}) {
    try {
      save_weights(path_, model.net.params(), {.dtype = DType::f16, .shard_bytes = shard});
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), testing::AllOf(HasSubstr("t_block.1.bias"), HasSubstr("100000")));
      EXPECT_THAT(e.hint(), HasSubstr("bf16"));
    }
    EXPECT_TRUE(std::filesystem::is_empty(dir_));
  }
  save_weights(path_, model.net.params(), {.dtype = DType::bf16});
}

TEST_F(WeightsTest, APartReadsItsOwnAndNothingTwice) {
  const std::vector<float> v = {5, 6};
  std::vector<SafetensorWrite> list;
  for (const char* n : {"a", "b", "c"})
    list.push_back({n, DType::f32, {2}, std::as_bytes(std::span(v))});
  write_safetensors(path_, list);
  const Table whole({"a", "b", "c"});
  Table part({"b", "c"});
  WeightFiles files = WeightFiles::open(path_);
  check_weights(files, whole, {});
  EXPECT_THROW(check_weights(files, part, {}), Error) << "a is none of its parameters";
  read_weights(files, part, {}, [](const Parameter& p) { return p.name == "c"; });
  EXPECT_EQ(part.first("b"), 5);
  EXPECT_EQ(part.first("c"), 0) << "somebody else's";
  EXPECT_EQ(files.bytes_read(), 8u);
}

TEST_F(WeightsTest, AMissingTensorIsNamed) {
  Model model(tiny_model());
  const std::string said = load_changed(model, [](auto& list) {
    std::erase_if(list, [](const auto& w) { return w.name == "spatial_blocks.1.attn.proj.bias"; });
  });
  EXPECT_THAT(said, HasSubstr("spatial_blocks.1.attn.proj.bias"));
}

TEST_F(WeightsTest, AnExtraTensorIsNamedWithItsNearest) {
  Model model(tiny_model());
  const std::vector<float> one(12);
  const auto extra = [&](const std::string& name) {
    return load_changed(model, [&](auto& list) {
      list.push_back({name, DType::f32, {12}, std::as_bytes(std::span(one))});
    });
  };
  const std::string near = extra("final_layer.linear.biaz");
  EXPECT_THAT(near, HasSubstr("\"final_layer.linear.biaz\""));
  EXPECT_THAT(near, HasSubstr("\"final_layer.linear.bias\""));
  EXPECT_THAT(extra("something.else.entirely.unlike.any"), HasSubstr("[model]"));
}

TEST_F(WeightsTest, AWrongShapeIsNamedWithBoth) {
  Model model(tiny_model());
  const std::string said = load_changed(model, [](auto& list) {
    for (auto& w : list)
      if (w.name == "t_block.1.weight") w.shape = {12, 72};
  });
  EXPECT_THAT(said, HasSubstr("t_block.1.weight"));
  EXPECT_THAT(said, HasSubstr("[12, 72]"));
  EXPECT_THAT(said, HasSubstr("[72, 12]"));
}

TEST_F(WeightsTest, AnIntegerTensorIsRefused) {
  Model model(tiny_model());
  const std::string said = load_changed(model, [](auto& list) {
    for (auto& w : list)
      if (w.name == "t_block.1.bias") w.dtype = DType::i32;
  });
  EXPECT_THAT(said, HasSubstr("t_block.1.bias"));
}

}  // namespace
}  // namespace weft::test
