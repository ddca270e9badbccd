// What the operations of nn share: weights by type, and the bookkeeping of parameter uses.
#pragma once

#include <initializer_list>
#include <span>

#include "nn/nn.h"
#include "ops/matmul.h"

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
  if (ops::detail::op_watch != nullptr)
    ops::detail::op_watch->met(collective, std::span(sent.begin(), sent.size()));
}

// dw, dbias of one linear layer.
inline void add_weight_grad(const Linear& l, const Tensor& dy, const Tensor& x) {
  if (!l.weight->trainable) return;
  ops::linear_backward_weight(dy, x, l.weight->grad, l.bias->grad, l.weight->grad_written);
  l.weight->grad_written = l.bias->grad_written = true;
}

}  // namespace weft::nn::detail
