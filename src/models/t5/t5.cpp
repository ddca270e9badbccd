#include "models/t5/t5.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "models/t5/options.h"
#include "ops/attention.h"
#include "ops/layout.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "text/cleaning.h"

namespace weft {
namespace {

constexpr float epsilon = 1e-6f;
constexpr std::int64_t buckets = 32;  // of the relative position bias

// A weight as it is computed with: the bf16 copy where the model has one.
const Tensor& weight(const Parameter* p) { return p->working.defined() ? p->working : p->value; }

Tensor rms_norm(const Tensor& x, const Parameter* w) {
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  ops::rms_norm_forward(x, w->value, epsilon, y);
  return y;
}

}  // namespace

T5Encoder::T5Encoder(const T5Deck& config, std::int64_t first, std::int64_t last)
    : config_(config), first_(first), last_(last) {
  WEFT_ASSERT(0 <= first && first <= last && last <= config.num_layers);
  const std::int64_t C = config.d_model, inner = config.num_heads * config.d_kv, F = config.d_ff;
  const auto deviation = [](std::int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); };
  const auto add = [&](const std::string& name, const Shape& shape, Init init) {
    return &params_.add(name, shape, init, false);
  };
  const auto matrix = [&](const std::string& name, const Shape& shape, double deviation_of) {
    Parameter* p = add(name, shape, Init::normal(deviation_of));
    p->bf16_only = true;  // norms and bias stay f32
    return p;
  };
  const auto norm = [&](const std::string& name) { return add(name, {C}, Init::constant(1.0f)); };
  if (first == 0) embedding_ = matrix("shared.weight", {config.vocab_size, C}, 1.0);
  const auto bias = [&](std::int64_t layer) {
    return add(t5_bias_name(layer), {buckets, config.num_heads}, Init::normal(deviation(C)));
  };
  Parameter* shared_bias = config.umt5 ? nullptr : bias(0);
  for (std::int64_t i = first; i < last; ++i) {
    const std::string block = "encoder.block." + std::to_string(i) + ".layer.";
    const std::string attention = block + "0.SelfAttention.", mlp = block + "1.DenseReluDense.";
    Layer l;
    l.norm0 = norm(block + "0.layer_norm.weight");
    l.q = matrix(attention + "q.weight", {inner, C}, deviation(C * config.d_kv));
    l.k = matrix(attention + "k.weight", {inner, C}, deviation(C));
    l.v = matrix(attention + "v.weight", {inner, C}, deviation(C));
    l.o = matrix(attention + "o.weight", {C, inner}, deviation(inner));
    l.bias = config.umt5 ? bias(i) : shared_bias;
    l.norm1 = norm(block + "1.layer_norm.weight");
    l.wi_0 = matrix(mlp + "wi_0.weight", {F, C}, deviation(C));
    l.wi_1 = matrix(mlp + "wi_1.weight", {F, C}, deviation(C));
    l.wo = matrix(mlp + "wo.weight", {C, F}, deviation(F));
    layers_.push_back(l);
  }
  if (last == config.num_layers) final_norm_ = norm("encoder.final_layer_norm.weight");
}

bool T5Encoder::packs() const {
  return config_.dtype != "bf16" && this_device().kind == DeviceKind::cpu;
}

void T5Encoder::pack_weights() {
  if (packed_ || !packs()) return;
  for (const Layer& l : layers_)
    for (Parameter* p : {l.q, l.k, l.v, l.o, l.wi_0, l.wi_1, l.wo}) ops::pack_weight(p->value);
  packed_ = true;
}

// x [M,in] as products read it.
Tensor T5Encoder::operand(const Tensor& x) const {
  if (!packed_) return x;
  Tensor rows = Tensor::empty({ops::packed_rows(x.dim(0)), x.dim(1)}, x.dtype());
  ops::pack_rows(x, rows);
  return rows;
}

// y [M,out] = x w^T (+ residual), x being an operand().
void T5Encoder::product(const Tensor& x, const Parameter* w, const Tensor& residual,
                        Tensor& y) const {
  if (packed_)
    ops::packed_linear_forward(x, w->value, Tensor(), residual, y);
  else
    ops::linear_forward(x, weight(w), Tensor(), residual, y);
}

// The first M rows of part i of y [parts,rows,...] = x w^T.
void T5Encoder::product_into(const Tensor& x, const Parameter* w, std::int64_t M, Tensor& y,
                             std::int64_t i) const {
  Tensor part = y.slice(i, i + 1).view({y.dim(1), w->shape[0]}).slice(0, M);
  product(x, w, Tensor(), part);
}

// h + x w^T.
Tensor T5Encoder::added(const Tensor& h, const Tensor& x, const Parameter* w) const {
  Tensor y = Tensor::empty(h.shape(), h.dtype());
  product(x, w, h, y);
  return y;
}

Tensor T5Encoder::forward(const PackedTokens& in, const Tensor& given) {
  const std::int64_t M = in.ids.numel(), H = config_.num_heads, D = config_.d_kv;
  const DType dtype = config_.dtype == "bf16" ? DType::bf16 : DType::f32;
  WEFT_ASSERT(given.defined() || first_ == 0);
  Tensor h = given;
  if (!h.defined()) {
    h = Tensor::empty({M, config_.d_model}, dtype);
    ops::embedding_forward(in.ids, weight(embedding_), h);
  }
  WEFT_ASSERT(h.dtype() == dtype && h.dim(0) == M);
  for (const Layer& l : layers_) {
    Tensor x = operand(rms_norm(h, l.norm0));
    Tensor qkv = Tensor::empty({3, M, H, D}, dtype);
    product_into(x, l.q, M, qkv, 0);
    product_into(x, l.k, M, qkv, 1);
    product_into(x, l.v, M, qkv, 2);
    x.release();
    Tensor attended = Tensor::empty({M, H * D}, dtype);
    ops::relative_attention_forward(qkv, l.bias->value, in.offsets, in.longest, attended);
    qkv.release();
    attended = operand(attended);
    h = added(h, attended, l.o);
    attended.release();

    x = operand(rms_norm(h, l.norm1));
    // Packed rows can be more than M, so both parts have room for them: after gating, the result in
    // the first part is packed into the second.
    const std::int64_t rows = packed_ ? ops::packed_rows(M) : M;
    Tensor gu = Tensor::empty({2, rows, config_.d_ff}, dtype);
    product_into(x, l.wi_0, M, gu, 0);
    product_into(x, l.wi_1, M, gu, 1);
    x.release();
    Tensor gated = gu.slice(0, 1).view({rows, config_.d_ff});
    ops::gated_gelu_forward(gu, gated);
    if (packed_) {
      Tensor second = gu.slice(1, 2).view(gated.shape());
      ops::pack_rows(gated.slice(0, M), second);
      gated = second;
    }
    h = added(h, gated, l.wo);
  }
  return final_norm_ ? rms_norm(h, final_norm_) : h;
}

std::size_t T5Encoder::plan(std::int64_t tokens, std::int64_t longest) {
  const bool packed_now = std::exchange(packed_, packs());  // as it will run
  // In an arena of that size; 0: an unlimited one.
  const auto need = [&](std::size_t capacity) {
    const auto arena = Arena::planning(this_device().kind, capacity);
    const ArenaScope scope(*arena);
    PackedTokens in;
    in.ids = Tensor::empty({tokens}, DType::i32);
    in.offsets = Tensor::empty({tokens + 1}, DType::i32);  // as many captions as there can be
    in.longest = longest;
    Tensor h;
    if (first_ > 0)
      h = Tensor::empty({tokens, config_.d_model},
                        config_.dtype == "bf16" ? DType::bf16 : DType::f32);
    forward(in, h);
    return arena->need();
  };
  // Holes between blocks need room beyond the peak: grow to the first size that fits.
  std::size_t capacity = need(0).bytes;
  while (!need(capacity).fits)
    capacity += std::max(capacity / 16, Arena::alignment) / Arena::alignment * Arena::alignment;
  packed_ = packed_now;
  return capacity;
}

T5Encoder::Sizes T5Encoder::sizes(const T5Deck& c) {
  const std::size_t size = c.dtype == "bf16" ? 2 : 4;
  const std::size_t both = c.dtype == "bf16" ? 6 : 4;  // what a bf16 model keeps in f32 too
  const auto bytes = [](std::int64_t elements, std::size_t each) {
    return static_cast<std::size_t>(elements) * each;
  };
  Sizes s;
  const std::size_t bias = bytes(buckets * c.num_heads, both);
  s.layer = bytes(4 * c.d_model * c.num_heads * c.d_kv + 3 * c.d_model * c.d_ff, size) +
            bytes(2 * c.d_model, both) + (c.umt5 ? bias : 0);
  s.embedding = bytes(c.vocab_size * c.d_model, size);
  s.every_part = bytes(c.d_model, both) + (c.umt5 ? 0 : bias);
  return s;
}

std::string t5_bias_name(std::int64_t layer) {
  return "encoder.block." + std::to_string(layer) +
         ".layer.0.SelfAttention.relative_attention_bias.weight";
}

namespace {

// The name that Wan releases for a parameter of umT5.
std::string released_name(const std::string& name) {
  return renamed_parts(
      name, {{"shared", "token_embedding"},
             {"encoder.final_layer_norm", "norm"},
             {"encoder.block", "blocks"},
             {"layer.0.layer_norm", "norm1"},
             {"layer.0.SelfAttention.relative_attention_bias", "pos_embedding.embedding"},
             {"layer.0.SelfAttention", "attn"},
             {"layer.1.layer_norm", "norm2"},
             {"layer.1.DenseReluDense.wi_0", "ffn.gate.0"},
             {"layer.1.DenseReluDense.wi_1", "ffn.fc1"},
             {"layer.1.DenseReluDense.wo", "ffn.fc2"}});
}

}  // namespace

WeightNames t5_weight_names(const T5Deck& t5) {
  return {"t5",
          [](const std::string& n) {
            return n.starts_with("decoder.") || n.starts_with("lm_head.") ||
                   n == "encoder.embed_tokens.weight";
          },
          [released = t5.umt5](const std::string& n) {
            std::vector<std::string> names;
            if (n == "shared.weight") names.push_back("encoder.embed_tokens.weight");
            if (released) names.push_back(released_name(n));
            return names;
          }};
}

Tokenizer t5_tokenizer(const T5Deck& t5) {
  return open_tokenizer(t5.tokenizer, t5.weights, t5.vocab_size,
                        t5.umt5 ? Tokenizer::Ids::of_file : Tokenizer::Ids::t5);
}

std::string t5_clean(const T5Deck& t5, const std::string& text) {
  if (!t5.clean) return text;
  return t5.umt5 ? clean_basic(text) : clean_text(text);
}

}  // namespace weft
