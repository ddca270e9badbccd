// Semantic segmentation's keys of the deck, in [model].
#pragma once

#include "config/deck.h"
#include "config/deck_table.h"

namespace weft {

// The network (docs/models/segmentation.md) and the files that its halves start from.
struct SegmentationDeck {
  std::string encoder = "resnet50dilated";
  std::string decoder = "ppm_deepsup";
  std::int64_t num_classes = 150;
  double dropout = 0.1;
  std::string weights_encoder, weights_decoder;
  std::string preprocessing = "imagenet";
  std::string class_names;
  std::vector<std::string> palette;
};

// Encoders and decoders by their names in the original.
const std::vector<std::string>& segmentation_encoders();
const std::vector<std::string>& segmentation_decoders();
// Why the two do not go together and what does; empty if they do.
struct Misfit {
  std::string what, hint;
};
Misfit segmentation_misfit(const std::string& encoder, const std::string& decoder);

std::vector<DeckTable> segmentation_tables();

// The keys of [train] that belong to segmentation alone.
struct SegmentationTrainDeck {
  double lr_encoder = 0.02;
  double lr_decoder = 0.02;
  double deep_sup_scale = 0.4;
  bool fix_bn = false;
  bool sync_bn = true;
  std::int64_t bn_ranks = 0;
  double bn_momentum = -1;
  // The loss (docs/models/segmentation.md, Training).
  std::vector<double> class_weight;
  std::string class_weight_by = "none";
  double dice_weight = 0;
  double ohem_thresh = 0;
  std::int64_t ohem_min_kept = 1000;
};
DeckTable segmentation_train_table();

}  // namespace weft
