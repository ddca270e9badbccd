// The texts of a job: rewritten by the user's command if the deck names one, then encoded. Rank 0
// keeps both results with the clips, so that a resumed job has the same.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "jobs/generate/prompts.h"
#include "models/interfaces.h"

namespace weft {

// For read_prompts: /bin/sh runs `command` on rank 0, with all texts, or texts of a number, that
// OUTPUT/refined_texts.json does not have yet, a line each, on its standard input; it prints as
// many lines. Exit::data names the command where it fails, prints another number of lines, an empty
// one or one that is not UTF-8; Exit::stopped where `stop` ended it. Collective, as the function
// that it returns. An empty `command` changes nothing.
RefineTexts refine_by(const std::string& command, const std::filesystem::path& output,
                      MPI_Comm world, const std::function<bool()>& stop);

// The features of one text: f32 [tokens, channels].
struct TextRows {
  std::vector<float> values;
  std::int64_t tokens = 0;
};

class PromptFeatures {
 public:
  // Collective. Encodes `texts`, which count on rank 0 alone, into DIR/text_features.safetensors;
  // of more than `texts_a_file` the next ones into DIR/text_features-1.safetensors and so on. A
  // file of the same texts and the same encoder stays as it is. Without an encoder (null, or one
  // that lacks something) there are no features, every text is the null caption. `stop`, asked on
  // every rank between micro-batches, ends the work early: see encoded().stopped.
  PromptFeatures(TextEncoder* encoder, const std::vector<std::string>& texts,
                 const std::filesystem::path& directory, MPI_Comm world,
                 const std::function<bool()>& stop = {}, std::int64_t texts_a_file = 2048);

  bool null_captions() const { return !there_; }
  // Exit::data where the file holds other features (channels, length). One thread at a time.
  TextRows read(std::int64_t text) const;
  // What encoding took; all zero where features were there already.
  const EncodedTexts& encoded() const { return encoded_; }

 private:
  std::filesystem::path file_name(std::int64_t file) const;

  std::int64_t channels_ = 0, longest_ = 0, texts_a_file_;
  std::filesystem::path directory_;
  bool there_ = false;
  mutable std::map<std::int64_t, SafetensorsFile> open_;  // those last read
  EncodedTexts encoded_;
};

}  // namespace weft
