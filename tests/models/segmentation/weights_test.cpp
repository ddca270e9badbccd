// Weight files of segmentation: a pair, one file of both, ImageNet's encoders, and what is said of
// others.
#include "models/segmentation/weights.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "tests/models/segmentation/fixture.h"

namespace weft::test {
namespace {

using testing::HasSubstr;

class SegmentationWeights : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() /
           ("weft_segmentation_weights_" + std::to_string(::getpid()));
    std::filesystem::create_directories(dir_);
    for (const auto& p : net_.net.params().all())
      if (p->name.find("running") != std::string::npos)
        p->set(0, std::vector<float>(static_cast<std::size_t>(p->shape.numel()), 0.25f));
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  static bool is_tmp(const std::string& name) { return name.find("._") != std::string::npos; }

  // The parameters whose names begin with `prefix`, without it where `cut`; `older`: without the
  // buffers of training on several GPUs. `spare` names a tensor in addition, of i64.
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
    if (!spare.empty()) list.push_back({spare, DType::i64, {}, std::as_bytes(std::span(&zero, 1))});
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
    EXPECT_THAT(complaint("x.safetensors", halves, two.net), HasSubstr("beside"));
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
  EXPECT_THAT(complaint("", deck, n.net), HasSubstr("\"cbr.2.weight\" is no parameter"));
  // A classifier of ImageNet has no place in a decoder.
  deck.weights_decoder = file("decoder.", true, false, "fc.weight");
  EXPECT_THAT(complaint("", deck, n.net), HasSubstr("\"fc.weight\" is no parameter"));
  EXPECT_THAT(complaint(file("encoder.", false, false, ""), pair_, n.net),
              HasSubstr("has no tensor decoder."));
}

}  // namespace
}  // namespace weft::test
