// Pictures with text, drawn in memory: for tests, for a first run without data, and to train a
// detector on before real pictures.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/synthetic.h"
#include "data/text_images/drawn/grounds.h"
#include "data/text_images/text_images.h"

namespace weft {

// Draws so many words, with capital letters of so many pixels, on the picture, and returns their
// regions.
std::vector<TextRegion> write_words(Draws& draws, NumberRange words, NumberRange letters,
                                    Picture& picture);

// `path` is "text:key=value,..." (blanks around keys and values do not count):
//   images=10000             how many
//   height=640               of each picture: one number, or a range such as 480..720
//   width=640
//   words=0..24              of each picture; fewer where no place is left
//   letters=8..72            height of capital letters in pixels; small ones are more frequent
//   seed=1                   another seed, other pictures: training and held-out ones differ by it
//   pictures=                a folder of pictures without text to draw on; else synthetic grounds
//
// Words stand in lines and blocks of one style, turned, slanted and seen at an angle; the picture
// is blurred and noisy now and then. The polygon of a word is the rectangle around its ink, seen
// the same way: its corners clockwise from the top left one. Words whose shorter side is below 8
// pixels are ignored regions. Everything about picture i follows from (seed, i), the other keys,
// and which pictures there are. Throws Exit::usage on an unknown key (naming the nearest) or a
// value out of range, or where there is no picture in `pictures`.
inline constexpr const char* drawn_text_prefix = "text:";
inline bool is_drawn_text(std::string_view path) { return path.starts_with(drawn_text_prefix); }
std::unique_ptr<TextImages> make_drawn_text(const std::string& path, const MediaDeck& limits);

}  // namespace weft
