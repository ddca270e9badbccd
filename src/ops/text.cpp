#include "ops/text.h"

#include <cstdlib>

namespace weft::ops {

int relative_bucket(int distance) {
  constexpr int buckets = 16;  // of each direction
  // First distances of buckets 8 to 15: 8 + trunc(8 ln(n/8) / ln(16)) as the original computes it in f32.
  constexpr int first[] = {8, 12, 16, 23, 32, 46, 64, 91};
  const int n = std::abs(distance);
  int bucket = n < 8 ? n : 7;
  for (const int f : first)
    if (n >= f) ++bucket;
  return bucket + (distance > 0 ? buckets : 0);
}

}  // namespace weft::ops
