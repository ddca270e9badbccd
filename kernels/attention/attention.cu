// The CUDA side of ops/attention.h: which kernels an attention takes. CPU twin:
// src/ops/cpu/attention/attention.cpp. Cases: tests/kernels/attention.cpp.
//
//   along T, one frame, or T <= 128 in bf16 with D = 64, 72, 128: temporal.cu, all in one kernel
//   separate q, k, v and cross attention: flash attention, as below
//   else:               qk_norm.cu into scratch (where there is a norm or a rotary embedding), then
//                       flash attention: flash_f32.cu for f32; for bf16 flash_sm90*.cu where the
//                       device and the shape allow it, else flash_sm80*.cu. WEFT_ATTENTION=sm80 in
//                       the environment overrides the choice.
//   backward on sm_90a: flash_sm90_backward.cu; the way "five" (ops/ways.h) takes
//                       flash_sm90_five.cu where keys are not packed.
//
// Scratch taken inside an operation (ops/scratch.cpp plans it): self attention with norm or
// rotary embedding 2/3 of qkv; backward also 4 bytes for each row and head (delta) and 8 D bytes
// for each of 4 blocks a multiprocessor (weight gradients); the backward of packed keys up to 8
// copies of k and v in f32. The kernels for sm_90a take 8 bytes for each row and head instead of
// delta, and multiprocessors / heads copies of k and v (backward_splits());
// flash_sm90_five.cu takes dq in f32 besides, with 128 columns for a D above 72 (111 MB for 15x1590
// rows of 16 heads of 72, 201 MB for 32,760 of 12 of 128), which is not planned: where it does not
// fit, flash_sm90_backward.cu runs.
#include "ops/attention.h"

#include <string>
#include <utility>

#include "attention/flash_sm90_order.cuh"
#include "attention/qk_norm.cuh"
#include "attention/temporal.cuh"
#include "matmul/ways.cuh"

namespace weft::ops::cuda {
namespace {

using namespace kernels;

// Head sizes that every kernel here can take; the model checks its own, so anything else is a bug.
void check_head_size(std::int64_t D) { WEFT_ASSERT(D >= 2 && D <= 128 && D % 2 == 0); }

FlashShape self_shape(const Tensor& qkv, Axis axis) {
  const std::int64_t B = qkv.dim(0), T = qkv.dim(1), S = qkv.dim(2);
  FlashShape shape;
  shape.sequences = static_cast<int>(axis == Axis::space ? B * T : B * S);
  shape.heads = static_cast<int>(qkv.dim(4));
  shape.D = static_cast<int>(qkv.dim(5));
  shape.nq = shape.nk = static_cast<int>(axis == Axis::space ? S : T);
  shape.inner = axis == Axis::space ? 1 : static_cast<int>(S);
  shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.D));
  check_head_size(shape.D);
  return shape;
}

// Part `part` of a tensor [B,T,S,parts,H,D] along the axis.
template <class T>
FlashRows<T> self_rows(T* base, const Tensor& qkv, Axis axis, int parts, int part) {
  const std::int64_t frames = qkv.dim(1), S = qkv.dim(2), C = qkv.dim(4) * qkv.dim(5);
  FlashRows<T> rows;
  rows.base = base + part * C;
  rows.head = static_cast<int>(qkv.dim(5));
  if (axis == Axis::space) {
    rows.outer = S * parts * C;
    rows.row = parts * C;
  } else {
    rows.outer = frames * S * parts * C;
    rows.step = parts * C;
    rows.row = S * parts * C;
  }
  return rows;
}

// q and k as attention wants them: those of qkv (undefined), or normalised and rotated copies in
// `qk`, or in scratch where that is undefined.
Tensor prepare_qk(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                  Axis axis, const Tensor& qk) {
  if (!wq.defined() && !rope.defined()) return Tensor();
  Tensor to = qk.defined() ? qk : Tensor::empty(qk_shape(qkv.shape()), qkv.dtype());
  qk_norm_forward(qkv, wq, wk, rope, axis, to);
  return to;
}

void run_forward(const FlashForward<float>& p) { flash_f32_forward(p); }
void run_forward(const FlashForward<__nv_bfloat16>& p) {
  if (flash_sm90_takes(p.shape)) return flash_sm90_forward(p);
  flash_sm80_forward(p);
}

void run_backward(const FlashBackward<float>& p) { flash_f32_backward(p); }
void run_backward(const FlashBackward<__nv_bfloat16>& p) { flash_sm80_backward(p); }

// Where `rows` of one of the outputs lie in `to`, which are like them.
void move_rows(FlashRows<__nv_bfloat16>& rows, const Outputs& outputs, const Outputs& to) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    __nv_bfloat16* const begin = data<__nv_bfloat16>(outputs[i]);
    if (rows.base < begin || rows.base >= begin + outputs[i].numel()) continue;
    rows.base = data<__nv_bfloat16>(to[i]) + (rows.base - begin);
    return;
  }
}

void run_sm90_backward(const FlashBackward<__nv_bfloat16>& p, const Outputs& outputs) {
  const FlashShape& s = p.shape;
  const std::int64_t multiplications = std::int64_t{5} * s.sequences * s.heads * s.nq * s.nk * s.D;
  if (s.key_offsets != nullptr || !is_tried("five") || !has_choice(multiplications))
    return flash_sm90_backward(p);
  const auto run = [&](int way, const Outputs& to) {
    FlashBackward<__nv_bfloat16> q = p;
    for (FlashRows<__nv_bfloat16>* rows : {&q.dq, &q.dk, &q.dv}) move_rows(*rows, outputs, to);
    if (way == 1) return flash_sm90_five(q);
    flash_sm90_backward(q);
    return true;
  };
  run_best("attention_backward " + std::to_string(s.sequences) + "x" + std::to_string(s.heads) +
               "x" + std::to_string(s.nq) + "x" + std::to_string(s.nk) + "x" + std::to_string(s.D),
           {"seven", "five"}, outputs, tolerance_of(DType::bf16), run);
}

// `outputs`: the tensors in which the gradients lie.
template <class T>
void run_backward_with_delta(FlashBackward<T> p, const Outputs& outputs) {
  if constexpr (sizeof(T) == 2)
    if (flash_sm90_takes(p.shape)) return run_sm90_backward(p, outputs);
  const Shape rows{p.shape.sequences, p.shape.heads, p.shape.nq};
  const Tensor delta = Tensor::empty(rows, DType::f32);
  p.delta = data<float>(delta);
  flash_delta(p);
  run_backward(p);
}

FlashShape cross_shape(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads) {
  FlashShape shape;
  shape.sequences = static_cast<int>(q.dim(0));
  shape.heads = heads;
  shape.D = static_cast<int>(q.dim(2) / heads);
  shape.nq = static_cast<int>(q.dim(1));
  shape.nk = static_cast<int>(kv.dim(0));
  shape.key_offsets = data<std::int32_t>(offsets);
  shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.D));
  check_head_size(shape.D);
  return shape;
}

// q [B,N,H*D]; k [rows,H*D], packed or in B equal parts.
FlashShape plain_shape(const Tensor& q, const Tensor& k, const Tensor& offsets,
                       const Tensor& last_bias, int heads) {
  FlashShape shape;
  shape.sequences = static_cast<int>(q.dim(0));
  shape.heads = heads;
  shape.D = static_cast<int>(q.dim(2) / heads);
  shape.nq = static_cast<int>(q.dim(1));
  const std::int64_t rows = k.numel() / q.dim(2);
  shape.nk = static_cast<int>(offsets.defined() ? rows : rows / q.dim(0));
  if (offsets.defined()) shape.key_offsets = data<std::int32_t>(offsets);
  if (last_bias.defined()) shape.last_bias = data<float>(last_bias);
  shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.D));
  check_head_size(shape.D);
  return shape;
}

// Rows of k or v of that.
template <class T>
FlashRows<T> key_rows(T* base, const FlashShape& shape) {
  const std::int64_t C = static_cast<std::int64_t>(shape.heads) * shape.D;
  return {base, shape.key_offsets ? 0 : shape.nk * C, 0, C, shape.D};
}

// Rows of [B,N,H*D].
template <class T>
FlashRows<T> query_rows(T* base, const FlashShape& shape) {
  const std::int64_t C = static_cast<std::int64_t>(shape.heads) * shape.D;
  return {base, shape.nq * C, 0, C, shape.D};
}
// Part `part` of packed captions [sum L,2,H,D]; the kernels add each sequence's first row.
template <class T>
FlashRows<T> caption_rows(T* base, const FlashShape& shape, int part) {
  const std::int64_t C = static_cast<std::int64_t>(shape.heads) * shape.D;
  return {base + part * C, 0, 0, 2 * C, shape.D};
}

// Captions are short and queries many: the queries of a key block are shared out over several
// blocks. The kernels for sm_90a have an order of their own; of the others' there are four for each
// multiprocessor, each with 512 queries at least, and 8 shares at most.
int cross_splits(const FlashShape& shape, DType dtype) {
  if (dtype == DType::bf16 && flash_sm90_takes(shape)) return backward_splits(shape);
  const std::int64_t blocks = static_cast<std::int64_t>(key_tiles(shape, 64)) * shape.heads;
  const std::int64_t wanted = 4ll * cuda_properties().multiProcessorCount;
  std::int64_t splits = (wanted + blocks - 1) / blocks;
  const std::int64_t most = blocks_of(shape.nq, 512);
  if (splits > most) splits = most;
  return static_cast<int>(splits < 8 ? splits : 8);
}

}  // namespace

void self_attention_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                            const Tensor& rope, Axis axis, Tensor& out, Tensor& lse, Tensor& qk) {
  if (axis == Axis::time && temporal_forward(qkv, wq, wk, rope, out, lse)) return;
  const Tensor prepared = prepare_qk(qkv, wq, wk, rope, axis, qk);
  by_type(qkv, [&]<class T>() {
    const Tensor& from = prepared.defined() ? prepared : qkv;
    const int parts = prepared.defined() ? 2 : 3;
    FlashForward<T> p;
    p.shape = self_shape(qkv, axis);
    p.q = self_rows<const T>(data<T>(from), qkv, axis, parts, 0);
    p.k = self_rows<const T>(data<T>(from), qkv, axis, parts, 1);
    p.v = self_rows<const T>(data<T>(qkv), qkv, axis, 3, 2);
    p.out = self_rows<T>(data<T>(out), qkv, axis, 1, 0);
    p.lse = data<float>(lse);
    run_forward(p);
  });
}

void self_attention_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                             const Tensor& rope, Axis axis, const Tensor& out, const Tensor& lse,
                             const Tensor& dout, Tensor& dqkv, Tensor& dwq, Tensor& dwk,
                             const Tensor& qk) {
  if (axis == Axis::time && temporal_backward(qkv, wq, wk, rope, out, lse, dout, dqkv, dwq, dwk))
    return;
  const Tensor prepared = qk.defined() ? qk : prepare_qk(qkv, wq, wk, rope, axis, qk);
  by_type(qkv, [&]<class T>() {
    const Tensor& from = prepared.defined() ? prepared : qkv;
    const int parts = prepared.defined() ? 2 : 3;
    FlashBackward<T> p;
    p.shape = self_shape(qkv, axis);
    p.q = self_rows<const T>(data<T>(from), qkv, axis, parts, 0);
    p.k = self_rows<const T>(data<T>(from), qkv, axis, parts, 1);
    p.v = self_rows<const T>(data<T>(qkv), qkv, axis, 3, 2);
    p.out = self_rows<const T>(data<T>(out), qkv, axis, 1, 0);
    p.dout = self_rows<const T>(data<T>(dout), qkv, axis, 1, 0);
    p.lse = data<float>(lse);
    p.dq = self_rows<T>(data<T>(dqkv), qkv, axis, 3, 0);
    p.dk = self_rows<T>(data<T>(dqkv), qkv, axis, 3, 1);
    p.dv = self_rows<T>(data<T>(dqkv), qkv, axis, 3, 2);
    run_backward_with_delta(p, {dqkv});
  });
  if (prepared.defined()) qk_norm_backward(qkv, wq, wk, rope, axis, dqkv, dwq, dwk);
}

void cross_attention_forward(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads,
                             Tensor& out, Tensor& lse) {
  by_type(q, [&]<class T>() {
    FlashForward<T> p;
    p.shape = cross_shape(q, kv, offsets, heads);
    p.q = query_rows<const T>(data<T>(q), p.shape);
    p.k = caption_rows<const T>(data<T>(kv), p.shape, 0);
    p.v = caption_rows<const T>(data<T>(kv), p.shape, 1);
    p.out = query_rows<T>(data<T>(out), p.shape);
    p.lse = data<float>(lse);
    run_forward(p);
  });
}

void cross_attention_backward(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads,
                              const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dq,
                              Tensor& dkv) {
  const FlashShape shape = cross_shape(q, kv, offsets, heads);
  const int splits = cross_splits(shape, q.dtype());
  const Tensor partial = Tensor::empty({splits, kv.dim(0), 2, heads, shape.D}, DType::f32);
  by_type(q, [&]<class T>() {
    FlashBackward<T> p;
    p.shape = shape;
    p.q = query_rows<const T>(data<T>(q), shape);
    p.k = caption_rows<const T>(data<T>(kv), shape, 0);
    p.v = caption_rows<const T>(data<T>(kv), shape, 1);
    p.out = query_rows<const T>(data<T>(out), shape);
    p.dout = query_rows<const T>(data<T>(dout), shape);
    p.lse = data<float>(lse);
    p.dq = query_rows<T>(data<T>(dq), shape);
    p.dk = caption_rows<T>(data<T>(dkv), shape, 0);
    p.dv = caption_rows<T>(data<T>(dkv), shape, 1);
    p.partial = data<float>(partial);
    p.splits = splits;
    run_backward_with_delta(p, {dq, dkv});
    flash_merge_splits(p);
  });
}

void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                       const Tensor& last_bias, int heads, Tensor& out, Tensor& lse) {
  by_type(q, [&]<class T>() {
    FlashForward<T> p;
    p.shape = plain_shape(q, k, offsets, last_bias, heads);
    p.q = query_rows<const T>(data<T>(q), p.shape);
    p.k = key_rows<const T>(data<T>(k), p.shape);
    p.v = key_rows<const T>(data<T>(v), p.shape);
    p.out = query_rows<T>(data<T>(out), p.shape);
    p.lse = data<float>(lse);
    run_forward(p);
  });
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                        const Tensor& last_bias, int heads, const Tensor& out, const Tensor& lse,
                        const Tensor& dout, Tensor& dq, Tensor& dk, Tensor& dv) {
  const FlashShape shape = plain_shape(q, k, offsets, last_bias, heads);
  const bool packed = offsets.defined();
  const int splits = packed ? cross_splits(shape, q.dtype()) : 1;
  const Tensor partial =
      packed ? Tensor::empty({splits, shape.nk, 2, heads, shape.D}, DType::f32) : Tensor();
  by_type(q, [&]<class T>() {
    FlashBackward<T> p;
    p.shape = shape;
    p.q = query_rows<const T>(data<T>(q), shape);
    p.k = key_rows<const T>(data<T>(k), shape);
    p.v = key_rows<const T>(data<T>(v), shape);
    p.out = query_rows<const T>(data<T>(out), shape);
    p.dout = query_rows<const T>(data<T>(dout), shape);
    p.lse = data<float>(lse);
    p.dq = query_rows<T>(data<T>(dq), shape);
    p.dk = key_rows<T>(data<T>(dk), shape);
    p.dv = key_rows<T>(data<T>(dv), shape);
    if (packed) p.partial = data<float>(partial);
    p.splits = splits;
    run_backward_with_delta(p, {dq, dk, dv});
    if (packed) flash_merge_splits(p);
  });
}

}  // namespace weft::ops::cuda
