// A program's way from main() to its exit code: MPI, the command line, the command, one message for
// whatever goes wrong. weft itself and the programs of its tests start by it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

struct Program {
  std::string name, help;
  std::string footer;  // of --help
  // `weft COMMAND ...`; or one command without a name, whose arguments follow the program's.
  std::vector<Command> commands;
  std::function<void()> register_tables;  // of the decks that the commands read; null: none do
};

// Returns the exit code of docs/errors.md, the same on every rank.
int run_program(int argc, char** argv, const Program& program);

}  // namespace weft
