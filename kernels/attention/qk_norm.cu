// q/k RMSNorm and rotary embedding in one pass for spatial attention (temporal.cu does it inside).
// CPU twin: src/ops/cpu/attention/attention.cpp (pack, unpack_gradient). Cases:
// src/bench/kernels/attention.cpp.
//
// Bound by bandwidth. Forward: q and k are read once and written once, 4 of the 3 + 1 tensors that
// attention itself moves. Backward: q, k and their gradient are read, the gradient is
// overwritten: 6. A group of 16 lanes owns a row of D <= 128 elements, 8 of them (16 bytes of bf16)
// a lane, so that sums over a row are four shuffles. Weight gradients are summed in registers along
// a block's rows, then over the block, then over the blocks, each in fixed order.
#include "attention/qk_norm.cuh"

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256, lanes = 16, groups = threads / lanes, chunk = 8;
constexpr int flight = 4;  // rows of a group whose loads are under way at once
constexpr float epsilon = 1e-6f;

struct QkShape {
  std::int64_t tokens;
  int S, T, H, D;
  bool time;  // positions along T, else along S
};

template <class T>
struct QkRow {
  const T* x;         // the row of q or k
  const float* rope;  // (cos, sin) of its position, or null
  std::int64_t token;
  int part, head;
};

// Rows are counted in 32 bits: a 64-bit division takes longer than memory takes to deliver a row.
template <class T>
__device__ __forceinline__ QkRow<T> find_row(const QkShape& shape, const T* qkv, const float* rope,
                                             unsigned token, int part, int head) {
  QkRow<T> row;
  row.head = head;
  row.part = part;
  row.token = token;
  row.x = qkv + ((row.token * 3 + part) * shape.H + head) * shape.D;
  row.rope = nullptr;
  if (rope) {
    const unsigned S = static_cast<unsigned>(shape.S), T_ = static_cast<unsigned>(shape.T);
    row.rope = rope + (shape.time ? token / S % T_ : token % S) * static_cast<unsigned>(shape.D);
  }
  return row;
}
// Row `i` of the q and k rows in the order of memory: token, part, head.
template <class T>
__device__ __forceinline__ QkRow<T> find_row(const QkShape& shape, const T* qkv, const float* rope,
                                             unsigned i) {
  const unsigned H = static_cast<unsigned>(shape.H), part_row = i / H;
  return find_row(shape, qkv, rope, part_row / 2, static_cast<int>(part_row % 2),
                  static_cast<int>(i - part_row * H));
}

// This lane's 8 elements of a row of D; zeros beyond.
template <class T>
__device__ __forceinline__ void load_chunk(float (&v)[chunk], const T* x, int D) {
  const int c = threadIdx.x % lanes * chunk;
  if (D % chunk == 0) {
    for (int e = 0; e < chunk; ++e) v[e] = 0.0f;
    if (c >= D) return;
#pragma unroll
    for (int part = 0; part < chunk / Pack<T>::size; ++part) {
      const Pack<T> p = load_pack(x + c + part * Pack<T>::size);
      for (int e = 0; e < Pack<T>::size; ++e) v[part * Pack<T>::size + e] = to_float(p.v[e]);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < chunk; ++e) v[e] = c + e < D ? to_float(x[c + e]) : 0.0f;
}
template <class T>
__device__ __forceinline__ void store_chunk(T* x, const float (&v)[chunk], int D) {
  const int c = threadIdx.x % lanes * chunk;
  if (D % chunk == 0) {
    if (c >= D) return;
#pragma unroll
    for (int part = 0; part < chunk / Pack<T>::size; ++part) {
      Pack<T> p;
      for (int e = 0; e < Pack<T>::size; ++e) p.v[e] = from_float<T>(v[part * Pack<T>::size + e]);
      store_pack(x + c + part * Pack<T>::size, p);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < chunk; ++e)
    if (c + e < D) x[c + e] = from_float<T>(v[e]);
}

__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_mask, x, offset);
  return x;
}

__device__ __forceinline__ float inverse_rms(const float (&v)[chunk], int D) {
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < chunk; ++e) squares += v[e] * v[e];
  return rsqrtf(group_sum(squares) / static_cast<float>(D) + epsilon);
}

// Rotates interleaved pairs by `sign` times their angle.
__device__ __forceinline__ void rotate(float (&v)[chunk], const float* rope, float sign, int D) {
  const int c = threadIdx.x % lanes * chunk;
#pragma unroll
  for (int e = 0; e < chunk; e += 2) {
    if (c + e >= D) continue;
    const float2 cs = *reinterpret_cast<const float2*>(rope + c + e);
    const float a = v[e], b = v[e + 1], sine = sign * cs.y;
    v[e] = a * cs.x - b * sine;
    v[e + 1] = a * sine + b * cs.x;
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    qk_norm_forward_kernel(QkShape shape, const T* qkv, const float* wq, const float* wk,
                           const float* rope, T* qk) {
  const unsigned rows = static_cast<unsigned>(shape.tokens * 2 * shape.H);
  const unsigned first = (blockIdx.x * groups + threadIdx.x / lanes) * flight;
  float v[flight][chunk];
#pragma unroll
  for (int r = 0; r < flight; ++r) {
    const unsigned i = first + r < rows ? first + r : rows - 1;
    load_chunk(v[r], find_row(shape, qkv, rope, i).x, shape.D);
  }
#pragma unroll
  for (int r = 0; r < flight; ++r) {
    const unsigned i = first + r < rows ? first + r : rows - 1;
    const QkRow<T> row = find_row(shape, qkv, rope, i);
    if (wq) {
      const float rstd = inverse_rms(v[r], shape.D);
      float w[chunk];
      load_chunk(w, row.part == 0 ? wq : wk, shape.D);
#pragma unroll
      for (int e = 0; e < chunk; ++e) v[r][e] *= rstd * w[e];
    }
    if (row.rope) rotate(v[r], row.rope, 1.0f, shape.D);
    if (first + r < rows)
      store_chunk(qk + ((row.token * 2 + row.part) * shape.H + row.head) * shape.D, v[r], shape.D);
  }
}

// Blocks x: rows of one part, strided over the blocks; y: the part. partial [2][gridDim.x][D].
template <class T>
__global__ void __launch_bounds__(threads)
    qk_norm_backward_kernel(QkShape shape, const T* qkv, const float* wq, const float* wk,
                            const float* rope, T* dqkv, float* partial) {
  const int part = static_cast<int>(blockIdx.y), group = threadIdx.x / lanes, D = shape.D;
  const unsigned rows = static_cast<unsigned>(shape.tokens * shape.H),
                 H = static_cast<unsigned>(shape.H);
  const float* const weight = part == 0 ? wq : wk;
  float w[chunk], dw[chunk];
  if (weight) load_chunk(w, weight, D);
#pragma unroll
  for (int e = 0; e < chunk; ++e) dw[e] = 0.0f;
  const unsigned step = gridDim.x * groups;
  // Every group makes as many passes as the others, since its warp's shuffles need all lanes.
  const unsigned passes = (rows + step - 1) / step;
  for (unsigned pass = 0; pass < passes; ++pass) {
    unsigned i = pass * step + blockIdx.x * groups + static_cast<unsigned>(group);
    const bool valid = i < rows;
    if (!valid) i = rows - 1;
    const unsigned token = i / H;
    const QkRow<T> row = find_row(shape, qkv, rope, token, part, static_cast<int>(i - token * H));
    T* const dx = dqkv + (row.x - qkv);
    float x[chunk], g[chunk];
    load_chunk(x, row.x, D);
    load_chunk(g, dx, D);
    if (row.rope) rotate(g, row.rope, -1.0f, D);
    if (weight) {
      const float rstd = inverse_rms(x, D);
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        x[e] *= rstd;
        if (valid) dw[e] += g[e] * x[e];
        g[e] *= w[e];
        dot += g[e] * x[e];
      }
      const float mean = group_sum(dot) / static_cast<float>(D);
#pragma unroll
      for (int e = 0; e < chunk; ++e) g[e] = rstd * (g[e] - x[e] * mean);
    }
    if (valid) store_chunk(dx, g, D);
  }
  if (partial == nullptr) return;
  float* const sums = shared_memory<float>();  // [groups][lanes * chunk]
#pragma unroll
  for (int e = 0; e < chunk; ++e)
    sums[group * lanes * chunk + threadIdx.x % lanes * chunk + e] = dw[e];
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x);
  if (c >= D) return;
  float sum = 0.0f;
  for (int i = 0; i < groups; ++i) sum += sums[i * lanes * chunk + c];
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
  QkShape s;
  s.tokens = qkv.dim(0) * qkv.dim(1) * qkv.dim(2);
  s.T = static_cast<int>(qkv.dim(1));
  s.S = static_cast<int>(qkv.dim(2));
  s.H = static_cast<int>(qkv.dim(4));
  s.D = static_cast<int>(qkv.dim(5));
  s.time = axis == ops::Axis::time;
  WEFT_ASSERT(s.tokens * 2 * s.H < std::int64_t{1} << 31);
  return s;
}

}  // namespace

void qk_norm_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                     ops::Axis axis, Tensor& qk) {
  const QkShape shape = shape_of(qkv, axis);
  by_type(qkv, [&]<class T>() {
    launch(qk_norm_forward_kernel<T>, dim3(blocks_for(shape.tokens * 2 * shape.H, flight * groups)),
           dim3(threads), 0, shape, data<T>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
           data_or_null<float>(rope), data<T>(qk));
  });
}

void qk_norm_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      ops::Axis axis, Tensor& dqkv, Tensor& dwq, Tensor& dwk) {
  const QkShape shape = shape_of(qkv, axis);
  // Enough blocks to fill the device, few enough that their partial sums are cheap.
  const unsigned most = 4 * static_cast<unsigned>(cuda_properties().multiProcessorCount);
  const unsigned needed = blocks_for(shape.tokens * shape.H, groups);
  const unsigned blocks = needed < most ? needed : most;
  Tensor partial;
  if (dwq.defined()) partial = Tensor::empty({2, blocks, shape.D}, DType::f32);
  by_type(qkv, [&]<class T>() {
    launch(qk_norm_backward_kernel<T>, dim3(blocks, 2), dim3(threads),
           sizeof(float) * groups * lanes * chunk, shape, data<T>(qkv), data_or_null<float>(wq),
           data_or_null<float>(wk), data_or_null<float>(rope), data<T>(dqkv),
           data_or_null<float>(partial));
  });
  if (!dwq.defined()) return;
  launch(qk_norm_weights_kernel, dim3(static_cast<unsigned>(shape.D), 2), dim3(threads),
         sizeof(float) * 32, data<float>(partial), static_cast<int>(blocks), shape.D,
         data<float>(dwq), data<float>(dwk));
}

}  // namespace weft::kernels
