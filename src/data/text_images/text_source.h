// Pictures with text as a ClipSource: what the training of a text detector reads.
#pragma once

#include <memory>

#include "data/clip_source.h"
#include "data/text_images/text_images.h"

namespace weft {

// Bits of a pixel's flags.
inline constexpr std::uint8_t text_bit = 1;       // within a shrunk polygon
inline constexpr std::uint8_t counts_bit = 2;     // for the loss of the probability
inline constexpr std::uint8_t threshold_bit = 4;  // for the loss of the threshold: near a polygon
// A pixel's threshold q in 0..255 stands for 0.3 + 0.4 q / 255.
inline constexpr float least_threshold = 0.3f, threshold_span = 0.4f;

// One bucket, "text-SIDE": 1 frame of data.crop x data.crop pixels, 3 channels, u8, label_rate 1,
// label_bytes 2. A sample is the pixels u8 [H,W,3], then flags u8 [H,W], then thresholds u8 [H,W]
// (text_targets.h), of the picture as change_text makes it (text_view.h), or with data.augment =
// false fit_text. read() gives that of fit_text.
//
// Steps walk through the pictures in epochs, each shuffled with Philox(seed, sample_order, epoch);
// a micro-batch may hold the last pictures of an epoch and the first of the next. What happens to
// a picture follows from (seed, epoch, picture).
//
// Throws Exit::usage for a data.crop that is no multiple of 32.
std::unique_ptr<ClipSource> make_text_source(std::unique_ptr<TextImages> images,
                                             const DataDeck& data);

}  // namespace weft
