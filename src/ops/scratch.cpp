#include <algorithm>
#include <limits>

#include "core/error.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/norm.h"
#include "ops/resize.h"

namespace weft::ops {

ConvScratch conv_scratch;

Shape Conv::output(const Shape& x, std::int64_t out_channels) const {
  WEFT_ASSERT(x.rank() == 5);
  WEFT_ASSERT(x[4] % groups == 0 && out_channels % groups == 0);
  WEFT_ASSERT(!upsample || (kh == 3 && kw == 3 && stride == 1 && stride_t == 1 && top == 1 &&
                            left == 1 && bottom == 1 && right == 1));
  WEFT_ASSERT(!upsample || (dilation == 1 && groups == 1));
  WEFT_ASSERT(!upsample || front + back == kt - 1);
  WEFT_ASSERT(back == 0 || back < kt);
  const std::int64_t scale = upsample ? 2 : 1;
  const std::int64_t t = x[1] + front + back - kt,
                     h = scale * x[2] + top + bottom - dilation * (kh - 1) - 1,
                     w = scale * x[3] + left + right - dilation * (kw - 1) - 1;
  WEFT_CHECK(t >= 0 && h >= 0 && w >= 0, Exit::data,
             "give frames of at least 8x8 pixels, or a clip of more frames",
             "a {}x{}x{} kernel does not fit into activations {}", kt, kh, kw, x.str());
  return {x[0], t / stride_t + 1, h / stride + 1, w / stride + 1, out_channels};
}

}  // namespace weft::ops

// The blocks that kernels/conv/conv.cu takes, in its order.
namespace weft::ops::cuda_plan {
namespace {

Tensor phase_weights(const Conv& k, std::int64_t out, std::int64_t in, DType type) {
  return Tensor::empty({4, out, k.kt, 2, 2, in}, type);
}

Tensor workspace() { return Tensor::empty({conv_scratch.workspace / 4}, DType::f32); }

// Phases of whole frames, or of whole volumes where time is summed over.
Tensor phases(const Conv& k, const Shape& small, std::int64_t out, DType type) {
  const std::int64_t depth = k.kt > 1 ? small[1] : 1;
  const std::int64_t unit = depth * (small[2] + 1) * (small[3] + 1) * 4 * out;
  const std::int64_t limit = conv_scratch.phases / static_cast<std::int64_t>(size_of(type));
  return Tensor::empty(
      {std::clamp<std::int64_t>(limit / unit, 1, small[0] * small[1] / depth), unit}, type);
}

}  // namespace

void conv_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                  Conv conv, Tensor& y) {
  if (y.numel() == 0 || conv.is_product()) return;
  if (conv.upsample) {
    const std::int64_t H = x.dim(2), row = (x.dim(3) + 1) * 4 * y.dim(4);
    const std::int64_t limit = conv_scratch.phases / static_cast<std::int64_t>(size_of(x.dtype()));
    // A band of `rows` input rows has one more row of phases.
    const std::int64_t rows = std::clamp<std::int64_t>(limit / row - 1, 1, H);
    const std::int64_t frames =
        rows < H ? 1 : std::clamp<std::int64_t>(limit / ((H + 1) * row), 1, x.dim(0) * x.dim(1));
    const Tensor weights = phase_weights(conv, y.dim(4), x.dim(4), x.dtype());
    if (conv.kt > 1) {
      const Tensor volumes = phases(conv, x.shape(), y.dim(4), x.dtype());
      workspace();
      return;
    }
    const Tensor bands = Tensor::empty({frames, rows + 1, row}, x.dtype());
    workspace();
    return;
  }
  const Tensor weights = Tensor::empty({w.numel()}, w.dtype());
  const bool in_place = residual.defined() && residual.raw() == y.raw();
  const Tensor rounded = bias.defined() && !in_place && x.dtype() != DType::f32
                             ? Tensor::empty(bias.shape(), x.dtype())
                             : Tensor();
  const Tensor sums = in_place ? Tensor::empty(y.shape(), y.dtype()) : Tensor();
  workspace();
}

void conv_backward_input(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx, bool) {
  if (dy.numel() == 0 || dx.numel() == 0 || conv.is_product()) return;
  if (!conv.upsample) {
    const Tensor weights = Tensor::empty({w.numel()}, w.dtype());
    workspace();
    return;
  }
  const Tensor weights = phase_weights(conv, dy.dim(4), dx.dim(4), w.dtype());
  const Tensor some = phases(conv, dx.shape(), dy.dim(4), dy.dtype());
  workspace();
}

void conv_backward_weight(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw, Tensor&, bool) {
  if (x.numel() == 0 || conv.is_product()) return;
  if (!conv.upsample) {
    const Tensor weights = Tensor::empty({dw.numel()}, x.dtype());
    workspace();
    return;
  }
  const Tensor weights = phase_weights(conv, dy.dim(4), x.dim(4), x.dtype());
  const Tensor some = phases(conv, x.shape(), dy.dim(4), dy.dtype());
  workspace();
}

// kernels/conv/deform.cu's.
void deform_backward_input(const Tensor&, const Tensor& dcolumns, Conv, std::int64_t, Tensor& dx) {
  const std::int64_t pixels = dx.numel() / dx.dim(4), readers = dcolumns.dim(0) * deform_taps;
  if (readers == 0 || dx.numel() == 0) return;
  const Tensor ends = Tensor::empty({pixels}, DType::i32),
               begins = Tensor::empty({pixels}, DType::i32),
               totals = Tensor::empty({1}, DType::i32),
               lists = Tensor::empty({4 * readers}, DType::i32),
               ordered = Tensor::empty({4 * readers, 2}, DType::i32);
}

// kernels/attention's, for whichever of its kernels takes most.
namespace {

constexpr std::int64_t most_multiprocessors = 192;

Tensor row_stats(std::int64_t sequences, std::int64_t heads, std::int64_t queries) {
  return Tensor::empty({sequences, heads, (queries + 63) / 64 * 64, 2}, DType::f32);
}

// f32 sums of packed keys, by blocks that share their queries.
Tensor packed_sums(std::int64_t keys, std::int64_t heads, std::int64_t D, std::int64_t queries) {
  const std::int64_t shares = std::clamp<std::int64_t>(
      (queries + 511) / 512, 1, std::max<std::int64_t>(8, most_multiprocessors / heads));
  return Tensor::empty({shares, keys, 2, heads, D}, DType::f32);
}

// Along frames one kernel does everything for one of them, and on tensor cores for sizes that fit
// the shared memory of every GPU.
bool in_one_kernel(const Tensor& qkv) {
  const std::int64_t T = qkv.dim(1), D = qkv.dim(5);
  if (T == 1) return D * static_cast<std::int64_t>(size_of(qkv.dtype())) % 16 == 0;
  return qkv.dtype() == DType::bf16 && (((D == 64 || D == 72) && T <= 64) || (D == 128 && T <= 16));
}

Tensor normed(const Tensor& qkv, const Tensor& wq, const Tensor& rope, Axis axis,
              const Tensor& qk) {
  const bool apart = axis == Axis::space || !in_one_kernel(qkv);
  return apart && !qk.defined() && (wq.defined() || rope.defined())
             ? Tensor::empty(qk_shape(qkv.shape()), qkv.dtype())
             : Tensor();
}

}  // namespace

void self_attention_forward(const Tensor& qkv, const Tensor& wq, const Tensor&, const Tensor& rope,
                            Axis axis, Tensor&, Tensor&, Tensor& qk) {
  normed(qkv, wq, rope, axis, qk);
}

void self_attention_backward(const Tensor& qkv, const Tensor& wq, const Tensor&, const Tensor& rope,
                             Axis axis, const Tensor&, const Tensor& lse, const Tensor&, Tensor&,
                             Tensor& dwq, Tensor&, const Tensor& qk) {
  const Tensor copy = normed(qkv, wq, rope, axis, qk);
  row_stats(lse.dim(0), lse.dim(1), lse.dim(2));
  // Sums of the norms' gradients, by block: along time up to 4096 of them (temporal.cuh, pieces).
  const std::int64_t blocks =
      axis == Axis::time ? std::min<std::int64_t>(lse.numel(), 4096) : 4 * most_multiprocessors;
  if (dwq.defined()) Tensor::empty({2, blocks, qkv.dim(5)}, DType::f32);
}

void cross_attention_backward(const Tensor& q, const Tensor& kv, const Tensor&, int heads,
                              const Tensor&, const Tensor&, const Tensor&, Tensor&, Tensor&) {
  const Tensor sums = packed_sums(kv.dim(0), heads, q.dim(2) / heads, q.dim(1));
  row_stats(q.dim(0), heads, q.dim(1));
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor&, const Tensor& offsets,
                        const Tensor&, int heads, const Tensor&, const Tensor&, const Tensor&,
                        Tensor&, Tensor&, Tensor&) {
  const Tensor sums = offsets.defined()
                          ? packed_sums(k.numel() / q.dim(2), heads, q.dim(2) / heads, q.dim(1))
                          : Tensor();
  row_stats(q.dim(0), heads, q.dim(1));
}

}  // namespace weft::ops::cuda_plan

namespace weft::ops {

InstancePieces instance_pieces(std::int64_t positions) {
  const std::int64_t length = std::max<std::int64_t>(64, (positions + 511) / 512);
  return {length, (positions + length - 1) / length};
}

}  // namespace weft::ops

namespace weft::ops::cuda_plan {

void instance_statistics(const Tensor& x, Tensor&) {
  const std::int64_t N = x.dim(0), C = x.dim(4);
  if (x.numel() > 0)
    Tensor::empty({N * instance_pieces(x.numel() / (N * C)).count, 2, C}, DType::f32);
}

}  // namespace weft::ops::cuda_plan

namespace weft::ops {

ActivationRange range_of(Activation act) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return {act == Activation::none ? -infinity : 0.0f, act == Activation::relu6 ? 6.0f : infinity};
}

BatchNormPieces batch_norm_pieces(const Tensor& x) {
  const std::int64_t P = x.numel() / x.dim(-1);
  // A GPU needs many pieces, a CPU long ones: what is kept of a piece is written and read again.
  const std::int64_t rows =
      x.device() == DeviceKind::cuda ? std::max<std::int64_t>(64, (P + 511) / 512) : 256;
  return {rows, (P + rows - 1) / rows};
}

}  // namespace weft::ops

namespace weft::ops::cuda_plan {
namespace {

void partial_sums(const Tensor& x) {
  if (x.numel() > 0) Tensor::empty({batch_norm_pieces(x).count, 2, x.dim(-1)}, DType::f32);
}

}  // namespace

void batch_norm_sums(const Tensor& x, Tensor&) { partial_sums(x); }

void batch_norm_backward_sums(const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                              Activation, const Tensor&, Tensor&, Tensor&, Tensor&, Tensor&) {
  partial_sums(x);
}

}  // namespace weft::ops::cuda_plan

namespace weft::ops {

VolumePieces volume_pieces(std::int64_t voxels) {
  const std::int64_t length = std::max<std::int64_t>(64, (voxels + 511) / 512);
  return {length, (voxels + length - 1) / length};
}

}  // namespace weft::ops

namespace weft::ops::cuda_plan {

void volume_expectation(const Tensor& logits, float, Tensor&) {
  const std::int64_t N = logits.dim(0), K = logits.dim(4);
  if (logits.numel() > 0)
    Tensor::empty({N * volume_pieces(logits.numel() / (N * K)).count, 5, K}, DType::f32);
}

}  // namespace weft::ops::cuda_plan
