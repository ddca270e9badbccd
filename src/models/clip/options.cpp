#include "models/clip/options.h"

#include "config/deck_table.h"

namespace weft {
namespace {

void clip_rows(Rows& r, ClipDeck& d) {
  r.path(
      "weights", d.weights,
      "Safetensors file or folder of a CLIP model, such as ViT-L/14, under Hugging Face's names; "
      "its shape follows from them.");
  r.path(
      "merges", d.merges,
      "Merges of CLIP's tokenizer, a text file; empty: merges.txt in the folder of the weights.");
  r.path(
      "aesthetic", d.aesthetic,
      "Safetensors file of the aesthetic predictor: five linear layers on CLIP's image features.");
}

void check_clip(const ClipDeck& d, const DeckDemand& demand) {
  demand(d.aesthetic.empty() || !d.weights.empty(),
         fmt::format("clip.aesthetic = \"{}\" has no effect without clip.weights", d.aesthetic),
         "name the CLIP model that the predictor was made for, or leave clip.aesthetic out");
}

}  // namespace

std::vector<DeckTable> clip_tables() { return {deck_table("clip", clip_rows, check_clip)}; }

}  // namespace weft
