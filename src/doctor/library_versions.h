// The libraries that this program was compiled against and those that it runs with.
#pragma once

#include <string>
#include <vector>

namespace weft {

struct LibraryVersion {
  std::string name;   // "HDF5"
  std::string found;  // by this process; "" where it is not there
  std::string built;  // by its headers; "" where they do not tell
};

// Both may be called before MPI_Init. The CUDA libraries only in a program with the CUDA side.
LibraryVersion mpi_version();
std::vector<LibraryVersion> library_versions();

// For `weft --version`: version_line(), the libraries, this host's processor and GPUs, a line each.
// Nothing here creates a context on a GPU.
std::string version_text();

}  // namespace weft
