// The commands of weft.
#pragma once

#include <optional>

#include "cli/program.h"

namespace weft {

Program weft_program();

// Runs a process that weft has started itself (data/store_file.h), before MPI: returns its
// exit code. Nothing for a process that a user started.
std::optional<int> run_as_child(int argc, char** argv);

}  // namespace weft
