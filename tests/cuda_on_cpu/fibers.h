// Runs the blocks of one kernel; each thread is a fiber.
#pragma once

#include <functional>
#include <string>

#include "cuda_runtime.h"

namespace emulation {

struct Kernel {
  const void* address;
  std::function<void()> body;  // one thread
  dim3 grid, block;
  std::size_t shared;
};

// All blocks to their end. Called by one OS thread at a time.
void run_kernel(const Kernel& kernel);

// ", in kernel NAME block (x,y,z) thread (x,y,z)" of what runs now; empty between kernels.
std::string where();
const void* running_kernel();  // null between kernels

// Is `p` in the memory that a block may use now, and what would it be called in a message? Null:
// nothing of ours.
const char* describe_fiber_memory(const void* p);

// The block's requested bytes of shared memory.
std::size_t shared_bytes();

// Lets others run: the running thread waits for `what`, which it looks at again afterwards. Chosen
// at random, so that everybody's turn comes. When nobody has made progress for long, that is a
// deadlock.
void yield(const char* what);
void made_progress();

// The running thread's cp.async state.
struct AsyncCopies;
AsyncCopies& async_copies();

}  // namespace emulation
