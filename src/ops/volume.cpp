#include "ops/volume.h"

#include <algorithm>

namespace weft::ops {

VolumePieces volume_pieces(std::int64_t voxels) {
  const std::int64_t length = std::max<std::int64_t>(64, (voxels + 511) / 512);
  return {length, (voxels + length - 1) / length};
}

}  // namespace weft::ops

namespace weft::ops::cuda_plan {

void volume_expectation(const Tensor& logits, float, Tensor&) {
  const std::int64_t N = logits.dim(0), K = logits.dim(4);
  if (logits.numel() > 0)
    Tensor::empty({N * volume_pieces(logits.numel() / (N * K)).count, 5, K}, DType::f32);
}

}  // namespace weft::ops::cuda_plan
