// LPIPS with VGG16 (docs/models/video_vae.md, LPIPS; Zhang et al., arXiv 1801.03924; the reference
// package `lpips`): how different two frames look, by the features of a fixed, pretrained network.
#pragma once

#include <array>
#include <filesystem>
#include <vector>

#include "nn/conv.h"

namespace weft {

class Lpips {
 public:
  // Laid out, without values. `bf16`: of activations.
  explicit Lpips(bool bf16);
  // Reads net.slice{1..5}.{idx}.weight/bias and lin{0..4}.model.1.weight of a safetensors file; the
  // package's other buffers (scaling_layer.*, lins.*) may be there too. Exit::data names what is
  // missing or does not fit.
  void load(const std::filesystem::path& weights);
  std::size_t weight_bytes() const;

  // Adds factor * (the sum of the frames' LPIPS) to loss f32 [1]. x, y [1,F,H,W,3] in [-1,1], H and
  // W at least 16. With `gradient` not 0, gradient * d(that sum)/dy is added to y->grad.
  void add(const Tensor& x, const Var& y, float factor, Tensor& loss, float gradient = 0);

 private:
  struct Layer {
    nn::ConvWeights conv;
    bool pool_first = false, tap = false;
  };
  // The five features, relu1_2 to relu5_3.
  std::vector<Var> features(nn::Context c, const Var& frames) const;

  ParameterTable params_;
  std::vector<Layer> layers_;
  std::array<Parameter*, 5> lin_{};
  Tensor scaling_;  // f32 [2,3]: the affine map that VGG wants
};

}  // namespace weft
