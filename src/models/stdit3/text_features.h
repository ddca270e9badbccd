// Precomputed T5 features of the captions of a clip source: a safetensors file with one tensor a
// clip, named by its sample id ("0", "1", ...), [tokens, caption_channels] in F32, F16 or BF16,
// valid tokens only.
#pragma once

#include <filesystem>

#include "checkpoint/safetensors.h"

namespace weft {

class TextFeatures {
 public:
  // Exit::data unless every one of `clips` clips has a caption of `channels` channels and 1 to
  // `max_length` tokens.
  TextFeatures(const std::filesystem::path& path, std::int64_t clips, std::int64_t channels,
               std::int64_t max_length);

  std::int64_t length(std::int64_t sample) const { return entry(sample).shape[0]; }
  // The features of one caption, length(sample) * channels floats.
  std::vector<float> read(std::int64_t sample) const { return file_.read_f32(entry(sample)); }

 private:
  const SafetensorEntry& entry(std::int64_t sample) const {
    return file_.at(std::to_string(sample));
  }
  SafetensorsFile file_;
};

}  // namespace weft
