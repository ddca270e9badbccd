// `weft doctor [DECK]`: is this machine fit for the job, and if not, what to do about it.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

struct DoctorRequest {
  std::string
      deck;  // its data path is read and its device taken; empty: the working directory, any device
  std::vector<std::string> overrides;
  std::string json;  // file for everything that was found; empty: none
};

// Collective. Looks at every rank (where it runs, what it was built from, its environment and
// limits), measures it (memory, copies, a matrix product with a known result, an all-reduce, file
// reads), runs a few operations that are compared with the CPU side, compares the ranks, and prints
// tables and one line a finding to stdout. Changes nothing but a temporary file where there is no
// clip store to read. Half a minute. Returns 0 if all is well or only warnings were found, 2 for
// what the user can mend, 6 for wrong results or a broken device. Throws Exit::usage for a deck
// that cannot be read, Exit::data if `json` cannot be written.
int doctor(const DoctorRequest& request, MPI_Comm world);
Command doctor_command();

}  // namespace weft
