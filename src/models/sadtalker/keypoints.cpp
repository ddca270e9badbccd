#include "models/sadtalker/keypoints.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "models/pixels.h"
#include "models/sadtalker/generator.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {

KeypointNet::KeypointNet(const SadtalkerDeck& d)
    : every_(std::lround(1 / d.kp_scale_factor)),
      depth_(d.kp_reshape_depth),
      num_kp_(d.num_kp),
      temperature_(static_cast<float>(d.kp_temperature)),
      net_(table_, "kp_extractor.") {
  WEFT_CHECK(std::abs(1 / d.kp_scale_factor - static_cast<double>(every_)) < 1e-6 && every_ <= 16,
             Exit::usage, "the released networks have 0.25",
             "sadtalker.kp_scale_factor = {} is not one over a whole number up to 16",
             d.kp_scale_factor);
  const auto channels = [&](std::int64_t level) {
    return std::min(d.kp_max_features, d.kp_block_expansion << level);
  };
  const std::int64_t deepest = channels(d.kp_num_blocks);
  WEFT_CHECK(d.kp_reshape_channel == d.kp_reshape_depth * deepest, Exit::usage,
             "the released networks have 16384, 16 and 1024",
             "sadtalker.kp_reshape_channel = {} is not kp_reshape_depth = {} times the {} channels "
             "of the deepest level",
             d.kp_reshape_channel, d.kp_reshape_depth, deepest);
  // A Gaussian of deviation (every - 1) / 2, as wide as four deviations each way.
  if (every_ > 1) {
    const auto reach = static_cast<int>(std::lround(2.0 * static_cast<double>(every_ - 1)));
    smooth_ = net_.add("down", "", 3, 3,
                       ops::Conv::strided(2 * reach + 1, static_cast<int>(every_), 1, 3));
  }
  net_.prefix += "predictor.";
  for (std::int64_t i = 0; i < d.kp_num_blocks; ++i) {
    const std::string name = fmt::format("down_blocks.down{}.", i);
    down_.push_back(net_.add(name + "conv", name + "norm", i == 0 ? 3 : channels(i),
                             channels(i + 1), ops::Conv::same(3), true));
  }
  to_depth_ = net_.add("conv", "", deepest, d.kp_reshape_channel, ops::Conv::same(1), true);
  net_.axes = 3;
  for (std::int64_t i = d.kp_num_blocks; i-- > 0;) {
    const std::string name = fmt::format("up_blocks.up{}.", d.kp_num_blocks - 1 - i);
    up_.push_back(net_.add(name + "conv", name + "norm", channels(i + 1), channels(i),
                           ops::Conv::volume_up(3), true));
  }
  net_.prefix = "kp_extractor.";
  logits_ = net_.add("kp", "", channels(0), num_kp_, ops::Conv::volume(3), true);
}

std::int64_t KeypointNet::stride() const { return every_ << down_.size(); }

Tensor KeypointNet::forward(const Tensor& image) const {
  WEFT_ASSERT(image.dim(2) % stride() == 0 && image.dim(3) % stride() == 0);
  Tensor x = smooth_ != nullptr ? convolve(*smooth_, image) : image;
  for (const ConvLayer* conv : down_) x = halve(convolve(*conv, x, 0));
  x = channels_to_depth(convolve(*to_depth_, x), depth_);
  for (const ConvLayer* conv : up_) x = convolve(*conv, x, 0);
  const Tensor logits = convolve(*logits_, x);
  Tensor keypoints = Tensor::empty({image.dim(0), num_kp_, 3}, DType::f32);
  ops::volume_expectation(logits, temperature_, keypoints);
  return keypoints;
}

namespace {

constexpr std::int64_t angle_bins = 66;  // of an angle
constexpr float mapping_slope = 0.1f;

// Along a sequence, which is a row of pixels here; no padding.
ops::Conv along(int k, int dilation) {
  ops::Conv c{1, 1, k};
  c.dilation = dilation;
  return c;
}

// x [N,1,1,L,C] without its first and last `cut` places.
Tensor without_ends(const Tensor& x, std::int64_t cut) {
  const std::int64_t N = x.dim(0), L = x.dim(3) - 2 * cut, C = x.dim(4);
  Tensor y = Tensor::empty({N, 1, L, C}, x.dtype());
  ops::copy_tokens(x.view({N, 1, x.dim(3), C}), {1, L, 0, cut, 0, 0}, y);
  return y.view({N, 1, 1, L, C});
}

}  // namespace

MappingNet::MappingNet(const SadtalkerDeck& d) : num_kp_(d.num_kp), net_(table_, "mapping.") {
  const std::int64_t C = d.mapping_descriptor_nc;
  net_.axes = 1;
  first_ = net_.add("first.0", "", d.coefficients(), C, along(7, 1), true);
  for (std::int64_t i = 0; i < d.mapping_layer; ++i)
    layers_.push_back(net_.add(fmt::format("encoder{}.1", i), "", C, C, along(3, 3), true));
  net_.axes = 0;
  for (const char* angle : {"fc_yaw", "fc_pitch", "fc_roll"})
    heads_.push_back(net_.add(angle, "", C, angle_bins, ops::Conv::same(1), true));
  heads_.push_back(net_.add("fc_t", "", C, 3, ops::Conv::same(1), true));
  heads_.push_back(net_.add("fc_exp", "", C, 3 * num_kp_, ops::Conv::same(1), true));
}

Tensor MappingNet::heads(const Tensor& windows) const {
  const std::int64_t N = windows.dim(0), length = windows.dim(1), C = windows.dim(2);
  WEFT_ASSERT(length == window);
  Tensor x = convolve(*first_, windows.view({N, 1, 1, length, C}));
  for (const ConvLayer* layer : layers_) {
    Tensor bent = Tensor::empty(x.shape(), x.dtype());
    ops::leaky_relu_forward(x, mapping_slope, bent);
    x = convolve(*layer, bent, 1, without_ends(x, 3));
  }
  Tensor mean = Tensor::empty({N, 1, 1, 1, x.dim(4)}, x.dtype());
  ops::adaptive_pool_forward(x, mean);
  Tensor all = Tensor::empty({N, 1, 1, 1, 3 * angle_bins + 3 + 3 * num_kp_}, DType::f32);
  std::int64_t at = 0;
  for (const ConvLayer* head : heads_) {
    ops::put_channels(convolve(*head, mean), at, all);
    at += head->out.channels;
  }
  return all.view({N, all.dim(4)});
}

std::vector<HeadMotion> MappingNet::forward(const Tensor& windows) const {
  const std::int64_t N = windows.dim(0), E = 3 * num_kp_;
  // On the CPU one by one: there the number of rows may change the order of a product's sums.
  const std::int64_t together = windows.device() == DeviceKind::cpu ? 1 : N;
  std::vector<HeadMotion> motions;
  for (std::int64_t first = 0; first < N; first += together) {
    const Tensor out = heads(windows.slice(first, first + together));
    if (ops::planning()) {
      HeadMotion none;
      none.expression.resize(E);
      motions.resize(motions.size() + static_cast<std::size_t>(together), none);
      continue;
    }
    const Tensor host = out.to_host();
    const auto values = host.span<float>();
    const auto columns = static_cast<std::size_t>(host.dim(1));
    for (std::size_t n = 0; n < static_cast<std::size_t>(together); ++n) {
      const std::span<const float> row = values.subspan(n * columns, columns);
      HeadMotion m;
      m.yaw = expected_degrees(row.subspan(0, angle_bins));
      m.pitch = expected_degrees(row.subspan(angle_bins, angle_bins));
      m.roll = expected_degrees(row.subspan(2 * angle_bins, angle_bins));
      for (std::size_t i = 0; i < 3; ++i) m.t[i] = row[3 * angle_bins + i];
      m.expression.assign(row.begin() + 3 * angle_bins + 3, row.end());
      motions.push_back(std::move(m));
    }
  }
  return motions;
}

double expected_degrees(std::span<const float> logits) {
  const double most = *std::ranges::max_element(logits);
  double sum = 0, weighted = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - most);
    sum += p;
    weighted += p * static_cast<double>(i);
  }
  return weighted / sum * 3 - 99;
}

std::array<double, 9> head_rotation(double yaw, double pitch, double roll) {
  const auto radians = [](double degrees) { return degrees / 180 * 3.14; };
  const double cx = std::cos(radians(pitch)), sx = std::sin(radians(pitch));
  const double cy = std::cos(radians(yaw)), sy = std::sin(radians(yaw));
  const double cz = std::cos(radians(roll)), sz = std::sin(radians(roll));
  return {cy * cz,
          -cy * sz,
          sy,
          sx * sy * cz + cx * sz,
          cx * cz - sx * sy * sz,
          -sx * cy,
          sx * sz - cx * sy * cz,
          cx * sy * sz + sx * cz,
          cx * cy};
}

std::vector<float> moved_keypoints(std::span<const float> canonical, const HeadMotion& m) {
  WEFT_ASSERT(canonical.size() == m.expression.size());
  const std::array<double, 9> R = head_rotation(m.yaw, m.pitch, m.roll);
  std::vector<float> moved(canonical.size());
  for (std::size_t i = 0; i < moved.size(); ++i) {
    const std::size_t axis = i % 3;
    const float* p = canonical.data() + (i - axis);
    const double turned = R[3 * axis] * p[0] + R[3 * axis + 1] * p[1] + R[3 * axis + 2] * p[2];
    moved[i] = static_cast<float>(turned + (axis == 1 ? m.t[1] : 0) + m.expression[i]);
  }
  return moved;
}

namespace {

constexpr std::int64_t predicted = 70, expression = 64;

void check_rows_finite(std::span<const float> values, std::int64_t columns, const char* whose) {
  const auto bad = std::ranges::find_if_not(values, [](float v) { return std::isfinite(v); });
  if (bad == values.end()) return;
  const auto at = static_cast<std::int64_t>(bad - values.begin());
  WEFT_CHECK(false, Exit::data, "check what made these coefficients",
             "{}: coefficient {} of row {} is {}", whose, at % columns, at / columns, *bad);
}

}  // namespace

std::vector<double> camera_degrees(std::span<const std::int64_t> list, std::int64_t frames) {
  if (list.empty()) return {};
  const auto all = static_cast<std::size_t>(frames);
  double path = 0;
  for (std::size_t i = 1; i < list.size(); ++i)
    path += std::abs(static_cast<double>(list[i] - list[i - 1]));
  if (path == 0 || frames < 2) return std::vector<double>(all, static_cast<double>(list[0]));
  const double speed = path / static_cast<double>(frames - 1);
  std::vector<double> degrees;
  for (std::size_t i = 1; i < list.size(); ++i) {
    const auto from = static_cast<double>(list[i - 1]), to = static_cast<double>(list[i]);
    const double step = to < from ? -speed : speed;
    // As many as numpy's arange(from, to, step) has.
    const auto steps = static_cast<std::int64_t>(std::ceil((to - from) / step));
    for (std::int64_t k = 0; k < steps; ++k)
      degrees.push_back(from + static_cast<double>(k) * step);
  }
  degrees.resize(all, degrees.back());
  return degrees;
}

DrivingRows driving_rows(const SadtalkerDeck& deck, std::span<const float> rows,
                         std::span<const float> source) {
  DrivingRows d;
  d.columns = deck.coefficients();
  d.frames = std::ssize(rows) / predicted;
  WEFT_CHECK(d.frames > 0 && std::ssize(rows) % predicted == 0, Exit::data,
             "each frame has 70 coefficients", "{} coefficients are not whole rows of 70",
             rows.size());
  WEFT_CHECK(std::ssize(source) == d.columns && d.columns >= predicted, Exit::data,
             "sadtalker.preprocess decides how many there are: 73 for full and extfull, else 70",
             "the picture has {} coefficients, the mapping network takes {}", source.size(),
             d.columns);
  check_rows_finite(rows, predicted, "predicted motion");
  check_rows_finite(source, d.columns, "the picture's face");
  const auto scale = static_cast<float>(deck.expression_scale);
  for (std::int64_t t = 0; t < d.frames; ++t)
    for (std::int64_t c = 0; c < d.columns; ++c) {
      const bool own = c < expression || (c < predicted && !deck.still);
      const float v = own ? rows[t * predicted + c] : source[c];
      d.values.push_back(c < expression ? v * scale : v);
    }
  d.yaw = camera_degrees(deck.input_yaw, d.frames);
  d.pitch = camera_degrees(deck.input_pitch, d.frames);
  d.roll = camera_degrees(deck.input_roll, d.frames);
  return d;
}

std::vector<float> driving_windows(const DrivingRows& rows, std::int64_t first,
                                   std::int64_t count) {
  WEFT_ASSERT(first >= 0 && count >= 0 && first + count <= rows.frames);
  constexpr std::int64_t reach = MappingNet::window / 2;
  std::vector<float> windows;
  windows.reserve(count * MappingNet::window * rows.columns);
  for (std::int64_t t = first; t < first + count; ++t)
    for (std::int64_t i = t - reach; i <= t + reach; ++i) {
      const auto* row =
          rows.values.data() + std::clamp<std::int64_t>(i, 0, rows.frames - 1) * rows.columns;
      windows.insert(windows.end(), row, row + rows.columns);
    }
  return windows;
}

}  // namespace weft
