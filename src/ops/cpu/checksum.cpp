// CPU side of ops/checksum.h: bound by memory.
#include "ops/checksum.h"

#include <cstring>

#include "core/error.h"

WEFT_CPU_BEGIN

void checksum(const Tensor& x, Tensor& sum) {
  WEFT_ASSERT(x.bytes() % 4 == 0);
  const auto count = static_cast<std::int64_t>(x.bytes() / 4);
  const auto* bytes = static_cast<const std::byte*>(x.raw());
  std::uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) if (count > 65536)
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t word;
    std::memcpy(&word, bytes + 4 * i, 4);
    total += checksum_mix(static_cast<std::uint64_t>(i), word);
  }
  sum.data<double>()[0] = static_cast<double>(total & 0xffffffffu);
  sum.data<double>()[1] = static_cast<double>(total >> 32);
}

WEFT_CPU_END
