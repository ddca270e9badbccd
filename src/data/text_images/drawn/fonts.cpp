// The fonts of the folder fonts/ beside this file, as bytes of the program: drawn text is the same
// on every host, whatever fonts it has.
#include "core/embed.h"
#include "data/text_images/drawn/typesetter.h"

// WEFT_FONTS: that folder (CMakeLists.txt).
WEFT_EMBED(weft_font_sans_bold, WEFT_FONTS "/DejaVuSans-Bold.ttf")
WEFT_EMBED(weft_font_sans, WEFT_FONTS "/DejaVuSans.ttf")
WEFT_EMBED(weft_font_mono_bold, WEFT_FONTS "/DejaVuSansMono-Bold.ttf")
WEFT_EMBED(weft_font_mono, WEFT_FONTS "/DejaVuSansMono.ttf")
WEFT_EMBED(weft_font_serif_bold, WEFT_FONTS "/DejaVuSerif-Bold.ttf")
WEFT_EMBED(weft_font_serif, WEFT_FONTS "/DejaVuSerif.ttf")

namespace weft {

// In the order of their names, as files are.
std::vector<FontFile> built_in_fonts() {
  return {{"DejaVuSans-Bold.ttf", 0, {weft_font_sans_bold, weft_font_sans_bold_end}},
          {"DejaVuSans.ttf", 0, {weft_font_sans, weft_font_sans_end}},
          {"DejaVuSansMono-Bold.ttf", 0, {weft_font_mono_bold, weft_font_mono_bold_end}},
          {"DejaVuSansMono.ttf", 0, {weft_font_mono, weft_font_mono_end}},
          {"DejaVuSerif-Bold.ttf", 0, {weft_font_serif_bold, weft_font_serif_bold_end}},
          {"DejaVuSerif.ttf", 0, {weft_font_serif, weft_font_serif_end}}};
}

}  // namespace weft
