// The keys of [train] that belong to segmentation alone.
#pragma once

#include "config/deck_table.h"

namespace weft {

struct SegmentationTrainDeck {
  double lr_encoder = 0.02;
  double lr_decoder = 0.02;
  double deep_sup_scale = 0.4;
  bool fix_bn = false;
  bool sync_bn = true;
  std::int64_t bn_ranks = 0;
  double bn_momentum = -1;
};
DeckTable segmentation_train_table();

}  // namespace weft
