// Cases of ops/resize.h (kernels/volume.cu beside src/ops/cpu/volume.cpp).
#include "ops/resize.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tests/kernels/cases.h"

namespace weft {
namespace {

using Place = std::array<double, 3>;  // x, y, z

struct Volume {
  std::int64_t D, H, W;

  std::int64_t voxels() const { return D * H * W; }
  // Place of voxel i on the grid.
  Place at(std::int64_t i) const {
    const auto coordinate = [](std::int64_t at, std::int64_t n) {
      return 2.0 * static_cast<double>(at) / static_cast<double>(std::max<std::int64_t>(n - 1, 1)) -
             1.0;
    };
    return {coordinate(i % W, W), coordinate(i / W % H, H), coordinate(i / W / H, D)};
  }
  // Calls f(voxel, share) for the neighbours of `place` that lie inside.
  template <class F>
  void each_neighbour(const Place& place, F f) const {
    const std::int64_t size[3] = {W, H, D};
    double at[3];
    std::int64_t first[3];
    for (int axis = 0; axis < 3; ++axis) {
      const auto n = static_cast<double>(size[axis]);
      at[axis] = ((place[axis] + 1) * n - 1) / 2;
      if (!(at[axis] > -1 && at[axis] < n)) return;
      first[axis] = static_cast<std::int64_t>(std::floor(at[axis]));
    }
    for (int k = 0; k < 8; ++k) {
      std::int64_t own[3];
      double share = 1;
      bool inside = true;
      for (int axis = 0; axis < 3; ++axis) {
        own[axis] = first[axis] + (k >> axis & 1);
        inside = inside && own[axis] >= 0 && own[axis] < size[axis];
        share *= 1 - std::abs(at[axis] - static_cast<double>(own[axis]));
      }
      if (inside) f((own[2] * H + own[1]) * W + own[0], share);
    }
  }
};

// Where candidate k of frame n moves `place`.
Place moved(Place place, const Values& source, const Values& driving, std::int64_t K,
            std::int64_t n, std::int64_t k) {
  for (std::int64_t axis = 0; k > 0 && axis < 3; ++axis)
    place[axis] += source[3 * (k - 1) + axis] - driving[3 * (n * K + k - 1) + axis];
  return place;
}

std::string text_of(std::int64_t N, const Volume& v, std::int64_t C) {
  return fmt::format("N{} D{} {}x{} C{}", N, v.D, v.H, v.W, C);
}

// `spread`: how far the places lie from the middle.
void add_sample(Cases& cases, bool shared, std::int64_t N, const Volume& v, std::int64_t C,
                float spread, DType dtype) {
  const Shape from{shared ? 1 : N, v.D, v.H, v.W, C}, to{N, v.D, v.H, v.W, C};
  const Tensor grid = random_tensor({N, v.D, v.H, v.W, 3}, DType::f32, 2, spread);
  KernelCase c = bandwidth_case(
      "volume_sample", text_of(N, v, C) + (shared ? " shared" : "") + fmt::format(" to {}", spread),
      dtype, from.numel() + to.numel(), {random_tensor(from, dtype, 1), grid},
      [=](std::vector<Tensor>& in) {
        Tensor y = Tensor::empty(to, dtype);
        ops::volume_sample(in[0], in[1], y);
        return std::vector<Tensor>{y};
      });
  c.bytes += static_cast<double>(grid.bytes());
  c.reference = [=](const std::vector<Values>& in) {
    Values y(to.numel());
    for (std::int64_t p = 0; p < N * v.voxels(); ++p) {
      const std::int64_t first = shared ? 0 : p / v.voxels() * v.voxels();
      v.each_neighbour({in[1][3 * p], in[1][3 * p + 1], in[1][3 * p + 2]},
                       [&](std::int64_t voxel, double share) {
                         for (std::int64_t i = 0; i < C; ++i)
                           y[p * C + i] += share * in[0][(first + voxel) * C + i];
                       });
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

void add_candidates(Cases& cases, std::int64_t N, const Volume& v, std::int64_t K, std::int64_t C,
                    DType dtype) {
  const Shape from{1, v.D, v.H, v.W, C}, to{N, v.D, v.H, v.W, (K + 1) * (1 + C)};
  KernelCase c =
      bandwidth_case("motion_candidates", text_of(N, v, C) + fmt::format(" K{}", K), dtype,
                     from.numel() + to.numel(),
                     {random_tensor(from, dtype, 1), random_tensor({1, K, 3}, DType::f32, 2, 0.4f),
                      random_tensor({N, K, 3}, DType::f32, 3, 0.4f)},
                     [=](std::vector<Tensor>& in) {
                       Tensor y = Tensor::empty(to, dtype);
                       ops::motion_candidates(in[0], in[1], in[2], y);
                       return std::vector<Tensor>{y};
                     });
  c.reference = [=](const std::vector<Values>& in) {
    const auto heat = [](const Place& g, const double* point) {
      double squares = 0;
      for (int axis = 0; axis < 3; ++axis)
        squares += (g[axis] - point[axis]) * (g[axis] - point[axis]);
      return std::exp(-squares / 0.02);
    };
    Values y(to.numel());
    for (std::int64_t i = 0; i < N * v.voxels() * (K + 1); ++i) {
      const std::int64_t k = i % (K + 1), n = i / (K + 1) / v.voxels();
      const Place g = v.at(i / (K + 1) % v.voxels());
      double* const own = y.data() + i * (1 + C);
      if (k > 0)
        own[0] = heat(g, in[2].data() + 3 * (n * K + k - 1)) - heat(g, in[1].data() + 3 * (k - 1));
      v.each_neighbour(moved(g, in[1], in[2], K, n, k), [&](std::int64_t voxel, double share) {
        for (std::int64_t j = 0; j < C; ++j) own[1 + j] += share * in[0][voxel * C + j];
      });
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

// `mask`: the type of the mask that is wanted, u8: none is.
void add_field(Cases& cases, std::int64_t N, const Volume& v, std::int64_t K, float threshold,
               DType mask, DType dtype) {
  const Shape shape{N, v.D, v.H, v.W, K + 1}, to{N, v.D, v.H, v.W, 3};
  const bool with_mask = mask != DType::u8;
  const std::string text = fmt::format("{} K{} threshold {} mask {}", text_of(N, v, K + 1), K,
                                       threshold, with_mask ? name_of(mask) : "none");
  KernelCase c = bandwidth_case(
      "motion_field", text, dtype, shape.numel(),
      {random_tensor(shape, dtype, 1, 3.0f), random_tensor({1, K, 3}, DType::f32, 2, 0.4f),
       random_tensor({N, K, 3}, DType::f32, 3, 0.4f)},
      [=](std::vector<Tensor>& in) {
        Tensor m = with_mask ? Tensor::empty(shape, mask) : Tensor(),
               y = Tensor::empty(to, DType::f32);
        ops::motion_field(in[0], in[1], in[2], threshold, m, y);
        if (!with_mask) return std::vector<Tensor>{y};
        return std::vector<Tensor>{m, y};
      });
  c.bytes += static_cast<double>(to.numel()) * 4 +
             (with_mask ? static_cast<double>(shape.numel() * size_of(mask)) : 0.0);
  // A share next to the threshold may fall on either side.
  if (mask != DType::bf16) c.tolerance = threshold > 0 && shape.numel() > 1 << 16 ? 1e-2 : 2e-5;
  c.reference = [=](const std::vector<Values>& in) {
    Values shares(shape.numel()), y(to.numel());
    for (std::int64_t i = 0; i < N * v.voxels(); ++i) {
      const double* const own = in[0].data() + i * (K + 1);
      const double most = *std::max_element(own, own + K + 1);
      double sum = 0;
      for (std::int64_t k = 0; k <= K; ++k) sum += std::exp(own[k] - most);
      for (std::int64_t k = 0; k <= K; ++k) {
        const double share = shares[i * (K + 1) + k] = std::exp(own[k] - most) / sum;
        if (share < threshold) continue;
        const Place motion = moved(v.at(i % v.voxels()), in[1], in[2], K, i / v.voxels(), k);
        for (int axis = 0; axis < 3; ++axis) y[3 * i + axis] += share * motion[axis];
      }
    }
    if (!with_mask) return std::vector<Values>{y};
    return std::vector<Values>{shares, y};
  };
  cases.push_back(std::move(c));
}

void add_expectation(Cases& cases, std::int64_t N, const Volume& v, std::int64_t K,
                     float temperature, DType dtype) {
  const Shape shape{N, v.D, v.H, v.W, K};
  KernelCase c = bandwidth_case(
      "volume_expectation", fmt::format("{} temperature {}", text_of(N, v, K), temperature), dtype,
      shape.numel(), {random_tensor(shape, dtype, 1, 0.3f)}, [=](std::vector<Tensor>& in) {
        Tensor y = Tensor::empty({N, K, 3}, DType::f32);
        ops::volume_expectation(in[0], temperature, y);
        return std::vector<Tensor>{y};
      });
  c.tolerance = 2e-5;  // f32 sums, of either type
  c.reference = [=](const std::vector<Values>& in) {
    Values y(N * K * 3);
    for (std::int64_t n = 0; n < N; ++n)
      for (std::int64_t k = 0; k < K; ++k) {
        const auto logit = [&](std::int64_t i) { return in[0][(n * v.voxels() + i) * K + k]; };
        double most = -INFINITY, sum = 0;
        for (std::int64_t i = 0; i < v.voxels(); ++i) most = std::max(most, logit(i));
        double* const to = y.data() + (n * K + k) * 3;
        for (std::int64_t i = 0; i < v.voxels(); ++i) {
          const double e = std::exp((logit(i) - most) / static_cast<double>(temperature));
          sum += e;
          for (int axis = 0; axis < 3; ++axis) to[axis] += e * v.at(i)[axis];
        }
        for (int axis = 0; axis < 3; ++axis) to[axis] /= sum;
      }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}

}  // namespace

void volume_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // SadTalker at 256x256, four frames.
    const Volume v{16, 64, 64};
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_sample(cases, true, 4, v, 32, 0.5f, dtype);
      add_candidates(cases, 4, v, 15, 4, dtype);
      add_field(cases, 4, v, 15, 1e-3f, DType::u8, dtype);
      add_expectation(cases, 1, v, 15, 0.1f, dtype);
    }
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // Places that mostly lie inside, and mostly outside; channels that fill no vector; a slice of
    // one, a volume of one voxel.
    add_sample(cases, true, 2, {3, 5, 4}, 32, 0.5f, dtype);
    add_sample(cases, false, 3, {2, 4, 7}, 8, 1.5f, dtype);
    add_sample(cases, false, 1, {4, 3, 3}, 5, 0.7f, dtype);
    add_sample(cases, true, 2, {1, 6, 5}, 40, 0.6f, dtype);
    add_sample(cases, true, 1, {1, 1, 1}, 3, 0.8f, dtype);
    add_candidates(cases, 2, {4, 6, 5}, 15, 4, dtype);
    add_candidates(cases, 1, {3, 5, 7}, 10, 8, dtype);
    add_candidates(cases, 3, {2, 3, 9}, 4, 3, dtype);
    add_candidates(cases, 1, {1, 4, 4}, 1, 1, dtype);
    for (const DType mask : {DType::f32, dtype, DType::u8}) {
      add_field(cases, 2, {3, 4, 5}, 15, 1e-3f, mask, dtype);
      add_field(cases, 1, {2, 3, 3}, 4, 0.1f, mask, dtype);
    }
    add_field(cases, 1, {2, 5, 3}, 20, 0.0f, DType::f32, dtype);
    add_field(cases, 2, {3, 13, 29}, 15, 1e-3f, DType::f32,
              dtype);  // several turns of a GPU's threads
    add_field(cases, 1, {2, 3, 5}, 7, 1e-3f, dtype, dtype);
    add_field(cases, 1, {1, 3, 5}, 127, 1e-3f, dtype, dtype);
    add_field(cases, 1, {2, 2, 3}, 90, 1e-3f, DType::u8, dtype);
    add_expectation(cases, 2, {4, 9, 7}, 15, 0.1f, dtype);
    add_expectation(cases, 1, {3, 17, 29}, 10, 0.5f, dtype);
    add_expectation(cases, 1, {1, 5, 1}, 300, 1.0f, dtype);
  }
}

}  // namespace weft
