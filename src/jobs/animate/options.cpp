#include "jobs/animate/options.h"

namespace weft {
namespace {

void rows(Rows& r, AnimateDeck& d) {
  r.text("input", d.input,
         "List of clips: CSV with a header line, or JSON lines (.jsonl). Columns are picture, "
         "speech, name and the keys that a row may set (docs/animate.md), paths begin in the "
         "list's folder; empty: one clip, of picture and speech.");
  r.text("picture", d.picture,
         "Picture of a face: JPEG, PNG, BMP, WebP, or a video's first frame.");
  r.text("speech", d.speech, "Speech, in any format and rate that FFmpeg reads.");
  r.text("name", d.name,
         "Name of the clip's file without .mp4; empty: made of the names of picture and speech.");
  r.text("output", d.output, "Folder of the results.");
  r.text("ref_eyeblink", d.ref_eyeblink,
         "Video whose eyes and expression the clip begins from, frame by frame; empty: drawn "
         "blinks.");
  r.text("ref_pose", d.ref_pose, "Video whose head motion is added to the clip's; empty: none.");
  r.text("landmarks", d.landmarks,
         "JSON or CSV of 68 x and y in pixels of the picture, instead of detecting them; pictures "
         "of that many clips share them.");
  r.text("coefficients", d.coefficients,
         "Coefficients of each frame, [frames,70] or [frames,73], as safetensors or JSON, instead "
         "of those predicted from the speech.");
  r.text("enhancer", d.enhancer, "Restores the face of each frame; empty: none.", {"", "gfpgan"});
  r.number("enhancer_scale", d.enhancer_scale, 1, 2,
           "With an enhancer, the clip's size in multiples of the rendered one.");
  r.number("seed", d.seed, 0, many, "Of drawn blinks, head motion and the enhancer's noise.");
  r.text("weights", d.weights,
         "SadTalker's networks: the released safetensors file, or random:SEED.");
  r.text("mapping_weights", d.mapping_weights,
         "Mapping network of 70 coefficients, for crop, extcrop and resize; a safetensors file or "
         "random:SEED.");
  r.text("mapping_full_weights", d.mapping_full_weights,
         "Mapping network of 73 coefficients, for full and extfull.");
  r.text("detector_weights", d.detector_weights, "Face detector, RetinaFace of ResNet-50.");
  r.text("landmark_weights", d.landmark_weights, "Landmark network, FAN of 98 points.");
  r.text("gfpgan_weights", d.gfpgan_weights, "Enhancer, GFPGAN v1.4.");
  r.text("parsenet_weights", d.parsenet_weights, "The enhancer's network for masks of faces.");
  r.number(
      "gfpgan_channels", d.gfpgan_channels, 32, 4096,
      "Channels of GFPGAN's levels, at most, a multiple of 32; the released weights have 512.");
  r.number("parsenet_channels", d.parsenet_channels, 1, 4096,
           "Channels of ParseNet's first level; the released weights have 64.");
  r.text("plan", d.plan, "Obsolete and ignored.", {"auto", "clips", "frames", "apart"});
  r.number("piece", d.piece, 1, 100000,
           "Frames of a piece, rounded up to batches: what a rank takes at a time, and what a "
           "killed one loses at most.");
  r.flag("keep_frames", d.keep_frames,
         "Beside each clip its frames as NAME_frames/000000.png, before compression.");
}

void check(const AnimateDeck& d, const DeckDemand& demand) {
  demand(d.gfpgan_channels % 32 == 0,
         fmt::format("animate.gfpgan_channels = {}", d.gfpgan_channels),
         "take a multiple of 32; the released weights have 512");
}

}  // namespace

DeckTable animate_table() { return deck_table("animate", rows, check); }

}  // namespace weft
