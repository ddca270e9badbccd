#include "models/stdit3/stdit3.h"

#include <cmath>
#include <utility>

#include "core/error.h"
#include "models/stdit3/options.h"
#include "ops/attention.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

constexpr int timestep_channels = 256;

nn::Linear add_linear(ParameterTable& table, const std::string& name, std::int64_t out,
                      std::int64_t in, bool trainable, Init weight) {
  nn::Linear l;
  l.weight = &table.add(name + ".weight", {out, in}, weight, trainable);
  l.bias = &table.add(name + ".bias", {out}, Init::constant(0), trainable);
  return l;
}

// Frames of a grid [B,T,S,C]; the grid itself, uncopied, if they are all of it.
Tensor take_frames(const Tensor& grid, Part frames) {
  if (frames.size() == grid.dim(1)) return grid;
  Tensor taken =
      Tensor::empty({grid.dim(0), frames.size(), grid.dim(2), grid.dim(3)}, grid.dtype());
  ops::copy_tokens(grid, {frames.size(), grid.dim(2), frames.begin}, taken);
  return taken;
}

}  // namespace

Stdit3::Stdit3(const Stdit3Config& config) : config_(config) {
  const std::int64_t C = config.hidden_size, D = C / config.num_heads;
  const bool all = !config.only_train_temporal;
  const bool captions = all && !config.freeze_y_embedder;
  const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    return add_linear(params_, name, out, in, all, Init::xavier(out, in));
  };

  // 10000^(-2i/D). A parameter, saved and loaded, because released checkpoints hold rounded values.
  rope_freqs_ = &params_.add("rope.freqs", {D / 2}, {Init::Kind::rotary, 10000.0f}, false);

  const auto& p = config.patch_size;
  const std::int64_t patch = p[0] * p[1] * p[2], fan_in = config.in_channels * patch;
  const double width = 1.0 / std::sqrt(static_cast<double>(fan_in));
  patch_.weight = &params_.add("x_embedder.proj.weight", {C, config.in_channels, p[0], p[1], p[2]},
                               Init::uniform(width), all);
  patch_.bias = &params_.add("x_embedder.proj.bias", {C}, Init::uniform(width), all);
  t1_ = linear("t_embedder.mlp.0", C, timestep_channels);
  t2_ = linear("t_embedder.mlp.2", C, C);
  fps1_ = add_linear(params_, "fps_embedder.mlp.0", C, timestep_channels, all, Init::normal(0.02));
  fps2_ = add_linear(params_, "fps_embedder.mlp.2", C, C, all, Init::constant(0));
  t_block_ = linear("t_block.1", 6 * C, C);

  const std::int64_t Cy = config.caption_channels;
  y_embedding_ = &params_.add("y_embedder.y_embedding", {config.model_max_length, Cy},
                              Init::normal(1.0 / std::sqrt(static_cast<double>(Cy))), false);
  y1_ = add_linear(params_, "y_embedder.y_proj.fc1", C, Cy, captions, Init::xavier(C, Cy));
  y2_ = add_linear(params_, "y_embedder.y_proj.fc2", C, C, captions, Init::xavier(C, C));

  for (std::int64_t i = 0; i < config.depth; ++i) {
    spatial_.push_back(add_block("spatial_blocks." + std::to_string(i), false));
    temporal_.push_back(add_block("temporal_blocks." + std::to_string(i), true));
  }
  final_table_ = &params_.add("final_layer.scale_shift_table", {2, C},
                              Init::normal(1.0 / std::sqrt(static_cast<double>(C))), all);
  final_ = linear("final_layer.linear", patch * out_channels(), C);

  for (std::vector<Stdit3Block>* blocks : {&spatial_, &temporal_})
    for (Stdit3Block& b : *blocks)
      for (nn::Linear* l :
           {&b.qkv, &b.proj, &b.cross.q, &b.cross.kv, &b.cross.proj, &b.fc1, &b.fc2})
        l->fp8 = config.dtype == "fp8";
  // Tokens and captions are bf16 in a bf16 model, and so are the weights and biases that they meet;
  // timesteps stay f32.
  std::vector<nn::Linear> low = {patch_, y1_, y2_, final_};
  for (const std::vector<Stdit3Block>* blocks : {&spatial_, &temporal_})
    for (const Stdit3Block& b : *blocks)
      low.insert(low.end(), {b.qkv, b.proj, b.cross.q, b.cross.kv, b.cross.proj, b.fc1, b.fc2});
  for (const nn::Linear& l : low) l.weight->bf16_only = l.bias->bf16_only = true;
}

Stdit3Block Stdit3::add_block(const std::string& name, bool temporal) {
  const std::int64_t C = config_.hidden_size, D = C / config_.num_heads;
  const auto hidden = static_cast<std::int64_t>(static_cast<double>(C) * config_.mlp_ratio);
  const bool trainable = temporal || !config_.only_train_temporal;
  const auto linear = [&](const std::string& part, std::int64_t out, std::int64_t in, bool zero) {
    return add_linear(params_, name + part, out, in, trainable,
                      zero ? Init::constant(0) : Init::xavier(out, in));
  };
  Stdit3Block b;
  b.scale_shift_table =
      &params_.add(name + ".scale_shift_table", {6, C},
                   Init::normal(1.0 / std::sqrt(static_cast<double>(C))), trainable);
  b.qkv = linear(".attn.qkv", 3 * C, C, false);
  b.q_norm = b.k_norm = nullptr;
  if (config_.qk_norm) {
    b.q_norm = &params_.add(name + ".attn.q_norm.weight", {D}, Init::constant(1), trainable);
    b.k_norm = &params_.add(name + ".attn.k_norm.weight", {D}, Init::constant(1), trainable);
  }
  // Temporal blocks start as the identity.
  b.proj = linear(".attn.proj", C, C, temporal);
  b.cross.q = linear(".cross_attn.q_linear", C, C, false);
  b.cross.kv = linear(".cross_attn.kv_linear", 2 * C, C, false);
  b.cross.proj = linear(".cross_attn.proj", C, C, temporal);
  b.fc1 = linear(".mlp.fc1", hidden, C, false);
  b.fc2 = linear(".mlp.fc2", C, hidden, temporal);
  return b;
}

void Stdit3::set_sequence_group(Communicator* group) { group_ = nn::SequenceGroup(group); }

void Stdit3::check_sequence(std::int64_t height, std::int64_t width, std::int64_t ranks) const {
  const auto& p = config_.patch_size;
  const std::int64_t S = ((height + p[1] - 1) / p[1]) * ((width + p[2] - 1) / p[2]);
  WEFT_CHECK(S >= ranks, Exit::usage, "lower parallel.sp",
             "a latent of {}x{} has {} tokens a frame, too few for parallel.sp = {} ranks", height,
             width, S, ranks);
}

std::vector<Parameter*> Stdit3Block::parameters() const {
  std::vector<Parameter*> all = {scale_shift_table, q_norm, k_norm};
  for (const nn::Linear& l : {qkv, proj, cross.q, cross.kv, cross.proj, fc1, fc2})
    all.insert(all.end(), {l.weight, l.bias, l.lora_a, l.lora_b});
  return all;
}

std::vector<nn::Linear*> Stdit3::linears() {
  std::vector<nn::Linear*> all = {&t1_, &t2_, &fps1_, &fps2_, &t_block_, &y1_, &y2_};
  for (std::size_t i = 0; i < spatial_.size(); ++i)
    for (Stdit3Block* b : {&spatial_[i], &temporal_[i]})
      all.insert(all.end(),
                 {&b->qkv, &b->proj, &b->cross.q, &b->cross.kv, &b->cross.proj, &b->fc1, &b->fc2});
  all.push_back(&final_);
  return all;
}

Var Stdit3::block(nn::Context c, const Stdit3Block& b, ops::Axis axis, const Var& x, const Var& y,
                  const Var& t6, const Tensor& rows, const Captions& captions, const Tensor& rope,
                  const Tensor& keep) {
  // Order of the modulation vectors (docs/models/stdit3.md, Modulation).
  enum { shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp };
  const Shape s = x->value.shape();  // [B,T,S,C]
  const std::int64_t H = config_.num_heads;
  const Tensor keep_attn = keep.defined() ? keep.slice(0, 1).view({s[0]}) : Tensor();
  const Tensor keep_mlp = keep.defined() ? keep.slice(1, 2).view({s[0]}) : Tensor();

  const Var m = nn::modulation(c, *b.scale_shift_table, t6);
  Var u = nn::layer_norm_modulate(c, x, m, rows, shift_msa, scale_msa);
  Var qkv = nn::view(c, nn::linear(c, u, b.qkv), {s[0], s[1], s[2], 3, H, s[3] / H});
  const Tensor& rotary = axis == ops::Axis::time ? rope : Tensor();
  Var a = nn::self_attention(c, qkv, b.q_norm, b.k_norm, rotary, axis);
  a = nn::linear(c, a, b.proj);
  const Var x1 = nn::gate_residual(c, x, a, m, rows, gate_msa, keep_attn);

  const Var x2 = nn::cross_attention(c, x1, y, b.cross, captions.offsets, captions.lengths,
                                     static_cast<int>(H));

  const Var v = nn::layer_norm_modulate(c, x2, m, rows, shift_mlp, scale_mlp);
  return nn::gate_residual(c, x2, nn::mlp(c, v, b.fc1, b.fc2), m, rows, gate_mlp, keep_mlp);
}

// What the steps of one forward share. The grid is [B,T,S,C]: S = H*W tokens in each of T frames.
struct Stdit3::Pass {
  nn::Context c;
  const Stdit3Input& in;
  ops::PatchGeometry patch;
  std::int64_t B, T, H, W, S;
  Part frames;  // this rank's, wherever the grid is cut by frames

  // The timestep's vectors [G,C] and [G,6C], G = B, or 2B with a frame mask: frames that are given
  // take those of t = 0, which stand behind the samples' own. The tensors have each frame's row of
  // them: of all frames, of this rank's, and without heed to the mask.
  Var t, t6;
  Tensor rows, frame_rows, sample_rows;

  Pass(Tape& tape, ParameterTable& params, const Stdit3Config& config,
       const nn::SequenceGroup& group, const Stdit3Input& input)
      : c{tape, params},
        in(input),
        patch{static_cast<int>(config.patch_size[0]), static_cast<int>(config.patch_size[1]),
              static_cast<int>(config.patch_size[2])},
        B(in.x.dim(0)),
        T((in.x.dim(2) + patch.pt - 1) / patch.pt),
        H((in.x.dim(3) + patch.ph - 1) / patch.ph),
        W((in.x.dim(4) + patch.pw - 1) / patch.pw),
        S(H * W),
        frames(nn::share_of(T, group.rank, group.size)) {
    WEFT_ASSERT(in.x.dim(1) == config.in_channels && S >= group.size);
    WEFT_ASSERT(!masked() || patch.pt == 1);
  }
  bool masked() const { return in.x_mask.defined(); }
};

Var Stdit3::forward(Tape& tape, const Stdit3Input& in, const Var& x_var, const Var& y_var) {
  Pass p(tape, params_, config_, group_, in);
  Var x = embed_patches(p, x_var);
  embed_times(p);
  if (in.blocks != nullptr) return final_layer(p, cached_blocks(p, x));
  const Var y = embed_captions(p, y_var);
  x = run_blocks(p, std::move(x), y);
  return final_layer(p, x);
}

// 1. Tokens: patches through one matrix product, plus the position embedding. [B,T_r,S,C]
Var Stdit3::embed_patches(const Pass& p, const Var& x_var) {
  const ops::PatchGeometry patch = p.patch;
  const std::int64_t C = config_.hidden_size;
  const std::int64_t patch_elements = config_.in_channels * patch.pt * patch.ph * patch.pw;
  Tensor patches = Tensor::empty({p.B, p.T, p.S, patch_elements}, activation_dtype());
  ops::patchify_forward(p.in.x, patch, patches);
  const Var patch_rows = make_var(take_frames(patches, p.frames), x_var != nullptr);
  if (x_var && p.c.tape.recording())
    p.c.tape.record([x_var, patch_rows, patch, frames = p.frames, grid = patches.shape()] {
      Tensor drows = patch_rows->grad;
      if (frames.size() != grid[1]) {
        drows = Tensor::empty(grid, patch_rows->value.dtype());
        ops::fill_zero(drows);
        if (frames.size() > 0)
          ops::copy_tokens(patch_rows->grad, {frames.size(), grid[2], 0, 0, frames.begin}, drows);
      }
      x_var->grad = Tensor::empty(x_var->value.shape(), DType::f32);
      ops::patchify_backward(drows, patch, x_var->grad);
    });
  patches.release();
  Var x;
  if (p.frames.size() > 0) {
    x = nn::linear(p.c, patch_rows, patch_);
  } else {
    // A rank without frames has nothing to compute until it gets its tokens of every frame.
    x = make_var(Tensor::empty({p.B, 0, p.S, C}, activation_dtype()));
    nn::skip(p.c, {patch_.weight, patch_.bias});
  }
  Tensor position = Tensor::empty({p.S, C}, DType::f32);
  ops::position_embedding(static_cast<int>(p.H), static_cast<int>(p.W),
                          std::sqrt(p.in.height * p.in.width) / config_.input_sq_size, position);
  // In place and unrecorded: a constant changes no gradient.
  ops::add_position(position, x->value);
  return x;
}

// 2. Timestep and frames a second, to what modulates the tokens.
void Stdit3::embed_times(Pass& p) {
  const std::int64_t G = p.masked() ? 2 * p.B : p.B;
  Tensor times = Tensor::empty({G}, DType::f32), rates = Tensor::empty({G}, DType::f32);
  p.rows = Tensor::empty({p.B * p.T}, DType::i32);
  p.sample_rows = Tensor::empty({p.B * p.T}, DType::i32);
  ops::modulation_rows(p.in.timestep, p.in.fps, p.in.x_mask, times, rates, p.rows, p.sample_rows);
  p.frame_rows = take_frames(p.rows.view({p.B, p.T, 1, 1}), p.frames).view({p.B * p.frames.size()});
  const auto embed = [&](const Tensor& scalars, const nn::Linear& first, const nn::Linear& second) {
    Tensor e = Tensor::empty({G, timestep_channels}, DType::f32);
    ops::timestep_embedding(scalars, e);
    return nn::linear(p.c, nn::silu(p.c, nn::linear(p.c, make_var(e, false), first)), second);
  };
  p.t = nn::add(p.c, embed(times, t1_, t2_), embed(rates, fps1_, fps2_));
  p.t6 = nn::linear(p.c, nn::silu(p.c, p.t), t_block_);
}

// 3. Captions: only the rows that count, projected to C. [sum L,C]
Var Stdit3::embed_captions(const Pass& p, const Var& y_var) {
  const Captions& captions = p.in.captions;
  Tensor rows =
      Tensor::empty({captions.index.numel(), config_.caption_channels}, activation_dtype());
  ops::gather_captions(captions.y, y_embedding_->value, captions.index, rows);
  const Var y = make_var(rows, y_var != nullptr);
  if (y_var && p.c.tape.recording())
    p.c.tape.record([y_var, y, index = captions.index] {
      ops::gather_captions_backward(y->grad, index, zeroed_grad(y_var));
    });
  return nn::mlp(p.c, y, y1_, y2_);
}

// 4. Pairs of spatial and temporal blocks. The first `recompute` share of them keeps its input
// only. In a group a spatial block runs on a share of the frames, a temporal one on a share of the
// tokens of each frame; between the two the grid changes hands. [B,T,S_r,C]
Var Stdit3::run_blocks(const Pass& p, Var x, const Var& y) {
  Tensor rope = Tensor::empty({p.T, config_.hidden_size / config_.num_heads / 2, 2}, DType::f32);
  ops::rope_table(rope_freqs_->value, rope);
  const auto recomputed = static_cast<std::int64_t>(
      std::ceil(recompute_share(p.in) * 2.0 * static_cast<double>(config_.depth)));
  nn::Cut cut = nn::Cut::frames;
  for (std::int64_t i = 0; i < 2 * config_.depth; ++i) {
    const bool temporal = i % 2 == 1;
    const Stdit3Block& b = (temporal ? temporal_ : spatial_)[i / 2];
    const ops::Axis axis = temporal ? ops::Axis::time : ops::Axis::space;
    const nn::Cut wanted = temporal ? nn::Cut::tokens : nn::Cut::frames;
    if (!group_.alone() && wanted != cut)
      x = nn::exchange(p.c, x, group_, wanted, temporal ? p.T : p.S);
    cut = wanted;
    if (x->value.numel() == 0) {  // none of this block's frames are here
      nn::skip(p.c, b.parameters());
      continue;
    }
    Tensor keep;
    if (p.in.drop_path.defined())
      keep = p.in.drop_path.view({2 * config_.depth, 2, p.B}).slice(i, i + 1).view({2, p.B});
    // All by value: a recomputed block runs again in the backward, when this pass is gone.
    const auto run = [this, &b, axis, input = x, y, t6 = p.t6,
                      rows = temporal ? p.rows : p.frame_rows, captions = p.in.captions, rope,
                      keep](Tape& tape) {
      return block({tape, params_}, b, axis, input, y, t6, rows, captions, rope, keep);
    };
    x = i < recomputed && p.c.tape.recording() ? recompute(p.c.tape, run) : run(p.c.tape);
  }
  return x;
}

// The blocks with a step cache, which keeps what all of them together add to the tokens, or has it
// added again. In a group the blocks begin with this rank's frames and end with its tokens, and so
// does what is kept. In sampling alone. [B,T,S_r,C]
Var Stdit3::cached_blocks(Pass& p, const Var& x) {
  Tensor& added = *p.in.blocks;
  Tensor copy = Tensor::empty(x->value.shape(), x->value.dtype());
  ops::convert(x->value, copy);
  Var before = make_var(copy);
  copy.release();
  if (!group_.alone()) before = nn::exchange(p.c, before, group_, nn::Cut::tokens, p.T);
  if (p.in.reuse_blocks) {
    ops::add_inplace(added, before->value);
    return before;
  }
  added.release();  // not to be held beside the blocks' own memory
  Var after = run_blocks(p, x, embed_captions(p, nullptr));
  added = Tensor::empty(after->value.shape(), after->value.dtype());
  ops::convert(after->value, added);
  ops::scaled_add(before->value, -1.0f, {}, added, true);
  return after;
}

// 5. Final layer, and the grid back to a latent. Clean frames are normalised twice: LN(o) of the
// already modulated o (docs/models/stdit3.md, Final layer).
Var Stdit3::final_layer(const Pass& p, const Var& x) {
  const Var m = nn::modulation(p.c, *final_table_, p.t);
  Var o = nn::layer_norm_modulate(p.c, x, m, p.sample_rows, 0, 1);
  if (p.masked()) o = nn::layer_norm_modulate(p.c, o, m, p.rows, 0, 1, static_cast<int>(p.B));
  Var out_rows = nn::linear(p.c, o, final_);
  if (!group_.alone()) out_rows = nn::gather_tokens(p.c, out_rows, group_, p.S);
  const Shape& latent = p.in.x.shape();
  return nn::unpatchify(p.c, out_rows, p.patch,
                        {p.B, out_channels(), latent[2], latent[3], latent[4]});
}

Tensor Stdit3::velocity(const DenoiserInput& in) {
  Stdit3Input of_model;
  static_cast<DenoiserInput&>(of_model) = in;
  Tape tape(Tape::Mode::infer);
  return forward(tape, of_model)->value;
}

// The first block's, of all tokens on every rank of a group: it costs next to nothing, and so no
// exchange. As published, without heed to frames that are given.
Tensor Stdit3::cache_signal(const DenoiserInput& in) {
  enum { shift_msa, scale_msa };
  Stdit3Input of_model;
  static_cast<DenoiserInput&>(of_model) = in;
  Tape tape(Tape::Mode::infer);
  Pass p(tape, params_, config_, {}, of_model);
  const Var x = embed_patches(p, nullptr);
  embed_times(p);
  const Var m = nn::modulation(p.c, *spatial_.front().scale_shift_table, p.t6);
  return nn::layer_norm_modulate(p.c, x, m, p.sample_rows, shift_msa, scale_msa)->value;
}

// TeaCache's fit for Open-Sora 1.2 (TeaCache4OpenSora in ali-vilab/TeaCache).
std::vector<double> Stdit3::cache_polynomial() const {
  return {2.17546007e+02, -1.18329252e+02, 2.68662585e+01, -4.59364272e-02, 4.84426240e-02};
}

double Stdit3::flops(std::int64_t frames, std::int64_t h, std::int64_t w) const {
  const auto patches = [](std::int64_t size, std::int64_t p) { return (size + p - 1) / p; };
  const auto& p = config_.patch_size;
  return forward_flops(patches(frames, p[0]), patches(h, p[1]) * patches(w, p[2]),
                       config_.model_max_length);
}

double Stdit3::forward_flops(std::int64_t T, std::int64_t S, std::int64_t L) const {
  const double C = static_cast<double>(config_.hidden_size), N = static_cast<double>(T * S);
  const double len = static_cast<double>(L), ratio = config_.mlp_ratio;
  const double linears = (24.0 + 8.0 * ratio) * C * C * N;  // 56 C^2 N at ratio 4
  const double pair =
      linears + 8 * C * N * len + 8 * C * C * len + 4 * C * N * static_cast<double>(S + T);
  const double patch =
      static_cast<double>(config_.patch_size[0] * config_.patch_size[1] * config_.patch_size[2]);
  return static_cast<double>(config_.depth) * pair +
         2 * C * N * patch * static_cast<double>(config_.in_channels + out_channels()) +
         2 * len * (static_cast<double>(config_.caption_channels) * C + C * C);
}

}  // namespace weft
