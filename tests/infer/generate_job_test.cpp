// What a job is to make, and what of it is finished.
#include "infer/generate_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/error.h"

namespace weft {
namespace {

Deck small() {
  return parse_deck(R"([model]
hidden_size = 32
depth = 1
num_heads = 2
caption_channels = 8
model_max_length = 4
[vae]
spatial_channels = [4, 4, 4, 4]
spatial_groups = 2
filters = 4
num_groups = 2
[generate]
aes = 0
prompts = ["a cat", "a dog {\"num_frames\": 34}", "a cat {\"num_frames\": 1, \"resolution\": \"144p\"}"]
image_size = []
num_frames = "17"
)",
                    "deck", {});
}

GenerateJob job_of(const Deck& deck, const std::string& weights = "w") {
  return plan_generate_job(deck, read_prompts(deck.generate), Stdit3(deck.model),
                           VideoVae(deck.vae), weights);
}

TEST(GenerateJob, ListsClipsLongestFirst) {
  Deck deck = small();
  deck.generate.num_samples = 2;
  const GenerateJob job = job_of(deck);
  ASSERT_EQ(job.items.size(), 6u);
  EXPECT_EQ(job.texts, (std::vector<std::string>{"a cat", "a dog"}));
  EXPECT_EQ(job.items[3].name, "sample_0001-1");
  EXPECT_EQ(job.items[3].latent_frames, 10);
  EXPECT_EQ(job.items[3].latent_height, 30);
  EXPECT_EQ(job.items[3].latent_width, 53);
  EXPECT_EQ(job.items[4].pixels, (PixelSize{1, 144, 256}));
  EXPECT_EQ(job.longest_first(), (std::vector<std::int64_t>{2, 3, 0, 1, 4, 5}));
}

TEST(GenerateJob, NoiseFollowsPromptAndSampleAlone) {
  Deck deck = small();
  const GenerateJob one = job_of(deck);
  deck.generate.num_samples = 3;
  const GenerateJob three = job_of(deck);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(one.items[i].noise_id(one.prompts), three.items[3 * i].noise_id(three.prompts));
  EXPECT_NE(three.items[0].noise_id(three.prompts), three.items[1].noise_id(three.prompts));
}

TEST(GenerateJob, KeysChangeWithWhatDecidesPixels) {
  const Deck deck = small();
  const GenerateJob job = job_of(deck);
  EXPECT_EQ(job.items[0].key, job_of(deck).items[0].key);
  EXPECT_NE(job.items[0].key, job.items[2].key);
  EXPECT_NE(job.items[0].key, job_of(deck, "others").items[0].key);
  for (const char* change :
       {"run.seed=1", "sampler.steps=3", "generate.fps=8", "generate.aes=5",
        "model.input_sq_size=256", "model.qk_norm=false", "vae.num_groups=4",
        "vae.spatial_groups=4", "vae.scale=[1,1,1,2]", "t5.max_length=3", "t5.dtype=bf16",
        "t5.tokenizer=another", "diffusion.fix_short_clips=false"}) {
    const Deck other = parse_deck(to_toml(deck), "deck", {change});
    EXPECT_NE(job.items[0].key, job_of(other).items[0].key) << change;
  }
  Deck same = deck;
  same.run.threads = 3;
  same.parallel.sp = 2;
  same.vae.micro_batch_size = 1;
  same.t5.micro_batch = 1;
  same.model.recompute = 1;
  same.diffusion.loc = 1;
  EXPECT_EQ(job.items[0].key, job_of(same).items[0].key);
}

TEST(GenerateJob, ErrorsNameThePrompt) {
  const auto error_of = [](const char* prompt) {
    Deck deck = small();
    deck.generate.prompts = {"a cat", prompt};
    try {
      job_of(deck);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(error_of(R"(a dog {"aspect_ratio": "7:7"})"),
              ::testing::HasSubstr("generate.prompts[1]: unknown aspect ratio \"7:7\""));
  EXPECT_THAT(error_of(R"(a dog {"mask_strategy": "0"})"),
              ::testing::HasSubstr("generate.prompts[1]: the mask strategy asks for reference 0"));
  EXPECT_EQ(error_of(R"(a dog {"mask_strategy": "1"})"), "");  // there is no loop 1
}

TEST(GenerateJob, NamesAreUnlike) {
  Deck deck = small();
  deck.generate.prompt_as_path = true;
  deck.generate.num_samples = 1;
  // The second and third prompt collide with each other, and then with what the first is called.
  deck.generate.prompts = {"a_0002", "a", "a", "a/0002", "a_0002"};
  std::set<std::string> names;
  for (const ClipItem& item : job_of(deck).items) names.insert(item.name);
  EXPECT_EQ(names.size(), 5u);
}

TEST(GenerateJob, LoopsMustFit) {
  Deck deck = small();
  deck.generate.prompts = {"a cat"};
  deck.generate.num_frames = "34";
  deck.generate.loop = 3;
  const GenerateJob job = job_of(deck);
  EXPECT_EQ(job.loops.condition_frames, 17);
  EXPECT_EQ(job.total_frames(job.items[0], deck.generate), 68);
  deck.generate.condition_frame_length = 4;
  EXPECT_THROW(job_of(deck), Error);
  deck.generate.condition_frame_length = 10;
  EXPECT_THROW(job_of(deck), Error);  // nothing new in a loop
}

}  // namespace
}  // namespace weft
