// Weights in one file, in shards and in folders, and what is said about sets that are not whole.
#include "checkpoint/weight_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "core/error.h"
#include "tests/folder.h"

namespace weft {
namespace {

using testing::HasSubstr;

class WeightFilesTest : public FolderTest {
 protected:
  // A shard that holds tensors of those names: of one dimension, the values `from`, `from` + 1 ...
  void shard(const std::string& file, const std::vector<std::string>& names, float from = 0,
             std::size_t size = 6) {
    std::vector<float> values(size);
    for (float& v : values) v = from++;
    std::vector<SafetensorWrite> list;
    for (const std::string& n : names)
      list.push_back(
          {n, DType::f32, {std::int64_t(size)}, std::as_bytes(std::span<const float>(values))});
    write_safetensors(dir_ / file, list);
  }
  void write(const std::string& file, const std::string& text) {
    std::ofstream(dir_ / file) << text;
  }
  void index(const std::string& map) {
    write("model.safetensors.index.json",
          R"({"metadata": {"total_size": 72, "deep": [{"weight_map": 1}]}, "weight_map": {)" + map +
              "}}");
  }
  // Two shards with the tensors a, c and b.
  void two_shards() {
    shard("1.safetensors", {"a", "c"});
    shard("2.safetensors", {"b"}, 10);
    index(R"("a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors")");
  }
  std::string refusal(const fs::path& path) {
    try {
      WeightFiles::open(path);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data) << e.what();
      EXPECT_FALSE(e.hint().empty()) << e.what();
      return std::string(e.what()) + " | " + e.hint();
    }
    ADD_FAILURE() << "taken";
    return "";
  }
  // What is said of an index of that text.
  std::string refused_index(const std::string& text) {
    write("model.safetensors.index.json", text);
    return refusal(dir_ / "model.safetensors.index.json");
  }
};

TEST_F(WeightFilesTest, ShardsByTheirIndexAreOneModel) {
  two_shards();
  for (const fs::path& path : {dir_, dir_ / "model.safetensors.index.json"}) {
    const WeightFiles files = WeightFiles::open(path);
    ASSERT_EQ(files.tensors().size(), 3u);
    EXPECT_EQ(files.find("d"), nullptr);
    const auto* b = files.find("b");
    ASSERT_NE(b, nullptr);
    EXPECT_EQ(files.file_of(*b).filename(), "2.safetensors");
    EXPECT_EQ(files.bytes_read(), 0u);
    std::vector<float> part(3);
    files.read_f32(*b, 2, part);
    EXPECT_THAT(part, testing::ElementsAre(12, 13, 14));
    EXPECT_EQ(files.bytes_read(), 12u);
    std::vector<bf16> low(2);
    files.read_bf16(*files.find("c"), 4, low);
    EXPECT_EQ(float(low[0]), 4.0f);
    EXPECT_EQ(files.bytes_read(), 20u);
  }
}

TEST_F(WeightFilesTest, PartsOfEveryFloatingTypeAreReadRounded) {
  const std::vector<std::uint16_t> half = {0x3c00, 0xc000, 0x3555},
                                   brain = {0x3f80, 0xc040, 0x4100};
  const std::vector<float> wide = {1, 1.00390625f,
                                   1.01171875f};  // the last two between bf16 numbers
  const std::vector<std::int64_t> whole = {1, 2, 3};
  const std::vector<SafetensorWrite> list = {
      {"half", DType::f16, {3}, std::as_bytes(std::span(half))},
      {"brain", DType::bf16, {3}, std::as_bytes(std::span(brain))},
      {"wide", DType::f32, {3}, std::as_bytes(std::span(wide))},
      {"whole", DType::i64, {3}, std::as_bytes(std::span(whole))}};
  write_safetensors(dir_ / "any.safetensors", list);
  const WeightFiles files = WeightFiles::open(dir_);  // the one file of a folder
  std::vector<float> two(2);
  files.read_f32(*files.find("half"), 1, two);
  EXPECT_THAT(two, testing::ElementsAre(-2.0f, 0.333251953125f));
  files.read_f32(*files.find("brain"), 1, two);
  EXPECT_THAT(two, testing::ElementsAre(-3.0f, 8.0f));
  std::vector<bf16> low(2);
  files.read_bf16(*files.find("wide"), 1, low);
  EXPECT_EQ(float(low[0]), 1.0f) << "ties go to even";
  EXPECT_EQ(float(low[1]), 1.015625f);
  files.read_bf16(*files.find("brain"), 0, low);
  EXPECT_EQ(low[1].bits, 0xc040);
  EXPECT_THROW(files.read_f32(*files.find("whole"), 0, two), Error);
}

TEST_F(WeightFilesTest, FoldersGiveTheirKnownNamesFirst) {
  shard("other.safetensors", {"x"});
  shard("z.safetensors", {"x"});
  EXPECT_THAT(refusal(dir_),
              testing::AllOf(HasSubstr("2 sets of weights"), HasSubstr("z.safetensors")));
  shard("diffusion_pytorch_model.safetensors", {"y"});
  EXPECT_NE(WeightFiles::open(dir_).find("y"), nullptr);
  shard("model.safetensors", {"w"});
  EXPECT_NE(WeightFiles::open(dir_).find("w"), nullptr);
}

TEST_F(WeightFilesTest, ShardsWithoutAnIndexAreOneModelOnceAllAreThere) {
  shard("model-00001-of-00002.safetensors", {"a", "c"});
  EXPECT_THAT(refusal(dir_), HasSubstr("1 of the shards model-*-of-00002.safetensors"));
  EXPECT_EQ(WeightFiles::open(dir_ / "model-00001-of-00002.safetensors").tensors().size(), 2u);
  shard("model-00002-of-00002.safetensors", {"b"});
  EXPECT_EQ(WeightFiles::open(dir_).tensors().size(), 3u);
  shard("model-00002-of-00002.safetensors", {"b", "c"});
  EXPECT_THAT(refusal(dir_), HasSubstr("tensor c occurs twice"));
  shard("other.safetensors", {"b"});
  EXPECT_THAT(refusal(dir_), HasSubstr("3 sets of weights"));
}

TEST_F(WeightFilesTest, SaysWhatStandsInTheFilesPlace) {
  for (const char* name : {"a.safetensors", "a.safetensors.index.json"}) {
    write(name, "version https://git-lfs.github.com/spec/v1\noid sha256:00\n");
    EXPECT_THAT(refusal(dir_ / name),
                testing::AllOf(HasSubstr("Git LFS"), HasSubstr("git lfs pull")));
    write(name, "<!DOCTYPE html><html>Not found");
    EXPECT_THAT(refusal(dir_ / name), HasSubstr("a web page"));
    write(name, "");
    EXPECT_THAT(refusal(dir_ / name), HasSubstr("an empty file"));
  }
  write("a.safetensors", R"({"metainfo": {"task_name": "textdet"}})");
  EXPECT_THAT(refusal(dir_ / "a.safetensors"), HasSubstr("text, which begins with"));
  write("a.safetensors", std::string("PK\x03\x04\x14\0\0\0zip", 11));
  EXPECT_THAT(refusal(dir_ / "a.safetensors"),
              testing::AllOf(HasSubstr("a ZIP archive"), HasSubstr("convert_weights.py")));
}

TEST_F(WeightFilesTest, RefusesWhatHoldsNoWeights) {
  EXPECT_THAT(refusal(dir_), HasSubstr("holds no safetensors file"));
  std::filesystem::create_directory(dir_ / "transformer");
  write("transformer/model.safetensors", "");
  EXPECT_THAT(refusal(dir_),
              testing::AllOf(HasSubstr("name one of its folders"), HasSubstr("/transformer")));
  write("pytorch_model.bin", "PK");
  EXPECT_THAT(refusal(dir_), HasSubstr("convert_weights.py"));
  EXPECT_THAT(refusal(dir_ / "pytorch_model.bin"), HasSubstr("convert_weights.py"));
  EXPECT_THAT(refusal(dir_ / "absent"), HasSubstr("No such file"));
}

TEST_F(WeightFilesTest, RefusesShardsThatAreMissingOrCutShort) {
  two_shards();
  fs::resize_file(dir_ / "1.safetensors", fs::file_size(dir_ / "1.safetensors") - 4);
  EXPECT_THAT(refusal(dir_),
              testing::AllOf(HasSubstr("1.safetensors"), HasSubstr("but the file has")));
  fs::remove(dir_ / "1.safetensors");
  EXPECT_THAT(refusal(dir_), HasSubstr("1.safetensors, which is not there"));
}

TEST_F(WeightFilesTest, RefusesShardsThatTheIndexDoesNotFit) {
  two_shards();
  index(R"("a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors")");
  EXPECT_THAT(refusal(dir_), HasSubstr("tensor b is in 1.safetensors, but it is not"));
  index(R"("a": "1.safetensors", "b": "2.safetensors")");
  EXPECT_THAT(refusal(dir_), HasSubstr("holds tensor c"));
  shard("2.safetensors", {"b", "c"});
  index(R"("a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors")");
  EXPECT_THAT(refusal(dir_), HasSubstr("tensor c is in 1.safetensors and in"));
}

TEST_F(WeightFilesTest, RefusesIndicesThatAreNone) {
  shard("1.safetensors", {"a"});
  EXPECT_THAT(refused_index("{"), HasSubstr("not JSON at byte"));
  EXPECT_THAT(refused_index("{}"), HasSubstr("no \"weight_map\""));
  EXPECT_THAT(refused_index("[1]"), HasSubstr("no \"weight_map\""));
  EXPECT_THAT(refused_index(R"({"weight_map": {}})"), HasSubstr("empty"));
  EXPECT_THAT(refused_index(R"({"weight_map": ["a"]})"), HasSubstr("not the name of a file"));
  EXPECT_THAT(refused_index(R"({"weight_map": {"a": 1}})"), HasSubstr("entry a of"));
  EXPECT_THAT(refused_index(R"({"weight_map": {"a": {}}})"), HasSubstr("entry a of"));
  EXPECT_THAT(refused_index(R"({"weight_map": {"a": "../1.safetensors"}})"),
              HasSubstr("tensor a is in \"../1.safetensors\""));
  EXPECT_THAT(refused_index(R"({"weight_map": {"a": "1.safetensors", "a": "1.safetensors"}})"),
              HasSubstr("tensor a occurs twice"));
  EXPECT_THAT(refused_index(std::string("{}\0", 3)), HasSubstr("zero byte"));
  EXPECT_THAT(refused_index(std::string(3'000'000, '[')), HasSubstr("not JSON"));
  fs::resize_file(dir_ / "model.safetensors.index.json", 100'000'001);  // zeros that take no room
  EXPECT_THAT(refusal(dir_ / "model.safetensors.index.json"), HasSubstr("too long for an index"));
}

}  // namespace
}  // namespace weft
