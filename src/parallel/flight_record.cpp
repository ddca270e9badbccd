#include "parallel/flight_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace weft {

std::string FlightRecord::Entry::describe() const {
  return fmt::format("{} ({}, {:.3f} MiB)", kind.data(), name_of(dtype),
                     static_cast<double>(bytes) / (1 << 20));
}

void FlightRecord::issued(std::uint64_t number, const Collective& what) {
  if (number > 0) {
    Slot& s = slots_[number % length];
    s.number = 0;
    s.bytes = what.bytes;
    s.kind = what.kind;
    s.dtype = what.dtype;
    s.number = number;
  }
  issued_ = number;
}

std::vector<FlightRecord::Entry> FlightRecord::entries() const {
  const std::uint64_t last = issued_;
  std::vector<Entry> found;
  found.reserve(length);
  for (std::uint64_t n = last > length ? last - length + 1 : 1; n <= last; ++n) {
    const Slot& s = slots_[n % length];
    if (s.number != n) continue;
    Entry e{n, s.bytes, {}, s.dtype};
    const std::string_view kind = s.kind.load();
    std::copy_n(kind.begin(), std::min(kind.size(), e.kind.size() - 1), e.kind.begin());
    if (s.number == n) found.push_back(e);
  }
  return found;
}

}  // namespace weft
