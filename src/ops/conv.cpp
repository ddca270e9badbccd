#include "ops/conv.h"

#include "core/error.h"

namespace weft::ops {

Shape Conv::output(const Shape& x, std::int64_t out_channels) const {
  WEFT_ASSERT(x.rank() == 5);
  const std::int64_t scale = upsample ? 2 : 1;
  const std::int64_t t = x[1] + front - kt, h = scale * x[2] + top + bottom - kh,
                     w = scale * x[3] + left + right - kw;
  WEFT_CHECK(t >= 0 && h >= 0 && w >= 0, Exit::data,
             "give frames of at least 8x8 pixels, or a clip of more frames",
             "a {}x{}x{} kernel does not fit into activations {}", kt, kh, kw, x.str());
  return {x[0], t / stride_t + 1, h / stride + 1, w / stride + 1, out_channels};
}

}  // namespace weft::ops
