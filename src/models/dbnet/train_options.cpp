#include "models/dbnet/train_options.h"

namespace weft {
namespace {

void rows(Rows& r, DbnetTrainDeck& d) {
  r.number("lr_detector", d.lr_detector, 0, 1e3, "Text detector: learning rate.");
}

}  // namespace

DeckTable dbnet_train_table() {
  DeckTable t = deck_table("train", rows);
  t.next = "parallel";
  t.fixed = true;
  return t;
}

}  // namespace weft
