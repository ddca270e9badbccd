// `weft inspect PATH`: what a clip store, a checkpoint or a safetensors file holds, verified.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

// Prints to stdout. PATH is a clip store, a safetensors file, a run directory, a checkpoint in it
// (step_N) or its link `latest`. Every hash there is gets checked. Returns 0; throws Exit::data for
// a broken file and Exit::checkpoint for a broken checkpoint.
int inspect(const std::string& path);
Command inspect_command();

}  // namespace weft
