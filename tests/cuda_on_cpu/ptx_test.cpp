// Matrix fragments, matrix loads and asynchronous copies against plain loops, and bf16 against its
// definition.
#include <cmath>
#include <cstring>
#include <limits>

#include "cuda_bf16.h"
#include "emulated_ptx.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

using weft::kernels::cp_async_16;
using weft::kernels::cp_async_commit;
using weft::kernels::cp_async_wait;
using weft::kernels::shared_memory;

float value(int i) { return static_cast<float>(i * 37 % 101 - 50) / 16.0f; }

std::vector<__nv_bfloat16> values(std::size_t n, int first) {
  std::vector<__nv_bfloat16> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = value(static_cast<int>(i) + first);
  return v;
}

// D [16,8] = 1 + A [16,16] B [16,8] through shared memory: A by ldmatrix, B [16,8] row-major by its
// transposed form, or B^T [8,16] row-major by the plain one.
template <bool b_by_rows>
__global__ void product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  auto* sa = shared_memory<__nv_bfloat16>();
  __nv_bfloat16* sb = sa + 256;
  for (unsigned i = threadIdx.x; i < 256; i += 32) sa[i] = a[i];
  for (unsigned i = threadIdx.x; i < 128; i += 32) sb[i] = b[i];
  __syncthreads();
  const unsigned l = threadIdx.x;
  std::uint32_t fa[4], fb[2];
  weft::kernels::ldmatrix_x4(fa, sa + (l % 16) * 16 + l / 16 * 8);
  if (b_by_rows)
    weft::kernels::ldmatrix_x2_trans(fb, sb + l % 16 * 8);
  else
    weft::kernels::ldmatrix_x2(fb, sb + l % 8 * 16 + l / 8 % 2 * 8);
  float fd[4] = {1, 1, 1, 1};
  weft::kernels::mma_16x8x16(fd, fa, fb);
  const unsigned group = l / 4, pair = l % 4;
  d[group * 8 + 2 * pair] = fd[0];
  d[group * 8 + 2 * pair + 1] = fd[1];
  d[(group + 8) * 8 + 2 * pair] = fd[2];
  d[(group + 8) * 8 + 2 * pair + 1] = fd[3];
}

TEST(Ptx, MatrixProductByFragments) {
  const std::vector<__nv_bfloat16> a = values(256, 0), b = values(128, 1000);
  const Stream stream;
  const Array<__nv_bfloat16> da(a), db(b);
  const Array<float> plain(128), transposed(128);
  EXPECT_CUDA(start(stream, product<true>, 1, 32, 768, da.get(), db.get(), plain.get()));
  EXPECT_CUDA(start(stream, product<false>, 1, 32, 768, da.get(), db.get(), transposed.get()));
  const std::vector<float> x = plain.read(), y = transposed.read();
  for (std::size_t i = 0; i < 16; ++i)
    for (std::size_t j = 0; j < 8; ++j) {
      float by_rows = 1, by_columns = 1;
      for (std::size_t k = 0; k < 16; ++k) {
        by_rows += float(a[i * 16 + k]) * float(b[k * 8 + j]);
        by_columns += float(a[i * 16 + k]) * float(b[j * 16 + k]);
      }
      // Products of these numbers and their sums are exact in f32.
      EXPECT_EQ(x[i * 8 + j], by_rows);
      EXPECT_EQ(y[i * 8 + j], by_columns);
    }
}

__global__ void four_matrices(const std::uint16_t* x, std::uint32_t* plain,
                              std::uint32_t* transposed) {
  auto* s = shared_memory<std::uint16_t>();
  for (unsigned i = threadIdx.x; i < 256; i += 32) s[i] = x[i];
  __syncthreads();
  std::uint32_t r[4];
  weft::kernels::ldmatrix_x4(r, s + threadIdx.x * 8);
  for (unsigned m = 0; m < 4; ++m) plain[m * 32 + threadIdx.x] = r[m];
  weft::kernels::ldmatrix_x4_trans(r, s + threadIdx.x * 8);
  for (unsigned m = 0; m < 4; ++m) transposed[m * 32 + threadIdx.x] = r[m];
}

TEST(Ptx, MatrixLoads) {
  std::vector<std::uint16_t> x(256);
  for (std::size_t i = 0; i < 256; ++i) x[i] = static_cast<std::uint16_t>(i);
  const Stream stream;
  const Array<std::uint16_t> in(x);
  const Array<std::uint32_t> plain(128), transposed(128);
  EXPECT_CUDA(start(stream, four_matrices, 1, 32, 512, in.get(), plain.get(), transposed.get()));
  const auto p = plain.read(), t = transposed.read();
  for (std::uint32_t m = 0; m < 4; ++m)
    for (std::uint32_t l = 0; l < 32; ++l) {
      const std::uint32_t row = l / 4, column = 2 * (l % 4), first = m * 64;
      EXPECT_EQ(p[m * 32 + l], (first + row * 8 + column) | (first + row * 8 + column + 1) << 16);
      EXPECT_EQ(t[m * 32 + l], (first + column * 8 + row) | (first + (column + 1) * 8 + row) << 16);
    }
}

// Two stages of copies; `wait` says whether the kernel waits for the right one.
template <bool wait>
__global__ void staged(const float4* x, float4* y) {
  auto* s = shared_memory<float4>();
  const unsigned t = threadIdx.x;
  cp_async_16(s + t, x + t, true);
  cp_async_commit();
  cp_async_16(s + 64 + t, x + 64 + t, t != 3);  // zeros for thread 3
  cp_async_commit();
  if (wait) cp_async_wait<1>();
  y[t] = s[t];
  cp_async_wait<0>();
  y[64 + t] = s[64 + t];
}

TEST(Ptx, AsynchronousCopies) {
  std::vector<float4> x(128);
  for (std::size_t i = 0; i < 128; ++i) x[i] = make_float4(value(static_cast<int>(i)), 1, 2, 3);
  const Stream stream;
  const Array<float4> in(x), right(128), wrong(128);
  EXPECT_CUDA(start(stream, staged<true>, 1, 64, 2048, in.get(), right.get()));
  EXPECT_CUDA(start(stream, staged<false>, 1, 64, 2048, in.get(), wrong.get()));
  const auto r = right.read(), w = wrong.read();
  int different = 0;
  for (std::size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(r[i].x, i == 67 ? 0.0f : x[i].x);
    different += !(w[i].x == r[i].x);
  }
  // Half of the copies happen only when they are waited for.
  EXPECT_GT(different, 10);
  EXPECT_LT(different, 54);
}

__global__ void misplaced(const float4* x) { cp_async_16(shared_memory<char>() + 8, x, true); }

TEST(PtxDeathTest, MisalignedCopy) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const Stream stream;
        const Array<float4> x(1);
        start(stream, misplaced, 1, 1, 64, x.get());
        cudaDeviceSynchronize();
      },
      "cuda_on_cpu: cp.async at byte 8 of shared memory, not a multiple of 16.*misplaced");
}

TEST(Bf16, RoundsToNearestEven) {
  const auto bits = [](float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); };
  EXPECT_EQ(bits(1.0f), 0x3f80);
  EXPECT_EQ(bits(1.00390625f), 0x3f80);  // half way: to the even one
  EXPECT_EQ(bits(1.01171875f), 0x3f82);
  EXPECT_EQ(bits(1.00390637f), 0x3f81);
  EXPECT_EQ(bits(-0.0f), 0x8000);
  EXPECT_EQ(bits(std::numeric_limits<float>::infinity()), 0x7f80);
  EXPECT_EQ(bits(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(bits(std::numeric_limits<float>::quiet_NaN()), 0x7fff);
  // The double 1 + 2^-8 + 2^-40 rounds up; by way of f32 it would be half way and go down.
  EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1.0 + 0.00390625 + std::ldexp(1.0, -40))),
            0x3f81);
  for (unsigned b = 0; b < 0x7f80; ++b)
    EXPECT_EQ(bits(__bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(b)))), b);
}

TEST(Bf16, PairsAreLowThenHigh) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(1.0f, -2.0f);
  std::uint32_t raw;
  std::memcpy(&raw, &pair, 4);
  EXPECT_EQ(raw, 0xc0003f80u);
  EXPECT_EQ(__low2float(pair), 1.0f);
  EXPECT_EQ(__bfloat1622float2(pair).y, -2.0f);
}

}  // namespace
}  // namespace stand_in_test
