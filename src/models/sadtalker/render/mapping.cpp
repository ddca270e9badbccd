#include "models/sadtalker/render/mapping.h"

#include "core/error.h"
#include "models/sadtalker/render/transform.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr std::int64_t bins = 66;  // of an angle
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
    heads_.push_back(net_.add(angle, "", C, bins, ops::Conv::same(1), true));
  heads_.push_back(net_.add("fc_t", "", C, 3, ops::Conv::same(1), true));
  heads_.push_back(net_.add("fc_exp", "", C, 3 * num_kp_, ops::Conv::same(1), true));
}

Tensor MappingNet::heads(const Tensor& windows) const {
  const std::int64_t N = windows.dim(0), length = windows.dim(1), C = windows.dim(2);
  WEFT_ASSERT(length == window);
  Tensor x = convolve(*first_, windows.view({N, 1, 1, length, C}));
  for (const FoldedConv* layer : layers_) {
    Tensor bent = Tensor::empty(x.shape(), x.dtype());
    ops::leaky_relu_forward(x, mapping_slope, bent);
    x = convolve(*layer, bent, 1, without_ends(x, 3));
  }
  Tensor mean = Tensor::empty({N, 1, 1, 1, x.dim(4)}, x.dtype());
  ops::adaptive_pool_forward(x, mean);
  Tensor all = Tensor::empty({N, 1, 1, 1, 3 * bins + 3 + 3 * num_kp_}, DType::f32);
  std::int64_t at = 0;
  for (const FoldedConv* head : heads_) {
    ops::put_channels(convolve(*head, mean), at, all);
    at += head->out;
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
      none.expression.resize(static_cast<std::size_t>(E));
      motions.resize(motions.size() + static_cast<std::size_t>(together), none);
      continue;
    }
    const Tensor host = out.to_host();
    const auto values = host.span<float>();
    const auto columns = static_cast<std::size_t>(host.dim(1));
    for (std::size_t n = 0; n < static_cast<std::size_t>(together); ++n) {
      const std::span<const float> row = values.subspan(n * columns, columns);
      HeadMotion m;
      m.yaw = expected_degrees(row.subspan(0, bins));
      m.pitch = expected_degrees(row.subspan(bins, bins));
      m.roll = expected_degrees(row.subspan(2 * bins, bins));
      for (std::size_t i = 0; i < 3; ++i) m.t[i] = row[3 * bins + i];
      m.expression.assign(row.begin() + 3 * bins + 3, row.end());
      motions.push_back(std::move(m));
    }
  }
  return motions;
}

}  // namespace weft
