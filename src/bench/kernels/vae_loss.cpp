// Cases of ops/vae_loss.h and ops/critic.h (kernels/vae_loss.cu, pooling.cu and critic.cu beside their twins in src/ops/cpu).

#include <fmt/format.h>

#include <utility>

#include "bench/kernels/cases.h"
#include "ops/loss.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "ops/pool.h"

namespace weft {
namespace {

using Run = std::function<std::vector<Tensor>(std::vector<Tensor>& in)>;

// `values`: read and written in all.
KernelCase make(const char* op, const std::string& shape, DType dtype, std::int64_t values,
                std::vector<Tensor> inputs, Run run) {
  KernelCase c;
  c.op = op;
  c.shape = shape;
  c.dtype = dtype;
  c.bytes = static_cast<double>(values) * static_cast<double>(size_of(dtype));
  // Sums in another order; bf16: one unit of the largest value's last place where two sides round either way.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 2e-5;
  c.inputs = std::move(inputs);
  c.run = std::move(run);
  return c;
}

Tensor loss_so_far() { return random_tensor({1}, DType::f32, 9); }

void add_losses(std::vector<KernelCase>& cases, const Shape& x, DType dtype, bool accumulate) {
  const std::int64_t n = x.numel(), C = x[4];
  const std::string text = fmt::format("{}{}", x.str(), accumulate ? " accumulate" : "");
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs, Run run) {
    cases.push_back(make(op, text, dtype, values, std::move(inputs), std::move(run)));
  };
  const Tensor a = random_tensor(x, dtype, 1), b = random_tensor(x, DType::f32, 2),
               b_alike = random_tensor(x, dtype, 2), dx = random_tensor(x, dtype, 3);
  add("l1_forward", 2 * n, {a, b, loss_so_far()}, [](std::vector<Tensor>& in) {
    ops::l1_forward(in[0], in[1], 0.01f, in[2]);
    return std::vector<Tensor>{in[2]};
  });
  add("l1_backward", 3 * n, {a, a, dx, b}, [=](std::vector<Tensor>& in) {
    ops::l1_backward(in[0], in[3], 0.3f, in[2], accumulate);
    ops::l1_backward(in[0], in[1], 0.3f, in[2], true);  // equal: nothing
    return std::vector<Tensor>{in[2]};
  });
  if (C % 2 == 0) {
    const Tensor wide = random_tensor(x, dtype, 4, 12.0f, -4.0f),
                 narrow = random_tensor(x, dtype, 4);
    add("kl_forward", n, {narrow, loss_so_far()}, [](std::vector<Tensor>& in) {
      ops::kl_forward(in[0], 0.01f, in[1]);
      return std::vector<Tensor>{in[1]};
    });
    add("kl_backward", 2 * n, {dtype == DType::f32 ? wide : narrow, dx},
        [=](std::vector<Tensor>& in) {
          ops::kl_backward(in[0], 0.01f, in[1], accumulate);
          return std::vector<Tensor>{in[1]};
        });
  }
  const Tensor w = random_tensor({C}, DType::f32, 5, 0.3f, 1.0f);
  add("lpips_forward", 2 * n, {a, b_alike, w, loss_so_far()}, [](std::vector<Tensor>& in) {
    ops::lpips_forward(in[0], in[1], in[2], 0.5f, in[3]);
    return std::vector<Tensor>{in[3]};
  });
  // The first position of b is zero.
  Tensor with_zero = random_tensor(x, dtype, 2);
  std::fill_n(static_cast<std::byte*>(with_zero.raw()),
              static_cast<std::size_t>(C) * size_of(dtype), std::byte{0});
  add("lpips_backward", 3 * n, {a, with_zero, w}, [=](std::vector<Tensor>& in) {
    Tensor db = Tensor::empty(x, dtype);
    ops::lpips_backward(in[0], in[1], in[2], 0.5f, db);
    return std::vector<Tensor>{db};
  });
  for (const auto& [kind, name] : {std::pair{ops::GanLoss::hinge, "hinge"},
                                   {ops::GanLoss::logistic, "logistic"},
                                   {ops::GanLoss::linear, "linear"}})
    for (const float sign : {1.0f, -1.0f}) {
      const std::string variant = fmt::format("{} {}{}", text, name, sign);
      cases.push_back(make("gan_loss_forward", variant, dtype, n, {a, loss_so_far()},
                           [=, kind = kind](std::vector<Tensor>& in) {
                             ops::gan_loss_forward(in[0], kind, sign, 0.5f, in[1]);
                             return std::vector<Tensor>{in[1]};
                           }));
      cases.push_back(make("gan_loss_backward", variant, dtype, 2 * n, {a, dx},
                           [=, kind = kind](std::vector<Tensor>& in) {
                             ops::gan_loss_backward(in[0], kind, sign, 0.5f, in[1], accumulate);
                             return std::vector<Tensor>{in[1]};
                           }));
    }
}

void add_pieces(std::vector<KernelCase>& cases, const Shape& x, DType dtype) {
  const std::int64_t n = x.numel();
  const Shape pooled{x[0], x[1], x[2] / 2, x[3] / 2, x[4]};
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs, Run run) {
    cases.push_back(make(op, x.str(), dtype, values, std::move(inputs), std::move(run)));
  };
  const Tensor a = random_tensor(x, dtype, 1), b = random_tensor(x, dtype, 2);
  add("leaky_relu_forward", 2 * n, {a}, [](std::vector<Tensor>& in) {
    ops::leaky_relu_forward(in[0], 0.2f, in[0]);
    return std::vector<Tensor>{in[0]};
  });
  add("leaky_relu_backward", 3 * n, {a, b}, [](std::vector<Tensor>& in) {
    ops::leaky_relu_backward(in[0], 0.2f, in[1], in[1]);
    return std::vector<Tensor>{in[1]};
  });
  add("max_pool_forward", n + n / 4, {a}, [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(pooled, dtype);
    ops::max_pool_forward(in[0], y);
    return std::vector<Tensor>{y};
  });
  // Rectified, so that greatest elements tie.
  add("max_pool_backward", 2 * n + n / 4, {a, random_tensor(pooled, dtype, 3)},
      [=](std::vector<Tensor>& in) {
        Tensor dx = Tensor::empty(x, dtype);
        ops::leaky_relu_forward(in[0], 0.0f, in[0]);
        ops::max_pool_backward(in[0], in[1], dx);
        return std::vector<Tensor>{dx};
      });
  for (const bool by_factor : {false, true})
    add("scaled_add", (by_factor ? 3 : 2) * n,
        {a, by_factor ? random_tensor({1}, DType::f32, 4) : Tensor(),
         random_tensor(x, DType::f32, 5)},
        [=](std::vector<Tensor>& in) {
          ops::scaled_add(in[0], 1.5f, in[1], in[2], by_factor);
          return std::vector<Tensor>{in[2]};
        });
  if (dtype == DType::f32)
    add("adaptive_weight", 2 * n, {a, b}, [](std::vector<Tensor>& in) {
      Tensor weight = Tensor::empty({1}, DType::f32);
      ops::adaptive_weight(in[0], in[1], 0.5f, weight);
      return std::vector<Tensor>{weight};
    });
}

void add_critic(std::vector<KernelCase>& cases, const Shape& x, DType dtype) {
  const std::int64_t n = x.numel();
  const auto add = [&](const char* op, std::int64_t values, std::vector<Tensor> inputs, Run run) {
    cases.push_back(make(op, x.str(), dtype, values, std::move(inputs), std::move(run)));
  };
  add("gradient_penalty", 3 * n, {random_tensor(x, dtype, 1), loss_so_far()},
      [=](std::vector<Tensor>& in) {
        Tensor norms = Tensor::empty({x[1]}, DType::f32);
        ops::gradient_penalty_forward(in[0], 0.5f, norms, in[1]);
        ops::gradient_penalty_backward(in[0], norms, 0.5f, in[0]);
        return std::vector<Tensor>{norms, in[1], in[0]};
      });
  if (dtype != DType::f32) return;
  for (const float sign : {1.0f, -1.0f})
    add("lecam", 4, {loss_so_far(), random_tensor({1}, DType::f32, 2), loss_so_far()},
        [=](std::vector<Tensor>& in) {
          Tensor slope = Tensor::empty({1}, DType::f32);
          ops::lecam(in[0], in[1], sign, 2.0f, in[2], slope);
          return std::vector<Tensor>{in[2], slope};
        });
  Tensor rows = Tensor::host({15}, DType::f64);
  for (int i = 0; i < 15; ++i) rows.data<double>()[i] = 0.1 * i;
  add("running_average", 5, {rows, random_tensor({2}, DType::f32, 3)}, [](std::vector<Tensor>& in) {
    ops::running_average(in[0], 5, 2, 0.25f, 0.9f, in[1]);
    return std::vector<Tensor>{in[1]};
  });
}

}  // namespace

std::vector<KernelCase> vae_loss_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  if (size == CaseSize::real) {
    // VGG16's first layer on four frames of 256 x 256.
    add_losses(cases, {1, 4, 256, 256, 64}, DType::bf16, false);
    add_pieces(cases, {1, 4, 256, 256, 64}, DType::bf16);
    add_critic(cases, {1, 17, 256, 256, 3}, DType::bf16);
    return cases;
  }
  // Odd rows and columns; channels beside a warp's 32; more elements than a block's chunk.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_losses(cases, {1, 2, 3, 5, 6}, dtype, true);
    add_losses(cases, {2, 1, 8, 5, 33}, dtype, false);
    add_pieces(cases, {1, 2, 5, 4, 3}, dtype);
    add_critic(cases, {1, 3, 20, 13, 3}, dtype);
  }
  return cases;
}

}  // namespace weft
