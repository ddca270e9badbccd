#include "models/video_vae/vae_loss.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"
#include "ops/conv.h"
#include "ops/loss.h"
#include "ops/pointwise.h"

namespace weft {

// ---- LPIPS

namespace {

// VGG16's convolutions by slice: their numbers in torchvision's `features`, and the channels behind
// them.
struct Slice {
  std::vector<int> numbers;
  std::int64_t channels;
};
const std::array<Slice, 5> slices{
    {{{0, 2}, 64}, {{5, 7}, 128}, {{10, 12, 14}, 256}, {{17, 19, 21}, 512}, {{24, 26, 28}, 512}}};
// Mean and deviation of the package's scaling_layer.
constexpr std::array<float, 3> mean{-.030f, -.088f, -.188f}, deviation{.458f, .448f, .450f};

}  // namespace

Lpips::Lpips(bool bf16) {
  const Init zero = Init::constant(0);
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

// ---- PatchGAN

namespace {

constexpr int kernel = 4;
constexpr float slope = 0.2f, batch_norm_eps = 1e-5f, initial_deviation = 0.02f;
constexpr std::int64_t filters = 64;

// BatchNorm in training: a group for each channel, over all frames.
Var batch_norm(nn::Context c, const Var& x, const nn::NormWeights& w, float eps) {
  return nn::group_norm(c, x, w, static_cast<int>(x->value.dim(-1)), eps, false);
}

}  // namespace

PatchGan::PatchGan(ParameterTable& params, const std::string& prefix) : prefix_(prefix) {
  const auto add = [&](const std::string& name, const Shape& shape, Init init) {
    Parameter& p = params.add(prefix + "main." + name, shape, init);
    p.group = 1;
    return &p;
  };
  // Numbers in the original's list of modules: convolution, norm, activation; the first layer has
  // no norm.
  int number = 0;
  std::int64_t in = 3;
  const auto layer = [&](std::int64_t out, int stride, bool norm, bool last) {
    Layer l;
    l.stride = stride;
    const std::string conv = std::to_string(number++);
    l.conv.weight =
        add(conv + ".weight", {out, in, kernel, kernel}, Init::normal(initial_deviation));
    const auto fan_in = static_cast<float>(in * kernel * kernel);
    if (!norm)  // a norm brings its own bias
      l.conv.bias = add(conv + ".bias", {out}, Init::uniform(1.0f / std::sqrt(fan_in)));
    if (norm) {
      const std::string name = std::to_string(number++);
      l.norm.weight = add(name + ".weight", {out}, Init::constant(1));
      l.norm.bias = add(name + ".bias", {out}, Init::constant(0));
    }
    if (!last) ++number;  // the activation
    layers_.push_back(l);
    in = out;
  };
  layer(filters, 2, false, false);
  layer(2 * filters, 2, true, false);
  layer(4 * filters, 2, true, false);
  layer(8 * filters, 1, true, false);
  layer(1, 1, false, true);
}

template <class X>
X PatchGan::through_layers(nn::Context c, X x) const {
  for (const Layer& l : layers_) {
    ops::Conv geometry = ops::Conv::same(kernel);
    geometry.stride = l.stride;
    geometry.top = geometry.left = geometry.bottom = geometry.right = 1;
    x = nn::conv(c, x, l.conv, geometry);
    if (l.norm.weight != nullptr) x = batch_norm(c, x, l.norm, batch_norm_eps);
    if (&l != &layers_.back()) x = nn::leaky_relu(c, x, slope);
  }
  return x;
}

Var PatchGan::forward(nn::Context c, const Var& frames) const { return through_layers(c, frames); }

nn::Dual PatchGan::forward(nn::Context c, const nn::Dual& frames) const {
  return through_layers(c, frames);
}

// ---- The discriminator's loss

namespace {

// The derivative of the logits' sum: ones.
void send_ones(const Var& logits) {
  const auto [d, accumulate] = grad_target(logits);
  ops::gan_loss_backward(logits->value, ops::GanLoss::linear, 1,
                         static_cast<float>(logits->value.numel()), d, accumulate);
}

}  // namespace

DiscriminatorLoss::DiscriminatorLoss(const VaeTrainDeck& deck, PatchGan& gan,
                                     ParameterTable& params)
    : deck_(deck), gan_(gan), params_(params), averages_(Tensor::persistent({2}, DType::f32)) {
  averages_.set(std::span<const float>(std::array<float, 2>{}));
}

// The losses of one side's logits, and their gradient there.
void DiscriminatorLoss::judge(const Var& logits, bool real, float weight, Sums& sums) const {
  using ops::GanLoss;
  const GanLoss kind = deck_.discriminator_loss == "hinge" ? GanLoss::hinge : GanLoss::logistic;
  const float sign = real ? -1 : 1;
  Tensor& mean = real ? sums.real : sums.fake;
  ops::gan_loss_forward(logits->value, kind, sign, 0.5f, sums.loss);
  ops::gan_loss_forward(logits->value, GanLoss::linear, 1, 1, mean);
  const auto [d, accumulate] = grad_target(logits);
  ops::gan_loss_backward(logits->value, kind, sign, 0.5f * weight, d, accumulate);
  if (deck_.lecam_weight == 0) return;
  const auto factor = static_cast<float>(deck_.lecam_weight);
  const Tensor other = real ? averages_.slice(1, 2) : averages_.slice(0, 1);
  Tensor slope = Tensor::empty({1}, DType::f32);
  ops::lecam(mean, other, -sign, factor, sums.lecam, slope);
  Tensor each = Tensor::empty(logits->value.shape(), logits->value.dtype());
  ops::gan_loss_backward(logits->value, GanLoss::linear, 1, 1, each, false);
  ops::scaled_add(each, factor * weight, slope, d, true);
}

// Adds the penalty and returns v, its derivative by the gradient g of the logits' sum at the
// frames. The penalty's derivative by a parameter is that of v g with v held fixed, and v g is the
// tangent of the logits' sum along v.
Tensor DiscriminatorLoss::penalise(const Tensor& real, float weight, Tensor& sum) const {
  const auto factor = static_cast<float>(deck_.gradient_penalty_weight);
  const Var x = make_var(real);
  {
    const FrozenScope frozen(params_, gan_.prefix());
    Tape tape;
    send_ones(gan_.forward({tape, params_}, x));
    tape.backward();
  }
  Tensor norms = Tensor::empty({real.dim(1)}, DType::f32);
  ops::gradient_penalty_forward(x->grad, factor, norms, sum);
  ops::gradient_penalty_backward(x->grad, norms, factor * weight, x->grad);
  return std::move(x->grad);
}

void DiscriminatorLoss::learn(const Tensor& real, const Tensor& fake, float weight,
                              Sums sums) const {
  Tape tape;
  const nn::Context c{tape, params_};
  // Fake frames first: their pass waits for new weights, which penalise() with its frozen
  // parameters does not.
  judge(gan_.forward(c, make_var(fake, false)), false, weight, sums);
  const Var x = make_var(real, false);
  if (deck_.gradient_penalty_weight > 0) {
    const Tensor along = penalise(real, weight, sums.penalty);
    const nn::Dual logits = gan_.forward(c, nn::Dual{x, make_var(along, false)});
    judge(logits.value, true, weight, sums);
    send_ones(logits.tangent);
  } else {
    judge(gan_.forward(c, x), true, weight, sums);
  }
  tape.backward();
}

// ---- The VAE's loss

namespace {

constexpr std::int64_t channels = SpatialVae::latent_channels;
constexpr const char* spatial_prefix = "spatial_vae.";

Tensor zeros(const Shape& shape, DType dtype = DType::f32) {
  Tensor t = Tensor::empty(shape, dtype);
  ops::fill_zero(t);
  return t;
}

Tensor factors(float a) {
  Tensor t = Tensor::persistent({2, channels}, DType::f32);
  std::vector<float> values(2 * channels, 0.0f);
  std::fill_n(values.begin(), channels, a);
  t.set(std::span<const float>(values));
  return t;
}

}  // namespace

// What the pieces of one clip's loss share.
struct VaeLoss::Step {
  const VaeSample& in;
  Var z_rec,
      last_input;  // the 2D latents as the temporal VAE gives them back; the input of its last
                   // layer
  float weight;
  Tensor sums;  // f32 [terms]
  Tensor of(Term t) const { return sums.slice(t, t + 1); }
  std::int64_t frames() const { return in.frames.dim(1); }
};

std::vector<std::string> VaeLoss::names() {
  return {"pixel",         "perceptual", "kl",
          "latent",        "identity",   "adversarial",
          "discriminator", "lecam",      "gradient_penalty",
          "logit_real",    "logit_made", "mae"};
}

VaeLoss::VaeLoss(const Deck& deck, VideoVae& vae, Lpips* lpips, PatchGan* gan)
    : deck_(deck.get<VaeTrainDeck>()),
      vae_(vae),
      lpips_(lpips),
      gan_(gan),
      frozen_(deck.get<VaeTrainDeck>().freeze_spatial),
      group_(deck.get<VaeDeck>().micro_batch_size),
      in_(factors(SpatialVae::scaling)),
      out_(factors(1.0f / SpatialVae::scaling)) {
  if (gan != nullptr) discriminator_.emplace(deck_, *gan, vae.params());
}

std::int64_t VaeLoss::group(std::int64_t frames) const {
  return group_ > 0 ? std::min(group_, frames) : frames;
}

std::int64_t VaeLoss::groups(std::int64_t frames) const {
  const std::int64_t size = group(frames);
  return (frames + size - 1) / size;
}

// The drawn 2D latents [1,T,h,w,4].
Var VaeLoss::encode(nn::Context c, const VaeSample& in) const {
  const std::int64_t frames = in.frames.dim(1), size = group(frames);
  // Less 1e-9, so that rounding errors in the share do not add a group.
  const auto again = static_cast<std::int64_t>(
      std::ceil(in.recompute * static_cast<double>(groups(frames)) - 1e-9));
  Tape plain(Tape::Mode::infer);
  std::vector<Var> pieces;
  for (std::int64_t first = 0; first < frames; first += size) {
    const std::int64_t count = std::min(size, frames - first);
    const Tensor x = nn::frames_of(in.frames, first, count);
    const Tensor eps = nn::frames_of(in.spatial_noise, first, count);
    const auto part = [this, x, eps](Tape& tape) {
      const nn::Context here{tape, vae_.params()};
      return nn::posterior_draw(here, vae_.spatial().encode(here, make_var(x, false)), eps, in_);
    };
    if (frozen_)
      pieces.push_back(part(plain));
    else
      pieces.push_back(first / size < again ? recompute(c.tape, part) : part(c.tape));
  }
  if (!frozen_) return nn::join_frames(c, pieces);
  return make_var(nn::join_frames({plain, c.parameters}, pieces)->value, false);
}

// Pixels of some frames; `z` becomes the node whose gradient is that of these latents.
Var VaeLoss::decode(Tape& tape, const Var& z_rec, std::int64_t first, std::int64_t count,
                    Var& z) const {
  const nn::Context c{tape, vae_.params()};
  z = make_var(nn::frames_of(z_rec->value, first, count));
  return vae_.spatial().decode(c, nn::channel_affine(c, z, out_));
}

// L1 and LPIPS of decoded frames: adds `weight` times their gradient to y's, and with `count` their
// values to the sums.
void VaeLoss::add_pixels(const Step& s, const Var& y, std::int64_t first, float weight,
                         bool count) const {
  const Tensor x = nn::frames_of(s.in.frames, first, y->value.dim(1));
  const float a_frame = 1.0f / static_cast<float>(s.frames());
  Tensor pixel_sum = s.of(pixel), perceptual_sum = s.of(perceptual);
  if (count) ops::l1_forward(x, y->value, a_frame, pixel_sum);
  const auto [dy, accumulate] = grad_target(y);
  ops::l1_backward(y->value, x, weight * a_frame, dy, accumulate);
  if (lpips_ == nullptr) return;
  const float often = perceptual_factor(s, y);
  Tensor unused = zeros({1});
  lpips_->add(x, y, often, count ? perceptual_sum : unused, weight * often);
}

// The loss adds a frame's LPIPS to each of the frame's values, so it counts once per value.
float VaeLoss::perceptual_factor(const Step& s, const Var& y) const {
  const float a_frame = 1.0f / static_cast<float>(s.frames());
  return static_cast<float>(deck_.perceptual_weight) * a_frame *
         static_cast<float>(y->value.numel() / y->value.dim(1));
}

// Groups of frames, one after the other: f(first frame, frames in the group).
void VaeLoss::each_group(std::int64_t frames,
                         const std::function<void(std::int64_t, std::int64_t)>& f) const {
  for (std::int64_t first = 0; first < frames; first += group(frames))
    f(first, std::min(group(frames), frames - first));
}

// Decodes one group at a time and runs its backward at once, with the gradients that `send` gives
// the pixels. The decoder learns. Its uses are counted in the last group only, since its gradients
// are complete only then. Adds the latents' gradient to that of z_rec.
void VaeLoss::train_decoder(const Step& s, const PixelGradient& send) const {
  ParameterTable& params = vae_.params();
  const bool counting = params.counting();
  each_group(s.frames(), [&](std::int64_t first, std::int64_t count) {
    const CountingScope counted(params, counting && first + count == s.frames());
    Tape tape;
    Var z;
    const Var y = decode(tape, s.z_rec, first, count, z);
    send(y, first);
    tape.backward();
    Tensor part = nn::frames_of(zeroed_grad(s.z_rec), first, count);
    ops::add_inplace(z->grad, part);
  });
}

void VaeLoss::learn_from_pixels(const Step& s) const {
  train_decoder(s,
                [&](const Var& y, std::int64_t first) { add_pixels(s, y, first, s.weight, true); });
}

// All frames as the decoder gives them back.
Tensor VaeLoss::decode_all(const Step& s) const {
  Tensor fake = Tensor::empty(s.in.frames.shape(), s.in.frames.dtype());
  each_group(s.frames(), [&](std::int64_t first, std::int64_t count) {
    Tape plain(Tape::Mode::infer);
    Var z;
    Tensor part = nn::frames_of(fake, first, count);
    ops::convert(decode(plain, s.z_rec, first, count, z)->value, part);
  });
  return fake;
}

// The discriminator's step, then its judgement of the fake frames: the generator's loss, and its
// gradient at the pixels.
Tensor VaeLoss::adversarial_gradient(const Step& s, const Tensor& fake, Tensor& loss) const {
  using ops::GanLoss;
  // As VQGAN has it for both of its losses; the non-saturating one is MAGVIT's.
  const GanLoss of_generator =
      deck_.discriminator_loss == "non-saturating" ? GanLoss::logistic : GanLoss::linear;
  discriminator_->learn(s.in.frames, fake, s.weight,
                        {s.of(discriminator), s.of(lecam), s.of(gradient_penalty), s.of(logit_real),
                         s.of(logit_fake)});
  const FrozenScope frozen(vae_.params(), gan_->prefix());
  const Var y = make_var(fake);
  {
    Tape tape;
    const Var logits = gan_->forward({tape, vae_.params()}, y);
    ops::gan_loss_forward(logits->value, of_generator, -1, 1, loss);
    const auto [d, accumulate] = grad_target(logits);
    ops::gan_loss_backward(logits->value, of_generator, -1, 1, d, accumulate);
    tape.backward();
  }
  return std::move(y->grad);
}

// The gradient at the weight of the temporal decoder's last layer, given that at its output.
Tensor VaeLoss::at_last_layer(const Step& s, const Tensor& dz) const {
  // The layer also makes the frames that decode() drops: their gradient is zero.
  const Shape& in = s.last_input->value.shape();
  Tensor padded = zeros({1, in[1], in[2], in[3], channels}, dz.dtype());
  Tensor kept = nn::frames_of(padded, in[1] - s.frames(), s.frames());
  ops::convert(dz, kept);
  Tensor dw = Tensor::empty(vae_.temporal().last_layer().shape, DType::f32), none;
  ops::conv_backward_weight(s.last_input->value, padded, ops::Conv::causal(3), dw, none, false);
  return dw;
}

// The latents' gradients by the pixels' loss alone and by the adversarial loss alone, through a
// decoder that does not learn.
VaeLoss::LatentGradients VaeLoss::latent_gradients(const Step& s, const Tensor& dy) const {
  const CountingScope uncounted(vae_.params(), false);
  const FrozenScope frozen(vae_.params(), spatial_prefix);
  const auto like_z = [&] { return Tensor::empty(s.z_rec->value.shape(), s.z_rec->value.dtype()); };
  LatentGradients by{like_z(), like_z()};
  const auto through_decoder = [&](std::int64_t first, std::int64_t count, Tensor& all,
                                   const auto& send) {
    Tape tape;
    Var z;
    const Var y = decode(tape, s.z_rec, first, count, z);
    send(y);
    tape.backward();
    Tensor part = nn::frames_of(all, first, count);
    ops::convert(z->grad, part);
  };
  each_group(s.frames(), [&](std::int64_t first, std::int64_t count) {
    through_decoder(first, count, by.pixels,
                    [&](const Var& y) { add_pixels(s, y, first, 1, deck_.pixel_loss); });
    through_decoder(first, count, by.adversarial,
                    [&](const Var& y) { y->grad = nn::frames_of(dy, first, count); });
  });
  return by;
}

// Pixels and the discriminator. The adversarial loss is weighted by the ratio of the pixel loss's
// gradient at the last layer to its own: knowing them takes one backward through the decoder each.
void VaeLoss::learn_from_discriminator(const Step& s) const {
  // 1. The discriminator learns from these frames, then judges them.
  Tensor fake = decode_all(s);
  Tensor loss = zeros({1});
  const Tensor dy_adversarial = adversarial_gradient(s, fake, loss);
  fake.release();

  // 2. The adaptive weight.
  const LatentGradients by = latent_gradients(s, dy_adversarial);
  Tensor factor = Tensor::empty({1}, DType::f32), sum = s.of(adversarial);
  ops::adaptive_weight(at_last_layer(s, by.pixels), at_last_layer(s, by.adversarial),
                       static_cast<float>(deck_.discriminator_weight), factor);
  ops::scaled_add(loss, 1, factor, sum, true);

  // 3. Both gradients to the latents, and through the decoder where it learns too.
  if (frozen_) {
    Tensor& dz = zeroed_grad(s.z_rec);
    if (deck_.pixel_loss) ops::scaled_add(by.pixels, s.weight, Tensor(), dz, true);
    ops::scaled_add(by.adversarial, s.weight, factor, dz, true);
    return;
  }
  train_decoder(s, [&](const Var& y, std::int64_t first) {
    if (deck_.pixel_loss) add_pixels(s, y, first, s.weight, false);
    const auto [dy, accumulate] = grad_target(y);
    ops::scaled_add(nn::frames_of(dy_adversarial, first, y->value.dim(1)), s.weight, factor, dy,
                    accumulate);
  });
}

void VaeLoss::add_kl(const Step& s, const Var& moments) const {
  const auto of_kl = static_cast<float>(deck_.kl_weight);
  Tensor sum = s.of(kl);
  ops::kl_forward(moments->value, of_kl, sum);
  const auto [d, accumulate] = grad_target(moments);
  ops::kl_backward(moments->value, s.weight * of_kl, d, accumulate);
}

// L1 between the 2D latents and what the temporal VAE makes of them; both sides learn where both
// are trained.
void VaeLoss::compare_latents(const Step& s, const Var& z2, const Var& other, Term term) const {
  const float a_frame = 1.0f / static_cast<float>(s.frames());
  Tensor sum = s.of(term);
  ops::l1_forward(z2->value, other->value, a_frame, sum);
  const auto [d, accumulate] = grad_target(other);
  ops::l1_backward(other->value, z2->value, s.weight * a_frame, d, accumulate);
  if (!z2->needs_grad) return;
  const auto [d2, accumulate2] = grad_target(z2);
  ops::l1_backward(z2->value, other->value, s.weight * a_frame, d2, accumulate2);
}

TrainingLoss VaeLoss::operator()(Tape& tape, const VaeSample& in, float weight) const {
  const nn::Context c{tape, vae_.params()};
  const std::int64_t T = in.frames.dim(1);
  const Var z2 = encode(c, in);
  const Var moments = vae_.temporal().encode(c, z2);
  const Var z = nn::posterior_draw(c, moments, in.temporal_noise, Tensor());
  Step s{in, nullptr, nullptr, weight, zeros({terms})};
  s.z_rec = vae_.temporal().decode(c, z, T, &s.last_input);

  if (deck_.pixel_loss) add_kl(s, moments);
  if (deck_.latent_loss) compare_latents(s, z2, s.z_rec, latent);
  if (deck_.identity_loss && T == 1) compare_latents(s, z2, z, identity);
  if (in.adversarial)
    learn_from_discriminator(s);
  else if (deck_.pixel_loss)
    learn_from_pixels(s);

  TrainingLoss loss{zeros({1}), s.sums};
  for (const Term t : {pixel, perceptual, kl, latent, identity, adversarial})
    ops::scaled_add(s.of(t), 1, Tensor(), loss.clips, true);
  Tensor of_mae = s.of(mae);
  const auto values = static_cast<float>(in.frames.numel() / T);  // of a frame, each in [-1,1]
  ops::scaled_add(s.of(pixel), 127.5f / values, Tensor(), of_mae, false);
  return loss;
}

Tensor VaeLoss::measure(const VaeSample& in) const {
  Tape plain(Tape::Mode::infer);
  const nn::Context c{plain, vae_.params()};
  const float a_frame = 1.0f / static_cast<float>(in.frames.dim(1));
  const Var z2 = encode(c, in);
  const Var moments = vae_.temporal().encode(c, z2);
  const Var z = nn::posterior_draw(c, moments, in.temporal_noise, Tensor());
  Step s{in, nullptr, nullptr, 0, zeros({terms})};
  s.z_rec = vae_.temporal().decode(c, z, s.frames(), &s.last_input);
  Tensor kl_sum = s.of(kl), latent_sum = s.of(latent);
  ops::kl_forward(moments->value, static_cast<float>(deck_.kl_weight), kl_sum);
  ops::l1_forward(z2->value, s.z_rec->value, a_frame, latent_sum);
  each_group(s.frames(), [&](std::int64_t first, std::int64_t count) {
    Tape tape(Tape::Mode::infer);
    Var unused;
    const Var y = decode(tape, s.z_rec, first, count, unused);
    const Tensor x = nn::frames_of(in.frames, first, count);
    Tensor pixel_sum = s.of(pixel), perceptual_sum = s.of(perceptual);
    ops::l1_forward(x, y->value, a_frame, pixel_sum);
    if (lpips_ != nullptr) lpips_->add(x, y, perceptual_factor(s, y), perceptual_sum);
  });
  return s.sums;
}

}  // namespace weft
