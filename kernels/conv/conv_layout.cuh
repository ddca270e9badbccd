// What convolutions need besides cuDNN: weights in its order, the upsampled convolution's four
// phases, sums behind a convolution that the library does not fuse (conv_layout.cu). Device
// addresses throughout.
#pragma once

#include "tensor/tensor.h"

namespace weft::kernels {

// Cout, Cin and the kernel's elements kt kh kw.
struct WeightShape {
  std::int64_t out, in, taps;
  std::int64_t numel() const { return out * in * taps; }
};

// to [out,taps,in] = w [out,in,taps], of one type.
void weights_to_library(const Tensor& w, const WeightShape& s, const Tensor& to);
// dw [out,in,taps] f32 (+)= from [out,taps,in].
void weights_from_library(const Tensor& from, const WeightShape& s, const Tensor& dw,
                          bool accumulate);

// A kt x 3 x 3 convolution of frames upsampled to twice their size gives, of the frames themselves,
// four kt x 2 x 2 convolutions: one for each parity a of the row and b of the column (a phase). All
// four are one convolution with a zero row and column on every side and 4 Cout channels, phase
// 2a + b in front: [4,out,kt,2,2,in]. Row i + a of its result is row 2i + a of the frame.
struct PhaseWeights {
  std::int64_t out, in, kt;
  std::int64_t numel() const { return 16 * out * in * kt; }
};
// to [4,out,kt,2,2,in] of w [out,in,kt,3,3].
void phase_weights(const Tensor& w, const PhaseWeights& s, const Tensor& to);
// dw [out,in,kt,3,3] f32 (+)= what a gradient of those [4,out,kt,2,2,in] says of w.
void phase_weights_backward(const Tensor& from, const PhaseWeights& s, const Tensor& dw,
                            bool accumulate);

// Rows [first, first + rows) of each of `frames` frames of H rows and W columns of C channels at
// the small size.
struct PhaseRows {
  std::int64_t frames, H, W, C, first, rows;
};
// y [frames,2H,2W,C], the rows 2 first .. 2 (first + rows) of it, = phases [frames,rows+1,W+1,4,C]
// + bias + residual (y's shape; it may be y); both may be missing.
void join_phases(const Tensor& phases, const PhaseRows& at, const Tensor& bias,
                 const Tensor& residual, const Tensor& y);
// phases [frames,H+1,W+1,4,C] = the gradient, zero where a phase has no row or column; dy
// [frames,2H,2W,C].
void split_phases(const Tensor& dy, const PhaseRows& at, const Tensor& phases);

// y [rows,C] = from + bias + residual, of one type and bias f32; each may be y, both additions may
// be missing.
void add_behind(const Tensor& from, const Tensor& bias, const Tensor& residual, std::int64_t C,
                const Tensor& y);

}  // namespace weft::kernels
