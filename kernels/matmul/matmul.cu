// CUDA side of ops/matmul.h. CPU twin src/ops/cpu/matmul/matmul.cpp, cases
// tests/kernels/matmul.cpp. Each operation is one cuBLASLt product (product_lt.cu) with an
// epilogue; least traffic in elements, and what is done about it:
//   linear_forward               M K + N K + M N (+ M N residual): bias and residual in the
//                                epilogue
//   linear_backward_input        M N + N K + M K (twice M K when accumulating)
//   linear_backward_weight       M N + M K + N K of f32: the bias gradient is summed while dy
//                                passes through
//   linear_gelu_forward          M K + N K + 2 M N: z is the epilogue's auxiliary output
//   linear_gelu_backward_input   M N + N K + 3 M K: gelu' in the epilogue; h = gelu(z) is one more
//                                pass, 2 M K
// Operations 2 M N K each. What the library does not fuse is done by kernels of our own behind the
// product, which the environment's WEFT_MATMUL_FUSED=0 asks for everywhere; with a table
// (set_matmul_tuning) the faster of the two is taken. Scratch: partial sums of the bias gradient,
// at most 128 N f32.
#include "ops/matmul.h"

#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "core/log.h"
#include "launch.cuh"
#include "matmul/product.cuh"
#include "matmul/tuning.cuh"
#include "ops/pointwise.h"

namespace weft::ops::cuda {
namespace {

using kernels::Epilogue;
using kernels::Operands;
using kernels::Product;

bool fusing() {
  static const bool asked = [] {
    const char* value = std::getenv("WEFT_MATMUL_FUSED");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return asked;
}

void count(const Product& p) {
  detail::add_flops(2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) *
                    static_cast<double>(p.inner));
}

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

// True to run `p` with its epilogue fused, false to run it in pieces. `pieces` and `whole` enqueue
// the operation into spare outputs of the given bytes each; whole returns false where the library
// cannot.
template <class Whole, class Pieces>
bool better_fused(const char* op, const Product& p, std::size_t bytes, Whole&& whole,
                  Pieces&& pieces) {
  if (!fusing()) return false;
  if (!kernels::is_measured(p.rows * p.columns * p.inner)) return true;
  const std::string key = std::string(op) + " " + kernels::describe(p);
  if (!kernels::must_measure(key)) return kernels::choose(key, 2, [](int) { return false; }) == 0;
  if (!kernels::Spoil::fits(2 * bytes)) return true;
  const kernels::Spoil first(bytes), second(bytes);
  const int best = kernels::choose(key, 2, [&](int option) {
    if (option == 0) return whole(first.get(), second.get());
    pieces(first.get(), second.get());
    return true;
  });
  device_runtime().synchronize();  // before the memory goes
  return best == 0;
}

DType type_of(const Tensor& bias) { return bias.defined() ? bias.dtype() : DType::f32; }

Tensor like(void* p, const Tensor& t) {
  return Tensor::borrow(p, t.shape(), t.dtype(), t.device());
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
  count(p);
  product(p, {x.raw(), w.raw(), residual.raw(), y.raw(), bias.raw(), nullptr, type_of(bias)});
}

void linear_backward_input(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = dy.numel() / n;
  if (m == 0) return;
  const Product p{m, k, n, false, false, dy.dtype(), dx.dtype(), Epilogue::none, accumulate};
  count(p);
  product(p, {dy.raw(), w.raw(), accumulate ? dx.raw() : nullptr, dx.raw(), nullptr, nullptr});
}

void linear_backward_weight(const Tensor& dy, const Tensor& x, Tensor& dw, Tensor& dbias,
                            bool accumulate) {
  const std::int64_t n = dw.dim(0), k = dw.numel() / n, m = dy.numel() / n;
  if (m == 0) {  // a batch without a single caption row: nothing to add
    if (accumulate) return;
    device_runtime().zero(dw.raw(), dw.bytes(), Stream::compute);
    if (dbias.defined()) device_runtime().zero(dbias.raw(), dbias.bytes(), Stream::compute);
    return;
  }
  Product p{n, k, m, true, false, dy.dtype(), DType::f32, Epilogue::none, accumulate};
  count(p);
  Operands at{dy.raw(), x.raw(), accumulate ? dw.raw() : nullptr, dw.raw(), nullptr, nullptr};
  if (!dbias.defined()) return product(p, at);

  float* const db = kernels::data<float>(dbias);
  Product whole = p;
  whole.epilogue = Epilogue::bias_gradient;
  // The library overwrites the bias gradient: one that accumulates goes through `sums`.
  const Tensor sums = accumulate ? Tensor::empty({n}, DType::f32) : Tensor();
  const auto run_whole = [&](void* d, float* vector) {
    Operands y = at;
    y.d = d;
    y.vector = accumulate ? sums.raw() : vector;
    if (!fused(whole, y)) return false;
    if (accumulate) kernels::add_vector(kernels::data<float>(sums), vector, n);
    return true;
  };
  const auto run_pieces = [&](void* d, float* vector) {
    Operands y = at;
    y.d = d;
    product(p, y);
    kernels::column_sums(dy, m, n, vector, accumulate);
  };
  const bool fuse = better_fused(
      accumulate ? "linear_backward_weight accumulating" : "linear_backward_weight", p, dw.bytes(),
      [&](void* d, void* vector) { return run_whole(d, static_cast<float*>(vector)); },
      [&](void* d, void* vector) { run_pieces(d, static_cast<float*>(vector)); });
  if (!fuse || !run_whole(dw.raw(), db)) run_pieces(dw.raw(), db);
}

void linear_gelu_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& z,
                         Tensor& h) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = x.numel() / k;
  WEFT_ASSERT(m * k == x.numel() && m * n == z.numel() && m * n == h.numel());
  if (m == 0) return;
  const bool keeps_z = z.raw() != h.raw();
  Product p{m,    n,         k,         false,
            true, x.dtype(), z.dtype(), bias.defined() ? Epilogue::bias : Epilogue::none,
            false};
  count(p);
  Operands at{x.raw(), w.raw(), nullptr, nullptr, bias.raw(), nullptr, type_of(bias)};
  Product whole = p;
  whole.epilogue = keeps_z ? Epilogue::gelu_bias_aux : Epilogue::gelu_bias;
  const auto run_whole = [&](void* to_z, void* to_h) {
    Operands y = at;
    y.d = to_h;
    y.aux = keeps_z ? to_z : nullptr;
    return bias.defined() && fused(whole, y);
  };
  const auto run_pieces = [&](void* to_z, void* to_h) {
    Operands y = at;
    y.d = to_z;
    product(p, y);
    Tensor result = like(to_h, h);
    gelu_forward(like(to_z, z), result);
  };
  const bool fuse = better_fused(keeps_z ? "linear_gelu_forward" : "linear_gelu_forward in place",
                                 p, z.bytes(), run_whole, run_pieces);
  if (!fuse || !run_whole(z.raw(), h.raw())) run_pieces(z.raw(), h.raw());
}

void linear_gelu_backward_input(const Tensor& dy, const Tensor& w, const Tensor& z, Tensor& dz,
                                Tensor& h) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = dy.numel() / n;
  WEFT_ASSERT(m * k == z.numel() && m * k == dz.numel() && dz.raw() != z.raw());
  if (m == 0) return;
  Product p{m, k, n, false, false, dy.dtype(), dz.dtype(), Epilogue::none, false};
  count(p);
  Operands at{dy.raw(), w.raw(), nullptr, nullptr, nullptr, nullptr};
  Product whole = p;
  whole.epilogue = Epilogue::gelu_gradient;
  const auto run_whole = [&](void* to_dz, void* to_h) {
    Operands y = at;
    y.d = to_dz;
    y.aux = z.raw();
    if (!fused(whole, y)) return false;
    if (to_h != nullptr) {
      Tensor again = like(to_h, z);
      gelu_forward(z, again);
    }
    return true;
  };
  const auto run_pieces = [&](void* to_dz, void* to_h) {
    Operands y = at;
    y.d = to_dz;
    product(p, y);
    Tensor gradient = like(to_dz, dz), again = to_h != nullptr ? like(to_h, z) : Tensor();
    gelu_backward(z, gradient, gradient, again);
  };
  const bool fuse =
      better_fused("linear_gelu_backward_input", p, dz.bytes(), run_whole, run_pieces);
  if (!fuse || !run_whole(dz.raw(), h.raw())) run_pieces(dz.raw(), h.raw());
}

void bias_gradient(const Tensor& dy, Tensor& dbias, bool accumulate) {
  const std::int64_t n = dbias.numel();
  kernels::column_sums(dy, dy.numel() / n, n, kernels::data<float>(dbias), accumulate);
}

}  // namespace weft::ops::cuda
