// The command line: `weft COMMAND DECK.toml [section.key=value ...]`.
#pragma once

#include <mpi.h>

#include <functional>
#include <optional>
#include <string>

namespace weft {

// What the command line asks for; run() returns the exit code and throws Error.
struct Invocation {
  std::function<int(MPI_Comm world)> run;
  // It takes SIGTERM, SIGINT and SIGUSR1 for requests to save its state and stop.
  bool heeds_stops = false;
};

// What weft starts itself for (data/clip_store_child.h), before MPI: its exit code. Nothing for
// what people start.
std::optional<int> run_as_child(int argc, char** argv);

// Throws Exit::usage for anything it does not understand. --help and --version become invocations
// too.
Invocation parse_command_line(int argc, char** argv);

}  // namespace weft
