// The text detector's keys of the deck: [model] and [postprocess].
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "config/deck_table.h"

namespace weft {

// The network (docs/models/dbnet.md).
struct DbnetDeck {
  std::string backbone = "oclip_resnet50";
  bool asf = true;
  double conv2_gain = 1;
  std::string deformable = "auto";
  std::string weights_backbone;
};

// How text regions are found in a probability map (docs/models/dbnet.md, Post-processing).
struct PostprocessDeck {
  double mask_threshold = 0.3;
  double min_text_score = 0.3;
  double min_text_width = 5;
  double unclip_ratio = 1.5;
  double epsilon_ratio = 0.002;
  std::int64_t max_candidates = 3000;
};

std::vector<DeckTable> dbnet_tables();

// The keys of [train] that belong to the text detector alone.
struct DbnetTrainDeck {
  double lr_detector = 0.007;
};
DeckTable dbnet_train_table();

}  // namespace weft
