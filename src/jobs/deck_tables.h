// Every table of the deck that a model or a job owns.
#pragma once

namespace weft {

// Registers them with the parser. The program calls this first; tests that read decks must call it
// themselves.
void register_deck_tables();

}  // namespace weft
