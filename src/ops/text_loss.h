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
#pragma once

#include <bit>

#include "ops/dispatch.h"

namespace weft::ops {

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
WEFT_OP(text_loss_forward, void(const Tensor& probability, const Tensor& threshold,
                                const Tensor& flags, const Tensor& thresholds, Tensor& stats));
// The gradients of weight * loss by the logits are written.
WEFT_OP(text_loss_backward, void(const Tensor& probability, const Tensor& threshold,
                                 const Tensor& flags, const Tensor& thresholds, const Tensor& stats,
                                 float weight, Tensor& dprobability, Tensor& dthreshold));
// What a step reports of these stats: losses f32 [n] = the loss, terms f32 [3] = n times the
// probability's, the threshold's and the binary map's part.
WEFT_OP(text_summary, void(const Tensor& stats, Tensor& losses, Tensor& terms));

}  // namespace weft::ops
