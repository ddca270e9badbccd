// The command line: `weft COMMAND DECK.toml [section.key=value ...]`.
#pragma once

#include <mpi.h>

#include <functional>
#include <optional>
#include <string>

namespace weft {

// The request of the command line; run() returns the exit code and throws Error.
struct Invocation {
  std::function<int(MPI_Comm world)> run;
  // It takes SIGTERM, SIGINT and SIGUSR1 for requests to save its state and stop.
  bool heeds_stops = false;
};

// Runs a process that weft has started itself (data/clip_store_child.h), before MPI: returns its
// exit code. Nothing for a process that a user started.
std::optional<int> run_as_child(int argc, char** argv);

// Throws Exit::usage where this process runs with an MPI of another binary interface than the one
// weft was compiled against: even its start would fail. To be called before MPI_Init.
void check_mpi();

// Throws Exit::usage for a command line it does not understand. --help and --version become
// invocations too.
Invocation parse_command_line(int argc, char** argv);

}  // namespace weft
