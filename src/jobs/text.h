// `weft text DECK FILE`: the captions of a text file through cleaning, tokenizer and T5 encoder, as
// far as is asked.
#pragma once

#include <mpi.h>

#include <string>

#include "config/command.h"

namespace weft {

struct TextRequest {
  std::string file;     // UTF-8, a caption a line
  std::string cleaned;  // file to write the cleaned captions to, a line each; empty: not wanted
  std::string
      tokens;  // file to write the token ids to, a line each with spaces between; empty: not wanted
  std::string features;  // file for data.text_features: one tensor a caption, named by its line,
                         // from 0; empty: not wanted
};

// Collective if features are requested: all ranks then share the encoder. Exit::usage if nothing is
// requested; Exit::data for a file that cannot be read, a line that is not UTF-8, and for the
// errors of encode_texts.
int text(const Deck& deck, const TextRequest& request, MPI_Comm world);
Command text_command();

}  // namespace weft
