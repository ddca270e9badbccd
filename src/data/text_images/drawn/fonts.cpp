// The fonts of the folder fonts/ beside this file, as bytes of the program: drawn text is the same
// on every host, whatever fonts it has.
#include "data/text_images/drawn/typesetter.h"

// WEFT_FONTS: that folder (CMakeLists.txt).
#define WEFT_FONT(symbol, file) \
  asm(".pushsection .rodata\n.balign 16\n.globl " #symbol "\n.globl " #symbol "_end\n" #symbol \
      ":\n.incbin \"" WEFT_FONTS "/" file "\"\n" #symbol "_end:\n.byte 0\n.popsection\n"); \
  extern "C" const unsigned char symbol[], symbol##_end[];

WEFT_FONT(weft_font_sans_bold, "DejaVuSans-Bold.ttf")
WEFT_FONT(weft_font_sans, "DejaVuSans.ttf")
WEFT_FONT(weft_font_mono_bold, "DejaVuSansMono-Bold.ttf")
WEFT_FONT(weft_font_mono, "DejaVuSansMono.ttf")
WEFT_FONT(weft_font_serif_bold, "DejaVuSerif-Bold.ttf")
WEFT_FONT(weft_font_serif, "DejaVuSerif.ttf")

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
