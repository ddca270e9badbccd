// What one call of an operation costs, by its tensors' shapes and types alone: the last argument of
// WEFT_OP (ops/dispatch.h), an expression over the operation's own arguments. Dry runs
// (train/step_cost.h) and profiles read it.
#pragma once

#include "tensor/tensor.h"

namespace weft::ops {

struct Cost {
  // At which of a device's rates its operations run; memory: they are nothing beside its bytes.
  enum class Kind {
    memory,
    product,
    fp8_product,
    attention,
    attention_backward,
    unpacked_attention,  // q, k and v are tensors of their own
    unpacked_attention_backward,
    convolution
  };
  Kind kind = Kind::memory;
  double operations = 0;    // floating-point ones, the least, as the plain sum has them
  double bytes = -1;        // that it has to move; -1: its tensors, each once
  double bytes_before = 0;  // moved before its operations begin, which do not hide them
};

namespace cost {

inline double count(const Tensor& t) { return t.defined() ? static_cast<double>(t.numel()) : 0; }
inline double bytes(const auto&... tensors) {
  return ((tensors.defined() ? static_cast<double>(tensors.bytes()) : 0.0) + ...);
}

// Of empty tensors a quotient may be NaN.
inline Cost at_rate(Cost::Kind kind, double operations) {
  return {kind, operations > 0 ? operations : 0};
}

inline Cost memory_bound() { return {}; }
inline Cost moves(double bytes) { return {Cost::Kind::memory, 0, bytes}; }
// 2 M N K.
inline Cost of_product(double operations) { return at_rate(Cost::Kind::product, operations); }
// Rounding comes before it: both operands are read twice, and a byte is written for each two.
inline Cost of_fp8_product(double operations, const Tensor& a, const Tensor& b) {
  Cost c = at_rate(Cost::Kind::fp8_product, operations);
  c.bytes_before = 2.5 * bytes(a, b);
  return c;
}
// 2 numel(y) Cin kt kh kw with weights w; 4/9 of that where `large` is wider than `small`, which is
// read upsampled twofold (ops/conv.h).
inline Cost of_convolution(const Tensor& y, const Tensor& w, const Tensor& small,
                           const Tensor& large) {
  const double upsampled = large.dim(3) > small.dim(3) ? 4.0 / 9.0 : 1.0;
  return at_rate(Cost::Kind::convolution, 2 * upsampled * count(y) * count(w) / w.dim(0));
}
// Of P positions to P others with C channels: 4 P P C forward, 10 P P C backward. Packed sequences,
// whose lengths are not in the shapes, count as if all were of the mean length.
inline Cost of_attention(double operations) { return at_rate(Cost::Kind::attention, operations); }
inline Cost of_attention_backward(double operations) {
  return at_rate(Cost::Kind::attention_backward, operations);
}
inline Cost of_unpacked_attention(double operations) {
  return at_rate(Cost::Kind::unpacked_attention, operations);
}
inline Cost of_unpacked_attention_backward(double operations) {
  return at_rate(Cost::Kind::unpacked_attention_backward, operations);
}

}  // namespace cost

}  // namespace weft::ops
