#include "plan/op_times.h"

#include <algorithm>

#include "core/error.h"

namespace weft {
namespace {

double numel(const Tensor& t) { return static_cast<double>(t.numel()); }

// Products an element of y: small [.., W, ..] is seen at twice its size where large is wider.
double convolution(const Tensor& y, const Tensor& w, const Tensor& small, const Tensor& large) {
  const double upsampled = large.dim(3) > small.dim(3) ? 4.0 / 9.0 : 1.0;
  return 2 * upsampled * numel(y) * numel(w) / static_cast<double>(w.dim(0));
}

}  // namespace

double operations_of(const std::string& name, std::span<const Tensor> t) {
  const auto last = t.size() - 1;
  if (name == "conv_forward") return convolution(t[last], t[1], t[0], t[last]);
  if (name == "conv_backward_input") return convolution(t[0], t[1], t[2], t[0]);
  if (name == "conv_backward_weight") return convolution(t[1], t[2], t[0], t[1]);
  if (name == "linear_forward") return 2 * numel(t[0]) * static_cast<double>(t[1].dim(0));
  if (name == "linear_backward_input") return 2 * numel(t[0]) * static_cast<double>(t[1].dim(1));
  if (name == "linear_backward_weight") return 2 * numel(t[0]) * static_cast<double>(t[1].dim(-1));
  // qkv [N,P,3,C] -> out [N,P,C].
  if (name == "wide_attention_forward") return 4 * numel(t[1]) * static_cast<double>(t[1].dim(1));
  if (name == "wide_attention_backward") return 10 * numel(t[1]) * static_cast<double>(t[1].dim(1));
  return 0;
}

OpTimes::OpTimes(const Rates& rates) : rates_(rates) {
  WEFT_CHECK(rates.convolutions > 0, Exit::usage, "add \"convolutions\", in FLOP/s",
             "the VAE's time needs a rate of convolutions, and the rates have none ({})",
             rates.origin);
  ops::set_op_watch(this);
}

void OpTimes::met(const std::string& name, std::span<const Tensor> tensors) {
  if (tensors.empty()) return;
  const double flops = operations_of(name, tensors);
  double bytes = 0;
  for (const Tensor& t : tensors)
    if (t.defined()) bytes += static_cast<double>(t.bytes());
  const double rate = name.starts_with("conv")     ? rates_.convolutions
                      : name.starts_with("linear") ? rates_.products
                      : name.ends_with("backward") ? rates_.attention_backward
                                                   : rates_.attention_forward;
  seconds_ += std::max(flops / rate, bytes / rates_.bandwidth) * (1 + rates_.gaps);
  flops_ += flops;
}

}  // namespace weft
