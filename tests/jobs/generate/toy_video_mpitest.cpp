// A second text-to-video model is one folder and one line: `generate` makes clips with a toy that
// only the registry's line knows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "jobs/generate/generate.h"
#include "jobs/generate/job.h"
#include "jobs/jobs.h"
#include "models/registry.h"
#include "tests/models/toy_video/toy_video.h"

namespace weft::test {
namespace {

template <class Role, class Toy>
std::unique_ptr<Role> make(const Deck&) {
  return std::make_unique<Toy>();
}

// A model like Wan: without a null caption, for clips from noise alone, of sides and lengths that
// its patches and its codec can take.
class ToyTextModel : public ToyDenoiser {
 public:
  bool has_null_caption() const override { return false; }
  bool takes_given_frames() const override { return false; }
  ClipDefaults clip_defaults() const override {
    return {.fps = 16, .aes = 0, .negative_prompt = "bad"};
  }
  std::int64_t side_multiple() const override { return 2; }
};
class ToyOddCodec : public ToyCodec {
 public:
  std::int64_t coded_frames(std::int64_t frames) const override { return (frames - 1) / 4 * 4 + 1; }
};

// The lines of the registry, and the parser's knowledge of them.
const bool registered = [] {
  add_model({"toy_text_model", nullptr, nullptr, make<Denoiser, ToyTextModel>,
             make<VideoCodec, ToyOddCodec>, make<TextEncoder, ToyTextEncoder>});
  add_model({"toy_without_texts", nullptr, nullptr, make<Denoiser, ToyTextModel>,
             make<VideoCodec, ToyOddCodec>});
  add_model({"toy_video", nullptr, nullptr, make<Denoiser, ToyDenoiser>, make<VideoCodec, ToyCodec>,
             make<TextEncoder, ToyTextEncoder>});
  register_deck_tables();
  return true;
}();

class ToyVideo : public testing::Test {
 protected:
  ToyVideo() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    long id = getpid();
    MPI_Bcast(&id, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    root_ = std::filesystem::path(testing::TempDir()) / ("weft_toy_video_" + std::to_string(id));
    if (rank_ == 0) {
      std::filesystem::create_directories(root_);
      const float offset = 0.25f;
      const SafetensorWrite weights[] = {
          {"toy.offset", DType::f32, {1}, std::as_bytes(std::span(&offset, 1))}};
      write_safetensors(root_ / "toy.safetensors", weights);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
  ~ToyVideo() override {
    MPI_Barrier(MPI_COMM_WORLD);
    std::error_code ignored;
    if (rank_ == 0) std::filesystem::remove_all(root_, ignored);
  }
  // Two prompts, of 5 and 10 bytes; the second begins with a white picture.
  Deck deck(const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> all = {"run.dir=" + (root_ / "run").string(),
                                    "generate.output=" + (root_ / "out").string(),
                                    "generate.weights=" + (root_ / "toy.safetensors").string()};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return parse_deck(
        "[model]\nname = \"toy_video\"\n[device]\nkind = \"cpu\"\n[memory]\narena_gib = 0.25\n"
        "[sampler]\nsteps = 3\ncfg_scale = 1\n"
        "[generate]\nprompts = [\"a cat\", \"a long dog\"]\naes = 0\ntensors = true\n"
        "image_size = [16, 32]\nnum_frames = \"4\"\n"
        "references = [\"\", \"lavfi:color=white:size=32x16:rate=1:duration=1\"]\n"
        "mask_strategies = [\"\", \"0\"]\n",
        "toy.toml", all);
  }
  std::vector<float> values(const char* clip, const char* name) const {
    const SafetensorsFile file =
        SafetensorsFile::open(root_ / "out" / (std::string(clip) + ".safetensors"));
    return file.read_f32(file.at(name));
  }

  int rank_ = 0;
  std::filesystem::path root_;
};

TEST_F(ToyVideo, GenerateMakesClipsOfTheRegistrysParts) {
  ASSERT_EQ(generate(deck(), MPI_COMM_WORLD), 0);
  const std::vector<float> cat = values("sample_0000", "latent_0");
  ASSERT_EQ(cat.size(), std::size_t{4 * 8 * 16});
  for (const float v : cat) ASSERT_NEAR(v, 0.05 + 0.25, 1e-5);
  const std::vector<float> frames = values("sample_0000", "frames");
  ASSERT_EQ(frames.size(), std::size_t{4 * 16 * 32 * 3});
  for (const float v : frames) ASSERT_NEAR(v, 0.05 + 0.25, 1e-5);
  // The first frame is the picture's, through the codec; the others follow the prompt.
  const std::vector<float> dog = values("sample_0001", "latent_0");
  for (std::size_t i = 0; i < dog.size(); ++i)
    ASSERT_NEAR(dog[i], i < 8 * 16 ? 1.0 : 0.1 + 0.25, 1e-5);
  EXPECT_TRUE(std::filesystem::exists(root_ / "out" / "sample_0001.mp4"));
}

// Guidance leads away from the negative prompt: the prompt's own, the deck's, or the model's. A
// text of n bytes is n / 100.
TEST_F(ToyVideo, ATextModelIsGuidedAwayFromItsNegativePrompt) {
  const auto latent = [&](const std::vector<std::string>& overrides, const char* clip) {
    std::vector<std::string> all = {"model.name=toy_text_model",
                                    "generate.num_frames=5",
                                    "generate.references=[]",
                                    "generate.mask_strategies=[]",
                                    "sampler.cfg_scale=3",
                                    "generate.batch_size=2",
                                    "generate.prompts=[\"a cat\", \"a dog "
                                    "{\\\"negative_prompt\\\": \\\"0123456789\\\"}\"]"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == 0) std::filesystem::remove_all(root_ / "out");  // nothing is replaced
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_EQ(generate(deck(all), MPI_COMM_WORLD), 0);
    return static_cast<double>(values(clip, "latent_0").front());
  };
  for (const char* solver : {"euler", "unipc", "dpm++"}) {
    const std::string s = std::string("sampler.solver=") + solver;
    const auto guided = [](double with, double without) {
      return 0.25 + without + 3 * (with - without);
    };
    EXPECT_NEAR(latent({s}, "sample_0000"), guided(0.05, 0.03), 1e-5) << solver;
    EXPECT_NEAR(latent({s, "generate.negative_prompt=ugly"}, "sample_0000"), guided(0.05, 0.04),
                1e-5);
    EXPECT_NEAR(latent({s}, "sample_0001"), guided(0.05, 0.10), 1e-5);
  }
  // So may a model that has a null caption.
  EXPECT_NEAR(latent({"model.name=toy_video", "generate.negative_prompt=ugly"}, "sample_0000"),
              0.25 + 0.04 + 3 * (0.05 - 0.04), 1e-5);
}

TEST_F(ToyVideo, WhatTheDeckLeavesOutIsTheModels) {
  const Deck plain = with_model_defaults(parse_deck("", "deck", {"model.name=toy_text_model"}));
  EXPECT_EQ(plain.get<GenerateDeck>().fps, 16);
  EXPECT_EQ(plain.get<GenerateDeck>().aes, 0);
  const Deck own = with_model_defaults(
      parse_deck("", "deck", {"model.name=toy_text_model", "generate.fps=8", "generate.aes=5"}));
  EXPECT_EQ(own.get<GenerateDeck>().fps, 8);
  EXPECT_EQ(own.get<GenerateDeck>().aes, 5);
  const Deck stdit3 = with_model_defaults(parse_deck("", "deck", {}));
  EXPECT_EQ(stdit3.get<GenerateDeck>().fps, 24);
  EXPECT_EQ(stdit3.get<GenerateDeck>().aes, 6.5);
}

TEST_F(ToyVideo, ClipsThatAModelCannotMakeAreRefused) {
  const std::vector<std::string> fits = {"model.name=toy_text_model", "generate.num_frames=5",
                                         "generate.references=[]", "generate.mask_strategies=[]"};
  const auto refused = [&](const std::vector<std::string>& overrides, const std::string& why) {
    std::vector<std::string> all = fits;
    all.insert(all.end(), overrides.begin(), overrides.end());
    try {
      generate(deck(all), MPI_COMM_WORLD);
      ADD_FAILURE() << why;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_THAT(e.what() + (" | " + e.hint()), testing::HasSubstr(why));
    }
  };
  refused({"generate.num_frames=4"}, "makes no clip of 4 frames | ask for 1 frames or for 5");
  refused({"generate.num_frames=6"}, "ask for 5 frames or for 9");
  refused({"generate.image_size=[16,36]", "generate.num_frames=1", "sampler.cache=teacache",
           "sampler.cache_threshold=0.1"},
          "no published coefficients for toy");
  refused({"generate.image_size=[18,32]"},
          "multiples of 4, such as generate.image_size = [16, 32]");
  refused({"generate.loop=2"}, "cannot begin with given frames");
  refused({"generate.references=[\"\", \"lavfi:color=white:size=32x16:rate=1:duration=1\"]",
           "generate.mask_strategies=[\"\", \"0\"]"},
          "cannot begin with given frames");
  refused({"model.name=toy_without_texts"}, "no null caption");
  refused({"sampler.solver=unipc", "sampler.steps=100000", "sampler.shift=1000"},
          "have the same time");
  refused({"sampler.cache_threshold=0.1"}, "sampler.cache is \"none\"");
  refused({"model.name=toy_video", "sampler.solver=unipc", "generate.num_frames=4",
           "generate.references=[\"\", \"lavfi:color=white:size=32x16:rate=1:duration=1\"]",
           "generate.mask_strategies=[\"\", \"0,0,0,0,1,0.5\"]"},
          "an edit ratio of 0.5");
}

TEST_F(ToyVideo, AModelNameWithoutThePartIsRefused) {
  EXPECT_THROW(ToyDenoiser().check_sequence(8, 16, 2), Error);  // parallel.sp = 2
  const Deck detector = deck({"model.name=dbnet"}), vae = deck({"model.name=vae"});
  EXPECT_THROW(make_denoiser(detector), Error);
  EXPECT_THROW(make_codec(detector), Error);
  EXPECT_THROW(make_text_encoder(detector), Error);
  EXPECT_THROW(t5_deck(detector), Error);
  EXPECT_THROW(make_denoiser(vae), Error);
  EXPECT_NE(make_codec(vae)->name(), make_codec(deck())->name());
  EXPECT_NE(make_text_encoder(vae), nullptr);
}

}  // namespace
}  // namespace weft::test
