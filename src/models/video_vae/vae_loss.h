// The loss of one clip that a VAE trains on (docs/models/video_vae.md, Losses;
// opensora/models/vae/losses.py and scripts/train_vae.py at v1.2.0) and its gradient. The 2D VAE
// and everything on pixels works on a few frames at a time, each forward followed at once by its
// backward: its memory does not grow with the clip, without computing anything twice.
#pragma once

#include <functional>
#include <optional>

#include "models/video_vae/discriminator_loss.h"
#include "models/video_vae/lpips.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "train/task.h"

namespace weft {

// Activations in the model's number format.
struct VaeSample {
  Tensor frames;          // [1,T,H,W,3] in [-1,1]
  Tensor spatial_noise;   // f32 [1,T,h,w,4] and
  Tensor temporal_noise;  // f32 [1,t,h,w,4], of the two posteriors
  bool adversarial = false;
  double recompute =
      0;  // share of the frame groups that the 2D encoder computes again in its backward
};

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
    terms
  };
  static std::vector<std::string> names();

  // The loss of the clip, which is the sum of its terms without the discriminator's, and the terms.
  // The temporal VAE's gradient waits in the tape; the discriminator's and, if it trains, the 2D
  // decoder's are already in the table.
  TrainingLoss operator()(Tape& tape, const VaeSample& in, float weight) const;

  // Of the discriminator; null where there is none.
  DiscriminatorLoss* discriminator_loss() { return discriminator_ ? &*discriminator_ : nullptr; }

  // Frames in a group, and groups of a clip.
  std::int64_t group(std::int64_t frames) const;
  std::int64_t groups(std::int64_t frames) const;

 private:
  struct Step;
  Var encode(nn::Context c, const VaeSample& in) const;
  Var decode(Tape& tape, const Var& z_rec, std::int64_t first, std::int64_t count, Var& z) const;
  void add_pixels(const Step& s, const Var& y, std::int64_t first, float weight, bool count) const;
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
