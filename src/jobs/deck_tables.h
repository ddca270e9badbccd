// Every table of the deck that a model or a job owns.
#pragma once

namespace weft {

// Makes them known to the parser. The program does so first of all; tests that read decks do it
// themselves.
void register_deck_tables();

}  // namespace weft
