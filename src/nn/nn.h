// Differentiable operations: each checks shapes, calls ops and records its backward on the tape.
// Letters: B batch, T frames, S tokens a frame, N = T*S, C channels, H heads, D head dimension, L
// text length.
#pragma once

#include <vector>

#include "nn/parameters.h"
#include "nn/tape.h"
#include "ops/attention.h"

namespace weft::nn {

struct Linear {
  Parameter* weight = nullptr;  // [out, in]
  Parameter* bias = nullptr;    // [out]
};

// What every nn function needs besides its operands.
struct Context {
  Tape& tape;
  ParameterTable& parameters;
};

// y = x w^T + bias (+ residual). x [..., in], y [..., out]; bf16 activations use the bf16 copies of
// the weight and of a bias that is bf16_only.
Var linear(Context c, const Var& x, const Linear& l, const Var& residual = nullptr);

// fc2(gelu_tanh(fc1(x))). Keeps only fc1's output; the backward recomputes the activation.
Var mlp(Context c, const Var& x, const Linear& fc1, const Linear& fc2);

Var silu(Context c, const Var& x);

// a + b, f32 of one shape.
Var add(Context c, const Var& a, const Var& b);

// m [G,K,C] = table [K,C] + t, t [G,K*C] or [G,C] (docs/models/stdit3.md, Modulation, Final layer).
Var modulation(Context c, Parameter& table, const Var& t);

// LN(x) (1 + m[row, scale]) + m[row, shift], x [B*T..., S, C], rows i32 [B*T] (ops/norm.h); frames
// whose row is below `first_row` pass unchanged.
Var layer_norm_modulate(Context c, const Var& x, const Var& m, const Tensor& rows, int shift,
                        int scale, int first_row = 0);

// x + m[row, gate] * keep[b] * p. The backward overwrites p's value with p's gradient: nothing else
// may need p.
Var gate_residual(Context c, const Var& x, const Var& p, const Var& m, const Tensor& rows, int gate,
                  const Tensor& keep);

// qkv [B,T,S,3,H,D] -> [B,T,S,H*D]; q_norm/k_norm may be null; rope as in ops/attention.h.
Var self_attention(Context c, const Var& qkv, Parameter* q_norm, Parameter* k_norm,
                   const Tensor& rope, ops::Axis axis);

struct CrossAttention {
  Linear q, kv, proj;
};
// x + proj(attention(q(x), kv(y))), docs/models/stdit3.md, Cross attention. x [B,T,S,C], y [sum L,
// C], offsets i32 [B+1] on the device and `lengths` [B] on the host: the caption rows of each
// sample. On the CPU short captions take the absorbed form (ops/attention.h), by a rule of shapes
// alone, so that a run repeats its bits.
Var cross_attention(Context c, const Var& x, const Var& y, const CrossAttention& w,
                    const Tensor& offsets, const std::vector<std::int64_t>& lengths, int heads);

// The same value under another shape.
Var view(Context c, const Var& x, const Shape& shape);

}  // namespace weft::nn
