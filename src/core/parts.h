// Divides a range of a flat array among ranks: one rule for reduction, optimizer,
// checkpoint and their tests.
#pragma once

#include <cstdint>

namespace weft {

struct Part {
  std::int64_t begin = 0, end = 0;  // elements
  std::int64_t size() const { return end - begin; }
};

// Part `rank` of [begin, end) among `ranks`: the parts tile the range in order and differ by one
// unit at most. Units are of 16 elements, a cache line of f32, so that no two ranks' parts share
// one; the last part takes the remainder.
inline constexpr std::int64_t part_unit = 16;
inline Part part_of(std::int64_t begin, std::int64_t end, int rank, int ranks) {
  const std::int64_t units = (end - begin) / part_unit;
  const auto cut = [&](std::int64_t r) {
    return r == ranks ? end : begin + units * r / ranks * part_unit;
  };
  return {cut(rank), cut(rank + 1)};
}

}  // namespace weft
