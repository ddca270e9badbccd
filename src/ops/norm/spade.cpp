#include "ops/norm/spade.h"

#include <algorithm>

namespace weft::ops {

InstancePieces instance_pieces(std::int64_t positions) {
  const std::int64_t length = std::max<std::int64_t>(64, (positions + 511) / 512);
  return {length, (positions + length - 1) / length};
}

}  // namespace weft::ops

namespace weft::ops::cuda_plan {

void instance_statistics(const Tensor& x, Tensor&) {
  const std::int64_t N = x.dim(0), C = x.dim(4);
  if (x.numel() > 0)
    Tensor::empty({N * instance_pieces(x.numel() / (N * C)).count, 2, C}, DType::f32);
}

}  // namespace weft::ops::cuda_plan
