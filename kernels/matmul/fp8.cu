// CUDA side of ops/fp8.h. CPU twin src/ops/cpu/matmul/fp8.cpp, cases tests/kernels/fp8.cpp.
//
// Products are of operands that were rounded to e4m3, in bf16. From compute capability 8.9 on,
// cuBLASLt multiplies e4m3 itself with f32 sums, where both operands lie with the inner dimension
// contiguous ("TN"): weights are transposed for the gradient of the input. That is the way "fp8",
// untested on GPU (ops/ways.h). It takes no inner dimensions or columns that are no multiple of 16,
// and no operands off 16 bytes.
//
// Three launches a product: largest magnitudes of both operands; rounding of both (one more for the
// gradient of the input, which transposes); the product. Memory bounds the first two: M K + N K
// elements are read twice and written once, 5 bytes an element; the second reading finds in the L2
// cache what the first read last, because it goes backwards. In the time of these 5 bytes an H100
// multiplies an element with 580 columns in bf16 (2.8 TB/s, 650 TFLOP/s).
//
// FAST_ACCUM is off: tensor cores keep some 14 bits of their own sums of e4m3, too few for the 4608
// and more products of fc2; so the library adds those up in f32 every few steps.
#include "ops/fp8.h"

#include <cfloat>

#include "core/error.h"
#include "matmul/product.cuh"
#include "matmul/ways.cuh"
#include "ops/matmul.h"
#include "ptx.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int bytes_at_once = 16;  // e4m3 values that a thread stores together

// The greatest of the block's values, to every thread; `of_warps` is shared memory for a float a
// warp.
__device__ __forceinline__ float block_max(float x, float* of_warps) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < warps ? of_warps[threadIdx.x % 32] : 0.0f);
}

// One of the two operands, and the blocks of a launch that work on it.
struct E4m3Operand {
  const __nv_bfloat16* values;
  std::int64_t count;
  float* pieces;   // [blocks], largest magnitudes
  float* inverse;  // 1 / scale
  void* rounded;   // bytes in e4m3, or bf16
  int blocks;
};

// pieces [blocks]: magnitudes are at least 0, so the order in which they are compared leaves no
// trace.
template <int V>
__global__ void __launch_bounds__(threads) e4m3_largest_kernel(E4m3Operand a, E4m3Operand b) {
  const bool first = static_cast<int>(blockIdx.x) < a.blocks;
  const E4m3Operand x = first ? a : b;
  const int block = static_cast<int>(blockIdx.x) - (first ? 0 : a.blocks);
  float largest = 0.0f;
#pragma unroll 2
  for (std::int64_t i = static_cast<std::int64_t>(block) * threads + threadIdx.x; i < x.count / V;
       i += static_cast<std::int64_t>(x.blocks) * threads) {
    float v[V];
    unpack(load_vec<V>(x.values, i), v);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const float magnitude = fabsf(v[e]);
      largest = fmaxf(largest, magnitude <= FLT_MAX ? magnitude : 0.0f);
    }
  }
  largest = block_max(largest, shared_memory<float>());
  if (threadIdx.x == 0) x.pieces[block] = largest;
}

// The scale, to every thread of the block.
__device__ __forceinline__ float e4m3_scale_of(const E4m3Operand& x, float* of_warps) {
  float largest = 0.0f;
  for (int i = threadIdx.x; i < x.blocks; i += threads) largest = fmaxf(largest, x.pieces[i]);
  return ops::e4m3_scale(block_max(largest, of_warps));
}

// Four values.
__device__ __forceinline__ std::uint32_t e4m3_bytes(const float* v, float scale) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  // GPUs of 8.9 run the code of 8.0, which knows no such instruction.
  std::uint32_t bytes = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    bytes |= static_cast<std::uint32_t>(ops::to_e4m3(v[e] * scale)) << (8 * e);
  return bytes;
#else
  // v * 0 is 0, or NaN for infinities and NaN; of infinities the instruction would make 448.
  float x[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = fmaf(v[e], 0.0f, v[e] * scale);
  return e4m3_pair(x[0], x[1]) | static_cast<std::uint32_t>(e4m3_pair(x[2], x[3])) << 16;
#endif
}

// Rounds both operands, a from its end to its beginning and then b.
template <class Out, int V>
__global__ void __launch_bounds__(threads) e4m3_round_kernel(E4m3Operand a, E4m3Operand b) {
  const bool first = static_cast<int>(blockIdx.x) < a.blocks;
  const E4m3Operand x = first ? a : b;
  const int block = static_cast<int>(blockIdx.x) - (first ? 0 : a.blocks);
  const float scale = e4m3_scale_of(x, shared_memory<float>()), inverse = 1.0f / scale;
  if (block == 0 && threadIdx.x == 0) *x.inverse = inverse;
  for (std::int64_t i = static_cast<std::int64_t>(block) * threads + threadIdx.x; i < x.count / V;
       i += static_cast<std::int64_t>(x.blocks) * threads) {
    const std::int64_t at = x.count / V - 1 - i;
    float v[V];
    unpack(load_vec<V>(x.values, at), v);
    if constexpr (sizeof(Out) == 1) {
      Pack<std::uint32_t> bytes;
#pragma unroll
      for (int e = 0; e < V; e += 4) bytes.v[e / 4] = e4m3_bytes(v + e, scale);
      store_pack(static_cast<std::uint32_t*>(x.rounded) + at * bytes.size, bytes);
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] = ops::from_e4m3(ops::to_e4m3(v[e] * scale)) * inverse;
      store_vec<V>(static_cast<Out*>(x.rounded), at, pack<Out>(v));
    }
  }
}

constexpr int e4m3_tile = 64;  // rows and columns of a transposed tile
constexpr int e4m3_tile_row =
    e4m3_tile + 16;  // bytes from row to row: 16-byte accesses, in other banks

// rounded [columns, rows] from values [rows, columns]; both multiples of 16.
__global__ void __launch_bounds__(threads)
    e4m3_transpose_kernel(E4m3Operand x, int rows, int columns) {
  static_assert(threads * bytes_at_once == e4m3_tile * e4m3_tile);
  float* const of_warps = shared_memory<float>();
  auto* const turned = reinterpret_cast<std::uint8_t*>(of_warps + 32);
  const float scale = e4m3_scale_of(x, of_warps);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *x.inverse = 1.0f / scale;
  const int line = threadIdx.x / 4, part = threadIdx.x % 4 * bytes_at_once;
  {
    const int row = blockIdx.y * e4m3_tile + line, column = blockIdx.x * e4m3_tile + part;
    if (row < rows && column < columns) {
      float v[bytes_at_once];
      unpack(load_vec<bytes_at_once>(
                 x.values, (static_cast<std::int64_t>(row) * columns + column) / bytes_at_once),
             v);
#pragma unroll
      for (int e = 0; e < bytes_at_once; e += 4) {
        const std::uint32_t bytes = e4m3_bytes(v + e, scale);
#pragma unroll
        for (int b = 0; b < 4; ++b)
          turned[(part + e + b) * e4m3_tile_row + line] =
              static_cast<std::uint8_t>(bytes >> (8 * b));
      }
    }
  }
  __syncthreads();
  const int row = blockIdx.x * e4m3_tile + line,
            column = blockIdx.y * e4m3_tile + part;  // of the result
  if (row < columns && column < rows)
    store_pack(
        static_cast<std::uint8_t*>(x.rounded) + static_cast<std::int64_t>(row) * rows + column,
        load_pack(turned + line * e4m3_tile_row + part));
}

constexpr std::size_t warp_floats = 32 * sizeof(float);

// A product's two operands on their way to e4m3, in blocks of the arena (ops/fp8.cpp plans them).
class E4m3Operands {
 public:
  E4m3Operands(const Tensor& a, const Tensor& b)
      : a_(Tensor::empty(a.shape(), DType::bf16)),
        b_(Tensor::empty(b.shape(), DType::bf16)),
        facts_(Tensor::empty({ops::e4m3_facts}, DType::f32)),
        wide_(a.numel() % bytes_at_once == 0 && b.numel() % bytes_at_once == 0 &&
              aligned<8>(a, b)) {
    float* const facts = data<float>(facts_);
    from_a_ = operand(a, facts, facts + 2 * ops::e4m3_pieces, a_);
    from_b_ = operand(b, facts + ops::e4m3_pieces, facts + 2 * ops::e4m3_pieces + 1, b_);
    const dim3 grid(static_cast<unsigned>(from_a_.blocks + from_b_.blocks));
    launch(wide_ ? e4m3_largest_kernel<bytes_at_once> : e4m3_largest_kernel<1>, grid, dim3(threads),
           warp_floats, from_a_, from_b_);
  }

  // Whether bytes() can be had: each thread takes 16 values.
  bool wide() const { return wide_; }

  // a and b as bytes in e4m3; b [rows, columns] also transposed, where `columns` is given.
  Operands bytes(int rows = 0, int columns = 0) const {
    const bool transpose = columns > 0;
    E4m3Operand b = from_b_;
    if (transpose) b.blocks = 0;
    launch(e4m3_round_kernel<std::uint8_t, bytes_at_once>,
           dim3(static_cast<unsigned>(from_a_.blocks + b.blocks)), dim3(threads), warp_floats,
           from_a_, b);
    if (transpose)
      launch(e4m3_transpose_kernel,
             dim3(blocks_for(columns, e4m3_tile), blocks_for(rows, e4m3_tile)), dim3(threads),
             warp_floats + e4m3_tile * e4m3_tile_row, from_b_, rows, columns);
    Operands x{};
    x.a = a_.raw(), x.b = b_.raw();
    x.a_scale = from_a_.inverse, x.b_scale = from_b_.inverse;
    return x;
  }

  // The same values in bf16.
  struct Rounded {
    Tensor a, b;
  };
  Rounded rounded() const {
    const dim3 grid(static_cast<unsigned>(from_a_.blocks + from_b_.blocks));
    launch(wide_ ? e4m3_round_kernel<__nv_bfloat16, bytes_at_once>
                 : e4m3_round_kernel<__nv_bfloat16, 1>,
           grid, dim3(threads), warp_floats, from_a_, from_b_);
    return {a_, b_};
  }

 private:
  static E4m3Operand operand(const Tensor& x, float* pieces, float* inverse, const Tensor& to) {
    constexpr std::int64_t a_block = 2 * threads * bytes_at_once;
    const std::int64_t blocks =
        std::clamp<std::int64_t>((x.numel() + a_block - 1) / a_block, 1, ops::e4m3_pieces);
    return {data<__nv_bfloat16>(x), x.numel(), pieces, inverse, to.raw(), static_cast<int>(blocks)};
  }

  Tensor a_, b_, facts_;
  E4m3Operand from_a_{}, from_b_{};
  bool wide_;
};

// Runs p from bytes where the GPU and the library can; else nothing has happened.
bool e4m3_product(const E4m3Operands& operands, Product p, const Operands& rest, bool transpose_b) {
  const cudaDeviceProp& gpu = cuda_properties();
  if (gpu.major * 10 + gpu.minor < 89 || !operands.wide() || p.inner % 16 != 0 ||
      p.columns % 16 != 0)
    return false;
  p.e4m3 = p.b_transposed = true;
  const int rows = static_cast<int>(p.inner), columns = static_cast<int>(p.columns);
  Operands x = transpose_b ? operands.bytes(rows, columns) : operands.bytes();
  x.c = rest.c, x.d = rest.d, x.vector = rest.vector, x.vector_type = rest.vector_type;
  return product_lt(p, x);
}

// Does the operation, whose product is p, in the best of its ways: in_bf16(operands rounded, to),
// or from bytes into what `rest(to)` says.
template <class InBf16, class Rest>
void in_best_way(const char* name, const Product& p, const Tensor& a, const Tensor& b,
                 bool transpose_b, const Tensor& output, InBf16&& in_bf16, Rest&& rest) {
  const E4m3Operands operands(a, b);
  const auto run = [&](int way, const Outputs& to) {
    if (way == 1) return e4m3_product(operands, p, rest(to[0]), transpose_b);
    in_bf16(operands.rounded(), to[0]);
    return true;
  };
  if (is_tried("fp8") && has_choice(p.rows * p.columns * p.inner))
    run_best(std::string(name) + " " + describe(p), {"bf16", "fp8"}, {output},
             tolerance_of(DType::bf16), run);
  else
    run(0, {output});
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using kernels::E4m3Operands;
using kernels::Epilogue;
using kernels::Operands;
using kernels::Product;

void fp8_linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                        const Tensor& residual, Tensor& y) {
  if (x.numel() == 0) return;
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = x.numel() / k;
  WEFT_ASSERT(m * k == x.numel() && m * n == y.numel() && y.dtype() == DType::bf16);
  const Product p{m,
                  n,
                  k,
                  false,
                  true,
                  DType::bf16,
                  DType::bf16,
                  bias.defined() ? Epilogue::bias : Epilogue::none,
                  residual.defined()};
  const DType bias_type = bias.defined() ? bias.dtype() : DType::f32;
  kernels::in_best_way(
      "fp8_linear_forward", p, x, w, false, y,
      [&](const E4m3Operands::Rounded& in, Tensor to) {
        linear_forward(in.a, in.b, bias, residual, to);
      },
      [&](const Tensor& to) {
        return Operands{nullptr, nullptr, residual.raw(), to.raw(), bias.raw(), nullptr, bias_type};
      });
}

void fp8_linear_backward_input(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate) {
  if (dy.numel() == 0) return;
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = dy.numel() / n;
  WEFT_ASSERT(m * n == dy.numel() && m * k == dx.numel() && dx.dtype() == DType::bf16);
  const Product p{m, k, n, false, false, DType::bf16, DType::bf16, Epilogue::none, accumulate};
  kernels::in_best_way(
      "fp8_linear_backward_input", p, dy, w, true, dx,
      [&](const E4m3Operands::Rounded& in, Tensor to) {
        linear_backward_input(in.a, in.b, to, accumulate);
      },
      [&](const Tensor& to) {
        return Operands{nullptr, nullptr, accumulate ? to.raw() : nullptr, to.raw()};
      });
}

}  // namespace weft::ops::cuda
