// CPU side of ops/random.h.
#include "ops/random.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Calls f(b, c, t, offset of the frame's first pixel in x) for every frame of x [B,C,T,H,W], in
// parallel.
template <class F>
void for_frames(const Tensor& x, F&& f) {
  const std::int64_t B = x.dim(0), C = x.dim(1), T = x.dim(2), frame = x.dim(3) * x.dim(4);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < B * C * T; ++i) f(i / (C * T), i / T % C, i % T, i * frame);
}

bool shown(const std::uint8_t* mask, std::int64_t b, std::int64_t t, std::int64_t T) {
  return mask == nullptr || mask[b * T + t] != 0;
}

}  // namespace

void flow_interpolate(const Tensor& x0, const Tensor& eps, const Tensor& tau, const Tensor& mask,
                      Tensor& xs) {
  const std::int64_t T = x0.dim(2), frame = x0.dim(3) * x0.dim(4);
  const std::uint8_t* m = mask.defined() ? mask.data<std::uint8_t>() : nullptr;
  for_frames(x0, [&](std::int64_t b, std::int64_t, std::int64_t t, std::int64_t at) {
    const float s = shown(m, b, t, T) ? tau.data<float>()[b] / 1000.0f : 0.0f;
    const float *x = x0.data<float>() + at, *e = eps.data<float>() + at;
    float* out = xs.data<float>() + at;
    for_vectors(frame, [&](std::int64_t i, int n) {
      store_n(out + i, (1.0f - s) * load_n(x + i, n) + s * load_n(e + i, n), n);
    });
  });
}

void velocity_loss_forward(const Tensor& out, const Tensor& x0, const Tensor& eps,
                           const Tensor& mask, Tensor& loss) {
  const std::int64_t B = x0.dim(0), C = x0.dim(1), T = x0.dim(2), frame = x0.dim(3) * x0.dim(4);
  const std::int64_t Co = out.dim(1);
  const std::uint8_t* m = mask.defined() ? mask.data<std::uint8_t>() : nullptr;
  std::vector<double> sums(B * C * T, 0.0);
  for_frames(x0, [&](std::int64_t b, std::int64_t c, std::int64_t t, std::int64_t at) {
    if (!shown(m, b, t, T)) return;
    const float *x = x0.data<float>() + at, *e = eps.data<float>() + at;
    const float* v = out.data<float>() + ((b * Co + c) * T + t) * frame;
    double sum = 0;
    for (std::int64_t i = 0; i < frame; ++i) {
      const double d = static_cast<double>(v[i]) - (x[i] - e[i]);
      sum += d * d;
    }
    sums[at / frame] = sum;
  });
  for (std::int64_t b = 0; b < B; ++b) {
    double sum = 0;
    std::int64_t frames = 0;
    for (std::int64_t i = 0; i < C * T; ++i) sum += sums[b * C * T + i];
    for (std::int64_t t = 0; t < T; ++t) frames += shown(m, b, t, T);
    loss.data<float>()[b] =
        frames == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(frames * C * frame));
  }
}

void velocity_loss_backward(const Tensor& out, const Tensor& x0, const Tensor& eps,
                            const Tensor& mask, const Tensor& weight, Tensor& dout) {
  const std::int64_t C = x0.dim(1), T = x0.dim(2), frame = x0.dim(3) * x0.dim(4);
  const std::uint8_t* m = mask.defined() ? mask.data<std::uint8_t>() : nullptr;
  for_frames(dout, [&](std::int64_t b, std::int64_t c, std::int64_t t, std::int64_t at) {
    float* d = dout.data<float>() + at;
    if (c >= C || !shown(m, b, t, T)) {
      std::fill_n(d, frame, 0.0f);
      return;
    }
    std::int64_t frames = 0;
    for (std::int64_t f = 0; f < T; ++f) frames += shown(m, b, f, T);
    const float factor = 2.0f * weight.data<float>()[0] / static_cast<float>(frames * C * frame);
    const std::int64_t from = ((b * C + c) * T + t) * frame;
    const float *x = x0.data<float>() + from, *e = eps.data<float>() + from;
    const float* v = out.data<float>() + at;
    for_vectors(frame, [&](std::int64_t i, int n) {
      store_n(d + i, factor * (load_n(v + i, n) - (load_n(x + i, n) - load_n(e + i, n))), n);
    });
  });
}

void guided_euler_step(const Tensor& out, float guidance, const Tensor& dt, const Tensor& act,
                       Tensor& z) {
  const std::int64_t T = z.dim(2), frame = z.dim(3) * z.dim(4), Co = out.dim(1);
  const std::int64_t half = out.dim(0) - z.dim(0);
  const std::uint8_t* a = act.defined() ? act.data<std::uint8_t>() : nullptr;
  for_frames(z, [&](std::int64_t b, std::int64_t c, std::int64_t t, std::int64_t at) {
    if (!shown(a, b, t, T)) return;
    const float* vc = out.data<float>() + ((b * Co + c) * T + t) * frame;
    const float* vu = out.data<float>() + (((b + half) * Co + c) * T + t) * frame;
    const float step = dt.data<float>()[b];
    float* x = z.data<float>() + at;
    for_vectors(frame, [&](std::int64_t i, int n) {
      const vf u = load_n(vu + i, n);
      store_n(x + i, load_n(x + i, n) + (u + guidance * (load_n(vc + i, n) - u)) * step, n);
    });
  });
}

WEFT_CPU_END
