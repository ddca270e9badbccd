#include "models/sadtalker/options.h"

#include "config/deck_table.h"

namespace weft {
namespace {

void rows(Rows& r, SadtalkerDeck& d) {
  r.number("num_kp", d.num_kp, 1, 64, "Keypoints of a face.");
  r.number("kp_block_expansion", d.kp_block_expansion, 1, 4096,
           "Keypoint detector: half of the channels of its first level.");
  r.number("kp_max_features", d.kp_max_features, 1, 65536,
           "Keypoint detector: channels of a level, at most.");
  r.number("kp_num_blocks", d.kp_num_blocks, 1, 12, "Keypoint detector: levels.");
  r.number("kp_reshape_channel", d.kp_reshape_channel, 1, 1 << 20,
           "Keypoint detector: channels that become a volume, kp_reshape_depth times those of its "
           "deepest level.");
  r.number("kp_reshape_depth", d.kp_reshape_depth, 1, 1024,
           "Keypoint detector: the volume's depth.");
  r.number("kp_scale_factor", d.kp_scale_factor, 0.01, 1,
           "Keypoint detector: the picture is made smaller by this.");
  r.number("kp_temperature", d.kp_temperature, 1e-6, 1e6,
           "Keypoint detector: logits are divided by this before the softmax.");
  r.number("gen_block_expansion", d.gen_block_expansion, 1, 4096,
           "Generator: channels after its first convolution.");
  r.number("gen_max_features", d.gen_max_features, 1, 65536,
           "Generator: channels that become a volume, gen_reshape_channel times "
           "gen_reshape_depth.");
  r.number("gen_num_down_blocks", d.gen_num_down_blocks, 1, 8,
           "Generator: how often its encoder halves the picture.");
  r.number("gen_reshape_channel", d.gen_reshape_channel, 1, 65536,
           "Generator: channels of the volume.");
  r.number("gen_reshape_depth", d.gen_reshape_depth, 1, 1024, "Generator: depth of the volume.");
  r.number("gen_num_resblocks", d.gen_num_resblocks, 0, 64,
           "Generator: residual blocks of the volume.");
  r.number("motion_block_expansion", d.motion_block_expansion, 1, 4096,
           "Dense motion: half of the channels of its first level.");
  r.number("motion_max_features", d.motion_max_features, 1, 65536,
           "Dense motion: channels of a level, at most.");
  r.number("motion_num_blocks", d.motion_num_blocks, 1, 12, "Dense motion: levels.");
  r.number("motion_compress", d.motion_compress, 1, 4096,
           "Dense motion: channels that the volume is compressed to.");
  r.number("mapping_coeff_nc", d.mapping_coeff_nc, 0, 4096,
           "Mapping network: coefficients of a frame. 0: 73 where preprocess is full or extfull, "
           "else 70.");
  r.number("mapping_descriptor_nc", d.mapping_descriptor_nc, 1, 65536,
           "Mapping network: channels.");
  r.number("mapping_layer", d.mapping_layer, 1, 3, "Mapping network: layers.");
  r.number("fan_num_modules", d.fan_num_modules, 1, 16, "Landmark network: stacked hourglasses.");
  r.number("pose_style", d.pose_style, 0, 45, "Style of the head's motion.");
  r.number("size", d.size, 32, 2048,
           "Pixels of the rendered face's width, a multiple of the networks' strides; the released "
           "weights are for 256 and 512.");
  r.number("batch_size", d.batch_size, 1, 1024, "Frames that are rendered together.");
  r.text("preprocess", d.preprocess,
         "What is rendered of the picture: crop, the face; extcrop, more around it; resize, the "
         "whole picture made square; full and extfull, the face, pasted back into the picture.",
         {"crop", "extcrop", "resize", "full", "extfull"});
  r.number("expression_scale", d.expression_scale, 0, 100, "Factor of the expression.");
  r.flag("still", d.still, "Keep the head where it is in the picture.");
  for (auto [name, list] : {std::pair{"input_yaw", &d.input_yaw},
                            {"input_pitch", &d.input_pitch},
                            {"input_roll", &d.input_roll}})
    r.number(name, *list, -180, 180,
             "Degrees that the head passes through over the clip, at even speed, in place of the "
             "predicted angle; empty: predicted.");
}

}  // namespace

std::vector<DeckTable> sadtalker_tables() { return {deck_table("sadtalker", rows)}; }

}  // namespace weft
