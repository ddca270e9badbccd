// The networks of Wan's VAEs (docs/models/wan_vae.md): an encoder and a decoder of causal 3-D
// convolutions. Latent frame 0 stands for pixel frame 0, every other one for the four frames up to
// its own last: 4n + 1 frames are n + 1 latents. Wan2.2's works on patches of pixels, and has
// shortcuts around its levels.
#pragma once

#include <string>
#include <vector>

#include "models/wan/options.h"
#include "nn/conv.h"

namespace weft {

// What a clip's frames so far have left behind for the next chunk: of each convolution over time,
// in the order of the forward pass, its last input frames. Lives in the arena.
class FrameCache {
 public:
  // Before each chunk.
  void begin_chunk() { next_ = 0, ++chunks_; }
  bool first_chunk() const { return chunks_ == 1; }
  // The next convolution's.
  Tensor& next() {
    if (next_ == frames_.size()) frames_.emplace_back();
    return frames_[next_++];
  }

 private:
  std::vector<Tensor> frames_;
  std::size_t next_ = 0;
  std::int64_t chunks_ = 0;
};

class CausalVae {
 public:
  // Registers its parameters in `params` under their released names.
  CausalVae(const WanVaeDeck& config, ParameterTable& params);

  // x [B,T,H,W,3] in [-1,1] -> moments [B,latent_frames(T),h,w,2C]: mean and log variance, not
  // clamped, not normalised; h = H / pixels_a_latent(), rounded down. Frames behind the last whole
  // group are not read.
  //
  // With a cache, x are the frames that follow those of the calls before, in whole groups: 1 + 4k
  // frames in the first chunk, 4k in every other, of one clip (B is 1); chunks together give what
  // the clip gives as a whole. Inference alone.
  Var encode(nn::Context c, const Var& x, FrameCache* cache = nullptr) const;
  // z [B,t,h,w,C], not normalised -> frames [B,pixel_frames(t),H,W,3], not clamped; H =
  // h pixels_a_latent(). With a cache likewise: the first chunk of k latents gives 1 + 4 (k - 1)
  // frames, every other 4k.
  Var decode(nn::Context c, const Var& z, FrameCache* cache = nullptr) const;

  // 8 (Wan2.2: 16) and 4 with the released shapes.
  std::int64_t pixels_a_latent() const { return patch_ << (encoder_.levels.size() - 1); }
  std::int64_t frames_a_latent() const { return frames_a_latent_; }
  // 1 -> 1, 2 to 4 -> 1, 5 -> 2; and back: 1 -> 1, 2 -> 5.
  std::int64_t latent_frames(std::int64_t frames) const {
    return (frames - 1) / frames_a_latent_ + 1;
  }
  std::int64_t pixel_frames(std::int64_t latents) const {
    return (latents - 1) * frames_a_latent_ + 1;
  }
  // Operations of decoding a frame of a long clip.
  double decoding_flops(double height, double width) const;

 private:
  struct ResBlock {
    Parameter *norm1 = nullptr, *norm2 = nullptr;  // gamma of a channel norm
    nn::ConvWeights conv1, conv2, shortcut;        // shortcut where the channels change
  };
  struct Attention {
    Parameter* norm = nullptr;
    nn::ConvWeights qkv, out;
  };
  struct Middle {
    ResBlock first, second;
    Attention attention;
  };
  struct Level {
    std::vector<ResBlock> blocks;
    nn::ConvWeights space, time;  // the change of size behind them; `time` where the length changes
    std::int64_t channels = 0;    // of its result
  };
  struct Side {
    nn::ConvWeights in, out, quant;
    Parameter* norm = nullptr;  // in front of out
    Middle middle;
    std::vector<Level> levels;  // in the order of the forward pass
  };

  // Registration, in the order of the forward pass.
  class Builder;

  Var res_block(nn::Context c, Var x, const ResBlock& b, FrameCache* cache) const;
  Var middle(nn::Context c, Var x, const Middle& m, FrameCache* cache) const;

  Side encoder_, decoder_;
  bool shortcuts_;
  std::int64_t patch_, frames_a_latent_ = 1;
};

}  // namespace weft
