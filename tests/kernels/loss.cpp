// Cases of ops/loss.h (kernels/loss.cu beside src/ops/cpu/loss.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/loss.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

Tensor loss_so_far() { return random_tensor({1}, DType::f32, 9); }

void add_losses(Cases& cases, const Shape& x, DType dtype, bool accumulate) {
  const std::int64_t n = x.numel(), C = x[4];
  const std::string text = fmt::format("{}{}", x.str(), accumulate ? " accumulate" : "");
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs,
                       KernelCase::Run run) {
    cases.push_back(bandwidth_case(op, text, dtype, values, std::move(inputs), std::move(run)));
  };
  const Tensor a = random_tensor(x, dtype, 1), b = random_tensor(x, DType::f32, 2),
               b_alike = random_tensor(x, dtype, 2), dx = random_tensor(x, dtype, 3);
  add("l1_forward", 2 * n, {a, b, loss_so_far()}, [](std::vector<Tensor>& in) {
    ops::l1_forward(in[0], in[1], 0.01f, in[2]);
    return std::vector<Tensor>{in[2]};
  });
  cases.back().reference = [](const std::vector<Values>& in) {
    double sum = 0;
    for (std::size_t i = 0; i < in[0].size(); ++i) sum += std::abs(in[0][i] - in[1][i]);
    return std::vector<Values>{{in[2][0] + 0.01f * sum}};
  };
  add("l1_backward", 3 * n, {a, a, dx, b}, [=](std::vector<Tensor>& in) {
    ops::l1_backward(in[0], in[3], 0.3f, in[2], accumulate);
    ops::l1_backward(in[0], in[1], 0.3f, in[2], true);  // equal: nothing
    return std::vector<Tensor>{in[2]};
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values d = fp64::map(in[0], in[3], [](double u, double v) {
      return u > v ? 0.3f : u < v ? -0.3f : 0.0;
    });
    return std::vector<Values>{fp64::added(d, accumulate ? in[2] : Values())};
  };
  if (C % 2 == 0) {
    const Tensor wide = random_tensor(x, dtype, 4, 12.0f, -4.0f),
                 narrow = random_tensor(x, dtype, 4);
    add("kl_forward", n, {narrow, loss_so_far()}, [](std::vector<Tensor>& in) {
      ops::kl_forward(in[0], 0.01f, in[1]);
      return std::vector<Tensor>{in[1]};
    });
    cases.back().reference = [=](const std::vector<Values>& in) {
      double sum = 0;
      for (std::size_t i = 0; i < in[0].size(); ++i) {
        const double v = in[0][i];
        sum += static_cast<std::int64_t>(i) % C < C / 2 ? 0.5 * v * v : 0.5 * (std::exp(v) - 1 - v);
      }
      return std::vector<Values>{{in[1][0] + 0.01f * sum}};
    };
    add("kl_backward", 2 * n, {dtype == DType::f32 ? wide : narrow, dx},
        [=](std::vector<Tensor>& in) {
          ops::kl_backward(in[0], 0.01f, in[1], accumulate);
          return std::vector<Tensor>{in[1]};
        });
    cases.back().reference = [=](const std::vector<Values>& in) {
      Values d = in[0];
      for (std::size_t i = 0; i < d.size(); ++i)
        if (static_cast<std::int64_t>(i) % C < C / 2)
          d[i] *= 0.01f;
        else
          d[i] = d[i] < -30 || d[i] > 20 ? 0 : 0.01f * 0.5 * (std::exp(d[i]) - 1);
      return std::vector<Values>{fp64::added(d, accumulate ? in[1] : Values())};
    };
  }
  const Tensor w = random_tensor({C}, DType::f32, 5, 0.3f, 1.0f);
  add("lpips_forward", 2 * n, {a, b_alike, w, loss_so_far()}, [](std::vector<Tensor>& in) {
    ops::lpips_forward(in[0], in[1], in[2], 0.5f, in[3]);
    return std::vector<Tensor>{in[3]};
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    double sum = 0;
    for (std::int64_t p = 0; p < n / C; ++p) {
      double aa = 0, bb = 0;
      for (std::int64_t c = p * C; c < (p + 1) * C; ++c)
        aa += in[0][c] * in[0][c], bb += in[1][c] * in[1][c];
      for (std::int64_t c = p * C; c < (p + 1) * C; ++c) {
        const double d = in[0][c] / (std::sqrt(aa) + 1e-10) - in[1][c] / (std::sqrt(bb) + 1e-10);
        sum += in[2][c - p * C] * d * d;
      }
    }
    return std::vector<Values>{{in[3][0] + 0.5 * sum / static_cast<double>(x[2] * x[3])}};
  };
  // The first position of b is zero.
  Tensor with_zero = random_tensor(x, dtype, 2);
  std::fill_n(static_cast<std::byte*>(with_zero.raw()),
              static_cast<std::size_t>(C) * size_of(dtype), std::byte{0});
  add("lpips_backward", 3 * n, {a, with_zero, w}, [=](std::vector<Tensor>& in) {
    Tensor db = Tensor::empty(x, dtype);
    ops::lpips_backward(in[0], in[1], in[2], 0.5f, db);
    return std::vector<Tensor>{db};
  });
  // Of u = b / (|b| + e): du/db of g is g / (|b| + e) - b (g b) / (|b| (|b| + e)^2), 0 where b is.
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values db(in[1].size());
    for (std::int64_t p = 0; p < n; p += C) {
      double aa = 0, bb = 0, along = 0;
      for (std::int64_t c = p; c < p + C; ++c) aa += in[0][c] * in[0][c], bb += in[1][c] * in[1][c];
      if (bb == 0) continue;
      const double to_a = std::sqrt(aa) + 1e-10, to_b = std::sqrt(bb) + 1e-10;
      for (std::int64_t c = p; c < p + C; ++c) {
        db[c] =
            -in[2][c - p] * (in[0][c] / to_a - in[1][c] / to_b) / static_cast<double>(x[2] * x[3]);
        along += db[c] * in[1][c];
      }
      for (std::int64_t c = p; c < p + C; ++c)
        db[c] = db[c] / to_b - in[1][c] * along / (std::sqrt(bb) * to_b * to_b);
    }
    return std::vector<Values>{db};
  };
  for (const auto& [kind, name] : {std::pair{ops::GanLoss::hinge, "hinge"},
                                   {ops::GanLoss::logistic, "logistic"},
                                   {ops::GanLoss::linear, "linear"}})
    for (const float sign : {1.0f, -1.0f}) {
      const std::string variant = fmt::format("{} {}{}", text, name, sign);
      cases.push_back(bandwidth_case("gan_loss_forward", variant, dtype, n, {a, loss_so_far()},
                                     [=, kind = kind](std::vector<Tensor>& in) {
                                       ops::gan_loss_forward(in[0], kind, sign, 0.5f, in[1]);
                                       return std::vector<Tensor>{in[1]};
                                     }));
      cases.back().reference = [=, kind = kind](const std::vector<Values>& in) {
        double sum = 0;
        for (const double v : in[0])
          sum += kind == ops::GanLoss::hinge      ? std::max(0.0, 1 + sign * v)
                 : kind == ops::GanLoss::logistic ? std::log1p(std::exp(sign * v))
                                                  : sign * v;
        return std::vector<Values>{{in[1][0] + 0.5 * sum / static_cast<double>(n)}};
      };
      cases.push_back(bandwidth_case("gan_loss_backward", variant, dtype, 2 * n, {a, dx},
                                     [=, kind = kind](std::vector<Tensor>& in) {
                                       ops::gan_loss_backward(in[0], kind, sign, 0.5f, in[1],
                                                              accumulate);
                                       return std::vector<Tensor>{in[1]};
                                     }));
      cases.back().reference = [=, kind = kind](const std::vector<Values>& in) {
        const Values d = fp64::map(in[0], in[0], [&](double v, double) {
          const double slope = kind == ops::GanLoss::hinge      ? (1 + sign * v > 0 ? 1 : 0)
                               : kind == ops::GanLoss::logistic ? fp64::sigmoid(sign * v)
                                                                : 1;
          return 0.5 * sign * slope / static_cast<double>(n);
        });
        return std::vector<Values>{fp64::added(d, accumulate ? in[1] : Values())};
      };
    }
}

void add_adaptive_weight(Cases& cases, const Shape& x) {
  const DType dtype = DType::f32;
  const auto norm = [](const Values& v) {
    double squares = 0;
    for (const double e : v) squares += e * e;
    return std::sqrt(squares);
  };
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs,
                       KernelCase::Run run) {
    cases.push_back(bandwidth_case(op, x.str(), dtype, values, std::move(inputs), std::move(run)));
  };
  add("adaptive_weight", 2 * x.numel(), {random_tensor(x, dtype, 1), random_tensor(x, dtype, 2)},
      [](std::vector<Tensor>& in) {
        Tensor weight = Tensor::empty({1}, DType::f32);
        ops::adaptive_weight(in[0], in[1], 0.5f, weight);
        return std::vector<Tensor>{weight};
      });
  cases.back().reference = [norm](const std::vector<Values>& in) {
    return std::vector<Values>{{0.5 * std::min(1e4, norm(in[0]) / (norm(in[1]) + 1e-4))}};
  };
  // A gradient of zero: the weight has a bound.
  Tensor zero = Tensor::host(x, dtype);
  std::fill_n(zero.data<float>(), x.numel(), 0.0f);
  add("adaptive_weight", 2 * x.numel(), {random_tensor(x, dtype, 1), zero},
      [](std::vector<Tensor>& in) {
        Tensor weight = Tensor::empty({1}, DType::f32);
        ops::adaptive_weight(in[0], in[1], 1.0f, weight);
        return std::vector<Tensor>{weight};
      });
  cases.back().shape += " bounded";
  cases.back().reference = [](const std::vector<Values>&) { return std::vector<Values>{{1e4}}; };
}

void add_regularisers(Cases& cases, const Shape& x, DType dtype) {
  const std::int64_t n = x.numel();
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs,
                       KernelCase::Run run) {
    cases.push_back(bandwidth_case(op, x.str(), dtype, values, std::move(inputs), std::move(run)));
  };
  // The last frame is zero: it has no direction to go.
  Tensor g = random_tensor(x, dtype, 1);
  const std::size_t frame = g.bytes() / static_cast<std::size_t>(x[1]);
  std::fill_n(static_cast<std::byte*>(g.raw()) + g.bytes() - frame, frame, std::byte{0});
  add("gradient_penalty", 3 * n, {g, loss_so_far()}, [=](std::vector<Tensor>& in) {
    Tensor norms = Tensor::empty({x[1]}, DType::f32);
    ops::gradient_penalty_forward(in[0], 0.5f, norms, in[1]);
    ops::gradient_penalty_backward(in[0], norms, 0.5f, in[0]);
    return std::vector<Tensor>{norms, in[1], in[0]};
  });
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values norms, d = in[0];
    double loss = in[1][0];
    const std::int64_t size = n / x[1];
    for (std::int64_t f = 0; f < x[1]; ++f) {
      double squares = 0;
      for (std::int64_t i = f * size; i < (f + 1) * size; ++i) squares += d[i] * d[i];
      const double norm = std::sqrt(squares), frames = static_cast<double>(x[1]);
      norms.push_back(norm);
      loss += 0.5 * (norm - 1) * (norm - 1) / frames;
      for (std::int64_t i = f * size; i < (f + 1) * size; ++i)
        d[i] *= norm > 0 ? 2 * 0.5 * (norm - 1) / norm / frames : 0;
    }
    return std::vector<Values>{norms, {loss}, d};
  };
  if (dtype != DType::f32) return;
  for (const float sign : {1.0f, -1.0f}) {
    add("lecam", 4, {loss_so_far(), random_tensor({1}, DType::f32, 2), loss_so_far()},
        [=](std::vector<Tensor>& in) {
          Tensor slope = Tensor::empty({1}, DType::f32);
          ops::lecam(in[0], in[1], sign, 2.0f, in[2], slope);
          return std::vector<Tensor>{in[2], slope};
        });
    cases.back().reference = [=](const std::vector<Values>& in) {
      const double d = std::max(0.0, sign * (in[0][0] - in[1][0]));
      return std::vector<Values>{{in[2][0] + 2 * d * d}, {2 * sign * d}};
    };
  }
}

}  // namespace

void loss_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // VGG16's first layer on four frames of 256 x 256.
    add_losses(cases, {1, 4, 256, 256, 64}, DType::bf16, false);
    add_regularisers(cases, {1, 17, 256, 256, 3}, DType::bf16);
    return;
  }
  // Odd rows and columns; channels beside a warp's 32; more elements than a block's chunk.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_losses(cases, {1, 2, 3, 5, 6}, dtype, true);
    add_losses(cases, {2, 1, 8, 5, 33}, dtype, false);
    // Positions of 8, 16 and 32 lanes, the last with two accesses a lane.
    add_losses(cases, {1, 1, 3, 5, 64}, dtype, true);
    add_losses(cases, {1, 1, 5, 3, 128}, dtype, false);
    add_losses(cases, {1, 1, 3, 3, 512}, dtype, false);
    add_regularisers(cases, {1, 3, 20, 13, 3}, dtype);
  }
  add_adaptive_weight(cases, {1, 2, 5, 4, 3});
}

}  // namespace weft
