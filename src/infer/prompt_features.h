// T5's features of a job's texts: made once, kept beside the clips, used again on restart.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/deck.h"
#include "formats/safetensors.h"
#include "infer/text_encoder.h"

namespace weft {

// The features of one text: f32 [tokens, channels].
struct TextRows {
  std::vector<float> values;
  std::int64_t tokens = 0;
};

class PromptFeatures {
 public:
  // Collective. Encodes `texts` into DIR/text_features.safetensors, unless that file is of the same texts, weights and
  // [t5] settings already. `wanted` false, or t5.weights empty: no features, every text is the null caption.
  PromptFeatures(const Deck& deck, const std::vector<std::string>& texts,
                 const std::filesystem::path& directory, bool wanted, MPI_Comm world);

  bool null_captions() const { return !file_; }
  // Exit::data where the features do not fit the model (channels, length).
  TextRows read(std::int64_t text) const;
  // What encoding took; all zero where features were there already.
  const EncodedTexts& encoded() const { return encoded_; }

 private:
  std::int64_t channels_, longest_;
  std::unique_ptr<SafetensorsFile> file_;
  EncodedTexts encoded_;
};

}  // namespace weft
