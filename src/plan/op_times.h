// The time of a walk through a planning arena (tensor/arena.h), by what each operation in it computes and moves. For models
// whose steps are walked rather than written down as formulas: the VAE, LPIPS and the discriminator.
#pragma once

#include "ops/dispatch.h"
#include "plan/step_model.h"

namespace weft {

// Operations of one call as nobody could do with fewer: of a convolution 2 numel(y) Cin kt kh kw, of an upsampled one 4/9 of
// that (ops/conv.h), of the VAE's attention 4 P P C forward and 2.5 times that backward. 0 for all that memory bounds.
double operations_of(const std::string& name, std::span<const Tensor> tensors);

// Listens to this thread's walks until its end. Each operation takes the larger of its FLOPs over their rate and its tensors'
// bytes over the bandwidth.
class OpTimes : public ops::OpWatch {
 public:
  // Exit::usage if the rates do not tell how fast convolutions are.
  explicit OpTimes(const Rates& rates);
  ~OpTimes() override { ops::set_op_watch(nullptr); }
  OpTimes(const OpTimes&) = delete;
  OpTimes& operator=(const OpTimes&) = delete;

  void met(const std::string& name, std::span<const Tensor> tensors) override;
  double seconds() const { return seconds_; }
  double flops() const { return flops_; }

 private:
  const Rates& rates_;
  double seconds_ = 0, flops_ = 0;
};

}  // namespace weft
