// Convolutions over channels-last frames, on the CPU by Winograd's transforms or oneDNN
// (ops/cpu/conv/), on GPUs by cuDNN. Padding, nearest upsampling and the causal front are part of
// the operation: none of them is ever written to memory.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// What a convolution does to [N,T,H,W,Cin]. Kernels and the weights' layout are PyTorch's: w
// [Cout,Cin/groups,kt,kh,kw], or [Cout,Cin/groups,kh,kw] where kt is 1.
struct Conv {
  int kt = 1, kh = 1, kw = 1;
  int stride_t = 1, stride = 1;                  // of frames; of rows and columns
  int front = 0;                                 // zero frames before the first
  int top = 0, left = 0, bottom = 0, right = 0;  // zero rows and columns
  bool upsample = false;  // each frame is seen at twice its height and width (nearest); the kernel
                          // is [kt,3,3] then, of stride 1, with a zero row and column on every side
  int dilation = 1;       // rows and columns from one of the kernel's elements to the next
  int groups = 1;  // output channels in groups, each of its own input channels; Cin: depthwise
  int back = 0;    // zero frames behind the last, fewer than kt; 0: causal

  // Kernel k x k, padded to keep the size (docs/models/video_vae.md, Spatial VAE).
  static Conv same(int k) { return {1, k, k, 1, 1, 0, k / 2, k / 2, k / 2, k / 2, false}; }
  // 3x3, stride 2, padded by one row below and one column on the right only
  // (docs/models/video_vae.md, Spatial VAE).
  static Conv down() { return {1, 3, 3, 1, 2, 0, 0, 0, 1, 1, false}; }
  // same(3) of the frame upsampled to twice its size.
  static Conv up() { return {1, 3, 3, 1, 1, 0, 1, 1, 1, 1, true}; }
  // CausalConv3d (docs/models/video_vae.md, Temporal VAE): k - 1 zero frames in front, one less
  // with a stride of two.
  static Conv causal(int k, int stride_t = 1) {
    return {k, k, k, stride_t, 1, k - 1 + (1 - stride_t), k / 2, k / 2, k / 2, k / 2, false};
  }
  // Kernel k x k with that stride, padded by dilation * (k / 2) on all four sides, as PyTorch's
  // padding = dilation * (k // 2).
  static Conv strided(int k, int stride, int dilation = 1, int groups = 1) {
    const int pad = dilation * (k / 2);
    return {1, k, k, 1, stride, 0, pad, pad, pad, pad, false, dilation, groups};
  }
  // Conv3d of PyTorch with kernel k and padding k / 2, k odd: the volume's depth T, its height and
  // its width are kept.
  static Conv volume(int k) {
    Conv c{k, k, k, 1, 1, k / 2, k / 2, k / 2, k / 2, k / 2, false};
    c.back = k / 2;
    return c;
  }
  // volume(3) of a volume whose every frame is seen at twice its height and width: nearest
  // upsampling by (1,2,2) and Conv3d. k is 3.
  static Conv volume_up(int k = 3) {
    Conv c = volume(k);
    c.upsample = true;
    return c;
  }
  // The shape of the result for x [N,T,H,W,Cin].
  Shape output(const Shape& x, std::int64_t out_channels) const;
};

// Bytes that a convolution on a GPU takes of the arena at most: for the phases of an upsampled one,
// which it makes of its frames a band at a time, and, always, for cuDNN's workspace. The stand-in
// for a GPU sets less.
struct ConvScratch {
  std::int64_t phases = 128 << 20, workspace = 256 << 20;
};
extern ConvScratch conv_scratch;

// y [N,To,Ho,Wo,Cout] = conv(x) + bias (+ residual, of y's shape and type; it may be y). x, w, y
// f32 or bf16 alike, bias f32 [Cout] or undefined. f32 accumulation. Products of the same shape
// always take the same path.
WEFT_SCRATCH_OP(conv_forward, void(const Tensor& x, const Tensor& w, const Tensor& bias,
                                   const Tensor& residual, Conv conv, Tensor& y));
// dx [N,T,H,W,Cin] (+)= the gradient of x. Gradients of padding are dropped.
WEFT_SCRATCH_OP(conv_backward_input,
                void(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx, bool accumulate));
// dw f32, of w's shape, (+)= the gradient of w; dbias f32 [Cout] (+)= sums of dy (undefined: not
// wanted).
WEFT_SCRATCH_OP(conv_backward_weight, void(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw,
                                           Tensor& dbias, bool accumulate));

}  // namespace weft::ops
