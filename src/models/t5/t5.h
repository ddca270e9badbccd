// The T5 v1.1 encoder (docs/models/t5.md, Shape, Forward, Parameters; transformers'
// T5EncoderModel) and umT5's (umT5 there), which differs in its position biases: some consecutive
// layers of it.
#pragma once

#include <vector>

#include "checkpoint/weights.h"
#include "config/deck.h"
#include "models/t5/options.h"
#include "nn/nn.h"
#include "text/tokenizer.h"

namespace weft {

// Captions of a micro-batch, packed: caption b has the rows [offsets[b], offsets[b+1]).
struct PackedTokens {
  Tensor ids;      // i32 [M]
  Tensor offsets;  // i32 [B+1]
  std::int64_t longest = 0;
};

class T5Encoder {
 public:
  // Layers [first, last) of config.num_layers; the embedding where first is 0, the final norm where
  // last is all. Registers their parameters (none trainable) under transformers' names;
  // params().allocate() is the caller's. Every part of a T5 has the bias table of block 0; of
  // umT5, each layer has its own. Matrices and the embedding are bf16_only: where their bf16 copy
  // is there it is read, otherwise the f32 value; norms and bias tables are always read in f32.
  T5Encoder(const T5Deck& config, std::int64_t first, std::int64_t last);

  ParameterTable& params() { return params_; }

  // Must be called once the weights are loaded: in f32 on the CPU it reorders the layers' matrices
  // in place as products read them (ops/matmul.h); their `value` is then no longer [out,in].
  // Otherwise it does nothing.
  void pack_weights();

  // h [M,d_model] into layer `first` (undefined: from in.ids) -> out of layer last - 1, with the
  // final norm behind the last. All in config.dtype. `h` itself is not written. Ids must lie in [0,
  // vocab_size): not checked.
  Tensor forward(const PackedTokens& in, const Tensor& h);

  // Bytes of an arena that forward() and its input go into, for M tokens in captions of `longest`.
  std::size_t plan(std::int64_t tokens, std::int64_t longest);

  // Bytes of one layer's parameters, of the embedding, of what a part has besides (the final norm,
  // and T5's bias table): for placements, without a model.
  struct Sizes {
    std::size_t layer = 0, embedding = 0, every_part = 0;
  };
  static Sizes sizes(const T5Deck& config);

 private:
  struct Layer {
    Parameter *norm0, *norm1;
    Parameter *q, *k, *v, *o, *wi_0, *wi_1, *wo;
    Parameter* bias;  // [32,num_heads]; T5's layers share one
  };
  bool packs() const;
  Tensor operand(const Tensor& x) const;
  void product(const Tensor& x, const Parameter* w, const Tensor& residual, Tensor& y) const;
  void product_into(const Tensor& x, const Parameter* w, std::int64_t M, Tensor& y,
                    std::int64_t i) const;
  Tensor added(const Tensor& h, const Tensor& x, const Parameter* w) const;

  T5Deck config_;
  bool packed_ = false;
  ParameterTable params_;
  Parameter *embedding_ = nullptr, *final_norm_ = nullptr;
  std::vector<Layer> layers_;
  std::int64_t first_, last_;
};

// The bias table of a layer; T5 has that of layer 0 alone.
std::string t5_bias_name(std::int64_t layer);

// decoder.* and lm_head.* are spare; encoder.embed_tokens.weight is another name of shared.weight
// (docs/models/t5.md, Parameters). umT5's parameters may have the names that Wan releases, too.
WeightNames t5_weight_names(const T5Deck& t5 = {});

// How texts become ids, as the deck asks.
Tokenizer t5_tokenizer(const T5Deck& t5);
std::string t5_clean(const T5Deck& t5, const std::string& text);

}  // namespace weft
