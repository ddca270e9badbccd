// Threads, barriers, warp functions, shared memory: each with its meaning, and with the fault that
// must not pass.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>

#include "cuda_bf16.h"
#include "emulated_ptx.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

using weft::kernels::shared_memory;

constexpr unsigned all = 0xffffffffu;

// Sums of rows of 256 through shared memory. Without its barrier it reads what other warps have not
// written yet.
template <bool with_barrier>
__global__ void row_sums(const float* x, float* sums) {
  float* scratch = shared_memory<float>();
  float v = x[blockIdx.x * 256 + threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(all, v, offset);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  if (with_barrier) __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int w = 0; w < 8; ++w) sum += scratch[w];
    sums[blockIdx.x] = sum;
  }
}

template <bool with_barrier>
int wrong_rows(unsigned long long seed) {
  emulation::set_seed(seed);
  constexpr int rows = 4;
  std::vector<float> x(rows * 256);
  std::iota(x.begin(), x.end(), 0.0f);
  const Stream stream;
  const Array<float> in(x), sums(rows);
  EXPECT_CUDA(start(stream, row_sums<with_barrier>, rows, 256, 32, in.get(), sums.get()));
  const std::vector<float> got = sums.read();
  int wrong = 0;
  for (int r = 0; r < rows; ++r)
    wrong += got[r] != 256.0f * (static_cast<float>(r) * 256.0f + 127.5f);
  return wrong;
}

TEST(Barrier, RowSumsAreRightUnderEverySeed) {
  for (unsigned long long seed = 1; seed <= 20; ++seed) EXPECT_EQ(wrong_rows<true>(seed), 0);
}

TEST(Barrier, MissingOneIsCaught) {
  int caught = 0;
  for (unsigned long long seed = 1; seed <= 20; ++seed) caught += wrong_rows<false>(seed) > 0;
  // A row passes only if warp 0 happens to come last: one of 8.
  EXPECT_GE(caught, 19);
}

// The buffer is used twice; without the second barrier a fast warp overwrites what a slow one has
// yet to read.
template <bool with_barrier>
__global__ void neighbours(int* out) {
  int* scratch = shared_memory<int>();
  for (int round = 0; round < 3; ++round) {
    scratch[threadIdx.x] = static_cast<int>(threadIdx.x) + 1000 * round;
    __syncthreads();
    out[static_cast<unsigned>(round) * blockDim.x + threadIdx.x] =
        scratch[(threadIdx.x + 32) % blockDim.x];
    if (with_barrier) __syncthreads();
  }
}

template <bool with_barrier>
bool neighbours_right(unsigned long long seed) {
  emulation::set_seed(seed);
  const Stream stream;
  const Array<int> out(3 * 128);
  EXPECT_CUDA(start(stream, neighbours<with_barrier>, 1, 128, 512, out.get()));
  const std::vector<int> got = out.read();
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i] != static_cast<int>((i % 128 + 32) % 128 + 1000 * (i / 128))) return false;
  return true;
}

TEST(Barrier, MissingOneBeforeReuseIsCaught) {
  int caught = 0;
  for (unsigned long long seed = 1; seed <= 10; ++seed) {
    EXPECT_TRUE(neighbours_right<true>(seed));
    caught += !neighbours_right<false>(seed);
  }
  EXPECT_GE(caught, 9);
}

// The first thread writes and all read: right by luck wherever warps, or the lanes of one warp, run
// in the order of their numbers. With several warps the first one's lanes are in order, so that
// only the order of warps is left.
template <bool with_barrier>
__global__ void told_by_the_first(int* out) {
  int* word = shared_memory<int>();
  if (threadIdx.x == 0) *word = 42;
  if (with_barrier && blockDim.x > 32) __syncthreads();
  if (with_barrier || blockDim.x > 32) __syncwarp();
  out[threadIdx.x] = *word;
}

TEST(Barrier, MissingOneIsCaughtWhereTheWriterComesFirst) {
  for (const unsigned threads : {32u, 128u}) {
    int caught = 0;
    for (unsigned long long seed = 1; seed <= 20; ++seed) {
      emulation::set_seed(seed);
      const Stream stream;
      const Array<int> right(threads), wrong(threads);
      EXPECT_CUDA(start(stream, told_by_the_first<true>, 1, threads, 4, right.get()));
      EXPECT_CUDA(start(stream, told_by_the_first<false>, 1, threads, 4, wrong.get()));
      EXPECT_EQ(right.read(), std::vector<int>(threads, 42));
      caught += wrong.read() != std::vector<int>(threads, 42);
    }
    EXPECT_GE(caught, 12) << threads << " threads";
  }
}

template <class T>
__global__ void heavy(T* out) {
  out[threadIdx.x] = T(1);
}

TEST(Launch, RegistersOfABlockAreLimited) {
  const std::string page = testing::TempDir() + "weft_registers_" + std::to_string(getpid());
  std::ofstream(page) << "| file | kernel | sm_90a |\n|---|---|---|\n"
                      << "| a.cu | `stand_in_test::heavy<float>` | 130 |\n"
                      << "| b.cu | `stand_in_test::heavy<float>` | 129 (8 B spilled) |\n";
  const Stream stream;
  const Array<float> out(1024);
  const Array<int> light(1024);
  const auto blocks = [](auto kernel, int threads) {
    int n = 0;
    EXPECT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &n, reinterpret_cast<const void*>(kernel), threads, 0));
    return n;
  };
  EXPECT_CUDA(start(stream, heavy<float>, 1, 512, 0, out.get()));
  ASSERT_EQ(setenv("WEFT_EMULATION_RESOURCES", page.c_str(), 1), 0);
  // 129 registers are 17 portions of 256 a warp: 15 warps have room.
  EXPECT_CUDA(start(stream, heavy<float>, 1, 480, 0, out.get()));
  EXPECT_EQ(start(stream, heavy<float>, 1, 512, 0, out.get()), cudaErrorLaunchOutOfResources);
  EXPECT_CUDA(start(stream, heavy<int>, 1, 1024, 0, light.get()));
  EXPECT_EQ(blocks(heavy<float>, 128), 3);
  EXPECT_EQ(blocks(heavy<int>, 128), 8);
  unsetenv("WEFT_EMULATION_RESOURCES");
  EXPECT_CUDA(start(stream, heavy<float>, 1, 512, 0, out.get()));
  EXPECT_CUDA(cudaDeviceSynchronize());
  std::filesystem::remove(page);
}

__global__ void some_at_a_barrier() {
  if (threadIdx.x < 40) __syncthreads();
}
__global__ void half_a_shuffle(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(all, 1, 1);
}
__global__ void two_functions(int* out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_xor_sync(all, 1, 1);
  else
    out[threadIdx.x] = __any_sync(all, 1);
}
__global__ void past_shared(int* out) {
  shared_memory<int>()[threadIdx.x + 1] = 1;
  out[threadIdx.x] = 0;
}
__global__ void counts(int* out) {
  const int p = static_cast<int>(threadIdx.x) % 3 == 0;
  const int count = __syncthreads_count(p), any = __syncthreads_or(p), every = __syncthreads_and(p);
  if (threadIdx.x == 0) out[0] = count, out[1] = any, out[2] = every;
}

class KernelDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(KernelDeathTest, BarrierThatSomeNeverReach) {
  EXPECT_DEATH(
      {
        const Stream stream;
        start(stream, some_at_a_barrier, 1, 64, 0);
        cudaDeviceSynchronize();
      },
      "cuda_on_cpu: .*__syncthreads: \\(.*and 36 more; ended:.*some_at_a_barrier block "
      "\\(0,0,0\\)");
}

TEST_F(KernelDeathTest, LanesThatNeverCome) {
  EXPECT_DEATH(
      {
        const Stream stream;
        const Array<int> out(32);
        start(stream, half_a_shuffle, 1, 32, 0, out.get());
        cudaDeviceSynchronize();
      },
      "cuda_on_cpu: .*__shfl_xor_sync.*half_a_shuffle");
}

TEST_F(KernelDeathTest, LanesInDifferentFunctions) {
  EXPECT_DEATH(
      {
        const Stream stream;
        const Array<int> out(32);
        start(stream, two_functions, 1, 32, 0, out.get());
        cudaDeviceSynchronize();
      },
      "cuda_on_cpu: lane .* while others of mask ffffffff are in .*two_functions");
}

TEST_F(KernelDeathTest, WritePastSharedMemory) {
  EXPECT_DEATH(
      {
        const Stream stream;
        const Array<int> out(32);
        start(stream, past_shared, 1, 32, 128, out.get());
        cudaDeviceSynchronize();
      },
      "cuda_on_cpu: a block wrote past the end of its 128 bytes of shared memory, at byte "
      "128.*past_shared");
}

TEST(Barrier, Votes) {
  const Stream stream;
  const Array<int> out(3);
  EXPECT_CUDA(start(stream, counts, 1, 50, 0, out.get()));
  EXPECT_EQ(out.read(), (std::vector<int>{17, 1, 0}));
}

__global__ void shuffles(int* out) {
  const int l = static_cast<int>(threadIdx.x), v = 100 + l;
  int* row = out + l;
  row[0 * 32] = __shfl_sync(all, v, 5);
  row[1 * 32] = __shfl_sync(all, v, l + 1, 8);
  row[2 * 32] = __shfl_up_sync(all, v, 3, 16);
  row[3 * 32] = __shfl_down_sync(all, v, 3, 16);
  row[4 * 32] = __shfl_xor_sync(all, v, 7);
  row[5 * 32] = static_cast<int>(__ballot_sync(all, l % 4 == 0));
  row[6 * 32] = static_cast<int>(__match_any_sync(all, l / 8));
  row[7 * 32] = __reduce_max_sync(all, l == 9 ? 77 : -l);
  // Two masks at once.
  const unsigned half = l < 16 ? 0xffffu : 0xffff0000u;
  row[8 * 32] = __reduce_add_sync(half, l);
}

TEST(Warp, FunctionsFollowTheirDefinition) {
  const Stream stream;
  const Array<int> out(9 * 32);
  EXPECT_CUDA(start(stream, shuffles, 1, 32, 0, out.get()));
  const std::vector<int> got = out.read();
  for (int l = 0; l < 32; ++l) {
    const auto row = [&](int r) { return got[r * 32 + l]; };
    EXPECT_EQ(row(0), 105);
    EXPECT_EQ(row(1), 100 + l / 8 * 8 + (l + 1) % 8);
    EXPECT_EQ(row(2), l % 16 < 3 ? 100 + l : 97 + l);
    EXPECT_EQ(row(3), l % 16 > 12 ? 100 + l : 103 + l);
    EXPECT_EQ(row(4), 100 + (l ^ 7));
    EXPECT_EQ(row(5), 0x11111111);
    EXPECT_EQ(static_cast<unsigned>(row(6)), 0xffu << (l / 8 * 8));
    EXPECT_EQ(row(7), 77);
    EXPECT_EQ(row(8), l < 16 ? 120 : 376);
  }
}

__global__ void where_am_i(int* out) {
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = static_cast<int>(1000 * b + t);
}

TEST(Launch, LimitsAreChecked) {
  const Stream stream;
  const Array<int> out(2048);
  EXPECT_EQ(start(stream, where_am_i, 1, 1025, 0, out.get()), cudaErrorInvalidConfiguration);
  EXPECT_EQ(start(stream, where_am_i, dim3(1, 70000), 1, 0, out.get()),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(start(stream, where_am_i, 1, 32, 50000, out.get()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(where_am_i, cudaFuncAttributeMaxDynamicSharedMemorySize, 200000),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_CUDA(cudaFuncSetAttribute(where_am_i, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
  EXPECT_CUDA(start(stream, where_am_i, 1, 32, 50000, out.get()));
  EXPECT_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace stand_in_test
