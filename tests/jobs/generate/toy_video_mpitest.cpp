// A second text-to-video model is one folder and one line: `generate` makes clips with a toy that
// only the registry's line knows.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "jobs/generate/generate.h"
#include "jobs/jobs.h"
#include "models/registry.h"
#include "tests/models/toy_video/toy_video.h"

namespace weft::test {
namespace {

template <class Role, class Toy>
std::unique_ptr<Role> make(const Deck&) {
  return std::make_unique<Toy>();
}

// The line of the registry, and the parser's knowledge of it.
const bool registered = [] {
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

// A model.name without the part that a job wants, as of a detector, gets the first model's that has
// it: decks of such runs serve `generate`, `encode` and `reconstruct` too.
TEST_F(ToyVideo, AModelNameWithoutThePartIsIgnored) {
  EXPECT_THROW(ToyDenoiser().check_sequence(8, 16, 2), Error);  // parallel.sp = 2
  const Deck detector = deck({"model.name=dbnet"}), vae = deck({"model.name=vae"});
  EXPECT_EQ(make_denoiser(detector)->name(), make_denoiser(vae)->name());
  EXPECT_EQ(make_codec(detector)->name(), make_codec(vae)->name());
  EXPECT_NE(make_codec(detector)->name(), make_codec(deck())->name());
  EXPECT_NE(make_text_encoder(detector), nullptr);
}

}  // namespace
}  // namespace weft::test
