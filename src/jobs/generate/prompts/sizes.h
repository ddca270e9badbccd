// How large a clip is to be: Open-Sora's names for sizes and lengths (docs/generate_reference.md,
// Sizes).
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "config/deck.h"
#include "jobs/generate/options.h"

namespace weft {

struct PixelSize {
  std::int64_t frames = 1, height = 0, width = 0;
  auto operator<=>(const PixelSize&) const = default;
};

// The key of data/aspect.h's tables for an aspect ratio H:W as Open-Sora writes it: "9:16" ->
// "0.56". Exit::usage names the nearest one of those that there are.
std::string aspect_key(const std::string& ratio);

// Frames of a clip: a number, "2s", "2x" and so on ("1x/2s" too). Exit::usage otherwise.
std::int64_t frame_count(const std::string& text);

// Size in pixels of generate.image_size, or of resolution and aspect ratio. Exit::usage for a
// resolution without that ratio, and for sizes below 8 pixels.
PixelSize clip_size(const GenerateDeck& deck, const std::string& num_frames,
                    const std::string& resolution, const std::string& aspect_ratio);

}  // namespace weft
