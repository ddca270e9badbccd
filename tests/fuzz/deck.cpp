// A deck: what is taken can be written and read back to the same values.
#include "config/deck.h"

#include "fuzz.h"
#include "tables.h"

static const bool registered = weft::fuzz::register_tables();

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string text(fuzz::text_of(data, size));
  fuzz::accepts([&] {
    const Deck deck = parse_deck(text, "deck.toml", {});
    fuzz::require(changed_keys(deck, parse_deck(to_toml(deck), "copy", {})).empty(),
                  "the stored deck differs");
  });
  return 0;
}
