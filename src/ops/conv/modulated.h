// What surrounds the convolutions of a network whose weights are modulated by a style for each
// sample (StyleGAN2, arXiv:1912.04958), over channels-last activations [N,T,H,W,C].
//
// The modulated and demodulated weights are w[o,i,k] s[n,i] d[n,o], with s the style and d[n,o] =
// (sum over i, k of (w[o,i,k] s[n,i])^2 + eps)^-1/2. Neither factor depends on the kernel's element
// or the pixel, so the convolution itself keeps its weights for all samples: its input is
// multiplied by s, its result by d. Weights are read once, and a batch is one convolution.
//
// Activations are f32 or bf16, arithmetic is f32; styles, factors and noise are f32.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// energy f32 [Cout,Cin] = sum over the kernel of w[o,i,.]^2, w [Cout,Cin,...] f32 or bf16: all that
// demodulation needs of the weights, once for all samples.
WEFT_OP(weight_energy, void(const Tensor& w, Tensor& energy));

// d f32 [N,Cout] = gain * (sum over i of energy[o,i] style[n,i]^2 + eps)^-1/2.
WEFT_OP(demodulation,
        void(const Tensor& energy, const Tensor& style, float gain, float eps, Tensor& d));

// y = x * style[n,c], x [N,T,h,w,C], y [N,T,H,W,C] of x's type: of x's size, or of twice its height
// and width, then resized as well (bilinear, ops/resize.h). y may be x where the sizes are equal.
WEFT_OP(modulate, void(const Tensor& x, const Tensor& style, Tensor& y));

// y = leaky_relu(x * d[n,c] + strength[0] * noise[n,t,h,w] + bias[c]), and, where `scale` is
// defined, the upper half of the channels of that times scale plus shift, which are [N,T,H,W,C/2]
// of x's type (a spatial feature transform of half of the channels). d [N,C], noise [N,T,H,W] or
// undefined, strength [1], bias [C]. y may be x.
WEFT_OP(modulated_finish,
        void(const Tensor& x, const Tensor& d, const Tensor& noise, const Tensor& strength,
             const Tensor& bias, float slope, const Tensor& scale, const Tensor& shift, Tensor& y));

// rgb f32 [N,T,H,W,3] = sum over c of x[n,t,h,w,c] style[n,c] w[o,c] + bias[o] (+ skip, f32
// [N,T,H/2,W/2,3], resized to twice its size, bilinear): a modulated 1x1 convolution to colours
// without demodulation, x [N,T,H,W,C], w f32 [3,C], bias f32 [3]. skip may be undefined.
WEFT_OP(modulated_rgb, void(const Tensor& x, const Tensor& style, const Tensor& w,
                            const Tensor& bias, const Tensor& skip, Tensor& rgb));

}  // namespace weft::ops
