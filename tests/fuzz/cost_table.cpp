// The costs in a checkpoint's notes, of a table of two buckets. What is taken reads back equal, and
// every cost can be placed by.
#include "train/cost_table.h"

#include <cmath>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string text(fuzz::text_of(data, size));
  CostTable table({{2, 10}, {2, 20}});
  if (!fuzz::accepts([&] { table.from_text(text); })) return 0;
  for (int b = 0; b < 2; ++b) {
    fuzz::require(table.cost(b) >= 0 && std::isfinite(table.cost(b)), "a cost that cannot place");
    fuzz::require(!(table.expected(b) < 0), "a negative time");
  }
  CostTable again({{2, 10}, {2, 20}});
  again.from_text(table.to_text());
  fuzz::require(again.to_text() == table.to_text(), "costs that read back otherwise");
  return 0;
}
