// Words that read like some, in the letters of a font.
#pragma once

#include <string>

#include "data/text_images/drawn/draws.h"

namespace weft {

enum class Script { latin, greek, cyrillic };

// A word of syllables, a number, a price, a time, or letters at random; no blanks.
std::u32string draw_word(Draws& draws, Script script);

}  // namespace weft
