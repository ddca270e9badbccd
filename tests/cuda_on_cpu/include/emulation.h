// What the stand-in offers beyond CUDA: for tests, and for the program that it is linked into.
#pragma once

#include <cstddef>

#include "cuda_runtime.h"

namespace emulation {

// Restarts every random order with `seed` (environment WEFT_EMULATION_SEED, default 1). No work may
// be pending.
void set_seed(unsigned long long seed);

// An arena inside one cudaMalloc tells its blocks through this (tensor/tensor.h,
// device_memory_hook): p as handed out, bytes as asked for. The arena must leave red_zone(bytes)
// bytes between p and the next block. The block's rest is marked when it is handed out, looked at
// when it is given back, and the block is then poisoned: each queued on the arena's stream, in
// order with the work that uses the block. During a capture the same is recorded.
void arena_block(void* p, std::size_t bytes, bool allocated);
// Bytes that a block of `bytes` takes: rounded up to 256, and 256 more.
std::size_t arena_block_bytes(std::size_t bytes);
// The arena's stream: the first stream created, unless set here. Null goes back to that.
void set_arena_stream(cudaStream_t stream);
// Looks at every mark of every live allocation and arena block now; dies where one is damaged. Also
// done by cudaDeviceSynchronize and cudaFree.
void check_marks();

// Fills device memory with the poison pattern, now.
void poison(void* p, std::size_t bytes);
// Kernels run so far, by all streams.
unsigned long long kernels_run();
// Collectives, sends and receives that NCCL was asked for so far, each of a group by itself.
unsigned long long nccl_operations();

// Lets the host look at device memory until it goes out of scope, also under WEFT_EMULATION_STRICT.
class HostAccess {
 public:
  HostAccess();
  ~HostAccess();
  HostAccess(const HostAccess&) = delete;
  HostAccess& operator=(const HostAccess&) = delete;
};

}  // namespace emulation
