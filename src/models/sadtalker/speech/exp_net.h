// What a face expresses while it speaks: SadTalker's ExpNet (docs/models/sadtalker.md, Speech).
#pragma once

#include <span>
#include <vector>

#include "models/sadtalker/speech/audio_encoder.h"

namespace weft {

class ExpNet {
 public:
  static constexpr const char* prefix = "audio2exp.";

  explicit ExpNet(ParameterTable& table);
  void fold();  // once the table is loaded

  // Expressions [block,64] of windows [block,1,80,16,1] and of what the face does otherwise, `face`
  // [block,65]: the reference's expression and how far the eyes are closed.
  Tensor run(const Tensor& windows, const Tensor& face) const;

  // The same of n <= speech_block frames on the host: windows [n,80,16], references [n,70],
  // closed [n] -> [n,64].
  std::vector<float> expressions(std::span<const float> windows, std::span<const float> references,
                                 std::span<const float> closed) const;

 private:
  FoldedNet net_;
  AudioEncoder encoder_;
  Dense mapping_;
};

}  // namespace weft
