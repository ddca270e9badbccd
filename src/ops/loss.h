// Losses and their gradients: absolute differences, KL divergence, LPIPS, classes of pixels, the
// losses of a discriminator and its regularisers, the loss of a text detector; and how pixels are
// classified and counted. Activations are f32 or bf16, channels last;
// arithmetic is f32, and sums are f64 in an order that does not depend on the thread count.
// `weight` multiplies the whole loss: backward functions write weight * d(what forward adds for a
// weight of 1).
#pragma once

#include <bit>
#include <span>

#include "ops/dispatch.h"

namespace weft::ops {

// loss f32 [1] += weight * sum |a - b|; a and b of one shape, types may differ.
WEFT_MEMORY_OP(l1_forward, void(const Tensor& a, const Tensor& b, float weight, Tensor& loss));
// da (+)= weight * sign(a - b), 0 where they are equal; b's gradient is that of l1 with a and b
// exchanged.
WEFT_MEMORY_OP(l1_backward,
               void(const Tensor& a, const Tensor& b, float weight, Tensor& da, bool accumulate));

// loss f32 [1] += weight * 0.5 * sum (mu^2 + exp(lv) - 1 - lv), lv clamped to [-30, 20], of moments
// [...,2C], mu in front.
WEFT_MEMORY_OP(kl_forward, void(const Tensor& moments, float weight, Tensor& loss));
// dmoments (+)= weight * (mu, 0.5 (exp(lv) - 1)); nothing where lv is clamped.
WEFT_MEMORY_OP(kl_backward,
               void(const Tensor& moments, float weight, Tensor& dmoments, bool accumulate));

// LPIPS of one layer: loss f32 [1] += weight * the sum over frames of mean_p sum_c w[c] (a/(|a| +
// 1e-10) - b/(|b| + 1e-10))^2,
// |.| over the channels of a position. a, b [N,F,H,W,C] of one type, w f32 [C].
WEFT_MEMORY_OP(lpips_forward,
               void(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& loss));
// db is written; it is 0 at positions where b is 0 in every channel. a is real footage and needs
// none.
WEFT_MEMORY_OP(lpips_backward,
               void(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& db));

// The cross entropy of the classes of positions, with weights of classes, of hard positions alone,
// and with Dice (docs/models/segmentation.md, Training). kernels/class_loss.cu,
// ops/cpu/class_loss.cpp. labels u8 [...]: v > 0 is class v - 1, 0 is ignored; C <= 255. A label
// above C makes the loss NaN.
struct ClassLoss {
  float dice = 0;         // weight of the Dice loss
  float ohem_thresh = 0;  // OHEM: positions whose class has a lower probability count; 0: all count
  std::int64_t ohem_min_kept = 0;  // at least so many do, the hardest ones and those equal to them
};
// What stats f64 [class_sums + 3 C] hold.
enum ClassStat : int {
  class_nll,       // the sum of weight * -log softmax(logits)[class] over the positions that count
  class_weight,    // the sum of their weights
  class_right,     // at how many of the labelled positions the class has the greatest logit, the
                   // first of equal ones
  class_labelled,  // how many these are
  class_dice,      // 1 - the mean over the classes that occur of 2 overlap / (area + labels); or 0
  class_count,     // how many occur
  class_sums       // of each class: area = the sum of its probability over the labelled positions;
                   // labels = how many are of it; overlap = the sum of its probability at these
};
// logits [...,C], labels u8 [...]; class_weights f32 [C]. Writes stats, and for
// the backward weights f32 [...]: of each position, 0 where it does not count.
WEFT_MEMORY_OP(class_loss_forward,
               void(const Tensor& logits, const Tensor& labels, const Tensor& class_weights,
                    const ClassLoss& loss, Tensor& weights, Tensor& stats));
// dlogits = weight * the gradient of stats[class_nll] / stats[class_weight] + dice *
// stats[class_dice]; the first is 0 where the weights sum to 0.
WEFT_MEMORY_OP(class_loss_backward,
               void(const Tensor& logits, const Tensor& labels, const ClassLoss& loss,
                    const Tensor& weights, const Tensor& stats, float weight, Tensor& dlogits));
// What a step reports: with loss = that sum, losses = loss of `main` + scale * loss of `aux`; terms
// f32: n times the share of labelled positions that are right, the loss of main, that of aux where
// it is defined, and with `dice` != 0 main's stats[class_dice].
WEFT_MEMORY_OP(class_loss_summary, void(const Tensor& main, const Tensor& aux, float dice,
                                        float scale, Tensor& losses, Tensor& terms));

// Losses of logits x with a sign s = +1 or -1: hinge max(0, 1 + s x); logistic log(1 + exp(s x));
// linear s x.
enum class GanLoss { hinge, logistic, linear };
// loss f32 [1] += weight * mean of them.
WEFT_MEMORY_OP(gan_loss_forward,
               void(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& loss));
// dx (+)= .
WEFT_MEMORY_OP(gan_loss_backward, void(const Tensor& x, GanLoss kind, float sign, float weight,
                                       Tensor& dx, bool accumulate));

// weight f32 [1] = a * min(|n| / (|g| + 1e-4), 1e4), |.| the L2 norms of n and g f32 (the adaptive
// weight of docs/models/video_vae.md, Losses).
WEFT_MEMORY_OP(adaptive_weight, void(const Tensor& n, const Tensor& g, float a, Tensor& weight));

// With d = sign * (mean - other), mean f32 [1] of a clip's logits and other f32 [1] the running
// average of the other side's: loss f32 [1] += weight * max(0, d)^2, and slope f32 [1] = its
// derivative by `mean` for a weight of 1. sign: +1 for real frames, -1 for fake ones.
WEFT_MEMORY_OP(lecam, void(const Tensor& mean, const Tensor& other, float sign, float weight,
                           Tensor& loss, Tensor& slope));

// g [1,F,...], the gradient at each frame: norms f32 [F] = its L2 norms, loss f32 [1] += weight *
// mean_f (norm - 1)^2.
WEFT_MEMORY_OP(gradient_penalty_forward,
               void(const Tensor& g, float weight, Tensor& norms, Tensor& loss));
// dg = weight * the derivative of that mean by g, 0 for a frame whose gradient is 0. dg may be g.
WEFT_MEMORY_OP(gradient_penalty_backward,
               void(const Tensor& g, const Tensor& norms, float weight, Tensor& dg));

// The loss of a text detector with differentiable binarization (arXiv:1911.08947; weights and
// details as in mmocr, docs/models/dbnet.md, Loss). Logits are f32 or bf16, arithmetic is f32, sums
// are f64 in an order that does not depend on the thread count.
//
// With P and T the sigmoids of the two maps' logits and B = 1 / (1 + exp(-50 (P - T))), over all
// pixels of a batch:
//   probability  balanced cross entropy of P: the mean over the text's pixels and as many others as
//                are 3 times as many, those with the greatest losses
//   threshold    mean |T - threshold| (smooth below 1e-6)
//   binary       1 - 2 sum(B text) / (sum(B) + sum(text))   (dice)
//   loss         5 probability + 10 threshold + binary

// Bits of a pixel's flags; a threshold q in 0..255 stands for least_threshold + threshold_span *
// q / 255 (data/text_images/text_images.h).
struct TextPixel {
  static constexpr std::uint8_t text = 1;       // within a shrunk polygon
  static constexpr std::uint8_t counts = 2;     // for probability and binary
  static constexpr std::uint8_t threshold = 4;  // counts for threshold
  static constexpr float least_threshold = 0.3f, threshold_span = 0.4f;
};

struct TextLoss {
  static constexpr double probability = 5, threshold = 10, binary = 1;  // weights in the loss
  static constexpr double negatives = 3;                                // a pixel of text
  static constexpr float steepness = 50.0f;                             // of B
  static constexpr double least = 1e-6;  // added to what is divided by
  static constexpr float smooth = 1e-6f;
};

// What stats f64 [text_stats] hold.
enum TextStat : int {
  text_total,        // the loss
  text_probability,  // its three parts, without their weights
  text_threshold,
  text_binary,
  text_positives,   // pixels of text that count
  text_negatives,   // others that were chosen
  text_thresholds,  // pixels that count for the threshold
  text_overlap,     // sum(B text)
  text_area,        // sum(B) + sum(text)
  text_edge,        // the least logit among the chosen, and the last pixel with that logit that was
  text_edge_pixel,  // chosen: of equal logits, the first ones are
  text_stats
};

// Greater for greater logits, which are those of greater losses.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline constexpr std::uint32_t
    text_order(float logit) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(logit);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// probability and threshold: logits [N,1,H,W,1] of one type; flags and thresholds u8 [N,H,W].
// stats f64 [text_stats] are written. Without text nothing but thresholds is learned: probability
// is 0 and binary is 1 with next to no gradient.
WEFT_MEMORY_OP(text_loss_forward,
               void(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                    const Tensor& thresholds, Tensor& stats));
// The gradients of weight * loss by the logits are written.
WEFT_MEMORY_OP(text_loss_backward,
               void(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                    const Tensor& thresholds, const Tensor& stats, float weight,
                    Tensor& dprobability, Tensor& dthreshold));
// What a step reports of these stats: losses f32 [n] = the loss, terms f32 [3] = n times the
// probability's, the threshold's and the binary map's part.
WEFT_MEMORY_OP(text_summary, void(const Tensor& stats, Tensor& losses, Tensor& terms));

// Predictions of networks that classify or score pixels, and counts for their evaluation.

// The class of every pixel of an image of H x W from the logits [1,1,h,w,C], f32 or bf16, that it
// got at several scales, C <= 255: each scale's logits are resized to H x W (bilinear,
// ops/resize.h), the means over the scales of their softmax are the scores, and prediction u8 [H,W]
// is the class of the greatest score, the first of equal ones. At most 16 scales.
// labels u8 [H,W], 0 for none and v for class v - 1, may be undefined; those above C count as none;
// counts i64 [3,C] += how many of the labelled pixels of each class are predicted rightly, are
// predicted, are labelled. scores f32 [C,H,W] is written if it is defined; otherwise they exist for
// a few pixels at a time.
WEFT_MEMORY_OP(predict_classes, void(Tensor& prediction, std::span<const Tensor> logits,
                                     const Tensor& labels, Tensor& counts, Tensor& scores));
constexpr std::size_t most_scales = 16;

// counts i32 [N]: how many values of each x[n] are above the threshold, x [N,...] f32 or bf16 with
// fewer than 2^31 values each. A NaN is not.
WEFT_MEMORY_OP(count_above, void(const Tensor& x, float threshold, Tensor& counts));

}  // namespace weft::ops
