// Reverse-mode differentiation over a list of closures (class Tape), and the differentiable
// operations that every model uses (namespace nn). A forward function calls nn:: operations;
// each records how to send its output's gradient to its inputs. backward() runs the records in
// reverse and drops each one, so that activations return to the arena as it goes.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/error.h"
#include "nn/parameters.h"
#include "ops/attention.h"
#include "ops/layout.h"
#include "ops/matmul.h"
#include "tensor/tensor.h"

namespace weft {

// A value of the forward pass and, during the backward pass, its gradient (of the value's type and
// shape).
struct Node {
  Tensor value;
  Tensor grad;
  bool needs_grad = true;
  // The bias that was added to make the value, if it is trained. Its gradient is the column sums of
  // `grad`, which an operation may add to it where it makes `grad`, and then says so. A layer whose
  // value has such a user is used once.
  Parameter* bias = nullptr;
  bool bias_summed = false;
};
using Var = std::shared_ptr<Node>;

inline Var make_var(Tensor value, bool needs_grad = true) {
  return std::make_shared<Node>(Node{std::move(value), Tensor(), needs_grad});
}

class Tape {
 public:
  enum class Mode {
    record,   // forward of a training step
    replay,   // the second forward of a recomputed part: recorded, but its parameter uses were
              // counted before
    discard,  // the first forward of a recomputed part: not recorded, parameter uses are counted
    infer,    // no backward will follow
  };
  explicit Tape(Mode mode = Mode::record) : mode_(mode) {}

  bool recording() const { return mode_ == Mode::record || mode_ == Mode::replay; }
  bool counts_uses() const { return mode_ == Mode::record || mode_ == Mode::discard; }

  void record(std::function<void()> step) { steps_.push_back({std::move(step), weights_}); }
  // Runs every record in reverse. The caller has set the gradient of the result.
  void backward();

  // Weights that are gathered when they are needed (Sharding): what is recorded from now on works
  // on those of `bucket`, so the backward enters it before.
  struct Weights {
    ParameterTable* table = nullptr;
    int bucket = -1;
  };
  void reads(Weights weights) { weights_ = weights; }
  const Weights& weights() const { return weights_; }

  // Activations that a record need not keep, but which make its backward cheaper: how many bytes
  // of them this tape may hold (plan_memory() finds what fits). 0: the backward recomputes them.
  void allow(std::size_t bytes) { allowed_ = bytes; }
  // True where `bytes` of them may be kept: they are then taken off what is allowed.
  bool keep(std::size_t bytes) {
    if (bytes > allowed_) return false;
    allowed_ -= bytes;
    kept_ += bytes;
    return true;
  }
  std::size_t kept() const { return kept_; }  // bytes so far

 private:
  struct Step {
    std::function<void()> run;
    Weights weights;
  };
  Mode mode_;
  Weights weights_;
  std::size_t allowed_ = 0, kept_ = 0;
  std::vector<Step> steps_;
};

// The tensor for the gradient of `v`: allocated if this is its first contribution, in which case
// `accumulate` is false.
struct GradTarget {
  Tensor& grad;
  bool accumulate;
};
GradTarget grad_target(const Var& v);
// The same for operations that only ever add: zeroed at the first contribution.
Tensor& zeroed_grad(const Var& v);
// Adds `g` to the gradient of `v`; the first contribution takes the tensor over without a copy, so
// the caller must not use `g` afterwards.
void give_grad(const Var& v, Tensor g);

// Runs `part` without recording and keeps only its inputs (which `part` has captured); the backward
// pass runs it again. For whole blocks: memory of one block instead of all, for one more forward.
Var recompute(Tape& tape, std::function<Var(Tape&)> part);
// The same for a part with several results, each of which is used.
std::vector<Var> recompute(Tape& tape, std::function<std::vector<Var>(Tape&)> part);

}  // namespace weft

// Differentiable operations: each checks shapes, calls ops and records its backward on the tape.
// Letters: B batch, T frames, S tokens a frame, N = T*S, C channels, H heads, D head dimension, L
// text length.
namespace weft::nn {

struct Linear {
  Parameter* weight = nullptr;  // [out, in]
  Parameter* bias = nullptr;    // [out]
  // LoRA (Hu et al., arXiv 2106.09685): where these are set, the layer adds lora_scale * (x A^T)
  // B^T to its product. models/lora.h makes them.
  Parameter* lora_a = nullptr;  // [rank, in]
  Parameter* lora_b = nullptr;  // [out, rank]
  float lora_scale = 0;
  // Its product, and that for the gradient of its input, take operands in e4m3 (ops/fp8.h). The
  // gradient of its weight, and what LoRA adds, do not. Activations are bf16 then.
  bool fp8 = false;

  bool adapted() const { return lora_a != nullptr; }
  // Whether its product is one that GELU can be fused to.
  bool plain() const { return !adapted() && !fp8; }
};

// What every nn function needs besides its operands.
struct Context {
  Tape& tape;
  ParameterTable& parameters;
};

// y = x w^T + bias (+ residual) (+ what LoRA adds). x [..., in], y [..., out]; bf16 activations use
// the bf16 copies of the weight and of a bias that is bf16_only.
Var linear(Context c, const Var& x, const Linear& l, const Var& residual = nullptr);

// fc2(gelu_tanh(fc1(x))), each as linear(). Keeps fc1's output, and the activation where the tape
// allows it (Tape::keep); else the backward recomputes it.
Var mlp(Context c, const Var& x, const Linear& fc1, const Linear& fc2);

Var silu(Context c, const Var& x);

// a + b of one shape: f32, or a in f32 and b in bf16.
Var add(Context c, const Var& a, const Var& b);

// m [G,K,C] = table [K,C] or [1,K,C] + t, t [G,K*C] or [G,C] (docs/models/stdit3.md, Modulation,
// Final layer).
Var modulation(Context c, Parameter& table, const Var& t);

// LN(x) (1 + m[row, scale]) + m[row, shift], x [B*T..., S, C], rows i32 [B*T] (ops/norm.h); frames
// whose row is below `first_row` pass unchanged. The result is of x's type, or of `dtype`, which
// may be bf16 where x is f32.
Var layer_norm_modulate(Context c, const Var& x, const Var& m, const Tensor& rows, int shift,
                        int scale, int first_row = 0, std::optional<DType> dtype = {});

// LN(x) * w + b over the last dimension; w, b [C]. `dtype` as above.
Var layer_norm_affine(Context c, const Var& x, Parameter& w, Parameter& b,
                      std::optional<DType> dtype = {});

// w * x / sqrt(mean(x^2) + 1e-6) over all channels of a token of x [B,N,C], then each head's pairs
// turned by rope f32 [N, D/2, 2] (ops/norm.h); rope undefined: not turned.
Var rms_rope(Context c, const Var& x, Parameter& w, const Tensor& rope, int heads);

// x + m[row, gate] * keep[b] * p, of x's type; p may be bf16 where x is f32. The backward
// overwrites p's value with p's gradient: nothing else may need p.
Var gate_residual(Context c, const Var& x, const Var& p, const Var& m, const Tensor& rows, int gate,
                  const Tensor& keep);

// qkv [B,T,S,3,H,D] -> [B,T,S,H*D]; q_norm/k_norm may be null; rope as in ops/attention.h. Keeps q
// and k after norm and rotation where the tape allows it (Tape::keep) and the backward wants them.
Var self_attention(Context c, const Var& qkv, Parameter* q_norm, Parameter* k_norm,
                   const Tensor& rope, ops::Axis axis);

// q [B,N,H*D], k, v [rows,H*D] or [B,N,H*D] -> like q; offsets and last_bias as in ops/attention.h,
// both may be undefined. Rows of k and v that are no sample's get a gradient of zero.
Var attention(Context c, const Var& q, const Var& k, const Var& v, const Tensor& offsets,
              const Tensor& last_bias, int heads);

struct CrossAttention {
  Linear q, kv, proj;
};
// x + proj(attention(q(x), kv(y))), docs/models/stdit3.md, Cross attention. x [B,T,S,C], y [sum L,
// C], offsets i32 [B+1] on the device and `lengths` [B] on the host: the caption rows of each
// sample. On the CPU short captions take the absorbed form (ops/attention.h), by a rule of shapes
// alone, so that a run repeats its bits; there adapted layers are w + lora_scale B A.
Var cross_attention(Context c, const Var& x, const Var& y, const CrossAttention& w,
                    const Tensor& offsets, const std::vector<std::int64_t>& lengths, int heads);

// The same value under another shape.
Var view(Context c, const Var& x, const Shape& shape);
// Rows of patches [B,T,S,pt*ph*pw*C] to f32 [B,C,T',H',W'] of that shape (ops/layout.h).
Var unpatchify(Context c, const Var& rows, ops::PatchGeometry patch, const Shape& shape);

}  // namespace weft::nn

// For the operations of nn alone: weights by type, and the bookkeeping of parameter uses.
namespace weft::nn::detail {

// The copy of a weight that matches the activations' type.
inline const Tensor& weight_for(const Linear& l, DType dtype) {
  return dtype == DType::bf16 ? l.weight->working : l.weight->value;
}

// Likewise of a bias, whose bf16 copy is current on every rank only if it is bf16_only.
inline const Tensor& bias_for(const Linear& l, DType dtype) {
  return dtype == DType::bf16 && l.bias->bf16_only ? l.bias->working : l.bias->value;
}

// Must be called before a forward reads the parameters: waits for new values still in transit.
inline void use(const Context& c, std::initializer_list<Parameter*> used) {
  for (Parameter* p : used) {
    if (p == nullptr) continue;
    c.parameters.await(*p);
    if (p->sharded) c.tape.reads({&c.parameters, p->bucket});
    if (c.tape.counts_uses()) c.parameters.note_use(*p);
  }
}

inline void note_done(ParameterTable& table, std::initializer_list<Parameter*> used) {
  for (Parameter* p : used)
    if (p != nullptr) table.note_done(*p);
}

// A tensor for a communicator, without ownership: a communicator may release its tensors late and
// in its own thread, but blocks of the arena must be freed here, in the order that was planned.
inline Tensor lent(const Tensor& t) {
  return Tensor::borrow(t.raw(), t.shape(), t.dtype(), t.device());
}

// Tells a dry run of an exchange that it leaves out: the collective, and what this rank would send.
inline void note_exchange(const char* collective, std::initializer_list<Tensor> sent) {
  double bytes = 0;
  for (const Tensor& t : sent) bytes += static_cast<double>(t.bytes());
  if (ops::detail::op_watch != nullptr) ops::detail::op_watch->exchanged(collective, bytes);
}

// dw, dbias of one linear layer. `bias`: false where the bias has its gradient already.
inline void add_weight_grad(const Linear& l, const Tensor& dy, const Tensor& x, bool bias = true) {
  if (!l.weight->trainable) return;
  WEFT_ASSERT(!bias || l.weight->grad_written == l.bias->grad_written);
  Tensor none;
  ops::linear_backward_weight(dy, x, l.weight->grad, bias ? l.bias->grad : none,
                              l.weight->grad_written);
  l.weight->grad_written = l.bias->grad_written = true;
}

}  // namespace weft::nn::detail
