#include "models/stdit3/text_features.h"

#include "core/error.h"

namespace weft {

TextFeatures::TextFeatures(const std::filesystem::path& path, std::int64_t clips,
                           std::int64_t channels, std::int64_t max_length)
    : file_(SafetensorsFile::open(path)) {
  for (std::int64_t i = 0; i < clips; ++i) {
    const SafetensorEntry& e = entry(i);
    const bool fits = e.shape.size() == 2 && e.shape[1] == channels && e.shape[0] >= 1 &&
                      e.shape[0] <= max_length;
    WEFT_CHECK(fits, Exit::data,
               "features must match model.caption_channels and model.model_max_length",
               "{}: caption {} has shape [{}], wanted [1..{}, {}]", path.string(), i,
               fmt::join(e.shape, ", "), max_length, channels);
  }
}

}  // namespace weft
