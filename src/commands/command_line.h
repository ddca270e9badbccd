// The command line: `weft COMMAND DECK.toml [section.key=value ...]`.
#pragma once

#include <mpi.h>

#include <functional>
#include <string>

namespace weft {

// What the command line asks for; run() returns the exit code and throws Error.
struct Invocation {
  std::function<int(MPI_Comm world)> run;
};

// Throws Exit::usage for anything it does not understand. --help and --version become invocations too.
Invocation parse_command_line(int argc, char** argv);

}  // namespace weft
