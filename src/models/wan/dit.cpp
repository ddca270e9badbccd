#include "models/wan/dit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "models/video_training.h"
#include "models/wan/options.h"
#include "ops/attention.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

// The same values in f32.
Var as_f32(nn::Context c, const Var& x) {
  if (x->value.dtype() == DType::f32) return x;
  Tensor y = Tensor::empty(x->value.shape(), DType::f32);
  ops::convert(x->value, y);
  const Var out = make_var(y);
  if (c.tape.recording())
    c.tape.record([x, out] {
      Tensor dx = Tensor::empty(x->value.shape(), x->value.dtype());
      ops::convert(out->grad, dx);
      out->grad.release();
      give_grad(x, dx);
    });
  return out;
}

// What each rank has of the N tokens and the heads of a sample: outside of self attention, and of
// the queries and the keys within it. As many ranks as divide both share the heads; the rest shares
// the queries (docs/parallel.md, Sequence parallelism).
struct AttentionBlocks {
  nn::Blocks tokens, queries, keys;
};
AttentionBlocks attention_blocks(std::int64_t N, std::int64_t heads, int ranks) {
  const int sharers = static_cast<int>(std::gcd(heads, ranks));
  AttentionBlocks b;
  for (int r = 0; r < ranks; ++r) {
    const int first = r / sharers * sharers;
    const Part of_heads = nn::share_of(heads, r % sharers, sharers);
    b.tokens.push_back({nn::share_of(N, r, ranks), {0, heads}});
    b.queries.push_back(
        {{nn::share_of(N, first, ranks).begin, nn::share_of(N, first + sharers - 1, ranks).end},
         of_heads});
    b.keys.push_back({{0, N}, of_heads});
  }
  return b;
}

}  // namespace

std::vector<float> add_padding_keys(CaptionBatch& captions, std::int64_t text_len) {
  CaptionBatch padded;
  std::vector<float> bias;
  padded.offsets.push_back(0);
  for (std::size_t b = 0; b + 1 < captions.offsets.size(); ++b) {
    const auto first = captions.index.begin() + captions.offsets[b];
    const std::int64_t length = captions.offsets[b + 1] - captions.offsets[b];
    WEFT_CHECK(length <= text_len, Exit::data, "set model.text_len to what the text was made with",
               "a caption has {} tokens, model.text_len is {}", length, text_len);
    padded.index.insert(padded.index.end(), first, first + length);
    if (length < text_len) padded.index.push_back(ops::padding_row);
    padded.offsets.push_back(static_cast<std::int32_t>(padded.index.size()));
    const auto equal = static_cast<double>(text_len - length);
    bias.push_back(equal > 0 ? static_cast<float>(std::log(equal)) : 0.0f);
  }
  captions = std::move(padded);
  return bias;
}

Wan::Wan(const WanConfig& config, ParameterTable* shared, const std::string& prefix)
    : config_(config),
      picture_(config.variant == "i2v", config.patch_size[1]),
      heads_(config.num_heads),
      head_(config.hidden_size / config.num_heads),
      params_(shared != nullptr ? *shared : own_) {
  const std::int64_t C = config.hidden_size;
  const auto add = [&](const std::string& name, const Shape& shape, Init init) {
    return &params_.add(prefix + name, shape, init);
  };
  const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in, Init weight) {
    return nn::add_linear(params_, prefix + name, out, in, weight);
  };
  const auto& p = config.patch_size;
  const std::int64_t patch = p[0] * p[1] * p[2], fan_in = config.in_channels * patch;
  patch_.weight = add("patch_embedding.weight", {C, config.in_channels, p[0], p[1], p[2]},
                      Init::xavier(C, fan_in));
  patch_.bias = add("patch_embedding.bias", {C}, Init::constant(0));
  time1_ = linear("time_embedding.0", C, config.freq_dim, Init::normal(0.02));
  time2_ = linear("time_embedding.2", C, C, Init::normal(0.02));
  time_projection_ = linear("time_projection.1", 6 * C, C, Init::xavier(6 * C, C));
  text1_ = linear("text_embedding.0", C, config.text_dim, Init::normal(0.02));
  text2_ = linear("text_embedding.2", C, C, Init::normal(0.02));
  const Init modulation = Init::normal(1.0 / std::sqrt(static_cast<double>(C)));
  for (std::int64_t i = 0; i < config.depth; ++i) {
    const std::string name = fmt::format("blocks.{}.", i);
    WanBlock b;
    b.modulation = add(name + "modulation", {1, 6, C}, modulation);
    b.self = add_attention(prefix + name + "self_attn.");
    b.norm3_weight = add(name + "norm3.weight", {C}, Init::constant(1));
    b.norm3_bias = add(name + "norm3.bias", {C}, Init::constant(0));
    b.cross = add_attention(prefix + name + "cross_attn.");
    b.fc1 = linear(name + "ffn.0", config.ffn_dim, C, Init::xavier(config.ffn_dim, C));
    b.fc2 = linear(name + "ffn.2", C, config.ffn_dim, Init::xavier(C, config.ffn_dim));
    blocks_.push_back(b);
  }
  head_modulation_ = add("head.modulation", {1, 2, C}, modulation);
  head_linear_ = linear("head.head", patch * channels(), C, Init::constant(0));

  for (WanBlock& b : blocks_)
    for (nn::Linear* l : {&b.self.q, &b.self.k, &b.self.v, &b.self.o, &b.cross.q, &b.cross.k,
                          &b.cross.v, &b.cross.o, &b.fc1, &b.fc2})
      l->fp8 = config.dtype == "fp8";
  // Activations are bf16 in a bf16 model, and so are the weights and biases that they meet.
  // Timesteps, the modulation made of them and the head stay f32, as the residual stream does.
  std::vector<nn::Linear> low = {patch_, text1_, text2_};
  for (const WanBlock& b : blocks_)
    low.insert(low.end(), {b.self.q, b.self.k, b.self.v, b.self.o, b.cross.q, b.cross.k, b.cross.v,
                           b.cross.o, b.fc1, b.fc2});
  for (const nn::Linear& l : low) l.weight->bf16_only = l.bias->bf16_only = true;
}

WanAttention Wan::add_attention(const std::string& name) {
  const std::int64_t C = config_.hidden_size;
  const auto linear = [&](const char* part) {
    return nn::add_linear(params_, name + part, C, C, Init::xavier(C, C));
  };
  WanAttention a;
  a.q = linear("q");
  a.norm_q = &params_.add(name + "norm_q.weight", {C}, Init::constant(1));
  a.k = linear("k");
  a.norm_k = &params_.add(name + "norm_k.weight", {C}, Init::constant(1));
  a.v = linear("v");
  a.o = linear("o");
  return a;
}

std::vector<nn::Linear*> Wan::linears() {
  std::vector<nn::Linear*> all = {&text1_, &text2_, &time1_, &time2_, &time_projection_};
  for (WanBlock& b : blocks_)
    all.insert(all.end(), {&b.self.q, &b.self.k, &b.self.v, &b.self.o, &b.cross.q, &b.cross.k,
                           &b.cross.v, &b.cross.o, &b.fc1, &b.fc2});
  all.push_back(&head_linear_);
  return all;
}

void Wan::set_sequence_group(Communicator* group) { group_ = nn::SequenceGroup(group); }

void Wan::check_sequence(std::int64_t height, std::int64_t width, std::int64_t ranks) const {
  const auto& p = config_.patch_size;
  WEFT_CHECK(height % p[1] == 0 && width % p[2] == 0, Exit::usage,
             "crop the footage so that its latents have whole patches (for the released model: "
             "height and width in multiples of 16 pixels)",
             "a latent of {}x{} does not divide into patches of {}x{} (model.patch_size)", height,
             width, p[1], p[2]);
  const std::int64_t tokens = height / p[1] * (width / p[2]);
  WEFT_CHECK(tokens >= ranks, Exit::usage, "lower parallel.sp",
             "a latent of {}x{} has {} tokens a frame, too few for parallel.sp = {} ranks", height,
             width, tokens, ranks);
}

// ---- Forward

WanInput Wan::complete(const DenoiserInput& in) const {
  WanInput whole;
  static_cast<DenoiserInput&>(whole) = in;
  CaptionBatch captions;
  captions.offsets.push_back(0);
  for (const std::int64_t length : in.captions.lengths)
    captions.offsets.push_back(captions.offsets.back() + static_cast<std::int32_t>(length));
  const auto rows = static_cast<std::size_t>(captions.offsets.back());
  if (Arena::current().is_planning()) {
    captions.index.assign(rows, 0);
  } else {
    const Tensor index = in.captions.index.to_host();
    const std::span<const std::int32_t> all = index.span<std::int32_t>();
    captions.index.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(rows));
  }
  const std::vector<float> bias = add_padding_keys(captions, config_.text_len);
  whole.captions = upload(captions, in.captions.y, count_tokens(in.x, config_.patch_size));
  whole.last_bias = Tensor::from_host(std::span<const float>(bias), {std::ssize(bias)});
  if (in.x_mask.defined() && !group_.alone()) {
    const Tensor mask = Arena::current().is_planning() ? Tensor() : in.x_mask.to_host();
    whole.rows = token_rows(
        in.x, mask.defined() ? mask.span<std::uint8_t>() : std::span<const std::uint8_t>());
  }
  return whole;
}

Tensor Wan::token_rows(const Tensor& x, std::span<const std::uint8_t> mask) const {
  const auto& p = config_.patch_size;
  const std::int64_t B = x.dim(0), T = x.dim(2) / p[0], S = x.dim(3) / p[1] * (x.dim(4) / p[2]);
  const Part own = nn::share_of(T * S, group_.rank, group_.size);
  const std::int64_t run = std::gcd(std::gcd(S, own.begin), own.size());
  std::vector<std::int32_t> rows;
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t at = own.begin; at < own.end; at += run) {
      const bool generated = mask.empty() || mask[static_cast<std::size_t>(b * T + at / S)] != 0;
      rows.push_back(static_cast<std::int32_t>(generated ? b : B + b));
    }
  return Tensor::from_host(std::span<const std::int32_t>(rows), {std::ssize(rows)});
}

// What the steps of one forward share. A rank alone has all N tokens of each sample.
struct Wan::Shared {
  Var m6;       // [G,6C], what each timestep in use adds to each block's modulation
  Tensor rows;  // i32 [B*R]: the row of m6 of each of R equal runs of a sample's tokens
  Tensor rope;  // of this rank's tokens
  Tensor offsets, last_bias;
  std::int64_t N;
};
struct Wan::Pass {
  nn::Context c;
  const WanInput& in;
  ops::PatchGeometry patch;
  std::int64_t B, T, S, N;
  Part tokens;  // this rank's, of each sample
  Var e;        // [G,C], of the timesteps
  Shared shared;

  Pass(Tape& tape, ParameterTable& params, const WanConfig& config, const nn::SequenceGroup& group,
       const WanInput& input)
      : c{tape, params},
        in(input),
        patch{static_cast<int>(config.patch_size[0]), static_cast<int>(config.patch_size[1]),
              static_cast<int>(config.patch_size[2])},
        B(in.x.dim(0)),
        T(in.x.dim(2) / patch.pt),
        S(in.x.dim(3) / patch.ph * (in.x.dim(4) / patch.pw)),
        N(T * S),
        tokens(nn::share_of(N, group.rank, group.size)) {
    WEFT_ASSERT(in.x.dim(1) == config.latent_channels() && N >= group.size);
    WEFT_ASSERT(in.condition.defined() == (config.in_channels > config.latent_channels()));
    WEFT_ASSERT(in.x.dim(2) % patch.pt == 0 && in.x.dim(3) % patch.ph == 0 &&
                in.x.dim(4) % patch.pw == 0);
    WEFT_ASSERT(in.last_bias.defined());
    shared.rope =
        Tensor::empty({tokens.size(), config.hidden_size / config.num_heads / 2, 2}, DType::f32);
    ops::rope_table_3d(static_cast<int>(in.x.dim(3) / patch.ph),
                       static_cast<int>(in.x.dim(4) / patch.pw), tokens.begin, shared.rope);
    shared.offsets = in.captions.offsets;
    shared.last_bias = in.last_bias;
    shared.N = N;
  }
};

Var Wan::forward(Tape& tape, const WanInput& in, const Inputs& inputs) {
  Pass p(tape, params_, config_, group_, in);
  Var x = embed_patches(p, inputs);
  embed_times(p);
  const Var y = embed_captions(p, inputs.captions);
  x = run_blocks(p, std::move(x), y);
  return head(p, x);
}

// 1. Tokens: patches of the latent and of what it reads beside it, through one matrix product.
// f32 [B,N_r,C]
Var Wan::embed_patches(const Pass& p, const Inputs& inputs) {
  const ops::PatchGeometry patch = p.patch;
  const std::int64_t size = patch.pt * patch.ph * patch.pw, values = config_.in_channels * size;
  const Shape grid{p.B, p.T, p.S, values}, all{p.B, 1, p.N, values};
  Tensor patches = Tensor::empty(grid, activation_dtype());
  if (!p.in.condition.defined()) {
    ops::patchify_forward(p.in.x, patch, patches);
  } else {
    std::int64_t first = 0;
    for (const Tensor& part : {p.in.x, p.in.condition}) {
      Tensor rows = Tensor::empty({p.B, p.T, p.S, part.dim(1) * size}, activation_dtype());
      ops::patchify_forward(part, patch, rows);
      ops::put_channels(rows, first, patches);
      first += rows.dim(3);
    }
  }
  Tensor own = patches.view(all);
  if (!group_.alone()) {
    own = Tensor::empty({p.B, 1, p.tokens.size(), values}, activation_dtype());
    ops::copy_tokens(patches.view(all), {1, p.tokens.size(), 0, p.tokens.begin}, own);
  }
  patches.release();
  const Var rows = make_var(own.view({p.B, p.tokens.size(), values}), inputs.x != nullptr);
  if (inputs.x && p.c.tape.recording())
    p.c.tape.record([inputs, rows, patch, grid, all, size, tokens = p.tokens] {
      Tensor drows = Tensor::empty(all, rows->value.dtype());
      ops::fill_zero(drows);
      ops::copy_tokens(rows->grad.view({all[0], 1, tokens.size(), all[3]}),
                       {1, tokens.size(), 0, 0, 0, tokens.begin}, drows);
      std::int64_t first = 0;
      for (const Var& part : {inputs.x, inputs.condition}) {
        if (!part) continue;
        Tensor own =
            Tensor::empty({grid[0], grid[1], grid[2], part->value.dim(1) * size}, drows.dtype());
        ops::take_channels(drows.view(grid), first, own, false);
        first += own.dim(3);
        part->grad = Tensor::empty(part->value.shape(), DType::f32);
        ops::patchify_backward(own, patch, part->grad);
      }
    });
  return as_f32(p.c, nn::linear(p.c, rows, patch_));
}

// 2. The timesteps, to what modulates the tokens.
void Wan::embed_times(Pass& p) {
  Tensor times = p.in.times;
  p.shared.rows = p.in.rows;
  if (!times.defined()) {
    const bool masked = p.in.x_mask.defined();
    const std::int64_t G = masked ? 2 * p.B : p.B, frames = masked ? p.B * p.T : p.B;
    times = Tensor::empty({G}, DType::f32);
    Tensor rates = Tensor::empty({G}, DType::f32);
    Tensor rows = Tensor::empty({frames}, DType::i32),
           samples = Tensor::empty({frames}, DType::i32);
    // The model has no frame rate: the timestep stands in for it.
    ops::modulation_rows(p.in.timestep, p.in.timestep, p.in.x_mask, times, rates, rows, samples);
    if (!p.shared.rows.defined()) p.shared.rows = rows;
    WEFT_ASSERT(!masked || p.in.rows.defined() || group_.alone());
  }
  Tensor waves = Tensor::empty({times.numel(), config_.freq_dim}, DType::f32);
  ops::timestep_embedding(times, waves);
  p.e = nn::linear(p.c, nn::silu(p.c, nn::linear(p.c, make_var(waves, false), time1_)), time2_);
  p.shared.m6 = nn::linear(p.c, nn::silu(p.c, p.e), time_projection_);
}

// 3. Captions, each with the row of its padding, which is zero before the projection.
// [keys, C]
Var Wan::embed_captions(const Pass& p, const Var& y_var) {
  const Captions& captions = p.in.captions;
  Tensor rows = Tensor::empty({captions.index.numel(), config_.text_dim}, activation_dtype());
  ops::gather_captions(captions.y, Tensor(), captions.index, rows);
  const Var y = make_var(rows, y_var != nullptr);
  if (y_var && p.c.tape.recording())
    p.c.tape.record([y_var, y, index = captions.index] {
      ops::gather_captions_backward(y->grad, index, zeroed_grad(y_var));
    });
  return nn::mlp(p.c, y, text1_, text2_);
}

// 4. Blocks. The first `recompute` share of them keeps its input only. f32 [B,N_r,C]
Var Wan::run_blocks(const Pass& p, Var x, const Var& y) {
  const double share = p.in.recompute < 0 ? config_.recompute : p.in.recompute;
  const auto recomputed =
      static_cast<std::size_t>(std::ceil(share * static_cast<double>(config_.depth)));
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto run = [this, &b = blocks_[i], input = x, y, shared = p.shared](Tape& tape) {
      return block({tape, params_}, b, input, y, shared);
    };
    x = i < recomputed && p.c.tape.recording() ? recompute(p.c.tape, run) : run(p.c.tape);
  }
  return x;
}

Var Wan::block(nn::Context c, const WanBlock& b, const Var& x, const Var& y, const Shared& s) {
  // Order of the modulation vectors (docs/models/wan.md, Block).
  enum { shift_attn, scale_attn, gate_attn, shift_ffn, scale_ffn, gate_ffn };
  const DType type = activation_dtype();  // x is f32
  const Var m = nn::modulation(c, *b.modulation, s.m6);
  Var u = nn::layer_norm_modulate(c, x, m, s.rows, shift_attn, scale_attn, 0, type);
  Var a = self_attention(c, b.self, u, s);
  u.reset();
  const Var x1 = nn::gate_residual(c, x, a, m, s.rows, gate_attn, Tensor());
  a.reset();

  u = nn::layer_norm_affine(c, x1, *b.norm3_weight, *b.norm3_bias, type);
  a = cross_attention(c, b.cross, u, y, s);
  u.reset();
  const Var x2 =
      bf16() ? nn::add(c, x1, nn::linear(c, a, b.cross.o)) : nn::linear(c, a, b.cross.o, x1);
  a.reset();

  u = nn::layer_norm_modulate(c, x2, m, s.rows, shift_ffn, scale_ffn, 0, type);
  return nn::gate_residual(c, x2, nn::mlp(c, u, b.fc1, b.fc2), m, s.rows, gate_ffn, Tensor());
}

// Attention among all N tokens of a sample. In a group each rank makes q, k and v of its own
// tokens, and then has its blocks of them.
Var Wan::self_attention(nn::Context c, const WanAttention& a, const Var& u, const Shared& s) {
  const int heads = static_cast<int>(heads_);
  Var q = nn::rms_rope(c, nn::linear(c, u, a.q), *a.norm_q, s.rope, heads);
  Var k = nn::rms_rope(c, nn::linear(c, u, a.k), *a.norm_k, s.rope, heads);
  Var v = nn::linear(c, u, a.v);
  AttentionBlocks blocks;
  if (!group_.alone()) {
    blocks = attention_blocks(s.N, heads_, group_.size);
    q = exchange_heads(c, q, blocks.tokens, blocks.queries, false);
    for (Var* part : {&k, &v}) *part = exchange_heads(c, *part, blocks.tokens, blocks.keys, false);
  }
  Var out =
      nn::attention(c, q, k, v, Tensor(), Tensor(), static_cast<int>(q->value.dim(2) / head_));
  for (Var* part : {&q, &k, &v}) part->reset();
  if (!group_.alone()) out = exchange_heads(c, out, blocks.queries, blocks.tokens, true);
  return nn::linear(c, out, a.o);
}

// Attention to the sample's caption and its padding's key.
Var Wan::cross_attention(nn::Context c, const WanAttention& a, const Var& u, const Var& y,
                         const Shared& s) {
  const int heads = static_cast<int>(heads_);
  const std::int64_t keys = y->value.dim(0), C = config_.hidden_size;
  const Var q = nn::rms_rope(c, nn::linear(c, u, a.q), *a.norm_q, Tensor(), heads);
  const Var k =
      nn::rms_rope(c, nn::view(c, nn::linear(c, y, a.k), {1, keys, C}), *a.norm_k, Tensor(), heads);
  const Var v = nn::view(c, nn::linear(c, y, a.v), {1, keys, C});
  return nn::attention(c, q, k, v, s.offsets, s.last_bias, heads);
}

// Rows of heads [B,n,H_r*D] from one rank's block to another. Frees x's value unless it is kept,
// because something else needs it.
Var Wan::exchange_heads(nn::Context c, const Var& x, const nn::Blocks& from, const nn::Blocks& to,
                        bool keep) {
  const Shape own = x->value.shape();
  const Var grid = make_var(x->value.view({own[0], own[1], own[2] / head_, head_}));
  if (!keep) x->value.release();
  if (c.tape.recording())
    c.tape.record([x, grid, own] { give_grad(x, std::exchange(grid->grad, {}).view(own)); });
  // To nn::exchange() tokens are frames and heads are the tokens of a frame.
  const Var other = nn::exchange(c, grid, group_, from, to);
  const Shape& s = other->value.shape();
  return nn::view(c, other, {s[0], s[1], s[2] * head_});
}

// 5. The head, and tokens back to a latent.
Var Wan::head(const Pass& p, const Var& x) {
  const Var m = nn::modulation(p.c, *head_modulation_, p.e);
  const Var o = nn::layer_norm_modulate(p.c, x, m, p.shared.rows, 0, 1);
  Var rows = nn::linear(p.c, o, head_linear_);
  const std::int64_t values = rows->value.dim(2);
  if (!group_.alone()) {
    rows = nn::view(p.c, rows, {p.B, 1, p.tokens.size(), values});
    rows = nn::gather_tokens(p.c, rows, group_, p.N);
  }
  rows = nn::view(p.c, rows, {p.B, p.T, p.S, values});
  return nn::unpatchify(p.c, rows, p.patch, p.in.x.shape());
}

Tensor Wan::velocity(const DenoiserInput& in) {
  Tape tape(Tape::Mode::infer);
  Tensor v = forward(tape, complete(in))->value;
  ops::scaled_add(v, -1, Tensor(), v, false);  // the role's velocity is x0 - eps
  return v;
}

// ---- Operations (docs/models/wan.md, Operations)

double Wan::flops(std::int64_t frames, std::int64_t h, std::int64_t w) const {
  const auto& p = config_.patch_size;
  const auto N = static_cast<double>(frames / p[0] * (h / p[1]) * (w / p[2]));
  const auto C = static_cast<double>(config_.hidden_size),
             M = static_cast<double>(config_.text_len);
  const auto ffn = static_cast<double>(config_.ffn_dim);
  const auto patch =
      static_cast<double>(p[0] * p[1] * p[2] * (config_.in_channels + channels())) / 2;
  const double text_keys = 4 * M * C * C;
  const double block =
      2 * N * (6 * C * C + 2 * C * ffn) + 4 * N * N * C + 4 * N * M * C + text_keys;
  return static_cast<double>(config_.depth) * block + 4 * N * C * patch +
         2 * M * (static_cast<double>(config_.text_dim) * C + C * C);
}

namespace {

std::string name_in_diffusers(const std::string& name) {
  // In order: head.modulation goes before those of the blocks. Released norm1 and norm2 have no
  // parameters; diffusers counts the affine one in the order of use, so it is norm2 there.
  return renamed_parts(name, {{"time_embedding.0", "condition_embedder.time_embedder.linear_1"},
                              {"time_embedding.2", "condition_embedder.time_embedder.linear_2"},
                              {"time_projection.1", "condition_embedder.time_proj"},
                              {"text_embedding.0", "condition_embedder.text_embedder.linear_1"},
                              {"text_embedding.2", "condition_embedder.text_embedder.linear_2"},
                              {"head.modulation", "scale_shift_table"},
                              {"head.head", "proj_out"},
                              {"modulation", "scale_shift_table"},
                              {"self_attn", "attn1"},
                              {"cross_attn", "attn2"},
                              {"q", "to_q"},
                              {"k", "to_k"},
                              {"v", "to_v"},
                              {"o", "to_out.0"},
                              {"norm3", "norm2"},
                              {"ffn.0", "ffn.net.0.proj"},
                              {"ffn.2", "ffn.net.2"}});
}

}  // namespace

WeightNames wan_weight_names() {
  WeightNames names;
  names.others = [](const std::string& name) {
    return std::vector<std::string>{"model.diffusion_model." + name, name_in_diffusers(name)};
  };
  return names;
}

std::vector<WeightSet> WanExperts::weight_sets() const {
  WeightSet low{wan_weight_names(), {"low_noise_model", "transformer_2"}};
  WeightSet high{wan_weight_names(), {"high_noise_model", "transformer"}};
  low.names.prefix = "low_noise_model.";
  high.names.prefix = "high_noise_model.";
  return {low, high};
}

}  // namespace weft
