// Asynchronous collectives between ranks: each call returns a ticket at once, and the work proceeds
// until the ticket is waited for. There is no barrier here and none in the step loop.
//
// Every rank of a communicator issues the same calls in the same order. The MPI communicator sums
// in f32 (f64 for f64 tensors) in the order of ranks, so that results are bit-identical for the
// same number of ranks; NCCL's own sums are so for one algorithm and one topology.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/parts.h"
#include "parallel/phase.h"
#include "tensor/tensor.h"

namespace weft {

// The type in which gradients are sent (parallel.wire). bf16: each rank's contribution is rounded
// once, and sums are still made in f32. NCCL's communicator sums inside each node first if there
// are several nodes of equally many ranks: then each node's contribution is rounded, once. With one
// rank nothing is sent, and nothing is rounded.
enum class CommDtype { f32, bf16 };

// Seconds after which an operation that has begun counts as hanging: WEFT_COMM_TIMEOUT from the
// environment, else the value requested, else (0) 600 on GPUs and 3600 on CPUs, where ranks may
// wait that much longer for each other's steps.
constexpr double default_comm_timeout = 0;

class Communicator {
 public:
  using Ticket = std::uint64_t;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // All calls take tensors of the host, or of this rank's GPU as written by the compute stream up
  // to the call. A tensor's memory stays alive until its operation is done. Tickets complete in
  // order of issue.

  // Sums `t` over all ranks, in place, to the same bits on every rank. f32 or f64; f64 is always
  // sent as f64. With bf16 (for f32) the result is a bf16 number on every rank, the owner of the
  // sum included.
  virtual Ticket all_reduce_sum(Tensor t, CommDtype comm_dtype = CommDtype::f32) = 0;
  // Sums `t` (f32) over all ranks; afterwards this rank's part of `t` (core/parts.h: part_of(0,
  // numel, rank, size)) holds the sum, in f32 whatever type was sent, and the rest of `t` is
  // undefined.
  virtual Ticket reduce_scatter_sum(Tensor t, CommDtype comm_dtype = CommDtype::f32) = 0;
  // Copies each rank's part of `t` (any type, parts as above in elements) to all ranks, bit for
  // bit.
  virtual Ticket all_gather(Tensor t) = 0;
  // `from` holds from_counts[r] elements for rank r, one rank after the other; `to` gets
  // to_counts[r] from rank r likewise. Both of one type; counts may be 0, and this rank's own piece
  // is copied too. `from` and `to` may not overlap.
  virtual Ticket all_to_all(Tensor from, std::span<const std::int64_t> from_counts, Tensor to,
                            std::span<const std::int64_t> to_counts) = 0;

  // The same for a few host doubles, which must stay alive until the ticket is waited for.
  Ticket all_reduce_sum(std::span<double> values) {
    return all_reduce_sum(
        Tensor::borrow(values.data(), {static_cast<std::int64_t>(values.size())}, DType::f64));
  }

  // MPI: blocks the host until the operation is done; returns the seconds it blocked. NCCL: makes
  // the compute stream wait, not the host, and returns 0. Throws what check() throws. Waiting again
  // for a ticket that is done costs nothing.
  virtual double wait(Ticket ticket) = 0;

  // Reports to the watchdog, for its table, which step (from 0) this rank is in and what it does.
  // Cheap; call it from the caller's thread.
  virtual void progress(std::int64_t step, Phase phase) = 0;
  // Sets the seconds without progress that count as a hang from now on.
  virtual void set_timeout(double seconds) = 0;
  // Throws if an operation failed (Exit::hardware) or took longer than the timeout (Exit::hang,
  // with the table of ranks). From then on every call throws the same error. Operations that hung
  // on a GPU have been ended by then and their results are worthless: call this after the host has
  // waited for the GPU, before it trusts what it reads.
  virtual void check() = 0;
  virtual std::string describe() const = 0;  // "NCCL 2.28.3", "MPI", "MPI, staged through the host"

  // Collective. A further communicator over the ranks of `part`, some or all of this one's; every
  // rank of this one takes part, with a part of its own, and waits for nothing else meanwhile.
  // With NCCL it shares buffers, connections and threads with this one and must be destroyed before
  // it; an abort of one (after a hang) aborts both. MPI: make_communicator(part).
  virtual std::unique_ptr<Communicator> split(MPI_Comm part,
                                              double timeout_seconds = default_comm_timeout);
  // A zeroed tensor outside all arenas (Tensor::persistent), in memory from which this communicator
  // sends fastest: NCCL's own, registered with it. For what collectives often move. It may outlive
  // the communicator.
  virtual Tensor persistent(const Shape& shape, DType dtype);
};

// Returns NCCL if every rank has a GPU of its own and this program is linked with NCCL; otherwise
// MPI. Collective, like the next two; `world` is duplicated. MPI must provide MPI_THREAD_MULTIPLE.
std::unique_ptr<Communicator> make_communicator(MPI_Comm world,
                                                double timeout_seconds = default_comm_timeout);

// From now on NCCL's sums have the same bits in every call; before the first communicator. Without,
// NVLink's switches may add, in an order of their own. What the environment chooses stays.
void use_repeatable_sums();

// The MPI communicator takes host memory, and device memory through pinned host memory (several
// ranks on one GPU, or no NCCL). A thread runs the operations one at a time; it sleeps wherever it
// waits, so that compute keeps its cores.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world,
                                                    double timeout_seconds = default_comm_timeout);

// The NCCL communicator takes device tensors only, with one rank per GPU. Null in a program that is
// not linked with NCCL.
[[gnu::weak]] std::unique_ptr<Communicator> make_nccl_communicator(
    MPI_Comm world, double timeout_seconds = default_comm_timeout);

}  // namespace weft
