// Reads a store's structure in a separate process. HDF5 trusts what it reads: a damaged file can
// crash it or keep it busy for ever, and then the child dies and not the rank. The rank receives
// the child's findings through a pipe and never calls HDF5 on a file that it reads; so nothing is
// read twice, and ranks need not agree.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/clip_store_open.h"

namespace weft {

// From now on open_clip_store() starts `command` with two more arguments, path and size in bytes.
// Without a command (the default) it reads in this process.
void read_stores_with(std::vector<std::string> command);

// Gets the facts about the store by running the command. Throws Exit::data as open_checked() does,
// or when the child dies.
StoreFacts read_store(const std::string& path, std::uint64_t bytes);

// Called at the start of main, before MPI: in a child it does the child's work and returns the exit
// code. Otherwise it makes read_store() start this program.
std::optional<int> serve_as_store_reader(int argc, char** argv);

}  // namespace weft
