// Collectives between ranks, asynchronous: each call returns a ticket at once, and work goes on
// until the ticket is waited for. There is no barrier in here and none in the step loop.
//
// Every rank of a communicator issues the same calls in the same order. Sums are made in f32 (f64
// for f64 tensors) in the order of ranks on the MPI side, so that they repeat their bits on as many
// ranks; NCCL's own sums repeat theirs for one algorithm and one topology.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/parts.h"
#include "tensor/tensor.h"

namespace weft {

// The type that gradients travel in (parallel.wire). bf16: each rank's contribution is rounded
// once, sums are made in f32 all the same. Where there is one rank nothing travels, and nothing is
// rounded.
enum class CommDtype { f32, bf16 };

class Communicator {
 public:
  using Ticket = std::uint64_t;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // All take tensors of the host, or of this rank's GPU as far as the compute stream has written
  // them when called. A tensor's memory stays alive until its operation is done. Tickets complete
  // in order of issue.

  // Sums `t` over all ranks, in place, to the same bits on every rank. f32 or f64; f64 always
  // travels whole. With bf16 (of f32) the result is a bf16 number on every rank, the owner of the
  // sum included.
  virtual Ticket all_reduce_sum(Tensor t, CommDtype comm_dtype = CommDtype::f32) = 0;
  // Sums `t` f32 over all ranks; afterwards this rank's part (core/parts.h: part_of(0, numel, rank,
  // size)) of `t` holds the sum, in f32 whatever travels, and the rest of `t` anything.
  virtual Ticket reduce_scatter_sum(Tensor t, CommDtype comm_dtype = CommDtype::f32) = 0;
  // Each rank's part of `t` (any type, as above in elements) to all ranks, bit for bit.
  virtual Ticket all_gather(Tensor t) = 0;
  // `from` holds from_counts[r] elements for rank r, one rank after the other; `to` gets
  // to_counts[r] from rank r likewise. Both of one type; counts may be 0, and this rank's own piece
  // is copied too. `from` and `to` may not overlap.
  virtual Ticket all_to_all(Tensor from, std::span<const std::int64_t> from_counts, Tensor to,
                            std::span<const std::int64_t> to_counts) = 0;

  // The same for a few doubles of the host, which must stay alive until the ticket is waited for.
  Ticket all_reduce_sum(std::span<double> values) {
    return all_reduce_sum(
        Tensor::borrow(values.data(), {static_cast<std::int64_t>(values.size())}, DType::f64));
  }

  // MPI: blocks the host until the operation is done; returns the seconds it blocked. NCCL: makes
  // the compute stream wait, not the host, and returns 0. Throws what check() throws. Waiting again
  // for a ticket that is done costs nothing.
  virtual double wait(Ticket ticket) = 0;
  // Seconds in operations, from the start of each (on NCCL: when its data was ready) to its end, as
  // far as they are known to be done: what there was to hide.
  virtual double busy_seconds() const = 0;

  // Told to the watch over hangs, for its table: which step (from 0) this rank is in and what it
  // does ("forward", "backward", "data", "optimizer", "save"; a string that lives for ever). Null
  // or "idle": in no step, and watched in operations alone. "save" may take ten times the timeout.
  // Cheap; from the caller's thread.
  virtual void progress(std::int64_t step, const char* phase) = 0;
  // Seconds without progress that count as a hang from now on.
  virtual void set_timeout(double seconds) = 0;
  // Throws if an operation failed (Exit::hardware) or took longer than the timeout (Exit::hang,
  // with the table of ranks). From then on every call throws the same. What hung on a GPU has been
  // ended by then and its results are worthless: call this after the host has waited for the GPU,
  // before it believes what it reads.
  virtual void check() = 0;
  virtual std::string describe() const = 0;  // "NCCL 2.28.3", "MPI", "MPI, staged through the host"
};

// Seconds after which an operation that has begun counts as hanging: the environment's
// WEFT_COMM_TIMEOUT, else what is asked for, else (0) 600 on GPUs and 3600 on CPUs, where ranks may
// wait that much longer for each other's steps.
constexpr double default_comm_timeout = 0;

// NCCL where every rank has a GPU of its own and this program is linked with NCCL; otherwise MPI.
// Collective, and so are the next two; `world` is duplicated. MPI must provide MPI_THREAD_MULTIPLE.
std::unique_ptr<Communicator> make_communicator(MPI_Comm world,
                                                double timeout_seconds = default_comm_timeout);

// MPI side: host memory, and device memory by way of pinned host memory (several ranks on one GPU,
// or no NCCL). A thread serves the operations one after the other; it sleeps wherever it waits, so
// that compute keeps its cores.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world,
                                                    double timeout_seconds = default_comm_timeout);

// NCCL side: device tensors only, one rank a GPU. Null in a program that is not linked with NCCL.
[[gnu::weak]] std::unique_ptr<Communicator> make_nccl_communicator(
    MPI_Comm world, double timeout_seconds = default_comm_timeout);

}  // namespace weft
