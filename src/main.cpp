// weft: one binary, `mpirun -n N weft COMMAND DECK.toml [section.key=value ...]`.
#include "cli/cli.h"

int main(int argc, char** argv) {
  if (const auto code = weft::run_as_child(argc, argv)) return *code;
  return weft::run_program(argc, argv, weft::weft_program());
}
