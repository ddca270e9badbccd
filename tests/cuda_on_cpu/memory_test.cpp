// Writes past the end, reads of what nobody wrote, and their healthy twins.
#include <cmath>
#include <cstdlib>

#include "test_support.h"

namespace stand_in_test {
namespace {

// Writes n elements and `more` behind them.
__global__ void fill(float* p, int n, int more) {
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(n + more); i += blockDim.x) p[i] = 1;
}
__global__ void read_one(const float* p, float* out) { *out = *p; }

class MemoryDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

void fill_allocation(int n, int more) {
  const Stream stream;
  const Array<float> x(static_cast<std::size_t>(n));
  EXPECT_CUDA(start(stream, fill, 1, 64, 0, x.get(), n, more));
  EXPECT_CUDA(cudaDeviceSynchronize());
}

TEST_F(MemoryDeathTest, WritePastAnAllocation) {
  fill_allocation(1000, 0);
  // Into the rounding to 256 bytes: the mark tells.
  EXPECT_DEATH(
      fill_allocation(1000, 1),
      "cuda_on_cpu: a write past the end, at byte 4000 of the 4000 bytes of device memory.*"
      "last kernels: .*fill");
  // Beyond it: the page tells at once, with the thread.
  EXPECT_DEATH(
      fill_allocation(1024, 1),
      "cuda_on_cpu: illegal access .* 0 bytes past the end of the 4096 bytes of device memory"
      ".*in kernel .*fill block \\(0,0,0\\) thread \\(0,0,0\\)");
}

TEST_F(MemoryDeathTest, CopyPastAnAllocation) {
  EXPECT_DEATH(
      {
        const Array<float> x(10);
        cudaMemset(x.get() + 5, 0, 24);
      },
      "cuda_on_cpu: 24 bytes from .* run past the end of the 40 bytes");
}

TEST_F(MemoryDeathTest, UseAfterFree) {
  EXPECT_DEATH(
      {
        const Stream stream;
        float* x;
        float* y;
        cudaMalloc(&x, 4);
        cudaMalloc(&y, 4);
        cudaFree(x);
        start(stream, read_one, 1, 1, 0, x, y);
        cudaDeviceSynchronize();
      },
      "cuda_on_cpu: illegal access .*which has been freed.*read_one");
}

__global__ void read_pair(const float* p, float* out) {
  *out = reinterpret_cast<const float2*>(p)->y;
}

TEST_F(MemoryDeathTest, MisalignedAccess) {
  const auto read_at = [](int element) {
    const Stream stream;
    const Array<float> x(std::vector<float>(4, 1.0f)), y(1);
    EXPECT_CUDA(start(stream, read_pair, 1, 1, 0, x.get() + element, y.get()));
    EXPECT_EQ(y.read()[0], 1.0f);
  };
  read_at(2);
  EXPECT_DEATH(read_at(1), "cuda_on_cpu: misaligned access, in kernel .*read_pair");
}

TEST(Memory, UnwrittenIsNaN) {
  const Stream stream;
  const Array<float> x(100), y(1);
  EXPECT_CUDA(start(stream, read_one, 1, 1, 0, x.get() + 37, y.get()));
  EXPECT_TRUE(std::isnan(y.read()[0]));
}

// Two neighbours of an arena, as tensor/tensor.cpp lays them out.
void fill_block(int n, int more) {
  const Stream stream;
  const std::size_t bytes = static_cast<std::size_t>(n) * 4,
                    step = emulation::arena_block_bytes(bytes);
  const Array<char> arena(2 * step);
  emulation::set_arena_stream(stream);
  emulation::arena_block(arena.get(), bytes, true);
  emulation::arena_block(arena.get() + step, bytes, true);
  EXPECT_CUDA(start(stream, fill, 1, 64, 0, reinterpret_cast<float*>(arena.get()), n, more));
  emulation::arena_block(arena.get(), bytes, false);
  emulation::arena_block(arena.get() + step, bytes, false);
  EXPECT_CUDA(cudaDeviceSynchronize());
  emulation::set_arena_stream(nullptr);
}

TEST_F(MemoryDeathTest, WritePastAnArenaBlock) {
  fill_block(1000, 0);
  fill_block(1024, 0);
  EXPECT_DEATH(
      fill_block(1000, 1),
      "cuda_on_cpu: a write past the end, at byte 4000 of the arena's block of 4000 bytes.*"
      "last kernels: .*fill");
  EXPECT_DEATH(fill_block(1024, 1), "at byte 4096 of the arena's block of 4096 bytes");
}

TEST(Memory, GivenBackBlocksArePoisonedInOrder) {
  const Stream stream;
  const Array<float> arena(1024), out(2);
  emulation::set_arena_stream(stream);
  emulation::arena_block(arena.get(), 400, true);
  EXPECT_CUDA(start(stream, fill, 1, 32, 0, arena.get(), 100, 0));
  EXPECT_CUDA(start(stream, read_one, 1, 1, 0, arena.get(), out.get()));  // before it is given back
  emulation::arena_block(arena.get(), 400, false);
  EXPECT_CUDA(start(stream, read_one, 1, 1, 0, arena.get(), out.get() + 1));  // after
  const std::vector<float> got = out.read();
  EXPECT_EQ(got[0], 1.0f);
  EXPECT_TRUE(std::isnan(got[1]));
  emulation::set_arena_stream(nullptr);
}

TEST_F(MemoryDeathTest, StrictModeKeepsTheHostOut) {
  EXPECT_DEATH(
      {
        setenv("WEFT_EMULATION_STRICT", "1", 1);
        const Array<float> x(std::vector<float>{1.0f});
        {
          const emulation::HostAccess allowed;
          if (*x.get() != 1.0f) std::exit(0);
        }
        *x.get() = 2.0f;
      },
      "cuda_on_cpu: illegal access .* byte 0 of the 4 bytes of device memory at .*, by the host");
}

TEST(Memory, SizeIsLimited) {
  std::size_t free = 0, total = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free, &total));
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, free + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(p, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  // All of it is there, and costs nothing until it is written.
  EXPECT_CUDA(cudaMalloc(&p, free));
  EXPECT_CUDA(cudaFree(p));
}

TEST(Devices, ACallOnAnotherThanTheProcesssOwnEndsIt) {
  EXPECT_DEATH(
      {
        setenv("WEFT_EMULATION_DEVICES", "2", 1);
        void* p = nullptr;
        EXPECT_CUDA(cudaMalloc(&p, 16));
        EXPECT_CUDA(cudaSetDevice(1));
        cudaMalloc(&p, 16);
      },
      "cuda_on_cpu: a call on device 1, and this process works on device 0");
}

}  // namespace
}  // namespace stand_in_test
