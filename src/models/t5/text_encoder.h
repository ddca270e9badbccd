// Captions to T5 features. The encoder is split over the ranks: each holds as many layers as fit
// its free memory, and captions pass through them in consecutive micro-batches.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"

namespace weft {

struct EncodedTexts {
  std::vector<std::int64_t> tokens;        // of each text, its end mark included
  std::vector<std::size_t> bytes_planned;  // [rank]
  std::vector<std::size_t>
      bytes_taken;  // [rank]: weights and the arena's peak; on the CPU also messages
  std::vector<std::size_t> limits;    // [rank]: what it was allowed
  std::size_t weight_bytes_read = 0;  // from the files, by all ranks together
  double seconds = 0;
  bool stopped = false;  // on request: files may be missing
};

// A file of features, of the texts behind those of the file before and before `end`.
struct TextFile {
  std::filesystem::path path;
  std::size_t end = 0;
  std::map<std::string, std::string> metadata;
};

// Collective. Cleans the texts (t5.clean) and encodes them; rank 0 writes `file`, a safetensors
// file with one tensor a text, named by its place in the list ("0", "1", ...), F32 [tokens,
// d_model]: what models/stdit3/text_features.h reads. The same values to 1e-5 at any number of
// ranks and any placement. Frees all its memory before it returns. `texts` matters only on rank 0;
// every rank gets the whole answer. No arena needs to be current. Exit::usage
// where the ranks' memory is too small together, with what is missing; Exit::data for weights or a
// tokenizer that do not fit, and for text that is not UTF-8.
EncodedTexts encode_texts(const Deck& deck, const std::vector<std::string>& texts,
                          const std::filesystem::path& file, MPI_Comm world);

// The same into several files, each written when its texts are done; names count from "0" in each.
// `files` counts on rank 0 alone. `stop`, if given, is asked between micro-batches by the rank that
// has the first layers, any one of them: it must know what any rank was asked. Micro-batches in
// flight are finished, but their file is not written; earlier files are complete.
EncodedTexts encode_texts(const Deck& deck, const std::vector<std::string>& texts,
                          const std::vector<TextFile>& files, const std::function<bool()>& stop,
                          MPI_Comm world);

// The same behind the tokenizer: the ids of each text, 1 to t5.max_length of them.
EncodedTexts encode_tokens(const Deck& deck, const std::vector<std::vector<std::int32_t>>& ids,
                           const std::filesystem::path& file, MPI_Comm world);
EncodedTexts encode_tokens(const Deck& deck, const std::vector<std::vector<std::int32_t>>& ids,
                           const std::vector<TextFile>& files, const std::function<bool()>& stop,
                           MPI_Comm world);

}  // namespace weft
