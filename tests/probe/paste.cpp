#include "models/sadtalker/face/paste.h"
#include "core/error.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"

namespace weft {

int probe_paste(const Deck&, const ProbeRequest& request) {
  const ProbeInputs inputs(request.inputs);
  const std::vector<std::int64_t> size = inputs.shape("image"), frames = inputs.shape("frames"),
                                  box = inputs.i64("box");
  WEFT_CHECK(size.size() == 3 && size[2] == 3 && frames.size() == 4 && frames[3] == 3 &&
                 frames[1] > 0 && frames[2] > 0 && box.size() == 4,
             Exit::data, probe_hint, "image is not [H,W,3], frames not [n,h,w,3], or box not [4]");
  const ImageFile picture{size[0], size[1], inputs.u8("image")};
  const std::vector<std::uint8_t> values = inputs.u8("frames");
  const PixelBox at{box[0], box[1], box[2], box[3]};
  const Pasting pasting(picture, at);
  const std::int64_t frame_bytes = frames[1] * frames[2] * 3;
  std::vector<std::uint8_t> resized, pasted;
  for (std::int64_t i = 0; i < frames[0]; ++i) {
    const auto first = values.begin() + i * frame_bytes;
    const ImageFile frame{frames[1], frames[2], {first, first + frame_bytes}};
    const ImageFile small = pasting.resized(frame), whole = pasting.paste(frame);
    resized.insert(resized.end(), small.values.begin(), small.values.end());
    pasted.insert(pasted.end(), whole.values.begin(), whole.values.end());
  }
  ProbeOutputs outputs;
  const auto add = [&](const char* name, std::vector<std::uint8_t>& bytes, std::int64_t height,
                       std::int64_t width) {
    outputs.add(name, Tensor::borrow(bytes.data(), {frames[0], height, width, 3}, DType::u8));
  };
  add("resized", resized, at.height(), at.width());
  add("pasted", pasted, size[0], size[1]);
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
