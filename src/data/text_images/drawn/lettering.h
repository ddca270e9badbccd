// Words drawn on a picture.
#pragma once

#include "data/key_values.h"
#include "data/text_images/drawn/draws.h"
#include "data/text_images/drawn/grounds.h"
#include "data/text_images/drawn/typesetter.h"
#include "data/text_images/text_images.h"

namespace weft {

struct Lettering {
  NumberRange words, letters;  // words of a picture; height of capital letters in pixels
  std::size_t fonts = 0;       // of the typesetter
};

// Draws words on the picture, and returns their regions.
std::vector<TextRegion> write_words(Draws& draws, const Lettering& lettering,
                                    Typesetter& typesetter, Picture& picture);

}  // namespace weft
