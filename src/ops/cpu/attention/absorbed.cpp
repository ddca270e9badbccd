// CPU side of cross attention with absorbed projections (ops/attention.h). The large products are
// ops/matmul.h; here are the small ones, head by head, on the register tiles of gemm_tile.h.
#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/gemm_tile.h"

struct Scratch;

struct Sizes {
  std::int64_t L, H, D, C, Lp, Dp, columns;
  explicit Sizes(const Tensor& kv)
      : L(kv.dim(0)),
        H(kv.dim(2)),
        D(kv.dim(3)),
        C(H * D),
        Lp((L + absorbed_padding - 1) / absorbed_padding * absorbed_padding),
        Dp((D + W - 1) / W * W),
        columns(H * Lp) {}
};

// Rows of head h of the keys (part 0) or values (part 1) as f32, [Lp, Dp], zero-padded, times
// `factor`.
template <class T>
void pack_head(const Sizes& s, const T* kv, std::int64_t part, std::int64_t h, float factor,
               float* to) {
  std::fill_n(to, s.Lp * s.Dp, 0.0f);
  for (std::int64_t l = 0; l < s.L; ++l)
    for_vectors(s.D, [&](std::int64_t i, int n) {
      store_n(to + l * s.Dp + i, load_n(kv + (2 * l + part) * s.C + h * s.D + i, n) * factor, n);
    });
}

template <class T>
void store_rows(const float* from, std::int64_t count, T* to) {
  for_vectors(count, [&](std::int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
}

}  // namespace

void absorb_forward(const Tensor& kv, const Tensor& wq, const Tensor& bq, const Tensor& wo,
                    Tensor& a, Tensor& a0, Tensor& b) {
  const Sizes s(kv);
  const float factor = 1.0f / std::sqrt(static_cast<float>(s.D));
  const float *q = wq.data<float>(), *qb = bq.data<float>(), *o = wo.data<float>();
  with_type(kv.dtype(), [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static)
    for (std::int64_t h = 0; h < s.H; ++h) {
      float* head = scratch<Scratch>(static_cast<std::size_t>(s.Lp * s.Dp * 2 + s.C * s.Lp));
      float *turned = head + s.Lp * s.Dp, *product = turned + s.Lp * s.Dp;
      pack_head(s, kv.data<T>(), 0, h, factor, head);
      // Keys: A = K Wq and a0 = K bq; pack_head() has applied 1/sqrt(D) to K.
      small_gemm(s.Lp, s.C, s.D, head, s.Dp, 1, q + h * s.D * s.C, s.C, product, s.C, false);
      store_rows(product, s.Lp * s.C, a.data<T>() + h * s.Lp * s.C);
      for (std::int64_t l = 0; l < s.Lp; ++l) {
        float sum = 0;
        for (std::int64_t d = 0; d < s.D; ++d) sum += head[l * s.Dp + d] * qb[h * s.D + d];
        a0.data<float>()[h * s.Lp + l] = sum;
      }
      pack_head(s, kv.data<T>(), 1, h, 1.0f, head);
      // Values: B = Wo V^T. V is transposed first: small_gemm() takes its second operand by rows
      // only.
      transpose(head, s.Dp, s.Lp, s.D, turned, s.Lp);
      small_gemm(s.C, s.Lp, s.D, o + h * s.D, s.C, 1, turned, s.Lp, product, s.Lp, false);
      for (std::int64_t c = 0; c < s.C; ++c)
        store_rows(product + c * s.Lp, s.Lp, b.data<T>() + c * s.columns + h * s.Lp);
    }
  });
}

void absorb_backward(const Tensor& kv, const Tensor& wq, const Tensor& bq, const Tensor& wo,
                     const Tensor& da, const Tensor& da0, const Tensor& db, Tensor& dkv,
                     Tensor& dwq, Tensor& dbq, Tensor& dwo) {
  const Sizes s(kv);
  const float factor = 1.0f / std::sqrt(static_cast<float>(s.D));
  const float *q = wq.data<float>(), *qb = bq.data<float>(), *o = wo.data<float>();
  with_type(kv.dtype(), [&](auto type) {
    using T = decltype(type);
    T* out = dkv.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t h = 0; h < s.H; ++h) {
      const float* dah = da.data<float>() + h * s.Lp * s.C;
      const float* da0h = da0.data<float>() + h * s.Lp;
      const float* dbh = db.data<float>() + h * s.Lp;
      float* head =
          scratch<Scratch>(static_cast<std::size_t>(3 * s.Lp * s.Dp + s.C * (s.Lp + 2 * s.Dp)));
      float *result = head + s.Lp * s.Dp, *result_t = result + s.Lp * s.Dp;
      float *turned = result_t + s.Dp * s.Lp, *weights = turned + s.C * s.Lp,
            *product = weights + s.C * s.Dp;

      // Keys: dK^T = Wq dA^T, dWq += K^T dA, each with the factor 1/sqrt(D).
      transpose(dah, s.C, s.Lp, s.C, turned, s.Lp);
      small_gemm(s.D, s.Lp, s.C, q + h * s.D * s.C, s.C, 1, turned, s.Lp, result_t, s.Lp, false);
      for (std::int64_t l = 0; l < s.L; ++l)
        for (std::int64_t d = 0; d < s.D; ++d)
          out[2 * l * s.C + h * s.D + d] =
              T(factor * (result_t[d * s.Lp + l] + da0h[l] * qb[h * s.D + d]));
      if (dwq.defined()) {
        pack_head(s, kv.data<T>(), 0, h, factor, head);
        small_gemm(s.D, s.C, s.Lp, head, 1, s.Dp, dah, s.C, dwq.data<float>() + h * s.D * s.C, s.C,
                   true);
        for (std::int64_t d = 0; d < s.D; ++d) {
          float sum = 0;
          for (std::int64_t l = 0; l < s.L; ++l) sum += head[l * s.Dp + d] * da0h[l];
          dbq.data<float>()[h * s.D + d] += sum;
        }
      }

      // Values: dV = dB^T Wo, dWo += dB V.
      for (std::int64_t c = 0; c < s.C; ++c)
        for_vectors(s.Dp, [&](std::int64_t i, int) {
          const int n = static_cast<int>(std::clamp<std::int64_t>(s.D - i, 0, W));
          store(weights + c * s.Dp + i, load_n(o + c * s.C + h * s.D + i, n));
        });
      small_gemm(s.L, s.Dp, s.C, dbh, 1, s.columns, weights, s.Dp, result, s.Dp, false);
      for (std::int64_t l = 0; l < s.L; ++l)
        store_rows(result + l * s.Dp, s.D, out + (2 * l + 1) * s.C + h * s.D);
      if (dwo.defined()) {
        pack_head(s, kv.data<T>(), 1, h, 1.0f, head);
        small_gemm(s.C, s.Dp, s.L, dbh, s.columns, 1, head, s.Dp, product, s.Dp, false);
        for (std::int64_t c = 0; c < s.C; ++c)
          for_vectors(s.D, [&](std::int64_t i, int n) {
            float* to = dwo.data<float>() + c * s.C + h * s.D + i;
            store_n(to, load_n(to, n) + load_n(product + c * s.Dp + i, n), n);
          });
      }
    }
  });
}

void head_softmax_forward(Tensor& s, int heads, int length) {
  const std::int64_t rows = s.dim(0), width = s.dim(1) / heads;
  with_type(s.dtype(), [&](auto type) {
    using T = decltype(type);
    T* data = s.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t segment = 0; segment < rows * heads; ++segment) {
      T* at = data + segment * width;
      // Only the first `length` columns are keys: padding must not raise the maximum, and becomes
      // 0.
      vf top = splat(-INFINITY);
      for_vectors(length, [&](std::int64_t i, int n) {
        top = vmax(top, select_first(load(at + i), n, -INFINITY));
      });
      const float max = hmax(top);
      vf sum{};
      for (std::int64_t i = 0; i < width; i += W) {
        const int n = static_cast<int>(std::clamp<std::int64_t>(length - i, 0, W));
        const vf e = select_first(vexp(load(at + i) - max), n, 0.0f);
        sum += e;
        store(at + i, e);
      }
      const float inverse = 1.0f / hsum(sum);
      for (std::int64_t i = 0; i < width; i += W) store(at + i, load(at + i) * inverse);
    }
  });
}

void head_softmax_backward(const Tensor& p, Tensor& dp, int heads) {
  const std::int64_t rows = p.dim(0), width = p.dim(1) / heads;
  with_type(p.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* ps = p.data<T>();
    T* ds = dp.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t segment = 0; segment < rows * heads; ++segment) {
      const T* pr = ps + segment * width;
      T* dr = ds + segment * width;
      vf sum{};
      // No mask: p is 0 in the padding, which so adds nothing to the sum and gets a gradient of 0.
      for (std::int64_t i = 0; i < width; i += W) sum += load(pr + i) * load(dr + i);
      const float total = hsum(sum);
      for (std::int64_t i = 0; i < width; i += W)
        store(dr + i, load(pr + i) * (load(dr + i) - total));
    }
  });
}

WEFT_CPU_END
