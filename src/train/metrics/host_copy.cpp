#include "train/metrics/host_copy.h"

#include <algorithm>

#include "core/error.h"
#include "tensor/device.h"

namespace weft {
namespace {

void free_host(double* p) {
  if (on_cuda())
    device_runtime().free_pinned(p);
  else
    delete[] p;
}

double* allocate_host(std::size_t count) {
  return on_cuda() ? static_cast<double*>(device_runtime().allocate_pinned(count * sizeof(double)))
                   : new double[count];
}

}  // namespace

HostCopy::HostCopy(std::int64_t count)
    : count_(static_cast<std::size_t>(count)), memory_(allocate_host(2 * count_), free_host) {}

std::span<const double> HostCopy::fetch(const Tensor& t) {
  WEFT_ASSERT(t.dtype() == DType::f64 && static_cast<std::size_t>(t.numel()) == count_);
  double* to = memory_.get() + (second_ ? count_ : 0);
  second_ = !second_;
  if (on_cuda())
    device_runtime().copy(to, t.raw(), t.bytes(), Stream::compute);
  else
    std::copy_n(t.data<double>(), count_, to);
  return {to, count_};
}

}  // namespace weft
