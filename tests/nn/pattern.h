// Numbers that a test and its PyTorch counterpart make alike.
#pragma once

#include "tests/ops/reference.h"

namespace weft::test {

// scale * sin((0.37 + k / 16) i^2 + 1.1 i + k): `pattern` of validation/test_numbers.py.
inline Vec pattern(std::int64_t count, double k, double scale = 1.0) {
  Vec v(static_cast<std::size_t>(count));
  for (std::int64_t n = 0; n < count; ++n) {
    const auto i = static_cast<double>(n);
    v[static_cast<std::size_t>(n)] = scale * std::sin((0.37 + k / 16) * i * i + 1.1 * i + k);
  }
  return v;
}

}  // namespace weft::test
