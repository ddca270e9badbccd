// The text encoder over ranks: the same features wherever its layers are, each weight byte read
// once, nobody above its limit, and all memory given back.
#include "models/t5/options.h"
#include "models/t5/text_encoder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/weight_files.h"
#include "checkpoint/weights.h"
#include "core/host.h"
#include "models/t5/placement.h"
#include "models/t5/t5.h"
#include "ops/dispatch.h"
#include "tensor/tensor.h"
#include "tests/ops/reference.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

T5Deck small_t5() {
  T5Deck d;
  d.d_model = 64;
  d.d_kv = 16;
  d.num_heads = 3;  // inner width 48
  d.d_ff = 96;
  d.num_layers = 6;
  d.vocab_size = 50;
  d.max_length = 20;
  d.micro_batch = 2;
  return d;
}

class TextEncoder : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    long name = getpid();
    MPI_Bcast(&name, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    dir_ = fs::temp_directory_path() / ("weft_text_encoder_" + std::to_string(name));
    if (rank_ == 0) fs::create_directories(dir_);
    MPI_Barrier(MPI_COMM_WORLD);
    deck_.get<T5Deck>() = small_t5();
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == 0) fs::remove_all(dir_);
  }

  // Weights drawn at random, in two shards with their index, the decoder's beside them. umT5's have
  // the names that Wan releases.
  void write_weights() {
    deck_.get<T5Deck>().weights = dir_.string();
    if (rank_ == 0) {
      T5Encoder whole(deck_.get<T5Deck>(), 0, deck_.get<T5Deck>().num_layers);
      whole.params().allocate_for_inference(false);
      whole.params().initialise(7);
      nlohmann::json index;
      std::vector<SafetensorWrite> shards[2];
      std::size_t i = 0;
      for (const auto& p : whole.params().all()) {
        const std::size_t shard = i++ % 3 == 0 ? 0 : 1;
        const std::string name = deck_.get<T5Deck>().umt5
                                     ? t5_weight_names(deck_.get<T5Deck>()).others(p->name).back()
                                     : p->name;
        shards[shard].push_back({name,
                                 DType::f32,
                                 {p->shape.dims().begin(), p->shape.dims().end()},
                                 std::as_bytes(p->value.span<float>())});
        index["weight_map"][name] = std::to_string(shard) + ".safetensors";
      }
      shards[1].push_back({"decoder.final_layer_norm.weight",
                           DType::f32,
                           {deck_.get<T5Deck>().d_model},
                           std::as_bytes(whole.params().all().back()->value.span<float>())});
      index["weight_map"]["decoder.final_layer_norm.weight"] = "1.safetensors";
      for (int s : {0, 1})
        write_safetensors(dir_ / (std::to_string(s) + ".safetensors"), shards[s]);
      std::ofstream(dir_ / "model.safetensors.index.json") << index;
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }

  // The same encoder in one piece on this rank, caption by caption.
  std::vector<std::vector<float>> features_in_one_piece() const {
    T5Encoder whole(deck_.get<T5Deck>(), 0, deck_.get<T5Deck>().num_layers);
    whole.params().allocate_for_inference(deck_.get<T5Deck>().dtype == "bf16");
    load_weights(dir_, whole.params(), t5_weight_names(deck_.get<T5Deck>()));
    const auto arena = Arena::reserve(std::size_t{1} << 28);
    const ArenaScope scope(*arena);
    std::vector<std::vector<float>> features;
    for (const auto& text : ids_) {
      const auto n = static_cast<std::int64_t>(text.size());
      const std::vector<std::int32_t> offsets = {0, static_cast<std::int32_t>(n)};
      PackedTokens in;
      in.ids = Tensor::from_host(std::span<const std::int32_t>(text), {n});
      in.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets), {2});
      in.longest = n;
      const Tensor y = whole.forward(in, Tensor());
      const test::Vec values = test::to_values(y);
      features.emplace_back(values.begin(), values.end());
    }
    return features;
  }

  EncodedTexts encode() {
    // Only rank 0 has the captions.
    return encode_tokens(deck_.get<T5Deck>(), rank_ == 0 ? ids_ : decltype(ids_){},
                         {{dir_ / "f", ids_.size(), {}}}, {}, MPI_COMM_WORLD);
  }

  // Encodes, and holds file and figures to what they must be.
  EncodedTexts encode_and_check(double tolerance = 1e-5) {
    const EncodedTexts done = encode();
    const auto expected = features_in_one_piece();
    const SafetensorsFile file = SafetensorsFile::open(dir_ / "f");
    EXPECT_EQ(file.entries().size(), ids_.size());
    double worst = 0, greatest = 0;
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      EXPECT_EQ(done.tokens.at(i), std::int64_t(ids_[i].size()));
      const SafetensorEntry& e = file.at(std::to_string(i));
      EXPECT_EQ(e.shape, (std::vector<std::int64_t>{std::int64_t(ids_[i].size()), 64}));
      const std::vector<float> got = file.read_f32(e);
      for (std::size_t j = 0; j < got.size(); ++j) {
        worst = std::max(worst, std::abs(double(got[j]) - double(expected[i][j])));
        greatest = std::max(greatest, std::abs(double(expected[i][j])));
      }
    }
    EXPECT_GT(greatest, 0.5) << "values, not zeros";
    EXPECT_LE(worst, tolerance * greatest);
    std::size_t bytes = 0;
    WeightFiles files = WeightFiles::open(dir_);
    for (const auto& t : files.tensors())
      if (!t.entry.name.starts_with("decoder.")) bytes += t.entry.end - t.entry.begin;
    EXPECT_EQ(done.weight_bytes_read, bytes) << "each byte once";
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks_); ++r) {
      EXPECT_LE(done.bytes_planned[r], done.limits[r]);
      EXPECT_LE(done.bytes_taken[r], done.bytes_planned[r]);
      EXPECT_EQ(done.bytes_taken[r] > 0, done.bytes_planned[r] > 0);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return done;
  }

  // Limits with room for so many layers on each rank, a little more, and the embedding where
  // `embedding`.
  void limit(const std::vector<int>& layers, std::size_t embedding) {
    deck_.get<T5Deck>().memory_gib.clear();
    std::vector<std::int64_t> tokens;
    for (const auto& t : ids_) tokens.push_back(std::int64_t(t.size()));
    const T5Job job = plan_t5(deck_.get<T5Deck>(), tokens, MPI_COMM_WORLD);
    const T5Encoder::Sizes s = T5Encoder::sizes(deck_.get<T5Deck>());
    for (std::size_t r = 0; r < layers.size(); ++r)
      deck_.get<T5Deck>().memory_gib.push_back(
          static_cast<double>(s.every_part + job.arena + job.messages +
                              static_cast<std::size_t>(layers[r]) * s.layer + s.layer / 4 +
                              (r == embedding ? s.embedding : 0)) /
          (1ull << 30));
  }

  int rank_ = 0, ranks_ = 1;
  fs::path dir_;
  Deck deck_;
  std::vector<std::vector<std::int32_t>> ids_ = {
      {5, 17, 1}, {3, 4, 49, 8, 9, 2, 30, 1},
      {1},        {9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1},
      {7, 1},     {40, 41, 42, 1},
      {11, 1}};
};

TEST_F(TextEncoder, GivesTheSameFeaturesOnAnyNumberOfRanks) {
  write_weights();
  const EncodedTexts done = encode_and_check();
  for (const std::size_t bytes : done.bytes_taken) EXPECT_GT(bytes, 0u) << "all have a part";
}

// Its layers have a bias table each, so none is shared among the ranks.
TEST_F(TextEncoder, GivesTheSameFeaturesOfUmT5) {
  deck_.get<T5Deck>().umt5 = true;
  write_weights();
  encode_and_check();
}

TEST_F(TextEncoder, PassesBf16FromRankToRank) {
  write_weights();
  deck_.get<T5Deck>().dtype = "bf16";
  // Other micro-batches may round otherwise: a few last places.
  encode_and_check(0x1p-6);
}

TEST_F(TextEncoder, PlacesLayersByUnevenLimits) {
  write_weights();
  const std::vector<std::vector<int>> layers = {{6}, {1, 5}, {2, 1, 3}, {1, 0, 4, 1}};
  const auto& mine = layers[ranks_ - 1];
  limit(mine, 0);
  const EncodedTexts done = encode_and_check();
  for (std::size_t r = 0; r < mine.size(); ++r)
    EXPECT_EQ(done.bytes_taken[r] > 0, mine[r] > 0) << "rank " << r;
}

TEST_F(TextEncoder, BeginsOnAnotherRankWhereTheFirstHasNoRoom) {
  if (ranks_ == 1) GTEST_SKIP();
  write_weights();
  std::vector<int> layers(ranks_, 3);
  layers[0] = 0;
  layers[1] = 6;
  limit(layers, 1);
  const EncodedTexts done = encode_and_check();
  EXPECT_EQ(done.bytes_taken[0], 0u);
}

TEST_F(TextEncoder, TakesSmallerMicroBatchesWhereMemoryIsShort) {
  write_weights();
  limit(std::vector<int>(ranks_, 6), 0);
  deck_.get<T5Deck>().micro_batch = 7;  // room was made for two
  encode_and_check();
}

TEST_F(TextEncoder, RefusesWhatDoesNotFitAndSaysWhatIsMissing) {
  write_weights();
  deck_.get<T5Deck>().memory_gib = {1e-5};
  try {
    encode();
    FAIL() << "taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_NE(std::string(e.what()).find("missing"), std::string::npos) << e.what();
  }
  deck_.get<T5Deck>().memory_gib = {1, 1, 1, 1, 1};
  EXPECT_THROW(encode(), Error) << "five values for fewer ranks";
  EXPECT_FALSE(fs::exists(dir_ / "f"));
}

TEST_F(TextEncoder, GivesItsMemoryBack) {
  write_weights();
  encode();  // what libraries keep once for all, they have now
  T5Deck& d = deck_.get<T5Deck>();
  d.d_model = 256, d.d_kv = 64, d.num_heads = 4, d.d_ff = 1024, d.num_layers = 8;
  write_weights();
  const std::size_t before = resident_bytes();
  const EncodedTexts done = encode();
  const std::size_t after = resident_bytes();
  const std::size_t taken = done.bytes_taken[rank_];
  EXPECT_GT(taken, 7u << 20);
  EXPECT_LT(after, before + (3u << 20)) << "of " << taken;
}

TEST_F(TextEncoder, WritesSeveralFilesAndStopsAmongThem) {
  write_weights();
  encode();
  const std::vector<TextFile> files = {
      {dir_ / "a", 3, {{"key", "k"}}}, {dir_ / "b", 4, {}}, {dir_ / "c", ids_.size(), {}}};
  const auto encode_files = [&](const std::function<bool()>& stop) {
    // Only rank 0 knows texts and files.
    return rank_ == 0 ? encode_tokens(deck_.get<T5Deck>(), ids_, files, stop, MPI_COMM_WORLD)
                      : encode_tokens(deck_.get<T5Deck>(), decltype(ids_){},
                                      std::vector<TextFile>{}, stop, MPI_COMM_WORLD);
  };
  // Asked to stop when a file is there: the first stage ends the stream, all know by the end of the
  // next file.
  EXPECT_TRUE(encode_files([&] { return fs::exists(dir_ / "a"); }).stopped);
  EXPECT_TRUE(fs::exists(dir_ / "a"));
  EXPECT_FALSE(fs::exists(dir_ / "c"));
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_FALSE(encode_files({}).stopped);
  const SafetensorsFile whole = SafetensorsFile::open(dir_ / "f");
  std::size_t first = 0;
  for (const TextFile& f : files) {
    const SafetensorsFile part = SafetensorsFile::open(f.path);
    EXPECT_EQ(part.entries().size(), f.end - first);
    for (std::size_t i = first; i < f.end; ++i) {
      const auto got = part.read_f32(part.at(std::to_string(i - first)));
      const auto expected = whole.read_f32(whole.at(std::to_string(i)));
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t j = 0; j < got.size(); ++j) EXPECT_NEAR(got[j], expected[j], 2e-5);
    }
    first = f.end;
  }
  EXPECT_EQ(SafetensorsFile::open(dir_ / "a").metadata().at("key"), "k");
}

// Asked to stop before the third micro-batch. Every rank has a layer, so the end of the stream
// passes through all.
TEST_F(TextEncoder, StopsBetweenMicroBatches) {
  deck_.get<T5Deck>().num_layers = ranks_;
  deck_.get<T5Deck>().micro_batch = 1;
  deck_.get<T5Deck>().max_length = 200;
  write_weights();
  ids_.assign(300, std::vector<std::int32_t>(200, 5));
  int asked = 0;
  const EncodedTexts done = encode_tokens(
      deck_.get<T5Deck>(), rank_ == 0 ? ids_ : decltype(ids_){},
      rank_ == 0 ? std::vector<TextFile>{{dir_ / "f", ids_.size(), {}}} : std::vector<TextFile>{},
      [&] { return ++asked == 3; }, MPI_COMM_WORLD);
  int stages_asked = asked > 0 ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &stages_asked, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_EQ(stages_asked, 1) << "the first pipeline stage alone asks";
  EXPECT_TRUE(done.stopped);
  EXPECT_EQ(done.tokens.size(), ids_.size());
  MPI_Barrier(MPI_COMM_WORLD);  // rank 0 gives the file up on its way out
  EXPECT_FALSE(fs::exists(dir_ / "f"));
  EXPECT_FALSE(fs::exists(dir_ / "f.tmp"));
  MPI_Barrier(MPI_COMM_WORLD);
  // All of it once nobody asks.
  ids_.resize(4);
  EXPECT_FALSE(encode().stopped);
  EXPECT_TRUE(fs::exists(dir_ / "f"));
}

TEST_F(TextEncoder, NoTextsMakeAnEmptyFile) {
  write_weights();
  ids_.clear();
  EXPECT_TRUE(encode().tokens.empty());
  EXPECT_TRUE(SafetensorsFile::open(dir_ / "f").entries().empty());
}

}  // namespace
}  // namespace weft
