// Vectors of a rank as tensors, for the tests of communicators.
#pragma once

#include <algorithm>
#include <vector>

#include "core/philox.h"
#include "tensor/tensor.h"

namespace weft {

// Numbers of [-0.5, 0.5) that every rank can compute for any other.
inline std::vector<float> values(std::int64_t n, int rank, std::uint64_t stream) {
  const Philox random(1, Purpose::noise, static_cast<std::uint64_t>(rank), stream);
  std::vector<float> v(n);
  // One block of four a time: lengths here go into the millions.
  for (std::size_t i = 0; i < v.size(); i += 4) {
    const auto b = random.block(static_cast<std::uint32_t>(i / 4));
    for (std::size_t j = i; j < std::min(i + 4, v.size()); ++j)
      v[j] = Philox::to_unit(b[j - i]) - 0.5f;
  }
  return v;
}

// The memory of `v`, which must outlive the tensor.
template <class T>
Tensor over(std::vector<T>& v) {
  return Tensor::borrow(v.data(), {std::int64_t(v.size())}, dtype_of<T>::value);
}

}  // namespace weft
