#include "ops/cost.h"

namespace weft::ops {
namespace {

double numel(const Tensor& t) { return static_cast<double>(t.numel()); }

// If `large` is wider, the convolution reads `small` [.., W, ..] upsampled twofold, which takes 4/9
// of the products (ops/conv.h).
double convolution(const Tensor& y, const Tensor& w, const Tensor& small, const Tensor& large) {
  const double upsampled = large.dim(3) > small.dim(3) ? 4.0 / 9.0 : 1.0;
  return 2 * upsampled * numel(y) * numel(w) / static_cast<double>(w.dim(0));
}

double size(const Tensor& t) { return t.defined() ? static_cast<double>(t.bytes()) : 0; }

}  // namespace

double operations_of(std::string_view name, std::span<const Tensor> t) {
  if (t.empty() || !t[0].defined() || t[0].numel() == 0) return 0;
  const auto last = t.size() - 1;
  if (name == "conv_forward") return convolution(t[last], t[1], t[0], t[last]);
  if (name == "conv_backward_input") return convolution(t[0], t[1], t[2], t[0]);
  if (name == "conv_backward_weight") return convolution(t[1], t[2], t[0], t[1]);
  if (name == "linear_forward" || name == "linear_gelu_forward" || name == "fp8_linear_forward")
    return 2 * numel(t[0]) * static_cast<double>(t[1].dim(0));
  if (name == "linear_backward_input" || name == "linear_gelu_backward_input" ||
      name == "fp8_linear_backward_input")
    return 2 * numel(t[0]) * static_cast<double>(t[1].dim(1));
  if (name == "linear_backward_weight") return 2 * numel(t[0]) * static_cast<double>(t[1].dim(-1));
  // Rows of x are padded, those of y are not.
  if (name == "packed_linear_forward")
    return 2 * numel(t[last]) * numel(t[1]) / static_cast<double>(t[1].dim(0));
  // kv [L,2,H,D] with weights [C,C]: two products of L C C, and twice that backward.
  if (name == "absorb_forward") return 2 * numel(t[0]) * static_cast<double>(t[1].dim(0));
  if (name == "absorb_backward") return 4 * numel(t[0]) * static_cast<double>(t[1].dim(0));

  const double a_position = name.ends_with("_backward") ? 10 : 4;
  // qkv, wq, wk, rope, out [B,T,S,C], lse [sequences,H,length].
  if (name == "self_attention_forward" || name == "self_attention_backward")
    return a_position * numel(t[4]) * static_cast<double>(t[5].dim(2));
  // q [B,N,C], k [rows,C] or [B,rows of one,C].
  if (name == "attention_forward" || name == "attention_backward")
    return a_position * numel(t[0]) * numel(t[1]) / static_cast<double>(t[0].dim(0) * t[0].dim(2));
  // q [B,N,C], kv [all rows, 2C], offsets [B+1]: a sample's share of the rows.
  if (name == "cross_attention_forward" || name == "cross_attention_backward")
    return a_position * numel(t[0]) * static_cast<double>(t[1].dim(0)) /
           static_cast<double>(t[2].numel() - 1);
  // qkv [3,M,H,D], bias, offsets [B+1].
  if (name == "relative_attention_forward")
    return a_position * numel(t[0]) / 3 * static_cast<double>(t[0].dim(1)) /
           static_cast<double>(t[2].numel() - 1);
  // qkv [N,P,3,C], out [N,P,C].
  if (name == "wide_attention_forward" || name == "wide_attention_backward")
    return a_position * numel(t[1]) * static_cast<double>(t[1].dim(1));
  return 0;
}

double bytes_of(std::string_view name, std::span<const Tensor> t) {
  // ids, table, y: the rows of the table that are asked for.
  if (name == "embedding_forward") return size(t[0]) + 2 * size(t[2]);
  // Some channels of the wider tensor.
  if (name == "put_channels") return 2 * size(t[0]);
  if (name == "take_channels") return 2 * size(t[1]);
  double bytes = 0;
  for (const Tensor& x : t) bytes += size(x);
  // squares, grad, p, m, v, ema, copy; squares, grad, p, v, ema, copy; squares, p, ema.
  if (name == "adamw_step") bytes += size(t[2]) + size(t[3]) + size(t[4]) + size(t[5]);
  if (name == "sgd_step") bytes += size(t[2]) + size(t[3]) + size(t[4]);
  if (name == "ema_step") bytes += size(t[2]);
  // x, y += x; s in place.
  if (name == "add_inplace") bytes += size(t[1]);
  if (name == "head_softmax_forward") bytes += size(t[0]);
  if (name == "head_softmax_backward") bytes += size(t[1]);
  return bytes;
}

}  // namespace weft::ops
