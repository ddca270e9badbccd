#include "models/video_vae/lpips.h"

#include "checkpoint/weights.h"
#include "core/error.h"
#include "nn/conv.h"
#include "ops/conv.h"
#include "ops/loss.h"

namespace weft {
namespace {

// VGG16's convolutions by slice: their numbers in torchvision's `features`, and the channels behind
// them.
struct Slice {
  std::vector<int> numbers;
  std::int64_t channels;
};
const std::array<Slice, 5> slices{
    {{{0, 2}, 64}, {{5, 7}, 128}, {{10, 12, 14}, 256}, {{17, 19, 21}, 512}, {{24, 26, 28}, 512}}};
// Of the package's scaling_layer.
constexpr std::array<float, 3> mean{-.030f, -.088f, -.188f}, deviation{.458f, .448f, .450f};

}  // namespace

Lpips::Lpips(bool bf16) {
  const Init zero{Init::Kind::constant, 0};
  std::int64_t in = 3;
  for (std::size_t k = 0; k < slices.size(); ++k) {
    const auto& [numbers, channels] = slices[k];
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const std::string name = fmt::format("net.slice{}.{}", k + 1, numbers[i]);
      Layer layer;
      layer.conv.weight = &params_.add(name + ".weight", {channels, in, 3, 3}, zero, false);
      layer.conv.bias = &params_.add(name + ".bias", {channels}, zero, false);
      layer.pool_first = k > 0 && i == 0;
      layer.tap = i + 1 == numbers.size();
      layers_.push_back(layer);
      in = channels;
    }
    lin_[k] =
        &params_.add(fmt::format("lin{}.model.1.weight", k), {1, channels, 1, 1}, zero, false);
  }
  params_.allocate(1, bf16, false);
  std::array<float, 6> affine{};
  for (std::size_t c = 0; c < 3; ++c) {
    affine[c] = 1.0f / deviation[c];
    affine[3 + c] = -mean[c] / deviation[c];
  }
  scaling_ = Tensor::persistent({2, 3}, DType::f32);
  scaling_.set(std::span<const float>(affine));
}

void Lpips::load(const std::filesystem::path& weights) {
  WeightNames names;
  names.section = "vae_train";
  names.spare = [](const std::string& name) {
    return name.starts_with("scaling_layer.") || name.starts_with("lins.");
  };
  load_weights(weights, params_, names);
}

std::size_t Lpips::weight_bytes() const {
  std::size_t bytes = 0;
  for (const auto& p : params_.all()) bytes += p->value.bytes() + p->working.bytes();
  return bytes;
}

std::vector<Var> Lpips::features(nn::Context c, const Var& frames) const {
  std::vector<Var> taps;
  Var x = nn::channel_affine(c, frames, scaling_);
  for (const Layer& layer : layers_) {
    if (layer.pool_first) x = nn::max_pool(c, x);
    x = nn::leaky_relu(c, nn::conv(c, x, layer.conv, ops::Conv::same(3)), 0);
    if (layer.tap) taps.push_back(x);
  }
  return taps;
}

void Lpips::add(const Tensor& x, const Var& y, float factor, Tensor& loss, float gradient) {
  Tape plain(Tape::Mode::infer), tape(gradient != 0 ? Tape::Mode::record : Tape::Mode::infer);
  const std::vector<Var> a = features({plain, params_}, make_var(x));
  const std::vector<Var> b = features({tape, params_}, y);
  for (std::size_t k = 0; k < a.size(); ++k) {
    const Tensor w = lin_[k]->value.view({lin_[k]->value.numel()});
    ops::lpips_forward(a[k]->value, b[k]->value, w, factor, loss);
    if (gradient == 0) continue;
    Tensor d = Tensor::empty(b[k]->value.shape(), b[k]->value.dtype());
    ops::lpips_backward(a[k]->value, b[k]->value, w, gradient, d);
    give_grad(b[k], std::move(d));
  }
  tape.backward();
}

}  // namespace weft
