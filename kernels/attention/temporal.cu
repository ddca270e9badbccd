// Self attention along frames (ops/attention.h with Axis::time): in bf16 with D = 64, 72 and 128 on
// tensor cores (temporal_mma.cu, where bytes and operations are counted); one frame (images) is a
// copy and is done as one, 4 values a channel and direction. All others are flash attention's
// (attention.cu). CPU twin src/ops/cpu/attention/attention.cpp, cases
// tests/kernels/attention.cpp.
#include "attention/temporal.cuh"

#include "attention/qk_norm.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace temporal {
namespace {

constexpr int max_frames = 128;

struct Layout {
  int T, S, H, D;
  unsigned units;  // B S H
};

// One frame. The softmax of a single score is 1 whatever the score: out is v, dv is dout, q and k
// get no gradient, and the weights none. Only lse takes q and k; the rotation, which is the same
// for both, does not change their product.

// 16 bytes a lane; a row of D <= 128 for so many.
template <class T>
constexpr int one_pack = 16 / sizeof(T);
template <class T>
constexpr int one_lanes = 128 / one_pack<T>;

template <class T>
__global__ void __launch_bounds__(threads)
    one_frame_forward_kernel(const T* qkv, const float* wq, const float* wk, T* out, float* lse,
                             Layout l, float factor) {
  constexpr int pack = one_pack<T>, lanes = one_lanes<T>;
  const int c = static_cast<int>(threadIdx.x) % lanes * pack;
  const unsigned row = blockIdx.x * (threads / lanes) + threadIdx.x / lanes;
  float sums[3] = {0.0f, 0.0f, 0.0f};  // q k, q q, k k
  if (row < l.units && c < l.D) {
    const unsigned token = row / static_cast<unsigned>(l.H);
    const std::int64_t C = static_cast<std::int64_t>(l.H) * l.D;
    const T* at = qkv + static_cast<std::int64_t>(row) * l.D + token * 2 * C + c;
    const auto q = load_vec<pack>(at, 0), k = load_vec<pack>(at + C, 0),
               v = load_vec<pack>(at + 2 * C, 0);
    store_vec<pack>(out + static_cast<std::int64_t>(row) * l.D + c, 0, v);
    float x[pack], y[pack];
    unpack(q, x);
    unpack(k, y);
#pragma unroll
    for (int e = 0; e < pack; ++e) {
      sums[0] += x[e] * y[e] * (wq != nullptr ? wq[c + e] * wk[c + e] : 1.0f);
      sums[1] += x[e] * x[e];
      sums[2] += y[e] * y[e];
    }
  }
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < 3; ++i) sums[i] += __shfl_xor_sync(full_mask, sums[i], offset);
  if (c > 0 || row >= l.units) return;
  if (wq != nullptr) {
    const float size = static_cast<float>(l.D);
    factor *= rsqrtf(sums[1] / size + qk_norm_epsilon) * rsqrtf(sums[2] / size + qk_norm_epsilon);
  }
  lse[row] = sums[0] * factor;
}

// A thread: 16 bytes of a token's C = H D.
template <class T>
__global__ void __launch_bounds__(threads)
    one_frame_backward_kernel(const T* dout, T* dqkv, unsigned count, unsigned row_packs) {
  constexpr int pack = one_pack<T>;
  const unsigned i = blockIdx.x * threads + threadIdx.x;
  if (i >= count) return;
  const auto g = load_vec<pack>(dout, i);
  const Vec<T, pack> zero{};
  const std::int64_t to = static_cast<std::int64_t>(i / row_packs) * 2 * row_packs + i;
  store_vec<pack>(dqkv, to, zero);
  store_vec<pack>(dqkv, to + row_packs, zero);
  store_vec<pack>(dqkv, to + 2 * static_cast<std::int64_t>(row_packs), g);
}

// Whether the two above can do it: row lengths and addresses of whole packs.
bool one_frame(const Tensor& qkv, const Layout& l, const Tensor& a, const Tensor& b) {
  const auto pack = static_cast<std::int64_t>(16 / size_of(qkv.dtype()));
  return l.T == 1 && l.D <= 128 && l.D % pack == 0 && qkv.numel() / pack < std::int64_t{1} << 32 &&
         (pack == 8 ? aligned<8>(a, b) : aligned<4>(a, b));
}

// One column a block.
__global__ void __launch_bounds__(256)
    add_pieces_kernel(const float* partial, int pieces, int D, float* dwq, float* dwk) {
  float* scratch = shared_memory<float>();
  const int column = static_cast<int>(blockIdx.x);
  const float* from = partial + static_cast<std::int64_t>(column) * pieces;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) sum += from[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) (column < D ? dwq[column] : dwk[column - D]) += sum;
}

Layout layout_of(const Tensor& qkv) {
  Layout l{static_cast<int>(qkv.dim(1)), static_cast<int>(qkv.dim(2)), static_cast<int>(qkv.dim(4)),
           static_cast<int>(qkv.dim(5)), 0};
  const std::int64_t units = qkv.dim(0) * l.S * l.H;
  WEFT_ASSERT(units < std::int64_t{1} << 31);
  l.units = static_cast<unsigned>(units);
  return l;
}

}  // namespace

void add_pieces(const Tensor& partial, Tensor& dwq, Tensor& dwk) {
  const auto D = static_cast<int>(partial.dim(0) / 2), n = static_cast<int>(partial.dim(1));
  launch(add_pieces_kernel, dim3(static_cast<unsigned>(2 * D)), dim3(256), 32 * sizeof(float),
         data<float>(partial), n, D, data<float>(dwq), data<float>(dwk));
}

}  // namespace temporal

bool temporal_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      Tensor& out, Tensor& lse) {
  using namespace temporal;
  const Layout l = layout_of(qkv);
  if (l.units == 0) return true;
  if (!one_frame(qkv, l, qkv, out))
    return l.T <= max_frames && mma_forward(qkv, wq, wk, rope, out, lse);
  by_type(qkv, [&]<class T>() {
    launch(one_frame_forward_kernel<T>, dim3(blocks_for(l.units, threads / one_lanes<T>)),
           dim3(threads), 0, data<T>(qkv), data_or_null<float>(wq), data_or_null<float>(wk),
           data<T>(out), data<float>(lse), l, inverse_root(l.D));
  });
  return true;
}

bool temporal_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                       const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                       Tensor& dwq, Tensor& dwk) {
  using namespace temporal;
  const Layout l = layout_of(qkv);
  if (l.units == 0) return true;
  if (!one_frame(qkv, l, dout, dqkv))
    return l.T <= max_frames && mma_backward(qkv, wq, wk, rope, out, lse, dout, dqkv, dwq, dwk);
  by_type(qkv, [&]<class T>() {
    const auto count = static_cast<unsigned>(dout.numel() / one_pack<T>);
    launch(one_frame_backward_kernel<T>, dim3(blocks_for(count, threads)), dim3(threads), 0,
           data<T>(dout), data<T>(dqkv), count, static_cast<unsigned>(l.H * l.D / one_pack<T>));
  });
  return true;
}

}  // namespace weft::kernels
