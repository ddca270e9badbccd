// Chooses the communicator of a job.
#include "parallel/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "core/mpi.h"
#include "tensor/device.h"

namespace weft {
namespace {

// True on all ranks or on none.
bool everywhere(MPI_Comm world, bool here) {
  int mine = here, all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, world);
  return all != 0;
}

// Whether no other rank of `comm` has the same text.
bool all_differ(const std::string& mine, MPI_Comm comm) {
  std::vector<std::string> all = texts_of_ranks(mine, comm);
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) == all.end();
}

// NCCL requires a separate GPU for every rank. GPUs are compared by UUID, which is the same in
// every process, whatever index the GPU has there; and those of a host by PCI address, because
// slices of one GPU (MIG) have UUIDs of their own, and NCCL takes them for one device.
bool own_gpus(MPI_Comm world) {
  const VisibleGpus gpus = visible_gpus();
  const auto index = static_cast<std::size_t>(this_device().index);
  if (!all_differ(gpus.uuids.at(index), world)) return false;
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  const bool whole = everywhere(world, all_differ(gpus.buses.at(index), host));
  MPI_Comm_free(&host);
  if (!whole)
    log::info(
        "no NCCL   ranks have slices (MIG) of one GPU, which NCCL refuses: they reduce through "
        "the host");
  return whole;
}

}  // namespace

std::unique_ptr<Communicator> Communicator::split(MPI_Comm part, double timeout_seconds) {
  return make_communicator(part, timeout_seconds);
}

Tensor Communicator::persistent(const Shape& shape, DType dtype) {
  return Tensor::persistent(shape, dtype);
}

void use_repeatable_sums() { setenv("NCCL_ALGO", "^NVLS,NVLSTree", 0); }

std::unique_ptr<Communicator> make_communicator(MPI_Comm world, double timeout_seconds) {
  int size = 1;
  MPI_Comm_size(world, &size);
  // Making a communicator is collective, so all ranks must make the same choice: hence
  // everywhere().
  const bool nccl = everywhere(world, on_cuda() && &make_nccl_communicator != nullptr);
  // For tests: WEFT_COMM=nccl forces NCCL also with one rank, or on one GPU that NCCL_HOSTID makes
  // NCCL take for several; WEFT_COMM=mpi forces MPI.
  const char* asked = std::getenv("WEFT_COMM");
  const std::string_view forced = asked == nullptr ? "" : asked;
  WEFT_CHECK(everywhere(world, forced == "" || forced == "mpi" || (forced == "nccl" && nccl)),
             Exit::usage, "use mpi, or nccl on GPUs in a build with NCCL, or leave it out",
             "WEFT_COMM = \"{}\" cannot be had on every rank", forced);
  if (everywhere(world, forced == "nccl")) return make_nccl_communicator(world, timeout_seconds);
  // A single rank has nothing to reduce, and the MPI communicator then does nothing at all.
  if (nccl && size > 1 && everywhere(world, forced != "mpi") && own_gpus(world))
    return make_nccl_communicator(world, timeout_seconds);
  return make_mpi_communicator(world, timeout_seconds);
}

}  // namespace weft
