// A picture laid over clips.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/deck.h"

namespace weft {

class Watermark {
 public:
  // A picture file, with or without transparency. Throws Exit::data, as VideoReader does.
  explicit Watermark(const std::string& path, const MediaDeck& limits = {});

  // Lays it over the upper left corner of each of `frames` frames rgb [T,H,W,3], a tenth of their
  // height high (at least 2 pixels), proportions kept: what the released sampler requests from
  // FFmpeg.
  void lay_over(std::uint8_t* rgb, std::int64_t frames, std::int64_t height,
                std::int64_t width) const;

 private:
  std::vector<std::uint8_t> rgba_;  // [height_, width_, 4]
  std::int64_t height_ = 0, width_ = 0;
};

}  // namespace weft
