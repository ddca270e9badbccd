// CUDA side of ops/matmul.h. CPU twin src/ops/cpu/matmul/matmul.cpp, cases
// tests/kernels/matmul.cpp. Each operation is one cuBLASLt product (product_lt.cu) with an
// epilogue; least traffic in elements, and what is done about it:
//   linear_forward               M K + N K + M N (+ M N residual): bias and residual in the
//                                epilogue
//   linear_backward_input        M N + N K + M K (twice M K when accumulating)
//   linear_backward_weight       M N + M K + N K of f32: the bias gradient is summed while dy
//                                passes through
//   linear_gelu_forward          M K + N K + 2 M N: z is the epilogue's auxiliary output
//   linear_gelu_backward_input   M N + N K + 2 M K: gelu' in the epilogue; h = gelu(z), where it
//                                is wanted, is one more pass, 2 M K; so is dz's bias gradient,
//                                M K, unless the epilogue sums it
// Operations 2 M N K each. linear_backward and linear_gelu_backward are two of them, which may run
// concurrently. What the library does not fuse is done by kernels of our own behind the product.
// Where an operation can be done in several ways, ways.cuh chooses. Scratch: partial sums of the
// bias gradient, at most 128 N f32.
#include "ops/matmul.h"

#include <string>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "launch.cuh"
#include "matmul/product.cuh"
#include "matmul/ways.cuh"
#include "ops/pointwise.h"

namespace weft::ops::cuda {
namespace {

using kernels::Epilogue;
using kernels::Operands;
using kernels::Outputs;
using kernels::Product;
using kernels::Work;

// Asks the library for `p` with its epilogue; false if it cannot, logged once per process.
bool fused(const Product& p, const Operands& x) {
  if (kernels::product_lt(p, x)) return true;
  static bool said = false;
  if (!said)
    log::write_warn("cuBLASLt has no fused kernel for a product of " + kernels::describe(p) +
                    ": kernels of our own follow it there");
  said = true;
  return false;
}

// Epilogue none or bias: always done.
void product(const Product& p, const Operands& x) {
  if (kernels::product_lt(p, x)) return;
  static bool said = false;
  if (!said)
    log::write_warn("cuBLASLt has no algorithm for a product of " + kernels::describe(p) +
                    ": a slow kernel takes it and its like");
  said = true;
  kernels::product_plain(p, x);
}

// Does an operation in the best of its ways: fused, whose product is `p`; in pieces, which fuses
// nothing and always can; or in an untested one, which is tried where it is given.
// `run(way, outputs, work)` enqueues it, or returns false where the library cannot.
enum { fused_way, pieces, untested_way };
template <class Run>
void in_best_way(const char* name, const Product& p, const char* untested, const Outputs& outputs,
                 Work& work, Run&& run) {
  if (!kernels::has_choice(p.rows * p.columns * p.inner)) {
    if (!run(fused_way, outputs, work)) run(pieces, outputs, work);
    return;
  }
  std::vector<std::string> ways{"fused", "pieces"};
  if (untested != nullptr && kernels::is_tried(untested)) ways.emplace_back(untested);
  kernels::run_best(
      std::string(name) + " " + kernels::describe(p), ways, outputs, kernels::tolerance_of(p.in),
      [&](int way, const Outputs& to) {
        Work measured;  // on the compute stream
        return run(way, to, &to == &outputs ? work : measured);
      },
      pieces);
}

DType type_of(const Tensor& bias) { return bias.defined() ? bias.dtype() : DType::f32; }

// The product of a weight gradient, and that of the gradient of a layer's input.
Product weight_product(const Tensor& dy, const Tensor& dw, bool accumulate) {
  const std::int64_t n = dw.dim(0), k = dw.numel() / n, m = dy.numel() / n;
  return {n, k, m, true, false, dy.dtype(), DType::f32, Epilogue::none, accumulate};
}
Product input_product(const Tensor& dy, const Tensor& w, DType out, bool accumulate) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = dy.numel() / n;
  return {m, k, n, false, false, dy.dtype(), out, Epilogue::none, accumulate};
}

void weight_gradient(const Tensor& dy, const Tensor& x, const Tensor& dw, const Tensor& dbias,
                     bool accumulate, Work& on) {
  const Product p = weight_product(dy, dw, accumulate);
  const std::int64_t n = p.rows, m = p.inner;
  const auto at = [&](const Tensor& to, const Work& work) {
    return Operands{.a = dy.raw(),
                    .b = x.raw(),
                    .c = accumulate ? to.raw() : nullptr,
                    .d = to.raw(),
                    .stream = work.stream};
  };
  if (!dbias.defined()) return product(p, at(dw, on));

  const auto run = [&](int way, const Outputs& to, Work& work) {
    Operands y = at(to[0], work);
    float* const sums = kernels::data<float>(to[1]);
    if (way == pieces) {
      product(p, y);
      kernels::column_sums(dy, m, n, sums, accumulate, work);
      return true;
    }
    // The library overwrites the bias gradient: one that accumulates takes another step.
    Product with_sums = p;
    with_sums.epilogue = Epilogue::bias_gradient;
    y.vector = accumulate ? work.scratch({n}, DType::f32).raw() : sums;
    if (!fused(with_sums, y)) return false;
    if (accumulate) kernels::add_vector(y.vector, DType::f32, sums, n, true, work.stream);
    return true;
  };
  in_best_way(accumulate ? "linear_backward_weight accumulating" : "linear_backward_weight", p,
              nullptr, {dw, dbias}, on, run);
}

// The gradient of a layer's weights, and what `input(outputs)` does to its input, whose product is
// `p`: they do not depend on each other, and run one after the other or, where that is tried and
// was measured to be faster, concurrently on two streams. `outputs`: dw, dbias, and those of
// `input`.
template <class Input>
void both_gradients(const char* name, const Tensor& dy, const Tensor& x, bool accumulate,
                    const Product& p, const Outputs& outputs, Input&& input) {
  const auto run = [&](bool beside, const Outputs& to) {
    DeviceRuntime& gpu = device_runtime();
    // Holds the second stream's blocks of the arena until the compute stream waits for it: what is
    // given back is used again in the order of the compute stream.
    Work work;
    if (beside) {
      work.stream = Stream::second;
      gpu.wait(Stream::second, gpu.record(Stream::compute));
    }
    // First, because its tiles often do not fill the multiprocessors evenly, and each takes long:
    // the many short ones of the other product fill the rest. Untested on GPU.
    weight_gradient(dy, x, to[0], to[1], accumulate, work);
    input(to);
    if (beside) gpu.wait(Stream::compute, gpu.record(Stream::second));
  };
  int best = 0;
  const Product weights = weight_product(dy, outputs[0], accumulate);
  if (kernels::is_tried("second_stream") &&
      kernels::has_choice(weights.rows * weights.columns * weights.inner))
    best = kernels::choose(std::string(name) + (outputs[1].defined() ? " with bias " : " ") +
                               kernels::describe(weights) + ", " + kernels::describe(p),
                           {"in turn", "second_stream"}, outputs, kernels::tolerance_of(p.in),
                           [&](int way, const Outputs& to) {
                             run(way == 1, to);
                             return true;
                           });
  run(best == 1, outputs);
}

}  // namespace

void linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                    Tensor& y) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = x.numel() / k;
  WEFT_ASSERT(m * k == x.numel() && m * n == y.numel());
  WEFT_ASSERT(!residual.defined() || residual.raw() != y.raw());
  if (m == 0) return;
  const Product p{m,
                  n,
                  k,
                  false,
                  true,
                  x.dtype(),
                  y.dtype(),
                  bias.defined() ? Epilogue::bias : Epilogue::none,
                  residual.defined()};
  product(p, {x.raw(), w.raw(), residual.raw(), y.raw(), bias.raw(), nullptr, type_of(bias)});
}

void linear_backward_input(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate) {
  const Product p = input_product(dy, w, dx.dtype(), accumulate);
  if (p.rows == 0) return;
  product(p, {dy.raw(), w.raw(), accumulate ? dx.raw() : nullptr, dx.raw(), nullptr, nullptr});
}

void linear_backward_weight(const Tensor& dy, const Tensor& x, Tensor& dw, Tensor& dbias,
                            bool accumulate) {
  if (dy.numel() == 0) {  // a batch without a single caption row: nothing to add
    if (accumulate) return;
    device_runtime().zero(dw.raw(), dw.bytes(), Stream::compute);
    if (dbias.defined()) device_runtime().zero(dbias.raw(), dbias.bytes(), Stream::compute);
    return;
  }
  Work work;
  weight_gradient(dy, x, dw, dbias, accumulate, work);
}

void linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor& dw, Tensor& dbias,
                     bool accumulate, Tensor& dx, bool accumulate_dx) {
  if (dy.numel() == 0) return linear_backward_weight(dy, x, dw, dbias, accumulate);
  both_gradients("linear_backward", dy, x, accumulate,
                 input_product(dy, w, dx.dtype(), accumulate_dx), {dw, dbias, dx},
                 [&](const Outputs& to) {
                   Tensor out = to[2];
                   linear_backward_input(dy, w, out, accumulate_dx);
                 });
}

void linear_gelu_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& z,
                         Tensor& h) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = x.numel() / k;
  WEFT_ASSERT(m * k == x.numel() && m * n == z.numel() && m * n == h.numel());
  if (m == 0) return;
  const bool keeps_z = z.raw() != h.raw();
  const Product p{m,    n,         k,         false,
                  true, x.dtype(), z.dtype(), bias.defined() ? Epilogue::bias : Epilogue::none,
                  false};
  const auto run = [&](int way, const Outputs& to, Work&) {
    Tensor result = to[1];
    const Tensor& sum = keeps_z ? to[0] : result;
    Operands y{x.raw(), w.raw(), nullptr, sum.raw(), bias.raw(), nullptr, type_of(bias)};
    if (way == pieces) {
      product(p, y);
      gelu_forward(sum, result);
      return true;
    }
    Product with_gelu = p;
    with_gelu.epilogue = keeps_z ? Epilogue::gelu_bias_aux : Epilogue::gelu_bias;
    y.d = result.raw();
    y.aux = keeps_z ? sum.raw() : nullptr;
    return bias.defined() && fused(with_gelu, y);
  };
  Work work;
  in_best_way(keeps_z ? "linear_gelu_forward" : "linear_gelu_forward in place", p, nullptr,
              {keeps_z ? z : Tensor(), h}, work, run);
}

void linear_gelu_backward_input(const Tensor& dy, const Tensor& w, const Tensor& z, Tensor& dz,
                                Tensor& h, Tensor& dbias, bool accumulate) {
  const Product p = input_product(dy, w, dz.dtype(), false);
  const std::int64_t m = p.rows, k = p.columns;
  WEFT_ASSERT(m * k == z.numel() && m * k == dz.numel() && dz.raw() != z.raw());
  if (m == 0) {
    if (dbias.defined() && !accumulate)
      device_runtime().zero(dbias.raw(), dbias.bytes(), Stream::compute);
    return;
  }
  const auto run = [&](int way, const Outputs& to, Work& work) {
    Tensor gradient = to[0], again = to[1];
    Operands y{dy.raw(), w.raw(), nullptr, gradient.raw()};
    const bool sums_fused = way == untested_way;
    if (way == pieces) {
      product(p, y);
      gelu_backward(z, gradient, gradient, again);
    } else {
      Product with_gelu = p;
      with_gelu.epilogue = sums_fused ? Epilogue::gelu_gradient_sums : Epilogue::gelu_gradient;
      y.aux = z.raw();
      // The library writes sums in dz's type.
      if (sums_fused) y.vector = work.scratch({k}, dz.dtype()).raw();
      if (!fused(with_gelu, y)) return false;
      if (again.defined()) gelu_forward(z, again);
    }
    if (!dbias.defined()) return true;
    float* const sums = kernels::data<float>(to[2]);
    if (sums_fused)
      kernels::add_vector(y.vector, dz.dtype(), sums, k, accumulate, work.stream);
    else
      kernels::column_sums(gradient, m, k, sums, accumulate, work);
    return true;
  };
  Work work;
  constexpr const char* names[2][2] = {
      {"linear_gelu_backward_input without h", "linear_gelu_backward_input without h with bias"},
      {"linear_gelu_backward_input", "linear_gelu_backward_input with bias"}};
  in_best_way(names[h.defined()][dbias.defined()], p, dbias.defined() ? "gelu_sums" : nullptr,
              {dz, h, dbias}, work, run);
}

void linear_gelu_backward(const Tensor& dy, const Tensor& h, const Tensor& w, const Tensor& z,
                          Tensor& dw, Tensor& dbias, bool accumulate, Tensor& dz, Tensor& dz_sums,
                          bool accumulate_sums) {
  const auto input = [&](const Outputs& to) {
    Tensor gradient = to[2], sums = to[3], none;
    linear_gelu_backward_input(dy, w, z, gradient, none, sums, accumulate_sums);
  };
  const Outputs outputs{dw, dbias, dz, dz_sums};
  if (dy.numel() > 0)
    return both_gradients(
        dz_sums.defined() ? "linear_gelu_backward and sums" : "linear_gelu_backward", dy, h,
        accumulate, input_product(dy, w, dz.dtype(), false), outputs, input);
  linear_backward_weight(dy, h, dw, dbias, accumulate);
  input(outputs);
}

void bias_gradient(const Tensor& dy, Tensor& dbias, bool accumulate) {
  const std::int64_t n = dbias.numel();
  kernels::column_sums(dy, dy.numel() / n, n, kernels::data<float>(dbias), accumulate);
}

}  // namespace weft::ops::cuda
