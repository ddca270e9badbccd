// What a job is to make, what of it is finished, and which clips are sampled together.
#include "jobs/generate/job.h"
#include "jobs/jobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/error.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/options.h"
#include "models/flow_sampler.h"
#include "models/stdit3/options.h"
#include "models/t5/options.h"
#include "models/video_vae/options.h"

namespace weft {
namespace {

const bool registered = (register_deck_tables(), true);

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
  return plan_generate_job(deck, read_prompts(deck.get<GenerateDeck>()), ClipParts(deck), weights);
}

TEST(GenerateJob, ListsClipsLongestFirst) {
  Deck deck = small();
  deck.get<GenerateDeck>().num_samples = 2;
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
  deck.get<GenerateDeck>().num_samples = 3;
  const GenerateJob three = job_of(deck);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(one.items[i].noise_id(one.prompts), three.items[3 * i].noise_id(three.prompts));
  EXPECT_NE(three.items[0].noise_id(three.prompts), three.items[1].noise_id(three.prompts));
}

TEST(GenerateJob, KeysChangeWithWhatDecidesPixels) {
  const Deck deck = parse_deck(to_toml(small()), "deck", {"t5.weights=w"});
  const GenerateJob job = job_of(deck);
  EXPECT_EQ(job.items[0].key, job_of(deck).items[0].key);
  EXPECT_NE(job.items[0].key, job.items[2].key);
  EXPECT_NE(job.items[0].key, job_of(deck, "others").items[0].key);
  for (const char* change :
       {"run.seed=1", "sampler.steps=3", "generate.fps=8", "generate.aes=5",
        "model.input_sq_size=256", "model.qk_norm=false", "vae.num_groups=4",
        "vae.spatial_groups=4", "vae.scale=[1,1,1,2]", "t5.max_length=3", "t5.dtype=bf16",
        "t5.tokenizer=another", "diffusion.use_discrete_timesteps=true"}) {
    const Deck other = parse_deck(to_toml(deck), "deck", {change});
    EXPECT_NE(job.items[0].key, job_of(other).items[0].key) << change;
  }
  Deck same = parse_deck(to_toml(deck), "deck", {"generate.max_clips=9", "generate.output=x"});
  same.run.threads = 3;
  same.parallel.sp = 2;
  same.get<VaeDeck>().micro_batch_size = 1;
  same.get<T5Deck>().micro_batch = 1;
  same.model.recompute = 1;
  same.get<DiffusionDeck>().loc = 1;
  EXPECT_EQ(job.items[0].key, job_of(same).items[0].key);
}

TEST(GenerateJob, NegativePromptsAreTextsLikeOthers) {
  const Deck deck = parse_deck(to_toml(small()), "deck", {"t5.weights=w"});
  const auto job_with = [&](std::vector<std::string> prompts, const std::string& negative) {
    Deck own = deck;
    own.get<GenerateDeck>().prompts = std::move(prompts);
    own.get<GenerateDeck>().negative_prompt = negative;
    return job_of(own);
  };
  const auto negatives = [](const GenerateJob& job) {
    std::vector<std::string> of;
    for (const ClipItem& item : job.items)
      of.push_back(item.negative < 0 ? "-" : job.texts[item.negative]);
    return of;
  };
  const std::vector<std::string> prompts = {"a", R"(b {"negative_prompt": " low "})",
                                            R"(c {"negative_prompt": null})",
                                            R"(d {"negative_prompt": ""})"};
  using testing::ElementsAre;
  // STDiT3 has a null caption.
  const GenerateJob own = job_with(prompts, "");
  EXPECT_THAT(negatives(own), ElementsAre("-", "low", "-", "-"));
  EXPECT_EQ(own.items[0].key, job_with({"a"}, "").items[0].key);
  const GenerateJob all = job_with(prompts, "bad");
  EXPECT_THAT(negatives(all), ElementsAre("bad", "low", "bad", "-"));
  EXPECT_THAT(all.texts, ElementsAre("a", "bad", "b", "low", "c", "d")) << "each once";
  EXPECT_NE(all.items[0].key, own.items[0].key);
  EXPECT_EQ(all.items[1].key, own.items[1].key);
  // A text and a null caption do not share a batch.
  Deck batched = deck;
  batched.get<GenerateDeck>().batch_size = 4;
  const auto order = all.longest_first();
  EXPECT_THAT(make_batches(batched, all, order, limit_batches(batched, all, order, 1)),
              ElementsAre(ClipBatch{0, 1, 2}, ClipBatch{3}));
}

TEST(GenerateJob, ErrorsNameThePrompt) {
  const auto error_of = [](const char* prompt) {
    Deck deck = small();
    deck.get<GenerateDeck>().prompts = {"a cat", prompt};
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
  deck.get<GenerateDeck>().prompt_as_path = true;
  deck.get<GenerateDeck>().num_samples = 1;
  // The second and third prompt collide with each other, and then with what the first is called.
  deck.get<GenerateDeck>().prompts = {"a_0002", "a", "a", "a/0002", "a_0002"};
  std::set<std::string> names;
  for (const ClipItem& item : job_of(deck).items) names.insert(item.name);
  EXPECT_EQ(names.size(), 5u);
}

TEST(ClipBatches, AreOfOneSizeAndNoLargerThanAGroupsShare) {
  Deck deck = small();
  const std::string picture = " {\"num_frames\": 1}";
  deck.get<GenerateDeck>().prompts = {"a" + picture, "b",           "c {\"mask_strategy\": \"1\"}",
                                      "d" + picture, "e",           "f",
                                      "g",           "h" + picture, "i"};
  deck.get<GenerateDeck>().batch_size = 4;
  const GenerateJob job = job_of(deck);
  const auto batches = [&](int groups) {
    const auto order = job.longest_first();
    return make_batches(deck, job, order, limit_batches(deck, job, order, groups));
  };
  // Item 2 has a mask: alone, though of the same size.
  EXPECT_EQ(batches(1), (std::vector<ClipBatch>{{1, 4, 5, 6}, {2}, {8}, {0, 3, 7}}));
  EXPECT_EQ(batches(2), (std::vector<ClipBatch>{{1, 4, 5}, {6, 8}, {2}, {0, 3}, {7}}));
  EXPECT_EQ(batches(3).size(), 7u);
  deck.get<GenerateDeck>().batch_size = 1;
  std::vector<std::int64_t> alone;
  for (const ClipBatch& batch : batches(1)) alone.push_back(batch.at(0));
  EXPECT_EQ(alone, job.longest_first());
  deck.get<GenerateDeck>().batch_size = 4;
  deck.get<GenerateDeck>().loop = 2;
  EXPECT_EQ(batches(1).size(), 9u);
  deck.get<GenerateDeck>().loop = 1;
  // Those that are finished need no place.
  const std::vector<std::int64_t> missing = {0, 1, 3, 8};
  EXPECT_EQ(make_batches(deck, job, missing, limit_batches(deck, job, missing, 1)),
            (std::vector<ClipBatch>{{1, 8}, {0, 3}}));
}

TEST(ClipBatches, AreAsLargeAsTheMemory) {
  const Deck deck = small();
  const GenerateJob job = job_of(deck);
  const ClipParts parts(deck);
  parts.denoiser->params().allocate_for_inference(false);
  const auto bytes = [&](std::int64_t clips) {
    return plan_sampling(deck, parts, job.items[0], clips).bytes;
  };
  const auto fitting = [&](std::size_t capacity) {
    return fit_batch(deck, parts, job.items[0], 8, capacity);
  };
  EXPECT_EQ(fitting(1), 1);
  EXPECT_EQ(fitting(bytes(3)), 2);  // a 32nd stays free
  EXPECT_EQ(fitting(bytes(4)), 3);
  EXPECT_EQ(fitting(2 * bytes(8)), 8);
}

TEST(GenerateJob, LoopsMustFit) {
  Deck deck = small();
  deck.get<GenerateDeck>().prompts = {"a cat"};
  deck.get<GenerateDeck>().num_frames = "34";
  deck.get<GenerateDeck>().loop = 3;
  const GenerateJob job = job_of(deck);
  EXPECT_EQ(job.loops.condition_frames, 17);
  EXPECT_EQ(job.total_frames(job.items[0], deck.get<GenerateDeck>()), 68);
  deck.get<GenerateDeck>().condition_frame_length = 4;
  EXPECT_THROW(job_of(deck), Error);
  deck.get<GenerateDeck>().condition_frame_length = 10;
  EXPECT_THROW(job_of(deck), Error);  // nothing new in a loop
}

Deck pixel_deck() {
  Deck deck;
  deck.get<Stdit3Deck>().in_channels = 3;
  return deck;
}

TEST(ClipParts, TakePixelsOrTheCodecsLatents) {
  EXPECT_TRUE(ClipParts(pixel_deck()).on_pixels);
  Deck deck;
  EXPECT_EQ(ClipParts(deck).codec->channels(), 4);
  deck.get<Stdit3Deck>().in_channels = 5;
  EXPECT_THROW(ClipParts{deck}, Error);
  deck.get<Stdit3Deck>().in_channels = 4;
  deck.get<VaeDeck>().scale.clear();
  EXPECT_THROW(ClipParts{deck}, Error);
}

}  // namespace
}  // namespace weft
