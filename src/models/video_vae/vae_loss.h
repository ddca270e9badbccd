// What a VAE is trained for: the loss of one clip and its gradient (docs/models/video_vae.md,
// Losses; opensora/models/vae/losses.py and scripts/train_vae.py at v1.2.0), and the networks that
// judge frames for it.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "config/deck.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "nn/conv.h"
#include "train/task.h"

namespace weft {

// LPIPS with VGG16 (docs/models/video_vae.md, LPIPS; Zhang et al., arXiv 1801.03924; the reference
// package `lpips`): how different two frames look, by the features of a fixed, pretrained network.
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

// The PatchGAN discriminator of Open-Sora's VAE training (opensora/models/vae/discriminator.py at
// v1.2.0, NLayerDiscriminator with three layers, which is pix2pix's and VQGAN's): frame by frame a
// map of logits, one for each patch of 70x70 pixels. Its BatchNorm normalises by the statistics of
// the frames that it is given, as in training; running averages, which training does not read, are
// not kept. Weights start normal with deviation 0.02, BatchNorm's at 1 (there: 1 +- 0.02).
class PatchGan {
 public:
  // Registers its parameters behind `prefix`, in group 1 of the table (nn/parameters.h): they have
  // an optimizer of their own.
  PatchGan(ParameterTable& params, const std::string& prefix);

  // frames [1,F,H,W,3] in [-1,1], H and W at least least_size -> logits [1,F,h,w,1].
  Var forward(nn::Context c, const Var& frames) const;
  // The same with the logits' tangents along a direction at the frames.
  nn::Dual forward(nn::Context c, const nn::Dual& frames) const;
  static constexpr std::int64_t least_size = 24;

  // What its parameters' names begin with.
  const std::string& prefix() const { return prefix_; }

 private:
  struct Layer {
    nn::ConvWeights conv;
    nn::NormWeights norm;  // none in the first and the last
    int stride = 1;
  };
  template <class X>
  X through_layers(nn::Context c, X x) const;

  std::string prefix_;
  std::vector<Layer> layers_;
};

// What the discriminator learns from one clip (losses.py, DiscriminatorLoss): half the loss of real
// and of fake frames each, LeCam, and the penalty on its gradient at the real frames. The original
// computes the last two in no training script; they are as its loss defines them, with LeCam's
// averages as its LeCamEMA.
class DiscriminatorLoss {
 public:
  // `gan` and its table outlive it. Once the device is chosen: it keeps the averages there.
  DiscriminatorLoss(const VaeTrainDeck& deck, PatchGan& gan, ParameterTable& params);

  // f32 [1] each, to be added to; the means of the logits are zero before.
  struct Sums {
    Tensor loss, lecam, penalty, real, fake;
  };
  // Frames [1,T,H,W,3]. `weight` times the gradient of loss + lecam + penalty is in the table
  // afterwards.
  void learn(const Tensor& real, const Tensor& fake, float weight, Sums sums) const;

  // LeCam's running averages of the mean logits of real and of fake frames, f32 [2]: part of a
  // run's state.
  Tensor& averages() { return averages_; }
  static constexpr float decay = 0.999f;

 private:
  void judge(const Var& logits, bool real, float weight, Sums& sums) const;
  Tensor penalise(const Tensor& real, float weight, Tensor& sum) const;

  const VaeTrainDeck& deck_;
  PatchGan& gan_;
  ParameterTable& params_;
  Tensor averages_;
};

// Activations in the model's number format.
struct VaeSample {
  Tensor frames;          // [1,T,H,W,3] in [-1,1]
  Tensor spatial_noise;   // f32 [1,T,h,w,4] and
  Tensor temporal_noise;  // f32 [1,t,h,w,4], of the two posteriors
  bool adversarial = false;
  double recompute =
      0;  // share of the frame groups that the 2D encoder computes again in its backward
};

// The 2D VAE and everything on pixels works on a few frames at a time, each forward followed at
// once by its backward: memory does not grow with the clip, without computing anything twice.
class VaeLoss {
 public:
  // `lpips` and `gan` may be null.
  VaeLoss(const Deck& deck, VideoVae& vae, Lpips* lpips, PatchGan* gan);

  enum Term {
    pixel,
    perceptual,
    kl,
    latent,
    identity,
    adversarial,
    discriminator,
    lecam,
    gradient_penalty,
    logit_real,
    logit_fake,
    mae,  // pixel, for people: the mean absolute error of a colour value, of 255
    terms
  };
  static std::vector<std::string> names();

  // The loss of the clip, which is the sum of its terms without the discriminator's, and the terms.
  // The temporal VAE's gradient waits in the tape; the discriminator's and, if it trains, the 2D
  // decoder's are already in the table.
  TrainingLoss operator()(Tape& tape, const VaeSample& in, float weight) const;

  // The terms pixel, perceptual, kl and latent of a clip, f32 [terms], from a forward alone.
  Tensor measure(const VaeSample& in) const;

  // The discriminator's loss; null where there is no discriminator.
  DiscriminatorLoss* discriminator_loss() { return discriminator_ ? &*discriminator_ : nullptr; }

  // Frames in a group, and groups of a clip.
  std::int64_t group(std::int64_t frames) const;
  std::int64_t groups(std::int64_t frames) const;

 private:
  struct Step;
  Var encode(nn::Context c, const VaeSample& in) const;
  Var decode(Tape& tape, const Var& z_rec, std::int64_t first, std::int64_t count, Var& z) const;
  void add_pixels(const Step& s, const Var& y, std::int64_t first, float weight, bool count) const;
  float perceptual_factor(const Step& s, const Var& y) const;
  void each_group(std::int64_t frames,
                  const std::function<void(std::int64_t, std::int64_t)>& f) const;
  using PixelGradient = std::function<void(const Var& y, std::int64_t first)>;
  void train_decoder(const Step& s, const PixelGradient& send) const;
  void add_kl(const Step& s, const Var& moments) const;
  void compare_latents(const Step& s, const Var& z2, const Var& other, Term term) const;
  void learn_from_pixels(const Step& s) const;

  Tensor decode_all(const Step& s) const;
  Tensor adversarial_gradient(const Step& s, const Tensor& fake, Tensor& loss) const;
  struct LatentGradients {
    Tensor pixels, adversarial;
  };
  LatentGradients latent_gradients(const Step& s, const Tensor& dy) const;
  Tensor at_last_layer(const Step& s, const Tensor& dz) const;
  void learn_from_discriminator(const Step& s) const;

  const VaeTrainDeck& deck_;
  VideoVae& vae_;
  Lpips* lpips_;
  PatchGan* gan_;
  std::optional<DiscriminatorLoss> discriminator_;
  bool frozen_;
  std::int64_t group_;
  Tensor in_, out_;  // f32 [2,4]: latents times 0.18215, and back
};

}  // namespace weft
