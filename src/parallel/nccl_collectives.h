// weft's collectives as NCCL calls on the communication stream.
//
// With bf16 every rank sends each other rank its contribution to that rank's part, and the owner
// sums them in f32 in the order of ranks. All ranks are treated as equally distant: where several
// nodes of many GPUs share few network cards, this sends more between nodes than NCCL's own f32
// sums, which add inside a node first.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/parts.h"
#include "parallel/communicator.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft {

// Throws Exit::hardware with NCCL's own words. `comm` may be null.
void check_nccl(ncclResult_t result, ncclComm_t comm, const char* call, int line);
#define NCCL_CHECK(call) ::weft::check_nccl((call), nullptr, #call, __LINE__)

// All calls come from the thread that issues; they return as soon as the work is queued. Parts,
// types and counts: communicator.h. Device memory for bf16 is allocated at first use and kept.
class NcclCollectives {
 public:
  NcclCollectives(int rank, int size) : rank_(rank), size_(size) {}
  ~NcclCollectives();
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;
  void use(ncclComm_t comm) { comm_ = comm; }

  void all_reduce(const Tensor& t, CommDtype comm_dtype);
  void reduce_scatter(const Tensor& t, CommDtype comm_dtype);
  void all_gather(const Tensor& t);
  void all_to_all(const Tensor& from, const std::vector<std::int64_t>& from_counts,
                  const Tensor& to, const std::vector<std::int64_t>& to_counts);

 private:
  Part part(const Tensor& t, int rank) const { return part_of(0, t.numel(), rank, size_); }
  bool equal_parts(const Tensor& t) const { return t.numel() % (part_unit * size_) == 0; }
  void sum_as_bf16(const Tensor& t, bool for_all);

  int rank_, size_;
  ncclComm_t comm_ = nullptr;
  void* scratch_ = nullptr;
};

}  // namespace weft
