// Overrides of the command line, one a line.
#include <sstream>

#include "config/deck.h"
#include "fuzz.h"
#include "tables.h"

static const bool registered = weft::fuzz::register_tables();

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  std::vector<std::string> overrides;
  std::istringstream in{std::string(fuzz::text_of(data, size))};
  for (std::string line; std::getline(in, line);) overrides.push_back(line);
  fuzz::accepts([&] {
    const Deck deck = parse_deck("", "deck.toml", overrides);
    fuzz::require(changed_keys(deck, parse_deck(to_toml(deck), "copy", {})).empty(),
                  "the stored deck differs");
  });
  return 0;
}
