// The table [t5] of the deck: T5's, and umT5's where the model is Wan's.
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
  // Not a key. umT5: every layer has a position bias of its own, files may have Wan's names, ids
  // are those of the tokenizer's file, and texts are cleaned as Wan does.
  bool umt5 = false;
};

// The encoder of Wan (docs/models/t5.md, umT5). The default is XXL.
struct UmT5Deck : T5Deck {
  UmT5Deck() {
    vocab_size = 256384;
    max_length = 512;
    umt5 = true;
  }
};

std::vector<DeckTable> t5_tables();
std::vector<DeckTable> umt5_tables();

}  // namespace weft
