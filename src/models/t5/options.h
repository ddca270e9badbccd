// T5's table of the deck: [t5].
#pragma once

#include "config/deck.h"

namespace weft {

// Shape of the T5 v1.1 encoder (docs/models/t5.md, Shape) and how it is run. The default is XXL.
struct T5Deck {
  std::string weights;
  std::string tokenizer;
  std::int64_t d_model = 4096;
  std::int64_t d_kv = 64;
  std::int64_t num_heads = 64;
  std::int64_t d_ff = 10240;
  std::int64_t num_layers = 24;
  std::int64_t vocab_size = 32128;
  std::int64_t max_length = 300;
  std::string dtype = "f32";
  bool clean = true;
  std::vector<double> memory_gib;
  std::int64_t micro_batch = 4;
};

std::vector<DeckTable> t5_tables();

}  // namespace weft
