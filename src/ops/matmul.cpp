#include "ops/matmul.h"

namespace weft::ops {
namespace {

// A profile times the two by themselves, and a dry run counts them so.
bool may_run_beside(const Tensor& dy) {
  return dy.device() == DeviceKind::cuda && !planning() && detail::active_profile == nullptr;
}

}  // namespace

void linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor& dw, Tensor& dbias,
                     bool accumulate, Tensor& dx, bool accumulate_dx) {
  if (may_run_beside(dy))
    return cuda::linear_backward(dy, x, w, dw, dbias, accumulate, dx, accumulate_dx);
  linear_backward_weight(dy, x, dw, dbias, accumulate);
  linear_backward_input(dy, w, dx, accumulate_dx);
}

void linear_gelu_backward(const Tensor& dy, const Tensor& h, const Tensor& w, const Tensor& z,
                          Tensor& dw, Tensor& dbias, bool accumulate, Tensor& dz, Tensor& dz_sums,
                          bool accumulate_sums) {
  if (may_run_beside(dy))
    return cuda::linear_gelu_backward(dy, h, w, z, dw, dbias, accumulate, dz, dz_sums,
                                      accumulate_sums);
  Tensor none;
  linear_backward_weight(dy, h, dw, dbias, accumulate);
  linear_gelu_backward_input(dy, w, z, dz, none, dz_sums, accumulate_sums);
}

}  // namespace weft::ops
