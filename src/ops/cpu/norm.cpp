// CPU side of ops/norm.h but for GroupNorm (group_norm.cpp). One token row (C floats, a few KiB)
// stays in the first-level cache between the passes over it, so that each operation reads and
// writes every activation once.
#include "ops/norm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "ops/matmul.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr float epsilon = 1e-6f;
// Tokens per partial sum of a parameter gradient. Fixed, so that the sums do not depend on the
// threads.
constexpr std::int64_t chunk_tokens = 64;

struct Frames {
  std::int64_t count, tokens, channels;
  std::int64_t chunks_per_frame() const { return (tokens + chunk_tokens - 1) / chunk_tokens; }
  std::int64_t chunks() const { return count * chunks_per_frame(); }
};

// x is [.., S, C] with `rows` one entry a frame.
Frames frames_of(const Tensor& x, const Tensor& rows) {
  const std::int64_t c = x.dim(-1), frames = rows.numel();
  return {frames, x.numel() / (frames * c), c};
}

// Calls f(frame, first token, last token, chunk) for all chunks, in parallel.
template <class F>
void for_chunks(const Frames& f, F&& body) {
  const std::int64_t per = f.chunks_per_frame();
#pragma omp parallel for schedule(static)
  for (std::int64_t chunk = 0; chunk < f.chunks(); ++chunk) {
    const std::int64_t frame = chunk / per, first = chunk % per * chunk_tokens;
    body(frame, frame * f.tokens + first,
         frame * f.tokens + std::min(first + chunk_tokens, f.tokens), chunk);
  }
}

// m[rows[frame], vector k] += sum of the frame's chunks' partials [chunk, parts, C], in order.
void add_partials(const Frames& f, const float* partial, int parts, const int* vectors,
                  const Tensor& rows, Tensor& dm) {
  const std::int64_t c = f.channels, per = f.chunks_per_frame();
  const std::int64_t k = dm.dim(1);
  const std::int32_t* row = rows.data<std::int32_t>();
  float* out = dm.data<float>();
#pragma omp parallel for schedule(static) collapse(2)
  for (int part = 0; part < parts; ++part)
    for (std::int64_t block = 0; block < (c + W - 1) / W; ++block) {
      const std::int64_t at = block * W;
      const int n = static_cast<int>(std::min<std::int64_t>(W, c - at));
      for (std::int64_t frame = 0; frame < f.count; ++frame) {
        vf sum{};
        for (std::int64_t i = 0; i < per; ++i)
          sum += load_n(partial + ((frame * per + i) * parts + part) * c + at, n);
        float* to = out + (row[frame] * k + vectors[part]) * c + at;
        store_n(to, load_n(to, n) + sum, n);
      }
    }
}

// to[c] += the partials [count, stride] of each column, in order.
void add_columns(const float* partial, std::int64_t count, std::int64_t stride, std::int64_t c,
                 float* to) {
#pragma omp parallel for schedule(static)
  for (std::int64_t block = 0; block < (c + W - 1) / W; ++block) {
    const std::int64_t at = block * W;
    const int n = static_cast<int>(std::min<std::int64_t>(W, c - at));
    vf sum{};
    for (std::int64_t i = 0; i < count; ++i) sum += load_n(partial + i * stride + at, n);
    store_n(to + at, load_n(to + at, n) + sum, n);
  }
}

// Calls f with values of the types of the residual stream and of the branch (ops/norm.h).
template <class F>
void with_types(const Tensor& stream, const Tensor& branch, F&& f) {
  WEFT_ASSERT(stream.dtype() == DType::f32 || branch.dtype() == DType::bf16);
  if (stream.dtype() == DType::bf16)
    f(bf16{}, bf16{});
  else
    with_type(branch.dtype(), [&](auto type) { f(float{}, type); });
}

// LayerNorm of one row: out = h * scale(i, n) + shift[i..], st = (mean, 1/sigma).
template <class X, class Y, class Scale>
void norm_row(const X* in, std::int64_t c, Scale&& scale, const float* shift, Y* out, float* st) {
  vf sum{};
  for_vectors(c, [&](std::int64_t i, int n) { sum += load_n(in + i, n); });
  const float mean = hsum(sum) / static_cast<float>(c);
  // A second pass over the cached row: mean(x^2) - mean^2 would cancel.
  vf squares{};
  for_vectors(c, [&](std::int64_t i, int n) {
    vf d = load_n(in + i, n) - mean;
    // Lanes beyond the row hold -mean, which must not count.
    if (n < W) d = select_first(d, n, 0.0f);
    squares += d * d;
  });
  const float rstd = 1.0f / std::sqrt(hsum(squares) / static_cast<float>(c) + epsilon);
  st[0] = mean;
  st[1] = rstd;
  for_vectors(c, [&](std::int64_t i, int n) {
    const vf h = (load_n(in + i, n) - mean) * rstd;
    store_n(out + i, h * scale(i, n) + load_n(shift + i, n), n);
  });
}

// Its derivative; dshift and dscale [C] are added to.
template <class X, class Y, class Scale>
void norm_row_backward(const X* in, const Y* g, std::int64_t c, Scale&& scale, const float* st,
                       X* out, bool accumulate, float* dshift, float* dscale) {
  const float mean = st[0], rstd = st[1];
  vf sum{}, product{};
  for_vectors(c, [&](std::int64_t i, int n) {
    const vf gi = load_n(g + i, n);
    const vf h = (load_n(in + i, n) - mean) * rstd;
    const vf gh = gi * h;
    const vf s1 = scale(i, n);
    sum += gi * s1;
    product += gh * s1;
    store_n(dshift + i, load_n(dshift + i, n) + gi, n);
    store_n(dscale + i, load_n(dscale + i, n) + gh, n);
  });
  const float mean_g = hsum(sum) / static_cast<float>(c);
  const float mean_gh = hsum(product) / static_cast<float>(c);
  for_vectors(c, [&](std::int64_t i, int n) {
    const vf h = (load_n(in + i, n) - mean) * rstd;
    vf d = rstd * (load_n(g + i, n) * scale(i, n) - mean_g - h * mean_gh);
    if (accumulate) d += load_n(out + i, n);
    store_n(out + i, d, n);
  });
}

// a * b + c, rounded once where the processor can.
#if defined(__AVX512F__)
static inline vf fused(vf a, vf b, vf c) {
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__AVX2__)
static inline vf fused(vf a, vf b, vf c) {
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
static inline vf fused(vf a, vf b, vf c) { return a * b + c; }
#endif

// The pairs of neighbours in v, of which `angles` holds (cos, sin), turned by them, or back.
template <bool back = false>
static inline vf turn(vf v, vf angles) {
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  const vf cosines = __builtin_shuffle(angles, lane & ~1);
  const vf sines = __builtin_shuffle(angles, lane | 1), partners = __builtin_shuffle(v, lane ^ 1);
  return fused(v, cosines, partners * ((lane & 1) == (back ? 1 : 0) ? -sines : sines));
}

// The tokens of rms_rope: rows of `channels`, whose positions repeat after `positions`.
struct Heads {
  std::int64_t channels, rows, positions, width;  // of a head; of the row where nothing turns
  const float* rope;                              // null: nothing turns

  // Calls f(channel, n, (cos, sin) of the channels' pairs) for all channels of a row.
  template <class F>
  void for_channels(std::int64_t row, F&& f) const {
    if (rope == nullptr) {
      for_vectors(channels, [&](std::int64_t i, int n) { f(i, n, vf{}); });
      return;
    }
    const float* angles = rope + row % positions * width;
    for (std::int64_t head = 0; head < channels; head += width)
      for_vectors(width, [&](std::int64_t i, int n) { f(head + i, n, load_n(angles + i, n)); });
  }
};

Heads heads_of(const Tensor& x, const Tensor& rope, int heads) {
  const std::int64_t c = x.dim(-1);
  if (!rope.defined()) return {c, x.numel() / c, 1, c, nullptr};
  const std::int64_t width = c / heads, positions = rope.dim(0);
  WEFT_ASSERT(width * heads == c && rope.numel() == positions * width &&
              x.numel() / c % positions == 0);
  return {c, x.numel() / c, positions, width, rope.data<float>()};
}

}  // namespace

void layer_norm_modulate_forward(const Tensor& x, const Tensor& m, const Tensor& rows, int shift,
                                 int scale, int first_row, Tensor& y, Tensor& stats) {
  const Frames f = frames_of(x, rows);
  const std::int64_t c = f.channels, k = m.dim(1);
  const std::int32_t* row = rows.data<std::int32_t>();
  const float* mod = m.data<float>();
  float* st = stats.data<float>();
  with_types(x, y, [&]<class X, class Y>(X, Y) {
    const X* xs = x.data<X>();
    Y* ys = y.data<Y>();
    for_chunks(f, [&](std::int64_t frame, std::int64_t first, std::int64_t last, std::int64_t) {
      if (row[frame] < first_row) {
        for_vectors((last - first) * c, [&](std::int64_t i, int n) {
          store_n(ys + first * c + i, load_n(xs + first * c + i, n), n);
        });
        return;
      }
      const float* sc = mod + (row[frame] * k + scale) * c;
      for (std::int64_t t = first; t < last; ++t)
        norm_row(
            xs + t * c, c, [sc](std::int64_t i, int n) { return 1.0f + load_n(sc + i, n); },
            mod + (row[frame] * k + shift) * c, ys + t * c, st + 2 * t);
    });
  });
}

void layer_norm_modulate_backward(const Tensor& x, const Tensor& m, const Tensor& rows, int shift,
                                  int scale, int first_row, const Tensor& stats, const Tensor& dy,
                                  Tensor& dx, bool accumulate, Tensor& dm) {
  const Frames f = frames_of(x, rows);
  const std::int64_t c = f.channels, k = m.dim(1);
  const std::int32_t* row = rows.data<std::int32_t>();
  const float* mod = m.data<float>();
  const float* st = stats.data<float>();
  struct Partials;
  float* partials = scratch<Partials>(static_cast<std::size_t>(f.chunks() * 2 * c));
  with_types(x, dy, [&]<class X, class Y>(X, Y) {
    const X* xs = x.data<X>();
    const Y* gs = dy.data<Y>();
    X* dxs = dx.data<X>();
    for_chunks(f,
               [&](std::int64_t frame, std::int64_t first, std::int64_t last, std::int64_t chunk) {
                 const float* sc = mod + (row[frame] * k + scale) * c;
                 float* dshift = partials + chunk * 2 * c;
                 std::fill_n(dshift, 2 * c, 0.0f);
                 if (row[frame] < first_row) {
                   for_vectors((last - first) * c, [&](std::int64_t i, int n) {
                     vf d = load_n(gs + first * c + i, n);
                     if (accumulate) d += load_n(dxs + first * c + i, n);
                     store_n(dxs + first * c + i, d, n);
                   });
                   return;
                 }
                 for (std::int64_t t = first; t < last; ++t)
                   norm_row_backward(
                       xs + t * c, gs + t * c, c,
                       [sc](std::int64_t i, int n) { return 1.0f + load_n(sc + i, n); }, st + 2 * t,
                       dxs + t * c, accumulate, dshift, dshift + c);
               });
  });
  const int vectors[2] = {shift, scale};
  add_partials(f, partials, 2, vectors, rows, dm);
}

void layer_norm_affine_forward(const Tensor& x, const Tensor& w, const Tensor& b, Tensor& y,
                               Tensor& stats) {
  const std::int64_t c = w.numel();
  const float *scale = w.data<float>(), *shift = b.data<float>();
  float* st = stats.data<float>();
  with_types(x, y, [&]<class X, class Y>(X, Y) {
    const X* xs = x.data<X>();
    Y* ys = y.data<Y>();
    for_chunks(Frames{1, x.numel() / c, c}, [&](std::int64_t, std::int64_t first, std::int64_t last,
                                                std::int64_t) {
      for (std::int64_t t = first; t < last; ++t)
        norm_row(
            xs + t * c, c, [scale](std::int64_t i, int n) { return load_n(scale + i, n); }, shift,
            ys + t * c, st + 2 * t);
    });
  });
}

void layer_norm_affine_backward(const Tensor& x, const Tensor& w, const Tensor& stats,
                                const Tensor& dy, Tensor& dx, bool accumulate, Tensor& dw,
                                Tensor& db) {
  const std::int64_t c = w.numel();
  const Frames f{1, x.numel() / c, c};
  const float *scale = w.data<float>(), *st = stats.data<float>();
  struct Partials;
  float* partials = scratch<Partials>(static_cast<std::size_t>(f.chunks() * 2 * c));
  with_types(x, dy, [&]<class X, class Y>(X, Y) {
    const X* xs = x.data<X>();
    const Y* gs = dy.data<Y>();
    X* dxs = dx.data<X>();
    for_chunks(f, [&](std::int64_t, std::int64_t first, std::int64_t last, std::int64_t chunk) {
      float* dshift = partials + chunk * 2 * c;
      std::fill_n(dshift, 2 * c, 0.0f);
      for (std::int64_t t = first; t < last; ++t)
        norm_row_backward(
            xs + t * c, gs + t * c, c,
            [scale](std::int64_t i, int n) { return load_n(scale + i, n); }, st + 2 * t,
            dxs + t * c, accumulate, dshift, dshift + c);
    });
  });
  if (!dw.defined()) return;
  add_columns(partials, f.chunks(), 2 * c, c, db.data<float>());
  add_columns(partials + c, f.chunks(), 2 * c, c, dw.data<float>());
}

void gate_residual_forward(const Tensor& x, const Tensor& p, const Tensor& m, const Tensor& rows,
                           int gate, const Tensor& keep, Tensor& y) {
  const Frames f = frames_of(x, rows);
  const std::int64_t c = f.channels, k = m.dim(1);
  const std::int32_t* row = rows.data<std::int32_t>();
  const float* mod = m.data<float>();
  const float* kept = keep.defined() ? keep.data<float>() : nullptr;
  const std::int64_t frames_per_sample = kept ? f.count / keep.numel() : 1;
  with_types(x, p, [&]<class X, class P>(X, P) {
    const X* xs = x.data<X>();
    const P* ps = p.data<P>();
    X* ys = y.data<X>();
    for_chunks(f, [&](std::int64_t frame, std::int64_t first, std::int64_t last, std::int64_t) {
      const float* g = mod + (row[frame] * k + gate) * c;
      const float factor = kept ? kept[frame / frames_per_sample] : 1.0f;
      for (std::int64_t t = first; t < last; ++t)
        for_vectors(c, [&](std::int64_t i, int n) {
          const std::int64_t at = t * c + i;
          store_n(ys + at, load_n(xs + at, n) + factor * load_n(g + i, n) * load_n(ps + at, n), n);
        });
    });
  });
}

void gate_residual_backward(const Tensor& dy, const Tensor& p, const Tensor& m, const Tensor& rows,
                            int gate, const Tensor& keep, Tensor& dp, Tensor& dm, Tensor& dbias,
                            bool accumulate) {
  const Frames f = frames_of(dy, rows);
  const std::int64_t c = f.channels, k = m.dim(1);
  const std::int32_t* row = rows.data<std::int32_t>();
  const float* mod = m.data<float>();
  const float* kept = keep.defined() ? keep.data<float>() : nullptr;
  const std::int64_t frames_per_sample = kept ? f.count / keep.numel() : 1;
  struct Partials;
  float* partials = scratch<Partials>(static_cast<std::size_t>(f.chunks() * c));
  with_types(dy, p, [&]<class X, class P>(X, P) {
    const X* gs = dy.data<X>();
    const P* ps = p.data<P>();
    P* ds = dp.data<P>();
    for_chunks(f,
               [&](std::int64_t frame, std::int64_t first, std::int64_t last, std::int64_t chunk) {
                 const float* g = mod + (row[frame] * k + gate) * c;
                 const float factor = kept ? kept[frame / frames_per_sample] : 1.0f;
                 float* dgate = partials + chunk * c;
                 std::fill_n(dgate, c, 0.0f);
                 for (std::int64_t t = first; t < last; ++t)
                   for_vectors(c, [&](std::int64_t i, int n) {
                     const std::int64_t at = t * c + i;
                     const vf d = factor * load_n(gs + at, n);
                     store_n(dgate + i, load_n(dgate + i, n) + d * load_n(ps + at, n), n);
                     store_n(ds + at, d * load_n(g + i, n), n);
                   });
               });
  });
  const int vectors[1] = {gate};
  add_partials(f, partials, 1, vectors, rows, dm);
  if (dbias.defined()) bias_gradient(dp, dbias, accumulate);
}

void modulation_forward(const Tensor& table, const Tensor& t, Tensor& m) {
  const std::int64_t groups = m.dim(0), k = m.dim(1), c = m.dim(2);
  const bool broadcast = t.dim(1) == c;
  const float *tab = table.data<float>(), *ts = t.data<float>();
  float* out = m.data<float>();
#pragma omp parallel for schedule(static) if (groups * k * c > 65536)
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t i = 0; i < k * c; ++i)
      out[g * k * c + i] = tab[i] + (broadcast ? ts[g * c + i % c] : ts[g * k * c + i]);
}

void modulation_backward(const Tensor& dm, Tensor& dtable, Tensor& dt) {
  const std::int64_t groups = dm.dim(0), k = dm.dim(1), c = dm.dim(2);
  const bool broadcast = dt.defined() && dt.dim(1) == c;
  const float* d = dm.data<float>();
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t j = 0; j < k; ++j)
      for (std::int64_t i = 0; i < c; ++i) {
        const float v = d[(g * k + j) * c + i];
        if (dtable.defined()) dtable.data<float>()[j * c + i] += v;
        if (dt.defined()) dt.data<float>()[broadcast ? g * c + i : (g * k + j) * c + i] += v;
      }
}

void modulation_rows(const Tensor& timestep, const Tensor& fps, const Tensor& mask, Tensor& times,
                     Tensor& rates, Tensor& rows, Tensor& sample_rows) {
  const std::int64_t B = timestep.numel(), G = times.numel(), frames = rows.numel();
  for (std::int64_t g = 0; g < G; ++g) {
    times.data<float>()[g] = g < B ? timestep.data<float>()[g] : 0.0f;
    rates.data<float>()[g] = fps.data<float>()[g % B];
  }
  for (std::int64_t f = 0; f < frames; ++f) {
    const std::int64_t b = f / (frames / B);
    const bool generated = !mask.defined() || mask.data<std::uint8_t>()[f] != 0;
    rows.data<std::int32_t>()[f] = static_cast<std::int32_t>(generated ? b : B + b);
    sample_rows.data<std::int32_t>()[f] = static_cast<std::int32_t>(b);
  }
}

void rms_norm_forward(const Tensor& x, const Tensor& w, float eps, Tensor& y) {
  const std::int64_t c = w.numel(), rows = x.numel() / c;
  const float* weight = w.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* ys = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* in = xs + r * c;
      T* out = ys + r * c;
      vf squares{};
      for_vectors(c, [&](std::int64_t i, int n) {
        const vf v = load_n(in + i, n);
        squares += v * v;
      });
      const float scale = 1.0f / std::sqrt(hsum(squares) / static_cast<float>(c) + eps);
      for_vectors(c, [&](std::int64_t i, int n) {
        store_n(out + i, load_n(in + i, n) * scale * load_n(weight + i, n), n);
      });
    }
  });
}

void rms_rope_forward(const Tensor& x, const Tensor& w, const Tensor& rope, int heads, float eps,
                      Tensor& y) {
  const Heads h = heads_of(x, rope, heads);
  const std::int64_t c = h.channels;
  const float* weight = w.data<float>();
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* xs = x.data<T>();
    T* ys = y.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t row = 0; row < h.rows; ++row) {
      const T* in = xs + row * c;
      T* out = ys + row * c;
      vf squares{};
      for_vectors(c, [&](std::int64_t i, int n) {
        const vf v = load_n(in + i, n);
        squares += v * v;
      });
      const float scale = 1.0f / std::sqrt(hsum(squares) / static_cast<float>(c) + eps);
      h.for_channels(row, [&](std::int64_t i, int n, vf angles) {
        const vf v = load_n(in + i, n) * scale * load_n(weight + i, n);
        store_n(out + i, h.rope != nullptr ? turn(v, angles) : v, n);
      });
    }
  });
}

// With n = x r, r = 1 / sqrt(mean(x^2) + eps), and g the gradient of w n, turned back: dx = r (g w
// - n mean(g w n)), dw = sum of g n.
void rms_rope_backward(const Tensor& x, const Tensor& w, const Tensor& rope, int heads, float eps,
                       const Tensor& dy, Tensor& dx, Tensor& dw) {
  const Heads h = heads_of(x, rope, heads);
  const std::int64_t c = h.channels;
  const Frames f{1, h.rows, c};
  const float* weight = w.data<float>();
  struct Partials;
  float* partials = scratch<Partials>(static_cast<std::size_t>(f.chunks() * c));
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *xs = x.data<T>(), *gs = dy.data<T>();
    T* dxs = dx.data<T>();
    for_chunks(f, [&](std::int64_t, std::int64_t first, std::int64_t last, std::int64_t chunk) {
      float* sum = partials + chunk * c;
      std::fill_n(sum, c, 0.0f);
      for (std::int64_t row = first; row < last; ++row) {
        const T *in = xs + row * c, *gradient = gs + row * c;
        T* out = dxs + row * c;
        const auto of_norm = [&](std::int64_t i, int n, vf angles) {
          const vf g = load_n(gradient + i, n);
          return h.rope != nullptr ? turn<true>(g, angles) : g;
        };
        vf squares{}, product{};
        h.for_channels(row, [&](std::int64_t i, int n, vf angles) {
          const vf v = load_n(in + i, n);
          squares += v * v;
          product += of_norm(i, n, angles) * load_n(weight + i, n) * v;
        });
        const float r = 1.0f / std::sqrt(hsum(squares) / static_cast<float>(c) + eps);
        const float along = hsum(product) / static_cast<float>(c) * r * r;
        h.for_channels(row, [&](std::int64_t i, int n, vf angles) {
          const vf g = of_norm(i, n, angles), v = load_n(in + i, n);
          store_n(sum + i, load_n(sum + i, n) + g * (v * r), n);
          store_n(out + i, r * (g * load_n(weight + i, n) - v * along), n);
        });
      }
    });
  });
  if (dw.defined()) add_columns(partials, f.chunks(), c, c, dw.data<float>());
}

WEFT_CPU_END
