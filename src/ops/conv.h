// Convolutions over channels-last frames, on the CPU by Winograd's transforms or oneDNN
// (ops/cpu/conv/), on GPUs by cuDNN. Padding, nearest upsampling and the causal front are part of
// the operation: none of them is ever written to memory. Then the parts of deformable (DCNv2),
// modulated (StyleGAN2) and pyramid convolutions, which nn/conv.h puts together.
#pragma once

#include <cmath>

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

  // A matrix product of rows: 1x1, of stride 1.
  bool is_product() const {
    return kt * kh * kw == 1 && stride * stride_t == 1 && groups == 1 && !upsample &&
           front + back + top + left + bottom + right == 0;
  }

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
WEFT_SCRATCH_OP(conv_forward,
                void(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                     Conv conv, Tensor& y),
                of_convolution(y, w, x, y));
// dx [N,T,H,W,Cin] (+)= the gradient of x. Gradients of padding are dropped.
WEFT_SCRATCH_OP(conv_backward_input,
                void(const Tensor& dy, const Tensor& w, Conv conv, Tensor& dx, bool accumulate),
                of_convolution(dy, w, dx, dy));
// dw f32, of w's shape, (+)= the gradient of w; dbias f32 [Cout] (+)= sums of dy (undefined: not
// wanted).
WEFT_SCRATCH_OP(conv_backward_weight,
                void(const Tensor& x, const Tensor& dy, Conv conv, Tensor& dw, Tensor& dbias,
                     bool accumulate),
                of_convolution(dy, dw, x, dy));

// Modulated deformable 3x3 convolutions (DCNv2, arXiv:1811.11168) over channels-last frames, as
// columns of sampled values for a matrix product (nn/conv.h puts the two together).
//
// offsets [N,T,h,w,27] are what the offset convolution gives for each pixel of the result: (dy, dx)
// of the 9 taps, row by row of the kernel, then 9 logits of their masks. Tap (i, j) of pixel
// (y, x) reads at row y * stride - top + i * dilation + dy, column alike: bilinear, neighbours
// outside of the frame count as 0, and a place a whole pixel or more outside reads 0. The value is
// multiplied by sigmoid(logit). Activations are f32 or bf16, x and offsets alike; arithmetic is
// f32.

constexpr int deform_taps = 9, deform_channels = 3 * deform_taps;

// Where a tap reads. The pixel `row`, `column` is the upper left of four, `below` and `right` are
// the shares of the others; any of the four may lie outside. Inside: at least one of them can
// count.
struct DeformPlace {
  int row, column;
  float below, right;
  bool inside;
};
#ifdef __CUDACC__
__host__ __device__
#endif
    inline DeformPlace
    deform_place(float y, float x, int H, int W) {
  // Written so that a NaN is outside.
  if (!(y > -1.0f && y < static_cast<float>(H) && x > -1.0f && x < static_cast<float>(W)))
    return {0, 0, 0.0f, 0.0f, false};
  const float row = std::floor(y), column = std::floor(x);
  return {static_cast<int>(row), static_cast<int>(column), y - row, x - column, true};
}

// columns [P,9,C] = what the taps of pixels [first, first + P) of the result read in x [N,T,H,W,C];
// pixels are counted through all frames. `conv` is the convolution's geometry: kernel 3x3, one
// group.
WEFT_MEMORY_OP(deform_columns, void(const Tensor& x, const Tensor& offsets, Conv conv,
                                    std::int64_t first, Tensor& columns));
// The gradient of the offsets and logits of the same pixels, from that of the columns: those rows
// of doffsets [N,T,h,w,27] are written.
WEFT_MEMORY_OP(deform_backward_offsets,
               void(const Tensor& x, const Tensor& offsets, const Tensor& dcolumns, Conv conv,
                    std::int64_t first, Tensor& doffsets));
// dx f32 [N,T,H,W,C] += the gradient of x by the same pixels, in an order that does not depend on
// the thread count. On a GPU each pixel of x gathers from the list of those who read it, so that
// bits repeat there too: of the arena 12 bytes for each of the 36 P values read, and 8 for each
// pixel of x.
WEFT_SCRATCH_OP(deform_backward_input,
                void(const Tensor& offsets, const Tensor& dcolumns, Conv conv, std::int64_t first,
                     Tensor& dx),
                memory_bound());

// Operations around convolutions whose weights are modulated by a style for each
// sample (StyleGAN2, arXiv:1912.04958), over channels-last activations [N,T,H,W,C].
//
// The modulated and demodulated weights are w[o,i,k] s[n,i] d[n,o], with s the style and d[n,o] =
// (sum over i, k of (w[o,i,k] s[n,i])^2 + eps)^-1/2. Neither factor depends on the kernel's element
// or the pixel, so the convolution itself keeps its weights for all samples: its input is
// multiplied by s, its result by d. Weights are read once, and a batch is one convolution.
//
// Activations are f32 or bf16, arithmetic is f32; styles, factors and noise are f32.

// energy f32 [Cout,Cin] = sum over the kernel of w[o,i,.]^2, w [Cout,Cin,...] f32 or bf16: all that
// demodulation needs of the weights, once for all samples.
WEFT_MEMORY_OP(weight_energy, void(const Tensor& w, Tensor& energy));

// d f32 [N,Cout] = gain * (sum over i of energy[o,i] style[n,i]^2 + eps)^-1/2.
WEFT_MEMORY_OP(demodulation,
               void(const Tensor& energy, const Tensor& style, float gain, float eps, Tensor& d));

// y = x * style[n,c], x [N,T,h,w,C], y [N,T,H,W,C] of x's type: of x's size, or of twice its height
// and width, then resized as well (bilinear, ops/resize.h). y may be x where the sizes are equal.
WEFT_MEMORY_OP(modulate, void(const Tensor& x, const Tensor& style, Tensor& y));

// y = leaky_relu(x * d[n,c] + strength[0] * noise[n,t,h,w] + bias[c]), and, where `scale` is
// defined, the upper half of the channels of that times scale plus shift, which are [N,T,H,W,C/2]
// of x's type (a spatial feature transform of half of the channels). d [N,C], noise [N,T,H,W] or
// undefined, strength [1], bias [C]. y may be x.
WEFT_MEMORY_OP(modulated_finish, void(const Tensor& x, const Tensor& d, const Tensor& noise,
                                      const Tensor& strength, const Tensor& bias, float slope,
                                      const Tensor& scale, const Tensor& shift, Tensor& y));

// rgb f32 [N,T,H,W,3] = sum over c of x[n,t,h,w,c] style[n,c] w[o,c] + bias[o] (+ skip, f32
// [N,T,H/2,W/2,3], resized to twice its size, bilinear): a modulated 1x1 convolution to colours
// without demodulation, x [N,T,H,W,C], w f32 [3,C], bias f32 [3]. skip may be undefined.
WEFT_MEMORY_OP(modulated_rgb, void(const Tensor& x, const Tensor& style, const Tensor& w,
                                   const Tensor& bias, const Tensor& skip, Tensor& rgb));

// What a 3x3 convolution of upsampled grids is made of (nn/conv.h): the interpolation of
// shifted pixels as a matrix, and the weights of some of the input channels apart from the rest.

// Columns [first, first + 9 s s) of a [H,W,K] (f32 or bf16): in row (h, w), column first +
// (i s + j) 9 + 3 u + v, how much cell (i, j) of an s x s grid weighs in pixel (h + u - 1,
// w + v - 1) of that grid resized to H x W bilinearly (pixel centres at halves: PyTorch's
// align_corners=False); 0 where that pixel lies outside.
WEFT_MEMORY_OP(resize_taps, void(std::int64_t s, std::int64_t first, Tensor& a));

// Input channels [first, first + count) of a convolution's weights w [out,in,kh,kw], in w's type.
// to [out,count,kh,kw], or [kh kw,out,count].
WEFT_MEMORY_OP(take_input_channels, void(const Tensor& w, std::int64_t first, Tensor& to));
// Those of dw [out,in,kh,kw] (+)= from, in either of the same orders. f32.
WEFT_MEMORY_OP(give_input_channels,
               void(const Tensor& from, std::int64_t first, Tensor& dw, bool accumulate));

}  // namespace weft::ops
