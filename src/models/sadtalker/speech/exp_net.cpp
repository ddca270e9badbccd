#include "models/sadtalker/speech/exp_net.h"

#include "core/error.h"
#include "models/sadtalker/speech/speech_motion.h"
#include "ops/layout.h"

namespace weft {
namespace {

constexpr std::int64_t face_values = expression_coefficients + 1;

Dense add_mapping(FoldedNet& net) {
  net.axes = 0;
  return Dense(net.add("mapping1", "", speech_embedding + face_values, expression_coefficients,
                       ops::Conv{}, true));
}

}  // namespace

ExpNet::ExpNet(ParameterTable& table)
    : net_(table, prefix), encoder_(net_, "audio_encoder"), mapping_(add_mapping(net_)) {}

void ExpNet::fold() {
  net_.fold();
  encoder_.pack();
  mapping_.pack();
}

Tensor ExpNet::run(const Tensor& windows, const Tensor& face) const {
  const Tensor heard = encoder_(windows);
  Tensor all = Tensor::empty({windows.dim(0), 1, 1, 1, speech_embedding + face_values}, DType::f32);
  ops::put_channels(heard, 0, all);
  ops::put_channels(face.view({face.dim(0), 1, 1, 1, face_values}), speech_embedding, all);
  return mapping_(all).view({windows.dim(0), expression_coefficients});
}

std::vector<float> ExpNet::expressions(std::span<const float> windows,
                                       std::span<const float> references,
                                       std::span<const float> closed) const {
  const std::size_t n = closed.size();
  WEFT_ASSERT(n > 0 && n <= static_cast<std::size_t>(speech_block) &&
              windows.size() == n * mel_bands * mel_window &&
              references.size() == n * motion_coefficients);
  std::vector<float> face;
  for (std::size_t i = 0; i < n; ++i) {
    const auto row = references.subspan(i * motion_coefficients, expression_coefficients);
    face.insert(face.end(), row.begin(), row.end());
    face.push_back(closed[i]);
  }
  const Tensor all = run(speech_block_of(windows, {speech_block, 1, mel_bands, mel_window, 1}),
                         speech_block_of(face, {speech_block, face_values}))
                         .to_host();
  const auto values = all.span<float>().first(n * expression_coefficients);
  return {values.begin(), values.end()};
}

}  // namespace weft
