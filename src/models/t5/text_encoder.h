// Captions to features of T5 or umT5. The encoder is split over the ranks: each holds as many
// layers as fit its free memory, and captions pass through them in consecutive micro-batches.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "models/interfaces.h"
#include "models/t5/options.h"

namespace weft {

// Collective. Cleans the texts (t5.clean) and encodes them; rank 0 writes `files`, safetensors
// files with one tensor a text, named by its place in the file ("0", "1", ...), F32 [tokens,
// d_model]: what models/stdit3/rectified_flow.h reads. Each is written when its texts are done. The
// same values to 1e-5 at any number of ranks and any placement. Frees all its memory before it
// returns. `texts` and `files` matter only on rank 0; every rank gets the whole answer. No arena
// needs to be current. `stop`, if given, is asked between micro-batches by the rank that has the
// first layers, any one of them: it must know what any rank was asked. Micro-batches in flight are
// finished, but their file is not written; earlier files are complete. Exit::usage where the ranks'
// memory is too small together, with what is missing; Exit::data for weights or a tokenizer that do
// not fit, and for text that is not UTF-8; Exit::non_finite for features that are not finite.
EncodedTexts encode_texts(const T5Deck& t5, const std::vector<std::string>& texts,
                          const std::vector<TextFile>& files, const std::function<bool()>& stop,
                          MPI_Comm world);

// The same behind the tokenizer: the ids of each text, 1 to t5.max_length of them.
EncodedTexts encode_tokens(const T5Deck& t5, const std::vector<std::vector<std::int32_t>>& ids,
                           const std::vector<TextFile>& files, const std::function<bool()>& stop,
                           MPI_Comm world);

// The ids of each text, cleaned, 1 to t5.max_length of them. One WARN counts and names the texts
// that were cut there, another those of which cleaning leaves nothing.
std::vector<std::vector<std::int32_t>> t5_ids(const T5Deck& t5,
                                              const std::vector<std::string>& texts);

// The role of jobs: encode_texts() of a table of the deck.
class T5TextEncoder : public TextEncoder {
 public:
  explicit T5TextEncoder(const T5Deck& t5) : t5_(t5) {}

  std::string name() const override { return t5_.umt5 ? "umT5" : "T5"; }
  std::string lacks() const override { return t5_.weights.empty() ? "t5.weights is empty" : ""; }
  std::int64_t channels() const override { return t5_.d_model; }
  std::int64_t max_tokens() const override { return t5_.max_length; }
  ModelSize size() const override;
  // Shape and precision, cleaning, weights, tokenizer.
  std::string describe() const override;
  void check_weights() const override;
  EncodedTexts encode(const std::vector<std::string>& texts, const std::vector<TextFile>& files,
                      const std::function<bool()>& stop, MPI_Comm world) override {
    return encode_texts(t5_, texts, files, stop, world);
  }

 private:
  const T5Deck t5_;
  mutable std::string described_;
};

}  // namespace weft
