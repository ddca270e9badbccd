#include "models/t5/options.h"

#include "config/deck_table.h"

namespace weft {
namespace {

void rows_of(Rows& r, T5Deck& d, const char* clean) {
  r.path("weights", d.weights,
         "Safetensors file, index or folder with the encoder; empty: the null caption, for "
         "models that have one.");
  r.path("tokenizer", d.tokenizer,
         "SentencePiece model; empty: spiece.model in the folder of the weights.");
  r.number("d_model", d.d_model, 4, 10240, "Channels of a token.");
  r.number("d_kv", d.d_kv, 1, 1024, "Channels of an attention head.");
  r.number("num_heads", d.num_heads, 1, 1024, "Attention heads.");
  r.number("d_ff", d.d_ff, 1, 1e6, "Width of the gated MLP.");
  r.number("num_layers", d.num_layers, 1, 1000, "Layers.");
  r.number("vocab_size", d.vocab_size, 1, 1e7, "Rows of the embedding.");
  r.number("max_length", d.max_length, 1, 65536,
           "Longest caption in tokens, its end mark included; longer ones are cut.");
  r.text("dtype", d.dtype, "Number format of its weights and activations.", {"f32", "bf16"});
  r.flag("clean", d.clean, clean);
  r.number("memory_gib", d.memory_gib, 0, 1e6,
           "Memory in GiB that the encoder may take on each rank; one value counts for all, none "
           "takes what is free.");
  r.number("micro_batch", d.micro_batch, 1, 65536, "Captions that go through the layers together.");
}

void t5_rows(Rows& r, T5Deck& d) { rows_of(r, d, "Clean captions as Open-Sora's inference does."); }
void umt5_rows(Rows& r, UmT5Deck& d) {
  rows_of(r, d, "Clean captions as Wan does: encodings, HTML entities, white space; case is kept.");
}

template <class Deck>
void check(const Deck& d, const DeckDemand& demand) {
  demand(d.d_model % 4 == 0, fmt::format("t5.d_model = {} does not divide by 4", d.d_model),
         "take a multiple of 4: the kernels move so many channels at once");
}

}  // namespace

std::vector<DeckTable> t5_tables() { return {deck_table("t5", t5_rows, check<T5Deck>)}; }
std::vector<DeckTable> umt5_tables() { return {deck_table("t5", umt5_rows, check<UmT5Deck>)}; }

}  // namespace weft
