// SadTalker's keys of the deck, the table [sadtalker]: the sizes of its networks, and what a clip
// is made with (docs/models/sadtalker.md).
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"

namespace weft {

struct SadtalkerDeck {
  std::int64_t num_kp = 15;
  std::int64_t kp_block_expansion = 32, kp_max_features = 1024, kp_num_blocks = 5;
  std::int64_t kp_reshape_channel = 16384, kp_reshape_depth = 16;
  double kp_scale_factor = 0.25, kp_temperature = 0.1;
  std::int64_t gen_block_expansion = 64, gen_max_features = 512, gen_num_down_blocks = 2;
  std::int64_t gen_reshape_channel = 32, gen_reshape_depth = 16, gen_num_resblocks = 6;
  std::int64_t motion_block_expansion = 32, motion_max_features = 1024, motion_num_blocks = 5;
  std::int64_t motion_compress = 4;
  std::int64_t mapping_coeff_nc = 0;  // 0: as preprocess has it
  std::int64_t mapping_descriptor_nc = 1024, mapping_layer = 3;
  std::int64_t fan_num_modules = 4;
  std::int64_t pose_style = 0;
  std::int64_t size = 256;
  std::int64_t batch_size = 2;
  std::string preprocess = "crop";
  double expression_scale = 1;
  bool still = false;
  std::vector<std::int64_t> input_yaw, input_pitch, input_roll;

  // Whether the face is rendered for the whole picture (full, extfull).
  bool full() const { return preprocess == "full" || preprocess == "extfull"; }
  // Coefficients of a frame: mapping_coeff_nc, or 73 where full(), else 70.
  std::int64_t coefficients() const {
    return mapping_coeff_nc > 0 ? mapping_coeff_nc : full() ? 73 : 70;
  }
};

std::vector<DeckTable> sadtalker_tables();

}  // namespace weft
