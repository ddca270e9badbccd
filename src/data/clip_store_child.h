// Reading a store's structure in a process of its own. HDF5 trusts what it reads: a damaged file
// can crash it or keep it busy for ever, and then that process dies and not the rank. The rank
// takes what the child found from a pipe and calls HDF5 for no file that it reads; so nothing is
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

// The facts about the store, by way of the command. Throws Exit::data as open_checked() does, or
// when the child dies.
StoreFacts read_store(const std::string& path, std::uint64_t bytes);

// For the start of main, before MPI: in a child it does the child's work and returns the exit code.
// Otherwise it has read_store() start this program.
std::optional<int> serve_as_store_reader(int argc, char** argv);

}  // namespace weft
