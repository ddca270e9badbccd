// STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2 (docs/models/stdit3.md;
// opensora/models/stdit/stdit3.py at v1.2.0): named parameters and one forward function.
#pragma once

#include <vector>

#include "config/deck.h"
#include "models/interfaces.h"
#include "models/stdit3/options.h"
#include "nn/exchange.h"
#include "nn/nn.h"

namespace weft {

// One transformer block; spatial and temporal ones are alike (docs/models/stdit3.md, Block).
struct Stdit3Block {
  Parameter* scale_shift_table;  // [6, C]
  nn::Linear qkv, proj;
  Parameter *q_norm, *k_norm;  // [D], null without qk_norm
  nn::CrossAttention cross;
  nn::Linear fc1, fc2;

  std::vector<Parameter*> parameters() const;
};

struct Stdit3Input : DenoiserInput {
  Tensor drop_path;       // f32 [depth, 2, 2, B]: factor of (pair, spatial/temporal, attention/mlp,
                          // sample); may be undefined
  double recompute = -1;  // share of the blocks to recompute for this input; below 0: the model's
};

class Stdit3 : public Denoiser {
 public:
  // Registers the parameters; params().allocate() is the caller's, who knows what is to be trained.
  explicit Stdit3(const Stdit3Config& config);

  std::string name() const override { return "STDiT3"; }
  ParameterTable& params() override { return params_; }
  const ParameterTable& params() const { return params_; }
  const Stdit3Config& config() const { return config_; }
  // Its linear layers, for adapters (models/lora.h). The patches' product is none: files have it as
  // a convolution.
  std::vector<nn::Linear*> linears();
  std::int64_t out_channels() const {
    return config_.pred_sigma ? 2 * config_.in_channels : config_.in_channels;
  }
  bool bf16() const override { return holds_bf16(config_.dtype); }
  std::set<std::string> tables() const override { return {"model", "sampler", "diffusion"}; }
  std::int64_t channels() const override { return config_.in_channels; }
  std::int64_t caption_channels() const override { return config_.caption_channels; }
  std::int64_t max_caption() const override { return config_.model_max_length; }
  std::string caption_keys() const override {
    return "model.caption_channels and model.model_max_length";
  }
  DType activation_dtype() const { return bf16() ? DType::bf16 : DType::f32; }

  // From now on the ranks of `group` run each forward and backward together, on the same input, and
  // share its tokens (nn/exchange.h): spatial blocks run on a share of the frames, temporal ones
  // and the final layer on a share of the tokens of each frame. Every rank gets the whole output
  // and must be given the whole gradient of it; its parameters' gradients are what its own tokens
  // contribute, to be summed over the group. Null: without a group. `group` outlives its use.
  void set_sequence_group(Communicator* group) override;
  const nn::SequenceGroup& sequence_group() const { return group_; }
  // Exit::usage unless a latent of this size has tokens for every rank of a group of `ranks`.
  void check_sequence(std::int64_t height, std::int64_t width, std::int64_t ranks) const override;

  // The share of the blocks that forward() recomputes for this input, of which ceil(share * 2 *
  // depth) blocks follow.
  double recompute_share(const Stdit3Input& in) const {
    return in.recompute < 0 ? config_.recompute : in.recompute;
  }

  // Velocity (and sigma) f32 [B, out_channels, T', H', W']. `x_var` and `y_var`, if given, are
  // nodes that hold in.x and in.captions.y and receive their gradients (weft_probe); in a group,
  // what this rank's tokens contribute.
  Var forward(Tape& tape, const Stdit3Input& in, const Var& x_var = nullptr,
              const Var& y_var = nullptr);

  Tensor velocity(const DenoiserInput& in) override;
  Tensor cache_signal(const DenoiserInput& in) override;
  std::vector<double> cache_polynomial() const override;
  double flops(std::int64_t frames, std::int64_t h, std::int64_t w) const override;

  // Forward operations of one sample with N = T*S tokens and L caption rows (docs/models/stdit3.md,
  // Operations).
  double forward_flops(std::int64_t T, std::int64_t S, std::int64_t L) const;

 private:
  Stdit3Block add_block(const std::string& name, bool temporal);
  // The steps of forward(), in their order.
  struct Pass;
  Var embed_patches(const Pass& p, const Var& x_var);
  void embed_times(Pass& p);
  Var embed_captions(const Pass& p, const Var& y_var);
  Var run_blocks(const Pass& p, Var x, const Var& y);
  Var cached_blocks(Pass& p, const Var& x);
  Var final_layer(const Pass& p, const Var& x);
  Var block(nn::Context c, const Stdit3Block& b, ops::Axis axis, const Var& x, const Var& y,
            const Var& t6, const Tensor& rows, const Captions& captions, const Tensor& rope,
            const Tensor& keep);

  Stdit3Config config_;
  nn::SequenceGroup group_;
  ParameterTable params_;
  Parameter *rope_freqs_, *y_embedding_;
  nn::Linear patch_, t1_, t2_, fps1_, fps2_, t_block_, y1_, y2_, final_;
  Parameter* final_table_;
  std::vector<Stdit3Block> spatial_, temporal_;
};

}  // namespace weft
