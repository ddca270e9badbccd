// What the norms of long rows share (norm_rows.cu, rms_rope.cu): a block walks a run of tokens of
// one frame, and holds a whole row at a time in registers, N quads of neighbouring channels a
// thread. What goes with a column (weights, sums of gradients) stays with its thread for all of the
// run. One barrier a sum over the row; eight and more blocks on an SM keep loads under way
// meanwhile.
#pragma once

#include "norm/frames.cuh"

namespace weft::kernels {

constexpr int row_threads = 512;  // most threads of a block

// Calls f.operator()<N>(threads) with N quads a thread. Models have whole quads of channels and no
// longer rows (their options say so), and tensors of them begin at 16 bytes.
template <class F>
void by_row(int channels, F&& f) {
  WEFT_ASSERT(channels % 4 == 0 && channels <= 4 * 5 * row_threads);
  if (channels <= 512)
    f.template operator()<1>(128);
  else if (channels <= 1536)
    f.template operator()<3>(128);
  else if (channels <= 3072)
    f.template operator()<3>(256);
  else
    f.template operator()<5>(channels <= 5120 ? 256 : row_threads);
}

// This thread's n-th quad of a row.
__device__ __forceinline__ int row_quad(int n) {
  return n * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
}

// This thread's quads of a row; those beyond it are zero.
template <class T, int N>
__device__ __forceinline__ void load_quads(const T* row, int channels, Quad<T> (&q)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    q[n] = row_quad(n) * 4 < channels ? load_vec<4>(row, row_quad(n)) : Quad<T>{};
}

// Sums over the block of two numbers of each thread, to every thread, in the order of warps. Two
// halves of the scratch take turns: the next call but one is behind another barrier, so one a call
// is enough.
class BlockSums {
 public:
  static constexpr int bytes = 2 * row_threads / 32 * static_cast<int>(sizeof(float2));
  __device__ BlockSums() : scratch_(shared_memory<float2>()) {}

  __device__ float2 operator()(float a, float b) {
    const int warps = static_cast<int>(blockDim.x) / 32;
    float2* at = scratch_ + turn_ * (row_threads / 32);
    turn_ ^= 1;
    a = warp_sum(a);
    b = warp_sum(b);
    if (threadIdx.x % 32 == 0) at[threadIdx.x / 32] = make_float2(a, b);
    __syncthreads();
    float2 sum = at[0];
    for (int w = 1; w < warps; ++w) {
      sum.x += at[w].x;
      sum.y += at[w].y;
    }
    return sum;
  }
  __device__ float operator()(float a) {
    const int warps = static_cast<int>(blockDim.x) / 32;
    float2* at = scratch_ + turn_ * (row_threads / 32);
    turn_ ^= 1;
    a = warp_sum(a);
    if (threadIdx.x % 32 == 0) at[threadIdx.x / 32].x = a;
    __syncthreads();
    float sum = at[0].x;
    for (int w = 1; w < warps; ++w) sum += at[w].x;
    return sum;
  }

 private:
  float2* scratch_;
  int turn_ = 0;
};

// Adds this thread's column sums to its place of out [C], as they are.
template <int N>
__device__ __forceinline__ void store_sums(const float (&sum)[N][4], int channels, float* out) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (row_quad(n) * 4 < channels) store_vec<4>(out, row_quad(n), pack<float, 4>(sum[n]));
}

// Calls f.operator()<X, Y>() with the types of the residual stream and of the branch (ops/norm.h).
template <class F>
void by_stream(const Tensor& stream, const Tensor& branch, F&& f) {
  WEFT_ASSERT(stream.dtype() == DType::f32 || branch.dtype() == DType::bf16);
  if (stream.dtype() == DType::bf16)
    f.template operator()<__nv_bfloat16, __nv_bfloat16>();
  else
    by_type(branch, [&]<class Y>() { f.template operator()<float, Y>(); });
}

// ---- norm_rows.cu: LayerNorm for what the warps of layer_norm.cu do not take: long rows, a
// residual stream of another type, affine norms.

// A frame's rows are scaled by one + scale and shifted: with a modulation (one = 1) by the row of
// it that `rows` names; affine (one = 0, rows null) by the weights themselves, one frame in all.
struct RowNorm {
  const float *scale, *shift;
  const std::int32_t* rows;
  float one;
  int first_row;
  FrameGrid g;

  __device__ int group(int frame) const { return rows == nullptr ? 0 : rows[frame]; }
  // Where the group's vector lies, of scale and of shift.
  __device__ std::int64_t offset(int group) const {
    return static_cast<std::int64_t>(group) * g.vectors * g.channels;
  }
};
void norm_rows_forward(RowNorm norm, const Tensor& x, Tensor& y, Tensor& stats);
// partial [frames, runs, 2, C]: the shift's and the scale's.
void norm_rows_backward(const RowNorm& norm, const Tensor& x, const Tensor& stats, const Tensor& dy,
                        Tensor& dx, bool accumulate, const Tensor& partial);
// Blocks of it that an SM has.
constexpr int norm_rows_blocks = 4;

// to [C] += the partials [count, stride] of each column, in an order that `count` decides.
void add_columns(const float* partial, int count, int stride, int channels, float* to);

}  // namespace weft::kernels
