// The matrix product of last resort and the column sums that go with products. CPU twin
// src/ops/cpu/matmul/matmul.cpp, cases tests/kernels/matmul.cpp.
//   column_sums: least traffic is one reading of x; 16 bytes a lane, eight rows in flight a block,
//     two stages whose split depends on the shape alone.
//   product_plain: 64x64 tiles, 16 FFMA for 8 values from shared memory: some shapes of tests and
//     odd captions, no hot one.
#include <algorithm>

#include "launch.cuh"
#include "matmul/product.cuh"

namespace weft::kernels {
namespace {

constexpr int tile = 64, slab = 16, tile_stride = tile + 4;

// Address of element (i, j) is base + i * row + j * column; one of the two strides is 1.
struct View {
  std::int64_t row, column;
};

// Loads [tile rows, slab] of A, or the same of B seen from its columns, as to[k][i]; zero beyond
// the edge. Neighbouring threads take the direction in which memory is contiguous.
template <class T>
__device__ void load_tile(const T* from, View v, std::int64_t first, std::int64_t rows,
                          std::int64_t k0, std::int64_t inner, float* to) {
  for (int e = threadIdx.x; e < tile * slab; e += blockDim.x) {
    const int i = v.column == 1 ? e / slab : e % tile, k = v.column == 1 ? e % slab : e / tile;
    const bool inside = first + i < rows && k0 + k < inner;
    to[k * tile_stride + i] =
        inside ? to_float(from[(first + i) * v.row + (k0 + k) * v.column]) : 0.0f;
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(256, 4)
    product_kernel(const In* a, View va, const In* b, View vb, const float* bias,
                   const Out* rounded_bias, const Out* c, Out* d, std::int64_t d_row,
                   std::int64_t rows, std::int64_t columns, std::int64_t inner) {
  float* as = shared_memory<float>();
  float* bs = as + slab * tile_stride;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * tile;
  const std::int64_t column0 = static_cast<std::int64_t>(blockIdx.y) * tile;
  const int ti = threadIdx.x / 16 * 4, tj = threadIdx.x % 16 * 4;
  float sum[4][4] = {};
  for (std::int64_t k0 = 0; k0 < inner; k0 += slab) {
    load_tile(a, va, row0, rows, k0, inner, as);
    load_tile(b, View{vb.column, vb.row}, column0, columns, k0, inner, bs);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < slab; ++k) {
      float x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = as[k * tile_stride + ti + i];
        y[i] = bs[k * tile_stride + tj + i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += x[i] * y[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t row = row0 + ti + i, column = column0 + tj + j;
      if (row >= rows || column >= columns) continue;
      float s = sum[i][j];
      if (bias != nullptr) s += bias[column];
      if (rounded_bias != nullptr) s += to_float(rounded_bias[column]);
      if (c != nullptr) s += to_float(c[row * d_row + column]);
      d[row * d_row + column] = from_float<Out>(s);
    }
}

constexpr int sum_warps = 8, sum_threads = 32 * sum_warps;

// Rows of one block of the first stage, so that some thousand blocks, `across` of them beside each
// other, share tall arrays: eight and more on a multiprocessor.
std::int64_t rows_per_chunk(std::int64_t rows, std::int64_t across) {
  const std::int64_t chunks = std::max<std::int64_t>(1, 1024 / across);
  return std::max<std::int64_t>(64, (rows + chunks - 1) / chunks);
}

// partial[chunk, column] = sum over the chunk's rows. Warp w takes rows w, w + 8 ...; a lane
// `width` columns.
template <class T, int width>
__global__ void __launch_bounds__(sum_threads)
    chunk_sums_kernel(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t chunk,
                      float* partial) {
  float* sums = shared_memory<float>();  // [warps][32 * width]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * 32 + lane) * width;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * chunk;
  const std::int64_t last = first + chunk < rows ? first + chunk : rows;
  float sum[width] = {};
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t row = first + warp; row < last; row += sum_warps) {
      if constexpr (width == 1) {
        sum[0] += to_float(x[row * columns + column]);
      } else {
        const Pack<T> p = load_pack(x + row * columns + column);
#pragma unroll
        for (int i = 0; i < width; ++i) sum[i] += to_float(p.v[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < width; ++i) sums[(warp * width + i) * 32 + lane] = sum[i];
  __syncthreads();
  for (int e = threadIdx.x; e < 32 * width; e += sum_threads) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < sum_warps; ++w) total += sums[(w * width + e % width) * 32 + e / width];
    const std::int64_t to = static_cast<std::int64_t>(blockIdx.x) * 32 * width + e;
    if (to < columns) partial[blockIdx.y * columns + to] = total;
  }
}

// sums[column] (+)= the chunks' partial sums: 32 columns a block, warp w takes chunks w, w + 8 ...
__global__ void __launch_bounds__(sum_threads)
    add_column_chunks_kernel(const float* partial, std::int64_t chunks, std::int64_t columns,
                             float* sums, bool accumulate) {
  float* parts = shared_memory<float>();  // [warps][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t chunk = warp; chunk < chunks; chunk += sum_warps)
      sum += partial[chunk * columns + column];
  }
  parts[warp * 32 + lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  float total = accumulate ? sums[column] : 0.0f;
#pragma unroll
  for (int w = 0; w < sum_warps; ++w) total += parts[w * 32 + lane];
  sums[column] = total;
}

template <class T>
__global__ void add_vector_kernel(const T* x, float* y, std::int64_t n, bool accumulate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = (accumulate ? y[i] : 0.0f) + to_float(x[i]);
}

__global__ void round_vector_kernel(const float* x, __nv_bfloat16* y, std::int64_t n) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __float2bfloat16_rn(x[i]);
}

template <class In, class Out>
void product_plain_as(const Product& p, const Operands& x) {
  const auto stored = [](std::int64_t row, std::int64_t length) { return row > 0 ? row : length; };
  const View a =
      p.a_transposed ? View{1, stored(p.a_row, p.rows)} : View{stored(p.a_row, p.inner), 1};
  const View b =
      p.b_transposed ? View{1, stored(p.b_row, p.inner)} : View{stored(p.b_row, p.columns), 1};
  const bool has_bias = p.epilogue == Epilogue::bias;
  const bool wide = has_bias && x.vector_type == DType::f32;
  launch_on(x.stream, product_kernel<In, Out>,
            dim3(blocks_for(p.rows, tile), blocks_for(p.columns, tile)), dim3(256),
            2 * slab * tile_stride * sizeof(float), static_cast<const In*>(x.a), a,
            static_cast<const In*>(x.b), b, static_cast<const float*>(wide ? x.vector : nullptr),
            static_cast<const Out*>(has_bias && !wide ? x.vector : nullptr),
            static_cast<const Out*>(p.add ? x.c : nullptr), static_cast<Out*>(x.d),
            stored(p.d_row, p.columns), p.rows, p.columns, p.inner);
}

}  // namespace

void product_plain(const Product& p, const Operands& x) {
  WEFT_ASSERT(p.epilogue == Epilogue::none || p.epilogue == Epilogue::bias);
  if (p.in == DType::f32)
    product_plain_as<float, float>(p, x);
  else if (p.out == DType::f32)
    product_plain_as<__nv_bfloat16, float>(p, x);
  else
    product_plain_as<__nv_bfloat16, __nv_bfloat16>(p, x);
}

void column_sums(const Tensor& x, std::int64_t rows, std::int64_t columns, float* sums,
                 bool accumulate, Work& work) {
  by_type(x, [&]<class T>() {
    const auto run = [&]<int width>() {
      const unsigned across = blocks_for(columns, 32 * width);
      const std::int64_t chunk = rows_per_chunk(rows, across), chunks = (rows + chunk - 1) / chunk;
      const Tensor partial = work.scratch({std::max<std::int64_t>(chunks, 1), columns}, DType::f32);
      launch_on(work.stream, chunk_sums_kernel<T, width>,
                dim3(across, static_cast<unsigned>(chunks)), dim3(sum_threads),
                sum_threads * width * sizeof(float), data<T>(x), rows, columns, chunk,
                data<float>(partial));
      launch_on(work.stream, add_column_chunks_kernel, dim3(blocks_for(columns, 32)),
                dim3(sum_threads), sum_threads * sizeof(float), data<float>(partial), chunks,
                columns, sums, accumulate);
    };
    constexpr int width = Pack<T>::size;
    const bool aligned = reinterpret_cast<std::uintptr_t>(x.raw()) % 16 == 0;
    if (columns % width == 0 && aligned)
      run.template operator()<width>();
    else
      run.template operator()<1>();
  });
}

void add_vector(const void* x, DType dtype, float* y, std::int64_t n, bool accumulate,
                Stream stream) {
  const dim3 grid(blocks_for(n, 256)), block(256);
  if (dtype == DType::bf16)
    launch_on(stream, add_vector_kernel<__nv_bfloat16>, grid, block, 0,
              static_cast<const __nv_bfloat16*>(x), y, n, accumulate);
  else
    launch_on(stream, add_vector_kernel<float>, grid, block, 0, static_cast<const float*>(x), y, n,
              accumulate);
}

void round_vector(const float* x, bf16* y, std::int64_t n, Stream stream) {
  launch_on(stream, round_vector_kernel, dim3(blocks_for(n, 256)), dim3(256), 0, x,
            reinterpret_cast<__nv_bfloat16*>(y), n);
}

}  // namespace weft::kernels
