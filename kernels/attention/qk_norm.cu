// q/k RMSNorm and rotary embedding in one pass for spatial attention (temporal.cu does it inside).
// CPU twin: src/ops/cpu/attention/attention.cpp (pack, unpack_gradient). Cases:
// tests/kernels/attention.cpp.
//
// Bound by bandwidth. Forward: q and k are read once and written once, 4 of the 3 + 1 tensors that
// attention itself moves. Backward: q, k and their gradient are read, the gradient is overwritten:
// 6. A group of lanes owns a row of D <= 128 elements, 8 of them (16 bytes of bf16) a lane: 8, 9
// and 16 lanes at D = 64, 72 and 128, so that a warp holds 4, 3 or 2 rows, and 5 lanes idle at 72.
// A group asks for all rows of a turn before it touches the first. Weight gradients are summed in
// registers along a block's rows, then over the block, then over the blocks, each in fixed order.
#include "attention/qk_norm.cuh"

#include <algorithm>

#include "divide.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int chunk = 8;

struct QkShape {
  unsigned rows;  // of one part: B T S H
  int H, D;
  Divisor heads, S, T;
  bool time;  // positions along T, else along S
};

// How lanes lie over rows of `size` elements; size 0: any D <= 128, element by element.
template <int size>
struct Lanes {
  static constexpr int lanes = size > 0 ? size / chunk : 16;  // of a row
  static constexpr int rows = 32 / lanes;                     // of a warp
  static constexpr int groups = threads / 32 * rows;          // of a block
  int group, column;
  bool idle;  // belongs to no row: computes along with the warp's first, stores nothing

  __device__ Lanes() {
    const int lane = threadIdx.x % 32, row = lane / lanes;
    idle = row >= rows;
    group = static_cast<int>(threadIdx.x) / 32 * rows + (idle ? 0 : row);
    column = lane % lanes * chunk;
  }

  // Over the lanes of the row; each has it, in a fixed order of its own.
  __device__ __forceinline__ float sum(float x) const {
    if constexpr (lanes == 9) {
      const int own = column / chunk, first = static_cast<int>(threadIdx.x % 32) - own;
      // Idle lanes reach beyond the warp and get some other row's: it counts nowhere.
      const auto from = [&](float y, int distance) {
        const int to = own + distance;
        return __shfl_sync(full_mask, y, first + (to < lanes ? to : to - lanes));
      };
      x += from(x, 1) + from(x, 2);
      return x + (from(x, 3) + from(x, 6));
    } else {
#pragma unroll
      for (int offset = lanes / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(full_mask, x, offset);
      return x;
    }
  }
};

// A lane's elements of a row as they are in memory.
template <class T>
struct Raw {
  static constexpr int width = 16 / sizeof(T), parts = chunk / width;
  Vec<T, width> part[parts];
};

// Zeros beyond D, of a size that is not fixed.
template <int size, class T>
__device__ __forceinline__ Raw<T> load_raw(const T* row, int column, int D) {
  using R = Raw<T>;
  R raw;
  if constexpr (size > 0) {
#pragma unroll
    for (int i = 0; i < R::parts; ++i)
      raw.part[i] = load_vec<R::width>(row + column + i * R::width, 0);
  } else {
#pragma unroll
    for (int i = 0; i < R::parts; ++i) {
      float v[R::width];
#pragma unroll
      for (int e = 0; e < R::width; ++e) {
        const int c = column + i * R::width + e;
        v[e] = c < D ? to_float(row[c]) : 0.0f;
      }
      raw.part[i] = pack<T>(v);
    }
  }
  return raw;
}
template <class T>
__device__ __forceinline__ void unpack_raw(float (&v)[chunk], const Raw<T>& raw) {
  using R = Raw<T>;
#pragma unroll
  for (int i = 0; i < R::parts; ++i) {
    float f[R::width];
    unpack(raw.part[i], f);
#pragma unroll
    for (int e = 0; e < R::width; ++e) v[i * R::width + e] = f[e];
  }
}
template <int size, class T>
__device__ __forceinline__ void store_chunk(T* row, int column, const float (&v)[chunk], int D) {
  using R = Raw<T>;
  if constexpr (size > 0) {
#pragma unroll
    for (int i = 0; i < R::parts; ++i) {
      float f[R::width];
#pragma unroll
      for (int e = 0; e < R::width; ++e) f[e] = v[i * R::width + e];
      store_vec<R::width>(row + column + i * R::width, 0, pack<T>(f));
    }
  } else {
#pragma unroll
    for (int e = 0; e < chunk; ++e)
      if (column + e < D) row[column + e] = from_float<T>(v[e]);
  }
}

// (cos, sin) of the position of a token.
__device__ __forceinline__ const float* turns_of(const QkShape& shape, const float* rope,
                                                 unsigned token) {
  const unsigned frame = shape.S.split(token);  // over B and T; the token is the place in it
  unsigned position = token;
  if (shape.time) {
    position = frame;
    shape.T.split(position);
  }
  return rope + static_cast<std::int64_t>(position) * shape.D;
}

// Rotates interleaved pairs by `sign` times their angle.
__device__ __forceinline__ void rotate(float (&v)[chunk], const float* turns, float sign,
                                       int column, int D) {
#pragma unroll
  for (int e = 0; e < chunk; e += 2) {
    if (column + e >= D) continue;
    const float2 cs = *reinterpret_cast<const float2*>(turns + column + e);
    const float a = v[e], b = v[e + 1], sine = sign * cs.y;
    v[e] = a * cs.x - b * sine;
    v[e + 1] = a * sine + b * cs.x;
  }
}

template <int size>
__device__ __forceinline__ float inverse_rms(const Lanes<size>& lanes, const float (&v)[chunk],
                                             float share) {
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < chunk; ++e) squares += v[e] * v[e];
  return rsqrtf(lanes.sum(squares) * share + qk_norm_epsilon);
}

// Blocks x: rows of one part; y: the part.
template <int size, class T>
__global__ void __launch_bounds__(threads)
    qk_norm_forward_kernel(QkShape shape, const T* qkv, const float* wq, const float* wk,
                           const float* rope, T* qk) {
  constexpr int flight = 4;  // rows of a group whose loads are under way at once
  const Lanes<size> lanes;
  const int part = static_cast<int>(blockIdx.y), D = size > 0 ? size : shape.D;
  const float* const weight = part == 0 ? wq : wk;
  const unsigned first = blockIdx.x * (Lanes<size>::groups * flight) + lanes.group;
  Raw<T> raw[flight];
  unsigned tokens[flight];
#pragma unroll
  for (int r = 0; r < flight; ++r) {
    const unsigned i = min(first + r * Lanes<size>::groups, shape.rows - 1);
    tokens[r] = shape.heads.divide(i);
    // A token has H rows of q, of k and of v.
    const std::int64_t row = i + static_cast<std::int64_t>(2 * tokens[r] + part) * shape.H;
    raw[r] = load_raw<size>(qkv + row * D, lanes.column, D);
  }
  float w[chunk];
  if (weight) unpack_raw(w, load_raw<size>(weight, lanes.column, D));
#pragma unroll
  for (int r = 0; r < flight; ++r) {
    const unsigned i = first + r * Lanes<size>::groups;
    float v[chunk];
    unpack_raw(v, raw[r]);
    if (weight) {
      const float rstd = inverse_rms(lanes, v, 1.0f / static_cast<float>(D));
#pragma unroll
      for (int e = 0; e < chunk; ++e) v[e] *= rstd * w[e];
    }
    if (rope) rotate(v, turns_of(shape, rope, tokens[r]), 1.0f, lanes.column, D);
    const std::int64_t row = i + static_cast<std::int64_t>(tokens[r] + part) * shape.H;
    if (i < shape.rows && !lanes.idle) store_chunk<size>(qk + row * D, lanes.column, v, D);
  }
}

// Blocks x: rows of one part, strided over the blocks; y: the part. partial [2][gridDim.x][D].
template <int size, class T>
__global__ void __launch_bounds__(threads, 3)
    qk_norm_backward_kernel(QkShape shape, const T* qkv, const float* wq, const float* wk,
                            const float* rope, T* dqkv, float* partial) {
  constexpr int flight = 2, groups = Lanes<size>::groups, width = Lanes<size>::lanes * chunk;
  const Lanes<size> lanes;
  const int part = static_cast<int>(blockIdx.y), D = size > 0 ? size : shape.D;
  const float* const weight = part == 0 ? wq : wk;
  const float share = 1.0f / static_cast<float>(D);
  float w[chunk], dw[chunk];
  if (weight) unpack_raw(w, load_raw<size>(weight, lanes.column, D));
#pragma unroll
  for (int e = 0; e < chunk; ++e) dw[e] = 0.0f;
  // Every group makes as many passes as the others, since its warp's shuffles need all lanes.
  for (unsigned base = blockIdx.x * groups * flight; base < shape.rows;
       base += gridDim.x * groups * flight) {
    Raw<T> raw_x[flight], raw_g[flight];
    unsigned tokens[flight];
    T* to[flight];
#pragma unroll
    for (int r = 0; r < flight; ++r) {
      const unsigned i = min(base + r * groups + lanes.group, shape.rows - 1);
      tokens[r] = shape.heads.divide(i);
      const std::int64_t row = i + static_cast<std::int64_t>(2 * tokens[r] + part) * shape.H;
      to[r] = dqkv + row * D;
      raw_x[r] = load_raw<size>(qkv + row * D, lanes.column, D);
      raw_g[r] = load_raw<size>(to[r], lanes.column, D);
    }
#pragma unroll
    for (int r = 0; r < flight; ++r) {
      const bool valid = base + r * groups + lanes.group < shape.rows && !lanes.idle;
      float x[chunk], g[chunk];
      unpack_raw(x, raw_x[r]);
      unpack_raw(g, raw_g[r]);
      if (rope) rotate(g, turns_of(shape, rope, tokens[r]), -1.0f, lanes.column, D);
      if (weight) {
        const float rstd = inverse_rms(lanes, x, share);
        float dot = 0.0f;
#pragma unroll
        for (int e = 0; e < chunk; ++e) {
          x[e] *= rstd;
          if (valid) dw[e] += g[e] * x[e];
          g[e] *= w[e];
          dot += g[e] * x[e];
        }
        const float mean = lanes.sum(dot) * share;
#pragma unroll
        for (int e = 0; e < chunk; ++e) g[e] = rstd * (g[e] - x[e] * mean);
      }
      if (valid) store_chunk<size>(to[r], lanes.column, g, D);
    }
  }
  if (partial == nullptr) return;
  float* const sums = shared_memory<float>();  // [groups][width]
  if (!lanes.idle) {
#pragma unroll
    for (int e = 0; e < chunk; ++e) sums[lanes.group * width + lanes.column + e] = dw[e];
  }
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= D) return;
  float sum = 0.0f;
  for (int i = 0; i < groups; ++i) sum += sums[i * width + c];
  partial[(static_cast<std::int64_t>(part) * gridDim.x + blockIdx.x) * D + c] = sum;
}

// One block a column and part: dw[c] += the sum of the blocks' partials, by a tree of fixed shape.
__global__ void __launch_bounds__(threads)
    qk_norm_weights_kernel(const float* partial, int blocks, int D, float* dwq, float* dwk) {
  const int c = static_cast<int>(blockIdx.x), part = static_cast<int>(blockIdx.y);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < blocks; i += threads)
    sum += partial[(static_cast<std::int64_t>(part) * blocks + i) * D + c];
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) (part == 0 ? dwq : dwk)[c] += sum;
}

QkShape shape_of(const Tensor& qkv, ops::Axis axis) {
  const std::int64_t rows = qkv.dim(0) * qkv.dim(1) * qkv.dim(2) * qkv.dim(4);
  WEFT_ASSERT(rows < std::int64_t{1} << 30);
  return {.rows = static_cast<unsigned>(rows),
          .H = static_cast<int>(qkv.dim(4)),
          .D = static_cast<int>(qkv.dim(5)),
          .heads = Divisor(qkv.dim(4)),
          .S = Divisor(qkv.dim(2)),
          .T = Divisor(qkv.dim(1)),
          .time = axis == ops::Axis::time};
}

// Calls f.operator()<size, type>() with the size of the rows that has kernels of its own, else 0.
template <class F>
void by_size(const Tensor& qkv, const Tensor& other, F&& f) {
  by_type(qkv, [&]<class T>() {
    const std::int64_t D = aligned<16 / sizeof(T)>(qkv, other) ? qkv.dim(5) : 0;
    if (D == 64) return f.template operator()<64, T>();
    if (D == 72) return f.template operator()<72, T>();
    if (D == 128) return f.template operator()<128, T>();
    f.template operator()<0, T>();
  });
}

}  // namespace

void qk_norm_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                     ops::Axis axis, Tensor& qk) {
  const QkShape shape = shape_of(qkv, axis);
  by_size(qkv, qk, [&]<int size, class T>() {
    launch(qk_norm_forward_kernel<size, T>,
           dim3(blocks_for(shape.rows, 4 * Lanes<size>::groups), 2), dim3(threads), 0, shape,
           data<T>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
           data_or_null<float>(rope), data<T>(qk));
  });
}

void qk_norm_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      ops::Axis axis, Tensor& dqkv, Tensor& dwq, Tensor& dwk) {
  const QkShape shape = shape_of(qkv, axis);
  by_size(qkv, dqkv, [&]<int size, class T>() {
    // As many blocks as the device holds at once, for both parts: few partial sums, no last wave
    // that leaves most of it idle.
    const unsigned most = 3 * static_cast<unsigned>(cuda_properties().multiProcessorCount) / 2;
    const unsigned blocks = std::min(most, blocks_for(shape.rows, 2 * Lanes<size>::groups));
    Tensor partial;
    if (dwq.defined()) partial = Tensor::empty({2, blocks, shape.D}, DType::f32);
    launch(qk_norm_backward_kernel<size, T>, dim3(blocks, 2), dim3(threads),
           sizeof(float) * Lanes<size>::groups * Lanes<size>::lanes * chunk, shape, data<T>(qkv),
           data_or_null<float>(wq), data_or_null<float>(wk), data_or_null<float>(rope),
           data<T>(dqkv), data_or_null<float>(partial));
    if (!dwq.defined()) return;
    launch(qk_norm_weights_kernel, dim3(static_cast<unsigned>(shape.D), 2), dim3(threads),
           sizeof(float) * 32, data<float>(partial), static_cast<int>(blocks), shape.D,
           data<float>(dwq), data<float>(dwk));
  });
}

}  // namespace weft::kernels
