#include "models/sadtalker/speech/dense.h"

#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {

void Dense::pack() const {
  if (on_cuda()) return;
  Tensor w = conv_->weight.view({conv_->out, conv_->in});
  ops::pack_weight(w);
}

Tensor Dense::operator()(const Tensor& x, float slope) const {
  if (on_cuda()) return convolve(*conv_, x, slope);
  const std::int64_t in = conv_->in, out = conv_->out, rows = x.numel() / in;
  Tensor packed = Tensor::empty({ops::packed_rows(rows), in}, DType::f32);
  ops::pack_rows(x.view({rows, in}), packed);
  Tensor y = Tensor::empty(conv_->geometry.output(x.shape(), out), DType::f32);
  Tensor flat = y.view({rows, out});
  ops::packed_linear_forward(packed, conv_->weight.view({out, in}), conv_->bias, {}, flat);
  if (slope != 1) ops::leaky_relu_forward(y, slope, y);
  return y;
}

}  // namespace weft
