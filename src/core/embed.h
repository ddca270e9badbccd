// Files of the source tree as bytes of the program.
#pragma once

// Declares `symbol` and `symbol_end`, between which the bytes of the file `path` lie, a literal.
// CMakeLists.txt compiles a file that uses it by itself, because ccache keeps nothing of it, and
// names what it embeds, because the compiler does not report it.
#define WEFT_EMBED(symbol, path) \
  asm(".pushsection .rodata\n.balign 16\n.globl " #symbol "\n.globl " #symbol "_end\n" #symbol \
      ":\n.incbin \"" path "\"\n" #symbol "_end:\n.byte 0\n.popsection\n"); \
  extern "C" const unsigned char symbol[], symbol##_end[];
