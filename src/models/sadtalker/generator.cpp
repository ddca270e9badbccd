#include "models/sadtalker/generator.h"

#include <algorithm>
#include <span>
#include <utility>

#include "core/error.h"
#include "models/images.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {

Tensor channels_to_depth(const Tensor& x, std::int64_t depth) {
  const std::int64_t N = x.dim(0), h = x.dim(2), w = x.dim(3), C = x.dim(4) / depth;
  Tensor first = Tensor::empty({N, C * depth, 1, h, w}, x.dtype());
  ops::to_channels_first(x, first);
  Tensor y = Tensor::empty({N, depth, h, w, C}, x.dtype());
  ops::to_channels_last(first.view({N, C, depth, h, w}), y);
  return y;
}

namespace {

constexpr float least_mask = 1e-3f;  // smaller ones move nothing

// A k x k kernel over all `depth` slices of a volume at once, whose result is a plane.
ops::Conv through(int depth, int k) {
  ops::Conv c = ops::Conv::same(k);
  c.kt = depth;
  return c;
}

}  // namespace

DenseMotion::DenseMotion(ConvNet& net, const SadtalkerDeck& d)
    : candidates_(d.num_kp + 1), channels_(candidates_ * (1 + d.motion_compress)) {
  const auto channels = [&](std::int64_t level) {
    return level == 0 ? channels_
                      : std::min(d.motion_max_features, d.motion_block_expansion << level);
  };
  const std::string before = net.prefix;
  const ops::Conv same = ops::Conv::volume(3), up = ops::Conv::volume_up(3);
  net.axes = 3;
  net.prefix = before + "dense_motion_network.hourglass.encoder.";
  for (std::int64_t i = 0; i < d.motion_num_blocks; ++i) {
    const std::string name = fmt::format("down_blocks.{}.", i);
    down_.push_back(
        net.add(name + "conv", name + "norm", channels(i), channels(i + 1), same, true));
  }
  net.prefix = before + "dense_motion_network.hourglass.decoder.";
  std::int64_t last = channels_;
  for (std::int64_t i = d.motion_num_blocks; i-- > 0;) {
    const std::string name = fmt::format("up_blocks.{}.", d.motion_num_blocks - 1 - i);
    const std::int64_t in = (i == d.motion_num_blocks - 1 ? 1 : 2) * channels(i + 1);
    last = std::min(d.motion_max_features, d.motion_block_expansion << i);
    up_.push_back(net.add(name + "conv", name + "norm", in, last, up, true));
  }
  last += channels_;
  last_ = net.add("conv", "norm", last, last, same, true);
  net.prefix = before + "dense_motion_network.";
  mask_ = net.add("mask", "", last, candidates_, ops::Conv::volume(7), true);
  compress_ = net.add("compress", "norm", d.gen_reshape_channel, d.motion_compress,
                      ops::Conv::volume(1), true);
  net.axes = 2;
  occlusion_ =
      net.add("occlusion", "", last, 1, through(static_cast<int>(d.gen_reshape_depth), 7), true);
  net.prefix = before;
}

Tensor DenseMotion::hourglass(Tensor x) const {
  std::vector<Tensor> levels = {std::move(x)};
  for (const ConvLayer* conv : down_) levels.push_back(halve(convolve(*conv, levels.back(), 0)));
  Tensor y = std::move(levels.back());
  for (const ConvLayer* conv : up_) {
    levels.pop_back();
    y = convolve(*conv, y, 0);
    y = join_channels(y, levels.back());
  }
  levels.clear();
  return convolve(*last_, y, 0);
}

DenseMotion::Motion DenseMotion::forward(const Tensor& compressed, const Tensor& kp_source,
                                         const Tensor& kp_driving, bool want_mask) const {
  const std::int64_t N = kp_driving.dim(0), D = compressed.dim(1), h = compressed.dim(2),
                     w = compressed.dim(3);
  Tensor seen = Tensor::empty({N, D, h, w, channels_}, compressed.dtype());
  ops::motion_candidates(compressed, kp_source, kp_driving, seen);
  const Tensor x = hourglass(std::exchange(seen, {}));
  Motion m;
  m.occlusion = convolve(*occlusion_, x);
  ops::sigmoid_forward(m.occlusion, m.occlusion);
  const Tensor logits = convolve(*mask_, x);
  if (want_mask) m.mask = Tensor::empty({N, D, h, w, candidates_}, DType::f32);
  m.deformation = Tensor::empty({N, D, h, w, 3}, DType::f32);
  ops::motion_field(logits, kp_source, kp_driving, least_mask, m.mask, m.deformation);
  return m;
}

namespace {

// Which of the small map's three pixels - before, here, behind - tap k of the 3x3 falls on, for
// place p of the square: its first, its inner two, its last.
constexpr int pixel_of(int p, int k) {
  if (p == 0 && k == 0) return 0;
  return p == 2 && k == 2 ? 2 : 1;
}

}  // namespace

void Quadruple::fold() {
  WEFT_ASSERT(conv_->folded() && conv_->bias.defined());
  const std::int64_t out = conv_->out.channels, pairs = out * conv_->in.channels;
  const Tensor host = conv_->weight.to_host(), bias = conv_->bias.to_host();
  const bool low = host.dtype() == DType::bf16;
  std::vector<float> sums(9 * pairs * 9);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < 9 * pairs; ++i) {
    const int row = static_cast<int>(i / pairs) / 3, column = static_cast<int>(i / pairs) % 3;
    const std::int64_t from = i % pairs * 9;
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) {
        const std::int64_t at = from + a * 3 + b;
        sums[i * 9 + pixel_of(row, a) * 3 + pixel_of(column, b)] +=
            low ? static_cast<float>(host.data<bf16>()[at]) : host.data<float>()[at];
      }
  }
  nine_.geometry = ops::Conv::same(3);
  nine_.in = conv_->in;
  nine_.out = 9 * out;
  nine_.weight = Tensor::persistent({9 * out, conv_->in.channels, 3, 3}, host.dtype());
  if (low) {
    std::vector<bf16> rounded(sums.size());
    std::ranges::transform(sums, rounded.begin(), [](float v) { return bf16(v); });
    nine_.weight.set(std::span<const bf16>(rounded));
  } else {
    nine_.weight.set(std::span<const float>(sums));
  }
  std::vector<float> biases;
  for (int k = 0; k < 9; ++k)
    biases.insert(biases.end(), bias.data<float>(), bias.data<float>() + out);
  nine_.bias = Tensor::persistent({9 * out}, DType::f32);
  nine_.bias.set(std::span<const float>(biases));
}

Tensor Quadruple::forward(const Tensor& x, float slope) const {
  const Tensor rows = convolve(nine_, x, slope);
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), 4 * x.dim(2), 4 * x.dim(3), conv_->out.channels},
                           x.dtype());
  ops::spread_4x4(rows, y);
  return y;
}

namespace {

constexpr std::int64_t hidden = 128;
constexpr float slope = 0.2f;

Tensor statistics_of(const Tensor& x) {
  Tensor s = Tensor::empty({x.dim(0), 2, x.dim(4)}, DType::f32);
  ops::instance_statistics(x, s);
  return s;
}

}  // namespace

SpadeDecoder::Block SpadeDecoder::add(ConvNet& net, const std::string& name, std::int64_t channels,
                                      std::int64_t out, int scale) {
  const std::int64_t middle = std::min(channels, out);
  const ops::Conv same = ops::Conv::same(3);
  const auto norm = [&](const char* which, std::int64_t C) {
    const std::string start = name + which;
    Norm n{
        net.add(start + "mlp_shared.0", "", in, hidden, scale == 2 ? ops::Conv::up() : same, true),
        net.add_joined({start + "mlp_gamma", start + "mlp_beta"}, hidden, C, same, true),
        {}};
    if (scale == 4) n.quadruple.emplace(n.shared);
    return n;
  };
  Block b;
  b.upsample = scale > 1;
  b.conv_0 = net.add_spectral(name + "conv_0", channels, middle, same, true);
  b.conv_1 = net.add_spectral(name + "conv_1", middle, out, same, true);
  b.norm_0 = norm("norm_0.", channels);
  b.norm_1 = norm("norm_1.", middle);
  if (channels == out) return b;
  b.conv_s = net.add_spectral(name + "conv_s", channels, out, ops::Conv::same(1));
  b.norm_s = norm("norm_s.", channels);
  return b;
}

SpadeDecoder::SpadeDecoder(ConvNet& net) {
  const std::string before = net.prefix;
  net.prefix += "decoder.";
  first_ = net.add("fc", "", in, 512, ops::Conv::same(3), true);
  for (std::size_t i = 0; i < middle_.size(); ++i)
    middle_[i] = add(net, fmt::format("G_middle_{}.", i), 512, 512, 1);
  up_[0] = add(net, "up_0.", 512, 256, 2);
  up_[1] = add(net, "up_1.", 256, 64, 4);
  picture_ = net.add("conv_img", "", 64, 3, ops::Conv::same(3), true);
  net.prefix = before;
}

void SpadeDecoder::fold() {
  for (Norm* n : {&up_[1].norm_0, &up_[1].norm_1, &up_[1].norm_s}) n->quadruple->fold();
}

Tensor SpadeDecoder::run(const Block& b, const Tensor& x, const Tensor& features,
                         float slope_behind) {
  const auto gamma_beta = [&](const Norm& n) {
    return convolve(*n.gamma_beta, n.quadruple ? n.quadruple->forward(features, 0)
                                               : convolve(*n.shared, features, 0));
  };
  // Both norms of x, which is read at the block's size.
  const Tensor statistics = statistics_of(x);
  const auto normalised = [&](const Norm& n, float s) {
    const Tensor maps = gamma_beta(n);
    Tensor y = Tensor::empty({x.dim(0), 1, maps.dim(2), maps.dim(3), x.dim(4)}, x.dtype());
    ops::spade(x, statistics, maps, b.upsample, s, y);
    return y;
  };
  const Tensor shortcut = b.conv_s == nullptr ? x : convolve(*b.conv_s, normalised(b.norm_s, 1));
  Tensor y = convolve(*b.conv_0, normalised(b.norm_0, slope));
  ops::spade(y, statistics_of(y), gamma_beta(b.norm_1), false, slope, y);
  return convolve(*b.conv_1, y, slope_behind, shortcut);
}

Tensor SpadeDecoder::forward(const Tensor& features) const {
  Tensor x = convolve(*first_, features);
  for (const Block& block : middle_) x = run(block, x, features, 1);
  x = run(up_[0], x, features, 1);
  // Behind the last block only its leaky ReLU is read.
  x = run(up_[1], x, features, slope);
  return convolve(*picture_, x);
}

FaceGenerator::FaceGenerator(const SadtalkerDeck& d)
    : depth_(d.gen_reshape_depth), net_(table_, "generator.") {
  WEFT_CHECK(d.gen_max_features == d.gen_reshape_channel * d.gen_reshape_depth, Exit::usage,
             "the released networks have 512, 32 and 16",
             "sadtalker.gen_max_features = {} is not gen_reshape_channel = {} times "
             "gen_reshape_depth = {}",
             d.gen_max_features, d.gen_reshape_channel, d.gen_reshape_depth);
  // The decoder makes four times the size of its features, which have 256 channels.
  WEFT_CHECK(d.gen_num_down_blocks == 2 && d.gen_block_expansion << 2 == SpadeDecoder::in,
             Exit::usage, "leave them out: 64 and 2 are the released networks'",
             "sadtalker.gen_block_expansion = {} and gen_num_down_blocks = {} do not fit the "
             "decoder",
             d.gen_block_expansion, d.gen_num_down_blocks);
  const auto channels = [&](std::int64_t level) {
    return std::min(d.gen_max_features, d.gen_block_expansion << level);
  };
  const ops::Conv same = ops::Conv::same(3), volume = ops::Conv::volume(3);
  first_ = net_.add("first.conv", "first.norm", 3, channels(0), same, true);
  for (std::int64_t i = 0; i < d.gen_num_down_blocks; ++i) {
    const std::string name = fmt::format("down_blocks.{}.", i);
    down_.push_back(
        net_.add(name + "conv", name + "norm", channels(i), channels(i + 1), same, true));
  }
  second_ = net_.add("second", "", channels(d.gen_num_down_blocks), d.gen_max_features,
                     ops::Conv::same(1), true);
  net_.axes = 3;
  for (std::int64_t i = 0; i < d.gen_num_resblocks; ++i) {
    const std::string name = fmt::format("resblocks_3d.3dr{}.", i);
    const std::int64_t C = d.gen_reshape_channel;
    Residual r;
    r.norm = net_.add_norm(name + "norm1", C);
    r.conv_1 = net_.add(name + "conv1", name + "norm2", C, C, volume, true);
    r.conv_2 = net_.add(name + "conv2", "", C, C, volume, true);
    residuals_.push_back(r);
  }
  net_.axes = 2;
  motion_.emplace(net_, d);
  // The warped volume's slices are channels to this one.
  ops::Conv through = same;
  through.kt = static_cast<int>(depth_);
  third_ =
      net_.add("third.conv", "third.norm", d.gen_reshape_channel, SpadeDecoder::in, through, true);
  fourth_ = net_.add("fourth", "", SpadeDecoder::in, SpadeDecoder::in, ops::Conv::same(1), true);
  decoder_.emplace(net_);
}

void FaceGenerator::fold() {
  net_.fold();
  decoder_->fold();
}

FaceGenerator::Features FaceGenerator::encode(const Tensor& image) const {
  WEFT_ASSERT(image.dim(0) == 1 && image.dim(2) % stride() == 0 && image.dim(3) % stride() == 0);
  Tensor x = convolve(*first_, image, 0);
  for (const ConvLayer* conv : down_) x = halve(convolve(*conv, x, 0));
  x = channels_to_depth(convolve(*second_, x), depth_);
  for (const Residual& r : residuals_) {
    Tensor y = Tensor::empty(x.shape(), x.dtype());
    normalise(*r.norm, x, true, y);
    y = convolve(*r.conv_1, y, 0);
    x = convolve(*r.conv_2, y, 1, x);
  }
  return {x, motion_->compress(x)};
}

FaceGenerator::Frames FaceGenerator::render(const Features& features, const Tensor& kp_source,
                                            const Tensor& kp_driving, bool want_mask) const {
  Frames f;
  f.motion = motion_->forward(features.compressed, kp_source, kp_driving, want_mask);
  const Shape& s = features.volume.shape();
  const std::int64_t N = kp_driving.dim(0);
  Tensor x = Tensor::empty({N, s[1], s[2], s[3], s[4]}, features.volume.dtype());
  ops::volume_sample(features.volume, f.motion.deformation, x);
  x = convolve(*fourth_, convolve(*third_, x, 0.01f));
  ops::scale_groups_forward(x, f.motion.occlusion, x);
  // The sigmoid is steeper than bf16 is fine near 0 and 1.
  const Tensor logits = ops::converted(decoder_->forward(std::exchange(x, {})), DType::f32);
  f.picture = Tensor::empty({N, logits.dim(2), logits.dim(3), 3}, DType::f32);
  ops::sigmoid_forward(logits.view(f.picture.shape()), f.picture);
  return f;
}

}  // namespace weft
