// CPU side of ops/matmul.h: by tiled.h, and on x86-64 by oneDNN, but for gradients in bf16 that are
// faster by pairs.h. Three paths of the library, at 0.99 of its best on a Xeon
// (validation/results/cpu.md): the forward fuses bias and residual into the matmul primitive, with
// weights packed into the layout it prefers where many rows share the packing; gradients in f32 go
// through sgemm, which has none of the shapes on which the primitive drops to half; all else is the
// plain primitive. Primitives are made once per shape and kept (onednn.h); their scratchpad is
// ours, so that the steady state allocates nothing large. sgemm must not be interrupted by a signal
// handler (train/stop.cpp).
#include "ops/matmul.h"

#include <omp.h>
#include <dnnl.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "ops/pointwise.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/onednn.h"
#include "ops/cpu/simd.h"

using dnnl::memory;

memory::data_type type_of(DType t) {
  return t == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

// C [m,n] = A [m,k] B [k,n] with either operand stored transposed.
struct Product {
  std::int64_t m, n, k;
  DType in, out;
  bool a_transposed, b_transposed, bias, residual, accumulate, packed;
  auto operator<=>(const Product&) const = default;
};

#include "ops/cpu/matmul/pairs.h"
#include "ops/cpu/matmul/tiled.h"

struct Primitive {
  dnnl::matmul run;
  memory::desc a, b, c, bias, scratchpad;
  memory::desc packed_b;  // b as the primitive prefers it
  dnnl::reorder pack;
};

// Rows from which packing the weights pays: its cost is that of reading and writing them, whatever
// the rows.
constexpr std::int64_t rows_worth_packing = 2048;

Primitive make(const Product& p) {
  using tag = memory::format_tag;
  Primitive r;
  r.a = memory::desc({p.m, p.k}, type_of(p.in), p.a_transposed ? tag::ba : tag::ab);
  r.b = memory::desc({p.k, p.n}, type_of(p.in), p.b_transposed ? tag::ba : tag::ab);
  r.c = memory::desc({p.m, p.n}, type_of(p.out), tag::ab);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  dnnl::post_ops epilogue;
  if (p.accumulate) epilogue.append_sum(1.0f);
  if (p.residual) epilogue.append_binary(dnnl::algorithm::binary_add, r.c);
  attributes.set_post_ops(epilogue);
  if (p.bias) r.bias = memory::desc({1, p.n}, memory::data_type::f32, tag::ab);
  const memory::desc b = p.packed ? memory::desc({p.k, p.n}, type_of(p.in), tag::any) : r.b;
  const auto chosen = p.bias ? describe<dnnl::matmul>(attributes, r.a, b, r.bias, r.c)
                             : describe<dnnl::matmul>(attributes, r.a, b, r.c);
  r.scratchpad = chosen.scratchpad_desc();
  r.packed_b = chosen.weights_desc();
  if (p.packed)
    r.pack = dnnl::reorder(dnnl::reorder::primitive_desc(engine(), r.b, engine(), r.packed_b));
  r.run = dnnl::matmul(chosen);
  return r;
}

bool library_uses(dnnl::cpu_isa isa) {
  const auto needed = static_cast<unsigned>(isa);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & needed) == needed;
}

// oneDNN multiplies bf16 from AVX-512 on.
bool multiplies_bf16() {
  static const bool yes = library_uses(dnnl::cpu_isa::avx512_core);
  return yes;
}

#ifdef __AVX512F__
// Where the library has tiles of AMX, nothing else comes near.
bool multiplies_pairs() {
  static const bool yes = cpu_multiplies_bf16() && !library_uses(dnnl::cpu_isa::avx512_core_amx);
  return yes;
}
#endif

std::vector<float> widened(const void* x, std::int64_t count, DType type) {
  std::vector<float> wide(count);
  with_type(type, [&](auto kind) {
    const auto* from = static_cast<const decltype(kind)*>(x);
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(from[i]);
  });
  return wide;
}

void run(const Product& p, const void* a, const void* b, const float* bias, const void* residual,
         void* c);

// The same product of operands in bf16 by way of f32, in which both would be summed anyway: slow,
// but right on every processor. The copies are the host's memory, not the arena's.
void run_widened(Product p, const void* a, const void* b, const float* bias, const void* residual,
                 void* c) {
  const DType in = p.in, out = p.out;
  const std::vector<float> wide_a = widened(a, p.m * p.k, in), wide_b = widened(b, p.k * p.n, in);
  const std::vector<float> wide_residual =
      p.residual ? widened(residual, p.m * p.n, out) : std::vector<float>();
  std::vector<float> wide_c =
      p.accumulate ? widened(c, p.m * p.n, out) : std::vector<float>(p.m * p.n);
  p.in = p.out = DType::f32;
  run(p, wide_a.data(), wide_b.data(), bias, wide_residual.data(), wide_c.data());
  with_type(out, [&](auto kind) {
    auto* to = static_cast<decltype(kind)*>(c);
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < p.m * p.n; ++i) to[i] = decltype(kind)(wide_c[i]);
  });
}

void run(const Product& p, const void* a, const void* b, const float* bias, const void* residual,
         void* c) {
  if (p.m == 0 || p.n == 0) return;
#ifndef __x86_64__
  return with_type(p.in, [&]<class T>(T) {
    with_type(p.out, [&]<class O>(O) {
      multiply_tiled(p, static_cast<const T*>(a), static_cast<const T*>(b), bias,
                     static_cast<const O*>(residual), static_cast<O*>(c));
    });
  });
#endif
  if (p.in == DType::bf16 && !multiplies_bf16()) {
    run_widened(p, a, b, bias, residual, c);
    return;
  }
#ifdef __AVX512F__
  if (p.in == DType::bf16 && multiplies_pairs() && suits_pairs(p)) {
    with_type(p.out, [&]<class O>(O) {
      multiply_pairs(p, static_cast<const bf16*>(a), static_cast<const bf16*>(b),
                     static_cast<O*>(c));
    });
    return;
  }
#endif
  // The forward's products without bias (T5) are better off with the primitive: a third faster at
  // 100 rows.
  const bool forward = !p.a_transposed && p.b_transposed;
  const bool plain = !p.bias && !p.residual && p.in == DType::f32 && p.out == DType::f32;
  if (plain && !forward) {
    const auto status = dnnl_sgemm(
        p.a_transposed ? 'T' : 'N', p.b_transposed ? 'T' : 'N', p.m, p.n, p.k, 1.0f,
        static_cast<const float*>(a), p.a_transposed ? p.m : p.k, static_cast<const float*>(b),
        p.b_transposed ? p.k : p.n, p.accumulate ? 1.0f : 0.0f, static_cast<float*>(c), p.n);
    WEFT_ASSERT(status == dnnl_success);
    return;
  }
  static Recent<Product, Primitive> made;
  static dnnl::stream stream(engine());
  const Primitive& r = made.get(p, [&] { return make(p); });
  struct Scratchpad;
  struct Packed;
  const auto at = [](const memory::desc& d, const void* x) {
    return memory(d, engine(), const_cast<void*>(x));
  };
  memory weights = at(r.b, b);
  if (p.packed) {
    memory packed = at(r.packed_b, scratch<Packed>(r.packed_b.get_size() / 4 + 1));
    r.pack.execute(stream, weights, packed);
    weights = packed;
  }
  std::unordered_map<int, memory> args{
      {DNNL_ARG_SRC, at(r.a, a)}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, at(r.c, c)}};
  if (p.bias) args.emplace(DNNL_ARG_BIAS, at(r.bias, bias));
  if (p.residual)
    // The number of the residual's post-op: it follows the sum, if there is one.
    args.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(p.accumulate ? 1 : 0) | DNNL_ARG_SRC_1,
                 at(r.c, residual));
  if (r.scratchpad.get_size() > 0)
    args.emplace(DNNL_ARG_SCRATCHPAD,
                 at(r.scratchpad, scratch<Scratchpad>(r.scratchpad.get_size() / 4 + 1)));
  r.run.execute(stream, args);
  stream.wait();
}

// sums [n] (+)= column sums of x [m,n], in an order that does not depend on the threads.
void column_sums(const Tensor& x, std::int64_t m, std::int64_t n, float* sums, bool accumulate) {
  constexpr std::int64_t rows = 64;
  const std::int64_t chunks = (m + rows - 1) / rows;
  struct Partials;
  float* partial = scratch<Partials>(static_cast<std::size_t>(chunks * n));
  with_type(x.dtype(), [&](auto type) {
    const auto* in = x.data<decltype(type)>();
#pragma omp parallel for schedule(static)
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      float* to = partial + chunk * n;
      const std::int64_t first = chunk * rows, last = std::min(first + rows, m);
      // Four vectors of columns at a time stay in registers over the rows.
      for (std::int64_t j = 0; j < n; j += 4 * W) {
        vf sum[4] = {};
        if (j + 4 * W <= n) {
          for (std::int64_t i = first; i < last; ++i)
            for (int q = 0; q < 4; ++q) sum[q] += load(in + i * n + j + q * W);
          for (int q = 0; q < 4; ++q) store(to + j + q * W, sum[q]);
        } else {
          for_vectors(n - j, [&](std::int64_t at, int width) {
            vf s{};
            for (std::int64_t i = first; i < last; ++i) s += load_n(in + i * n + j + at, width);
            store_n(to + j + at, s, width);
          });
        }
      }
    }
  });
  for_vectors(n, [&](std::int64_t j, int width) {
    vf s = accumulate ? load_n(sums + j, width) : vf{};
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
      s += load_n(partial + chunk * n + j, width);
    store_n(sums + j, s, width);
  });
}

}  // namespace

void linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                    Tensor& y) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = x.numel() / k;
  WEFT_ASSERT(m * k == x.numel() && m * n == y.numel());
  // A residual that is y itself is a sum in place: as another operand of the epilogue it would be
  // overwritten by kernels that store their sums first, as those for AVX2 do.
  const bool in_place = residual.defined() && residual.raw() == y.raw();
  const Product p{m,
                  n,
                  k,
                  x.dtype(),
                  y.dtype(),
                  false,
                  true,
                  bias.defined(),
                  residual.defined() && !in_place,
                  in_place,
                  m >= rows_worth_packing};
  std::vector<float> wide_bias;
  if (bias.defined() && bias.dtype() != DType::f32)
    wide_bias = widened(bias.raw(), n, bias.dtype());
  const float* const added = !bias.defined()      ? nullptr
                             : !wide_bias.empty() ? wide_bias.data()
                                                  : bias.data<float>();
  run(p, x.raw(), w.raw(), added, residual.raw(), y.raw());
}

void linear_backward_input(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate) {
  const std::int64_t n = w.dim(0), k = w.numel() / n, m = dy.numel() / n;
  const Product p{m, k, n, dy.dtype(), dx.dtype(), false, false, false, false, accumulate, false};
  run(p, dy.raw(), w.raw(), nullptr, nullptr, dx.raw());
}

void linear_backward_weight(const Tensor& dy, const Tensor& x, Tensor& dw, Tensor& dbias,
                            bool accumulate) {
  const std::int64_t n = dw.dim(0), k = dw.numel() / n, m = dy.numel() / n;
  if (m == 0) {  // a batch without a single caption row: nothing to add
    if (!accumulate) std::fill_n(dw.data<float>(), dw.numel(), 0.0f);
    if (!accumulate && dbias.defined()) std::fill_n(dbias.data<float>(), n, 0.0f);
    return;
  }
  const Product p{n, k, m, dy.dtype(), DType::f32, true, false, false, false, accumulate, false};
  run(p, dy.raw(), x.raw(), nullptr, nullptr, dw.raw());
  if (dbias.defined()) column_sums(dy, m, n, dbias.data<float>(), accumulate);
}

void linear_gelu_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& z,
                         Tensor& h) {
  linear_forward(x, w, bias, Tensor(), z);
  gelu_forward(z, h);
}

void linear_gelu_backward_input(const Tensor& dy, const Tensor& w, const Tensor& z, Tensor& dz,
                                Tensor& h, Tensor& dbias, bool accumulate) {
  linear_backward_input(dy, w, dz, false);
  gelu_backward(z, dz, dz, h);
  if (dbias.defined()) bias_gradient(dz, dbias, accumulate);
}

void bias_gradient(const Tensor& dy, Tensor& dbias, bool accumulate) {
  const std::int64_t n = dbias.numel();
  column_sums(dy, dy.numel() / n, n, dbias.data<float>(), accumulate);
}

WEFT_CPU_END
