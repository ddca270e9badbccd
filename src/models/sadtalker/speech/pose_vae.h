// How a head moves while it speaks: the decoder of SadTalker's PoseVAE (docs/models/sadtalker.md,
// Speech).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/sadtalker/speech/audio_encoder.h"

namespace weft {

inline constexpr std::int64_t pose_styles = 46, pose_values = 6, pose_latent = 64;
inline constexpr std::int64_t pose_call = 32;  // frames that the decoder moves at once

// Calls of the decoder for T frames: the first frame does not move.
constexpr std::int64_t pose_calls(std::int64_t frames) {
  return (frames - 1 + pose_call - 1) / pose_call;
}
// z [pose_calls(frames), 64], standard normal, drawn by the seed.
std::vector<float> draw_pose_latents(std::int64_t frames, std::uint64_t seed);

class PoseVae {
 public:
  static constexpr const char* prefix = "audio2pose.";
  // What files have under the prefix for training alone.
  static std::vector<std::string> unused();

  explicit PoseVae(ParameterTable& table);
  void fold();  // once the table is loaded

  // What the decoder hears, [block,6] of windows [block,1,80,16,1].
  Tensor hear(const Tensor& windows) const;
  // Motions [32,6] of a call's input [1,1,1,1,6+64+192]: the reference's pose, z, and what was
  // heard in each frame.
  static constexpr std::int64_t input_values = pose_values + pose_latent + pose_call * pose_values;
  Tensor decode(const Tensor& input) const;

  // hear() of n <= speech_block frames on the host: windows [n,80,16] -> [n,6].
  std::vector<float> heard(std::span<const float> windows) const;
  // Poses [T,6]: reference [6] plus a motion, 0 in the first frame. `heard` [T,6], of which the
  // first row is not used; z [pose_calls(T),64]; style < pose_styles. Frames go 32 a call; those
  // left over come last, with the frames before them, or copies of the first where there are fewer.
  std::vector<float> poses(std::span<const float> heard, std::span<const float> reference,
                           std::span<const float> z, std::int64_t style) const;

 private:
  // ReLU(norm) before each convolution; `stride` over rows.
  struct Residual {
    const FoldedNorm* norm;
    const FoldedConv *first, *second, *skip;
    int stride;
  };
  // A transposed 2x1 convolution of stride (2,1): a product for each of the two rows.
  struct RowsUp {
    Parameter *weight, *bias;
    std::int64_t channels;
    FoldedConv row[2];
  };
  Residual add_residual(const std::string& name, std::int64_t in, std::int64_t out, int stride);
  RowsUp add_rows_up(ParameterTable& table, const std::string& name, std::int64_t channels);
  Tensor residual(const Residual& r, const Tensor& x) const;
  // [N,1,2H,W,C] with the channels of `beside` [N,1,2H,W,c] behind.
  Tensor up(const RowsUp& u, const Tensor& x, const Tensor& beside) const;
  Tensor resunet(const Tensor& x) const;

  FoldedNet net_;
  AudioEncoder encoder_;
  Parameter* styles_;
  Dense audio_, mlp_[2], pose_, output_;
  const FoldedConv *input_[2], *input_skip_;
  Residual down_[2], bridge_, joined_[3];
  RowsUp up_[3];
  std::vector<float> style_values_;  // [46,64]
};

}  // namespace weft
