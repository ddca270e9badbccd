#include "models/sadtalker/speech_networks.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/philox.h"
#include "models/sadtalker/speech_motion.h"
#include "ops/layout.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {

void Dense::pack() const {
  if (on_cuda()) return;
  Tensor w = conv_->weight.view({conv_->out.channels, conv_->in.channels});
  ops::pack_weight(w);
}

Tensor Dense::operator()(const Tensor& x, float slope) const {
  if (on_cuda()) return convolve(*conv_, x, slope);
  const std::int64_t in = conv_->in.channels, out = conv_->out.channels, rows = x.numel() / in;
  Tensor packed = Tensor::empty({ops::packed_rows(rows), in}, DType::f32);
  ops::pack_rows(x.view({rows, in}), packed);
  Tensor y = Tensor::empty(conv_->geometry.output(x.shape(), out), DType::f32);
  Tensor flat = y.view({rows, out});
  ops::packed_linear_forward(packed, conv_->weight.view({out, in}), conv_->bias, {}, flat);
  if (slope != 1) ops::leaky_relu_forward(y, slope, y);
  return y;
}

RowStrideConv::RowStrideConv(const ConvLayer& conv, int row_stride, int column_stride)
    : conv_(conv) {
  WEFT_ASSERT(conv.geometry.kh == 3 && conv.geometry.kw == 3 && conv.weight.defined());
  ops::Conv& g = conv_.geometry;
  g = ops::Conv{3, 3, 1, row_stride, column_stride, 1, 1, 0, 1, 0};
  conv_.weight = conv.weight.view({conv.out.channels, conv.in.channels, 3, 3, 1});
}

Tensor RowStrideConv::operator()(const Tensor& x, float slope) const {
  const std::int64_t N = x.dim(0), H = x.dim(2), W = x.dim(3);
  WEFT_ASSERT(x.dim(1) == 1 && (H - 1) % conv_.geometry.stride_t != 0);
  const Tensor y = convolve(conv_, x.view({N, H, W, 1, conv_.in.channels}), slope);
  return y.view({N, 1, y.dim(1), y.dim(2), conv_.out.channels});
}

AudioEncoder::AudioEncoder(ConvNet& net, const std::string& name) {
  struct Layer {
    std::int64_t in, out;
    int row_stride, column_stride, padding;
    bool residual;
  };
  constexpr Layer layers[] = {
      {1, 32, 1, 1, 1, false},    {32, 32, 1, 1, 1, true},   {32, 32, 1, 1, 1, true},
      {32, 64, 3, 1, 1, false},   {64, 64, 1, 1, 1, true},   {64, 64, 1, 1, 1, true},
      {64, 128, 3, 3, 1, false},  {128, 128, 1, 1, 1, true}, {128, 128, 1, 1, 1, true},
      {128, 256, 3, 2, 1, false}, {256, 256, 1, 1, 1, true}, {256, 512, 1, 1, 0, false}};
  const auto add = [&](std::size_t i, std::int64_t in, std::int64_t out, const ops::Conv& g) {
    const std::string at = fmt::format("{}.{}.conv_block.", name, i);
    return net.add(at + "0", at + "1", in, out, g, true);
  };
  for (const Layer& l : layers) {
    const int stride = l.row_stride == l.column_stride ? l.row_stride : 1;
    const ops::Conv geometry{1, 3, 3, 1, stride, 0, l.padding, l.padding, l.padding, l.padding};
    blocks_.push_back(
        {add(blocks_.size(), l.in, l.out, geometry), l.residual, l.row_stride, l.column_stride});
  }
  last_ = Dense(add(blocks_.size(), speech_embedding, speech_embedding, {}));
}

Tensor AudioEncoder::operator()(const Tensor& windows) const {
  Tensor x = windows;
  for (const Block& b : blocks_) {
    if (b.row_stride != b.column_stride)
      x = RowStrideConv(*b.conv, b.row_stride, b.column_stride)(x, 0);
    else
      x = convolve(*b.conv, x, 0, b.residual ? x : Tensor());
  }
  return last_(x, 0);
}

Tensor speech_block_of(std::span<const float> values, const Shape& of_block) {
  const std::int64_t all = of_block.numel();
  WEFT_ASSERT(std::ssize(values) <= all && all % of_block[0] == 0);
  std::vector<float> block(all);
  std::ranges::copy(values, block.begin());
  return Tensor::from_host(std::span<const float>(block), of_block);
}

namespace {

constexpr std::int64_t face_values = expression_coefficients + 1;

Dense add_mapping(ConvNet& net) {
  net.axes = 0;
  return Dense(net.add("mapping1", "", speech_embedding + face_values, expression_coefficients,
                       ops::Conv{}, true));
}

}  // namespace

ExpNet::ExpNet(ParameterTable& table)
    : net_(table, prefix), encoder_(net_, "audio_encoder"), mapping_(add_mapping(net_)) {}

void ExpNet::fold() {
  net_.fold();
  encoder_.pack();
  mapping_.pack();
}

Tensor ExpNet::run(const Tensor& windows, const Tensor& face) const {
  const Tensor heard = encoder_(windows);
  Tensor all = Tensor::empty({windows.dim(0), 1, 1, 1, speech_embedding + face_values}, DType::f32);
  ops::put_channels(heard, 0, all);
  ops::put_channels(face.view({face.dim(0), 1, 1, 1, face_values}), speech_embedding, all);
  return mapping_(all).view({windows.dim(0), expression_coefficients});
}

std::vector<float> ExpNet::expressions(std::span<const float> windows,
                                       std::span<const float> references,
                                       std::span<const float> closed) const {
  const std::size_t n = closed.size();
  WEFT_ASSERT(n > 0 && n <= static_cast<std::size_t>(speech_block) &&
              windows.size() == n * mel_bands * mel_window &&
              references.size() == n * motion_coefficients);
  std::vector<float> face;
  for (std::size_t i = 0; i < n; ++i) {
    const auto row = references.subspan(i * motion_coefficients, expression_coefficients);
    face.insert(face.end(), row.begin(), row.end());
    face.push_back(closed[i]);
  }
  const Tensor all = run(speech_block_of(windows, {speech_block, 1, mel_bands, mel_window, 1}),
                         speech_block_of(face, {speech_block, face_values}))
                         .to_host();
  const auto values = all.span<float>().first(n * expression_coefficients);
  return {values.begin(), values.end()};
}

namespace {

constexpr std::int64_t call_values = pose_call * pose_values;

}  // namespace

std::vector<float> draw_pose_latents(std::int64_t frames, std::uint64_t seed) {
  std::vector<float> z;
  for (std::int64_t call = 0; call < pose_calls(frames); ++call) {
    const Philox random(seed, Purpose::head_pose, static_cast<std::uint64_t>(call), 0);
    for (std::uint32_t i = 0; i < pose_latent; ++i) z.push_back(random.normal(i));
  }
  return z;
}

std::vector<std::string> PoseVae::unused() {
  return {std::string(prefix) + "netG.encoder.", std::string(prefix) + "netD_motion."};
}

PoseVae::PoseVae(ParameterTable& table)
    : net_(table, prefix), encoder_(net_, "audio_encoder.audio_encoder") {
  net_.prefix = std::string(prefix) + "netG.decoder.";
  styles_ = &table.add(net_.prefix + "classbias", {pose_styles, pose_latent}, Init::normal(1));
  net_.axes = 0;
  audio_ = Dense(net_.add("linear_audio", "", speech_embedding, pose_values, {}, true));
  mlp_[0] = Dense(net_.add("MLP.L0", "", input_values, 128, {}, true));
  mlp_[1] = Dense(net_.add("MLP.L1", "", 128, call_values, {}, true));
  pose_ = Dense(net_.add("pose_linear", "", pose_values, pose_values, {}, true));
  net_.axes = 2;
  const ops::Conv same = ops::Conv::same(3);
  net_.prefix += "resunet.";
  input_[0] = net_.add("input_layer.0", "input_layer.1", 1, 32, same, true);
  input_[1] = net_.add("input_layer.3", "", 32, 32, same, true);
  input_skip_ = net_.add("input_skip.0", "", 1, 32, same, true);
  down_[0] = add_residual("residual_conv_1", 32, 64, 2);
  down_[1] = add_residual("residual_conv_2", 64, 128, 2);
  bridge_ = add_residual("bridge", 128, 256, 2);
  up_[0] = add_rows_up(table, "upsample_1.upsample", 256);
  joined_[0] = add_residual("up_residual_conv1", 256 + 128, 128, 1);
  up_[1] = add_rows_up(table, "upsample_2.upsample", 128);
  joined_[1] = add_residual("up_residual_conv2", 128 + 64, 64, 1);
  up_[2] = add_rows_up(table, "upsample_3.upsample", 64);
  joined_[2] = add_residual("up_residual_conv3", 64 + 32, 32, 1);
  output_ = Dense(net_.add("output_layer.0", "", 32, 1, {}, true));
}

PoseVae::Residual PoseVae::add_residual(const std::string& name, std::int64_t in, std::int64_t out,
                                        int stride) {
  const ops::Conv same = ops::Conv::same(3);
  Residual r;
  r.norm = net_.add_norm(name + ".conv_block.0", in);
  r.first = net_.add(name + ".conv_block.2", name + ".conv_block.3", in, out, same, true);
  r.second = net_.add(name + ".conv_block.5", "", out, out, same, true);
  r.skip = net_.add(name + ".conv_skip.0", name + ".conv_skip.1", in, out, same, true);
  r.stride = stride;
  return r;
}

PoseVae::RowsUp PoseVae::add_rows_up(ParameterTable& table, const std::string& name,
                                     std::int64_t channels) {
  const Init start = Init::uniform(1 / std::sqrt(2 * static_cast<float>(channels)));
  return {&table.add(net_.prefix + name + ".weight", {channels, channels, 2, 1}, start),
          &table.add(net_.prefix + name + ".bias", {channels}, start),
          channels,
          {}};
}

void PoseVae::fold() {
  net_.fold();
  const Tensor styles = styles_->value.to_host();
  style_values_.assign(styles.span<float>().begin(), styles.span<float>().end());
  for (RowsUp& u : up_) {
    // [in,out,2] of the file to a matrix [out,in] for each row, in its place.
    const auto C = static_cast<std::size_t>(u.channels);
    const Tensor host = u.weight->value.to_host();
    const auto from = host.span<float>();
    std::vector<float> rows(from.size());
    for (std::size_t in = 0; in < C; ++in)
      for (std::size_t out = 0; out < C; ++out)
        for (std::size_t row = 0; row < 2; ++row)
          rows[(row * C + out) * C + in] = from[(in * C + out) * 2 + row];
    u.weight->set(0, rows);
    const Tensor both = u.weight->value.view({2 * u.channels, u.channels, 1, 1});
    for (std::int64_t row = 0; row < 2; ++row) {
      u.row[row].in = u.row[row].out = u.channels;
      u.row[row].weight = both.slice(row * u.channels, (row + 1) * u.channels);
      u.row[row].bias = u.bias->value;
      Dense(&u.row[row]).pack();
    }
  }
  encoder_.pack();
  for (const Dense* layer : {&audio_, &mlp_[0], &mlp_[1], &pose_, &output_}) layer->pack();
}

Tensor PoseVae::residual(const Residual& r, const Tensor& x) const {
  const auto strided = [&](const ConvLayer& conv, const Tensor& from, float slope) {
    return r.stride == 1 ? convolve(conv, from, slope)
                         : RowStrideConv(conv, r.stride, 1)(from, slope);
  };
  Tensor in = Tensor::empty(x.shape(), DType::f32);
  normalise(*r.norm, x, true, in);
  return convolve(*r.second, strided(*r.first, in, 0), 1, strided(*r.skip, x, 1));
}

Tensor PoseVae::up(const RowsUp& u, const Tensor& x, const Tensor& beside) const {
  const std::int64_t N = x.dim(0), H = x.dim(2), W = x.dim(3), C = u.channels;
  Tensor both = Tensor::empty({N * H, 2 * W * C}, DType::f32);
  for (std::int64_t row = 0; row < 2; ++row)
    ops::put_channels(Dense(&u.row[row])(x).view({N * H, W * C}), row * W * C, both);
  Tensor joined = Tensor::empty({N, 1, 2 * H, W, C + beside.dim(4)}, DType::f32);
  ops::put_channels(both.view({N, 1, 2 * H, W, C}), 0, joined);
  ops::put_channels(beside, C, joined);
  return joined;
}

Tensor PoseVae::resunet(const Tensor& x) const {
  const Tensor skip = convolve(*input_skip_, x);
  const Tensor full = convolve(*input_[1], convolve(*input_[0], x, 0), 1, skip);
  const Tensor half = residual(down_[0], full);
  const Tensor quarter = residual(down_[1], half);
  Tensor y = residual(bridge_, quarter);
  y = residual(joined_[0], up(up_[0], y, quarter));
  y = residual(joined_[1], up(up_[1], y, half));
  y = residual(joined_[2], up(up_[2], y, full));
  y = output_(y);
  ops::sigmoid_forward(y, y);
  return y;
}

Tensor PoseVae::hear(const Tensor& windows) const {
  return audio_(encoder_(windows)).view({windows.dim(0), pose_values});
}

Tensor PoseVae::decode(const Tensor& input) const {
  Tensor x = mlp_[1](mlp_[0](input, 0));
  ops::sigmoid_forward(x, x);
  const Tensor moved = resunet(x.view({1, 1, pose_call, pose_values, 1}));
  return pose_(moved.view({pose_call, 1, 1, 1, pose_values})).view({pose_call, pose_values});
}

std::vector<float> PoseVae::heard(std::span<const float> windows) const {
  const std::int64_t n = std::ssize(windows) / (mel_bands * mel_window);
  const Tensor all =
      hear(speech_block_of(windows, {speech_block, 1, mel_bands, mel_window, 1})).to_host();
  const auto values = all.span<float>().first(n * pose_values);
  return {values.begin(), values.end()};
}

std::vector<float> PoseVae::poses(std::span<const float> heard, std::span<const float> reference,
                                  std::span<const float> z, std::int64_t style) const {
  const std::int64_t T = std::ssize(heard) / pose_values;
  WEFT_ASSERT(T > 0 && reference.size() == pose_values &&
              std::ssize(z) == pose_calls(T) * pose_latent && style >= 0 && style < pose_styles);
  std::vector<float> all;
  for (std::int64_t t = 0; t < T; ++t) all.insert(all.end(), reference.begin(), reference.end());
  for (std::int64_t call = 0; call < pose_calls(T); ++call) {
    // The last call ends with the clip, also where that makes it begin in frames already moved.
    const std::int64_t first = 1 + call * pose_call;
    const std::int64_t begin = std::min(first, T - pose_call);
    std::vector<float> input(reference.begin(), reference.end());
    for (std::int64_t i = 0; i < pose_latent; ++i)
      input.push_back(z[call * pose_latent + i] + style_values_[style * pose_latent + i]);
    for (std::int64_t t = begin; t < begin + pose_call; ++t) {
      const auto row = heard.subspan(std::max<std::int64_t>(t, 1) * pose_values, pose_values);
      input.insert(input.end(), row.begin(), row.end());
    }
    const Tensor moved =
        decode(Tensor::from_host(std::span<const float>(input), {1, 1, 1, 1, input_values}))
            .to_host();
    const auto motions = moved.span<float>();
    for (std::int64_t t = first; t < std::min(first + pose_call, T); ++t)
      for (std::int64_t i = 0; i < pose_values; ++i)
        all[t * pose_values + i] += motions[(t - begin) * pose_values + i];
  }
  return all;
}

}  // namespace weft
