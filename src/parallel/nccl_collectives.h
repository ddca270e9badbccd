// Collectives as NCCL calls: in which order of which calls, between ranks of one node and of
// several. Streams, tickets and the watchdog are nccl_communicator.cpp's.
#pragma once

#include <mpi.h>
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "core/parts.h"
#include "parallel/communicator.h"

namespace weft {

// Throws Exit::hardware with NCCL's own words, or CUDA's where the GPU has failed. `comm` may be
// null.
void check_nccl(ncclResult_t result, ncclComm_t comm, const char* call, int line);
#define NCCL_CHECK(call) check_nccl((call), nullptr, #call, __LINE__)

// Which ranks are on which node: those with equal names, NCCL's own choice of them (NCCL_HOSTID) or
// the host's. [node][place in it]; nodes in order of their first rank.
struct Nodes {
  std::vector<std::vector<int>> ranks;
  int node = 0, place = 0;  // this rank's

  explicit Nodes(MPI_Comm world);  // collective
  // Several nodes of several ranks each.
  bool two_levels() const { return ranks.size() > 1 && even() && ranks.front().size() > 1; }
  bool even() const {
    return std::ranges::all_of(ranks,
                               [&](const auto& r) { return r.size() == ranks.front().size(); });
  }
};

// The collectives as NCCL calls on the communication stream.
//
// With bf16 every rank sends each other rank its contribution to that rank's part, and the owner
// sums them in f32 in the order of ranks. Over several nodes that would send n - m times a bf16
// number through the cards of a node of m ranks of n, where NCCL's own f32 sums, which add inside a
// node first, send one f32 number. So there NCCL sums inside each node in f32, and between nodes
// ranks with the same local index exchange the nodes' sums in bf16: half of what f32 sends.
//
// All calls come from the thread that issues; they return as soon as the work is queued. Parts,
// types and counts: communicator.h. Device memory for bf16 is allocated at first use and kept, as
// are the communicators inside a node and between nodes.
class NcclCollectives {
 public:
  // Splits `comm`: ranks of one color, in the order of `key`. Returns once all ranks have called
  // it.
  using Split = std::function<ncclComm_t(int color, int key)>;
  NcclCollectives(int rank, int size, Nodes nodes, ncclComm_t comm, Split split)
      : rank_(rank),
        size_(size),
        nodes_(std::move(nodes)),
        comm_(comm),
        split_(std::move(split)),
        everyone_(static_cast<std::size_t>(size)) {
    std::iota(everyone_.begin(), everyone_.end(), 0);
  }
  ~NcclCollectives();
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;
  ncclComm_t comm() const { return comm_; }
  // Ends the communicators that it made: before `comm`, and only where that has not failed.
  void end();

  void all_reduce(const Tensor& t, CommDtype comm_dtype);
  void reduce_scatter(const Tensor& t, CommDtype comm_dtype);
  void all_gather(const Tensor& t);
  void all_to_all(const Tensor& from, const std::vector<std::int64_t>& from_counts,
                  const Tensor& to, const std::vector<std::int64_t>& to_counts);

 private:
  Part part(const Tensor& t, int rank) const { return part_of(0, t.numel(), rank, size_); }
  bool equal_parts(const Tensor& t) const { return t.numel() % (part_unit * size_) == 0; }
  void sum_as_bf16(const Tensor& t);
  void warn_of_unequal_nodes() const;
  void sum_inside_nodes(const Tensor& t);
  void exchange_and_sum(const Tensor& t, ncclComm_t among, const std::vector<int>& ranks, int me);
  void gather_as_bf16(const Tensor& t);
  // Memory for bf16 numbers, to send and to receive: scratch_elements each.
  bf16* scratch();

  int rank_, size_;
  Nodes nodes_;
  ncclComm_t comm_;
  Split split_;
  std::vector<int> everyone_;                        // 0, 1, ..., size - 1
  ncclComm_t inside_ = nullptr, between_ = nullptr;  // the node's ranks; one of each node
  void* scratch_ = nullptr;
  bool warned_ = false;
};

}  // namespace weft
