// The diffusion transformer of Wan2.1 and Wan2.2 (docs/models/wan.md; wan/modules/model.py of
// Wan-Video/Wan2.1 and Wan2.2): named parameters and one forward function. Attention is over all
// tokens of a clip.
#pragma once

#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/weights.h"
#include "config/deck.h"
#include "models/flow_sampler.h"
#include "models/interfaces.h"
#include "models/wan/options.h"
#include "models/wan/picture.h"
#include "nn/exchange.h"
#include "nn/nn.h"

namespace weft {

// What guidance steers away from where the deck asks for nothing else (Denoiser::clip_defaults).
// The negative prompt that Wan2.1 is released with (wan/configs/shared_config.py), as it stands
// there: cleaning makes its commas ASCII ones. Roughly: garish colours, overexposed, static,
// blurred details, subtitles, a painting, a still, grey, worst quality, JPEG artefacts, ugly, extra
// fingers, badly drawn hands and faces, deformed, fused fingers, a motionless picture, a cluttered
// background, three legs, many people in the background, walking backwards.
inline constexpr const char* wan_negative_prompt =
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，"
    "低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，"
    "毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走";

// Names in Wan's weight files (docs/models/wan.md, Weights).
// Parameters of the network have the names that Wan releases, which is what is written. Files may
// have them behind "model.diffusion_model.", as repackagings do, or be diffusers'
// WanTransformer3DModel.
WeightNames wan_weight_names();

// q, k, v and o of an attention, with the gains [C] of the norms of q and k.
struct WanAttention {
  nn::Linear q, k, v, o;
  Parameter *norm_q, *norm_k;
};
struct WanBlock {
  Parameter* modulation;  // [1,6,C]
  WanAttention self, cross;
  Parameter *norm3_weight, *norm3_bias;  // [C], of the LayerNorm before the cross attention
  nn::Linear fc1, fc2;
};

// Its captions have the padding's key (add_padding_keys): nothing in forward() needs the host, so
// that it can be recorded on GPUs.
struct WanInput : DenoiserInput {
  Tensor last_bias;       // f32 [B], added to the score of each sample's last key
  double recompute = -1;  // share of the blocks to recompute for this input; below 0: the model's
  // Where tokens of a sample have timesteps of their own: `rows` i32 [B*R] names that of each of R
  // equal runs of this rank's tokens, of `times` f32 [G]. Undefined: made from timestep and x_mask.
  Tensor times, rows;
};

// All `text_len` rows of a caption are keys of the cross attention, and those behind the caption
// are equal. Adds one row for them to each caption that is shorter, whose key counts
// text_len - L times: returns [B] what is added to its score, ln(text_len - L), or 0 where there is
// none. Exit::data for a longer caption.
std::vector<float> add_padding_keys(CaptionBatch& captions, std::int64_t text_len);

class Wan : public Denoiser {
 public:
  // Registers the parameters; params().allocate() is the caller's, who knows what is to be trained.
  // `shared`: in that table, with `prefix` before their names (WanExperts).
  explicit Wan(const WanConfig& config, ParameterTable* shared = nullptr,
               const std::string& prefix = {});

  std::string name() const override { return "Wan"; }
  ParameterTable& params() override { return params_; }
  WeightNames weight_names() const override { return wan_weight_names(); }
  const ParameterTable& params() const { return params_; }
  const WanConfig& config() const { return config_; }
  // Its linear layers, for adapters (models/lora.h). The patches' product is none: files have it as
  // a convolution.
  std::vector<nn::Linear*> linears();
  bool bf16() const override { return holds_bf16(config_.dtype); }
  std::set<std::string> tables() const override { return {"model", "sampler"}; }
  std::int64_t channels() const override { return config_.latent_channels(); }
  std::int64_t condition_channels() const override { return config_.in_channels - channels(); }
  std::int64_t caption_channels() const override { return config_.text_dim; }
  std::int64_t max_caption() const override { return config_.text_len; }
  std::string caption_keys() const override { return "model.text_dim and model.text_len"; }
  bool has_null_caption() const override { return false; }
  bool takes_given_frames() const override { return config_.variant == "ti2v"; }
  const PictureStart* picture_start() const override {
    return config_.variant == "t2v" ? nullptr : &picture_;
  }
  ClipDefaults clip_defaults() const override {
    return {config_.variant == "ti2v" ? 24.0 : 16.0, 0, wan_negative_prompt};
  }
  const SamplerDeck& sampler(const Deck& deck) const override { return deck.get<WanSamplerDeck>(); }
  std::int64_t side_multiple() const override {
    return std::lcm(config_.patch_size[1], config_.patch_size[2]);
  }
  DType activation_dtype() const { return bf16() ? DType::bf16 : DType::f32; }

  // From now on the ranks of `group` run each forward and backward together, on the same input, and
  // share its tokens: outside of self attention a rank has its share of the tokens, within it its
  // share of the heads of all tokens, and of the queries where the ranks do not divide the heads
  // (nn/exchange.h). Every rank gets the whole output and must be given the whole gradient of it;
  // its parameters' gradients are what its own tokens contribute, to be summed over the group.
  // Null: without a group. `group` outlives its use.
  void set_sequence_group(Communicator* group) override;
  const nn::SequenceGroup& sequence_group() const { return group_; }
  // Exit::usage unless a latent of this size is made of whole patches, and has a token for every
  // rank of a group of `ranks`.
  void check_sequence(std::int64_t height, std::int64_t width, std::int64_t ranks) const override;

  // The same input with the captions' padding keys, and in a group with the tokens' timesteps.
  // Reads the captions' index and the mask on the host.
  WanInput complete(const DenoiserInput& in) const;
  // WanInput::rows of this rank's tokens of a clip like x, for a mask [B*T] of frames: row b is the
  // sample's timestep, row B + b that of frames that are given.
  Tensor token_rows(const Tensor& x, std::span<const std::uint8_t> mask) const;

  // The model's own prediction, eps - x0, f32 [B,C,T,h,w]. Nodes of `inputs`, if given, hold in.x,
  // in.condition and in.captions.y and receive their gradients (weft_probe); in a group, what this
  // rank's tokens contribute.
  struct Inputs {
    Var x, condition, captions;
  };
  Var forward(Tape& tape, const WanInput& in, const Inputs& inputs = {});

  Tensor velocity(const DenoiserInput& in) override;
  double flops(std::int64_t frames, std::int64_t h, std::int64_t w) const override;

 private:
  struct Pass;
  WanAttention add_attention(const std::string& name);
  Var embed_patches(const Pass& p, const Inputs& inputs);
  void embed_times(Pass& p);
  Var embed_captions(const Pass& p, const Var& y_var);
  Var run_blocks(const Pass& p, Var x, const Var& y);
  Var head(const Pass& p, const Var& x);
  // What a block shares with the others of its forward, by value: a recomputed one runs again in
  // the backward.
  struct Shared;
  Var block(nn::Context c, const WanBlock& b, const Var& x, const Var& y, const Shared& s);
  Var self_attention(nn::Context c, const WanAttention& a, const Var& u, const Shared& s);
  Var cross_attention(nn::Context c, const WanAttention& a, const Var& u, const Var& y,
                      const Shared& s);
  Var exchange_heads(nn::Context c, const Var& x, const nn::Blocks& from, const nn::Blocks& to,
                     bool keep);

  WanConfig config_;
  WanPicture picture_;
  std::int64_t heads_, head_;  // H, D
  nn::SequenceGroup group_;
  ParameterTable own_;
  ParameterTable& params_;
  nn::Linear patch_, text1_, text2_, time1_, time2_, time_projection_, head_linear_;
  Parameter* head_modulation_;  // [1,2,C]
  std::vector<WanBlock> blocks_;
};

// Wan2.2's two models of one shape (docs/models/wan.md, Experts): one of them makes each step,
// as DenoiserInput::high_noise says. Their names have "high_noise_model." and "low_noise_model."
// before them.
class WanExperts : public Wan {
 public:
  explicit WanExperts(const WanConfig& config)
      : Wan(config, nullptr, "low_noise_model."), high_(config, &params(), "high_noise_model.") {}

  std::string name() const override { return "Wan with two experts"; }
  std::vector<WeightSet> weight_sets() const override;
  void set_sequence_group(Communicator* group) override {
    Wan::set_sequence_group(group);
    high_.set_sequence_group(group);
  }
  Tensor velocity(const DenoiserInput& in) override {
    return in.high_noise ? high_.velocity(in) : Wan::velocity(in);
  }

 private:
  Wan high_;
};

}  // namespace weft
