// The table [animate]: which clips are made, of what, and how the work is shared out. What a clip
// looks like is in [sadtalker] (models/sadtalker/options.h).
#pragma once

#include <cstdint>
#include <string>

#include "config/deck.h"
#include "config/deck_table.h"

namespace weft {

struct AnimateDeck {
  // A list of clips, or one clip; what a list's row does not say is as here.
  std::string input, picture, speech, name;
  std::string output = "animated";
  std::string ref_eyeblink, ref_pose;
  std::string landmarks, coefficients;
  std::string enhancer;
  std::int64_t enhancer_scale = 2;
  std::int64_t seed = 0;

  std::string weights = "SadTalker_V0.0.2_256.safetensors";
  std::string mapping_weights = "mapping_00229.safetensors";
  std::string mapping_full_weights = "mapping_00109.safetensors";
  std::string detector_weights = "detection_Resnet50_Final.safetensors";
  std::string landmark_weights = "alignment_WFLW_4HG.safetensors";
  std::string gfpgan_weights = "GFPGANv1.4.safetensors";
  std::string parsenet_weights = "parsing_parsenet.safetensors";

  std::string plan = "auto";
  std::int64_t piece = 100;
  bool keep_frames = false;
};

DeckTable animate_table();

}  // namespace weft
