// Decoded frames of YUV 4:2:0, which nearly all footage is, to RGB.
#pragma once

#include <cstdint>
#include <vector>

struct AVFrame;

namespace weft {

// Whether YuvRows takes frames such as this one: 4:2:0 of 8 bits with even sides of 32 or more, and
// a colour matrix that every FFmpeg knows by the same number. Others are left to libswscale.
bool is_plain_yuv(const AVFrame& frame);

// R = luma * (y - black) + red * v, and so on, as multiples of 2^-13.
struct YuvMatrix {
  std::int16_t luma = 0, red = 0, blue = 0, green_u = 0, green_v = 0;
  std::int16_t black = 0;
};

// The rows of a frame as RGB: the bytes that libswscale gives by bilinear + accurate_rnd +
// full_chroma_int without scaling (FFmpeg 5 to 7; a test compares them), faster, because that path
// of it has no vectors. Chroma is interpolated along rows by 3/4 and 1/4; between rows it is the
// mean of two rows of chroma on even rows, and one row on odd ones.
class YuvRows {
 public:
  // Takes another frame, which must live while its rows are asked for.
  void set(const AVFrame& frame);
  // Row y, 3 bytes a pixel.
  void row(std::int64_t y, std::uint8_t* out);

 private:
  const AVFrame* frame_ = nullptr;
  YuvMatrix matrix_;
  std::vector<std::int16_t> u_, v_;  // of a row
};

}  // namespace weft
