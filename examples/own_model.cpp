// A video model of your own in one file: a small transformer over patches of all frames, on pixels,
// that learns by rectified flow and makes clips. Trainer, checkpoints, samplers and all commands of
// weft come with it (docs/own_model.md).
#include "cli/cli.h"
#include "models/pixels.h"
#include "models/registry.h"
#include "models/video_task.h"
#include "ops/norm.h"

namespace {

using namespace weft;

// The table [own] of the deck.
struct OwnDeck {
  std::int64_t heads = 4, depth = 2, patch = 4;
};
void own_rows(Rows& r, OwnDeck& d) {
  r.number("heads", d.heads, 1, 512, "Attention heads, each of 16 channels of a token.");
  r.number("depth", d.depth, 1, 100, "Blocks.");
  r.number("patch", d.patch, 1, 64, "Rows and columns of a patch, in pixels.");
}

class OwnModel : public Denoiser {
 public:
  explicit OwnModel(const OwnDeck& deck) : deck_(deck) {
    const std::int64_t C = 16 * deck.heads, values = 3 * deck.patch * deck.patch;
    const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
      return nn::add_linear(params_, name, out, in, Init::xavier(out, in));
    };
    patches_ = linear("patches", C, values);
    time1_ = linear("time1", C, 256);
    time2_ = linear("time2", 6 * C, C);
    for (std::int64_t i = 0; i < deck.depth; ++i) {
      const std::string b = "blocks." + std::to_string(i) + ".";
      blocks_.push_back({&params_.add(b + "modulation", {6, C}, Init::normal(0.02)),
                         &params_.add(b + "norm_q", {C}, Init::constant(1)),
                         &params_.add(b + "norm_k", {C}, Init::constant(1)), linear(b + "q", C, C),
                         linear(b + "k", C, C), linear(b + "v", C, C), linear(b + "out", C, C),
                         linear(b + "fc1", 4 * C, C), linear(b + "fc2", C, 4 * C)});
    }
    head_ = linear("head", values, C);
  }

  std::string name() const override { return "own model"; }
  ParameterTable& params() override { return params_; }
  std::set<std::string> tables() const override { return {"own", "sampler"}; }
  std::int64_t channels() const override { return PixelCodec::pixel_channels; }
  std::int64_t side_multiple() const override { return deck_.patch; }
  double flops(std::int64_t frames, std::int64_t h, std::int64_t w) const override {
    const auto N = static_cast<double>(frames * h * w / (deck_.patch * deck_.patch));
    const auto C = static_cast<double>(16 * deck_.heads);
    return static_cast<double>(deck_.depth) * (24 * N * C * C + 4 * N * N * C);
  }
  Tensor velocity(const DenoiserInput& in) override {
    Tape tape(Tape::Mode::infer);
    return forward(tape, in.x, in.timestep)->value;
  }

  // x0 - eps, f32 [B,3,T,h,w] as x.
  Var forward(Tape& tape, const Tensor& x_t, const Tensor& timestep) {
    const nn::Context c{tape, params_};
    const int p = static_cast<int>(deck_.patch), heads = static_cast<int>(deck_.heads);
    const std::int64_t B = x_t.dim(0), rows = x_t.dim(3) / p, columns = x_t.dim(4) / p;
    const Shape grid{B, x_t.dim(2), rows * columns, 3 * p * p};
    const std::int64_t N = grid[1] * grid[2];
    Tensor values = Tensor::empty(grid, DType::f32);
    ops::patchify_forward(x_t, {1, p, p}, values);
    Var x = nn::linear(c, make_var(values.view({B, N, grid[3]}), false), patches_);

    // The timestep modulates the tokens of its sample.
    Tensor times = Tensor::empty({B}, DType::f32), rates = Tensor::empty({B}, DType::f32);
    Tensor sample = Tensor::empty({B}, DType::i32), unused = Tensor::empty({B}, DType::i32);
    ops::modulation_rows(timestep, timestep, Tensor(), times, rates, sample, unused);
    Tensor waves = Tensor::empty({B, 256}, DType::f32);
    ops::timestep_embedding(times, waves);
    const Var time = nn::silu(c, nn::linear(c, make_var(waves, false), time1_));
    const Var m6 = nn::linear(c, time, time2_);
    Tensor rope = Tensor::empty({N, 8, 2}, DType::f32);
    ops::rope_table_3d(static_cast<int>(rows), static_cast<int>(columns), 0, rope);

    for (const Block& b : blocks_) {
      const Var m = nn::modulation(c, *b.modulation, m6);
      Var u = nn::layer_norm_modulate(c, x, m, sample, 0, 1);
      const Var q = nn::rms_rope(c, nn::linear(c, u, b.q), *b.norm_q, rope, heads);
      const Var k = nn::rms_rope(c, nn::linear(c, u, b.k), *b.norm_k, rope, heads);
      const Var a = nn::attention(c, q, k, nn::linear(c, u, b.v), Tensor(), Tensor(), heads);
      x = nn::gate_residual(c, x, nn::linear(c, a, b.out), m, sample, 2, Tensor());
      u = nn::layer_norm_modulate(c, x, m, sample, 3, 4);
      x = nn::gate_residual(c, x, nn::mlp(c, u, b.fc1, b.fc2), m, sample, 5, Tensor());
    }
    return nn::unpatchify(c, nn::view(c, nn::linear(c, x, head_), grid), {1, p, p}, x_t.shape());
  }

 private:
  struct Block {
    Parameter *modulation, *norm_q, *norm_k;
    nn::Linear q, k, v, out, fc1, fc2;
  };
  OwnDeck deck_;
  ParameterTable params_;
  nn::Linear patches_, time1_, time2_, head_;
  std::vector<Block> blocks_;
};

class OwnTask : public VideoTask {
 public:
  explicit OwnTask(const Deck& deck)
      : VideoTask(deck, ClipLatents(deck, 3, std::make_unique<PixelCodec>(), Posterior::mean),
                  {1, 1, "", 0}, {1, deck.get<OwnDeck>().patch, deck.get<OwnDeck>().patch}),
        model_(deck.get<OwnDeck>()) {}
  OwnModel& model() override { return model_; }
  const OwnModel& model() const override { return model_; }
  std::string describe() const override { return model_.name(); }

 protected:
  Flow make_flow(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes, double,
                 bool held_out) override {
    const NoisyClips made = make_clips(deck_, bucket, clips, bytes, latents());
    Tensor times = Tensor::empty({made.x0.dim(0)}, DType::f32);
    std::vector<float> drawn;
    for (const SampleId s : clips.what.samples)
      drawn.push_back(1000 * draw_level("uniform", 0, 1, deck_.run.seed, clips.step, s));
    if (!is_planned(clips) && !held_out) times.set(std::span<const float>(drawn));
    return {made.x0, made.eps, times, "pixels", [this, made, times](Tape& tape, const Tensor& w) {
              return velocity_loss(tape, made.x0, made.eps, times, Tensor(), w,
                                   [&](const Tensor& x) { return model_.forward(tape, x, times); });
            }};
  }

 private:
  OwnModel model_;
};

}  // namespace

int main(int argc, char** argv) {
  if (const auto code = run_as_child(argc, argv)) return *code;
  Model own{"own", [] { return std::vector{deck_table("own", own_rows)}; }};
  own.make_task = [](const Deck& d) { return std::make_unique<OwnTask>(d); };
  own.make_denoiser = [](const Deck& d) -> std::unique_ptr<Denoiser> {
    return std::make_unique<OwnModel>(d.get<OwnDeck>());
  };
  own.make_codec = [](const Deck&) -> std::unique_ptr<VideoCodec> {
    return std::make_unique<PixelCodec>();
  };
  add_model(own);
  return run_program(argc, argv, weft_program());
}
