// Vectors of one register for the instruction set that the file is compiled for, and the few
// functions that the CPU operations are made of. Included inside WEFT_CPU_BEGIN/END, so that the
// compilations never share a symbol. What names no instruction set is GCC's vectors, which any
// processor has: NEON takes no other code.

#pragma once

#if defined(__AVX512F__)
constexpr int W = 16, vector_registers = 32;
#elif defined(__AVX2__)
constexpr int W = 8, vector_registers = 16;
#else  // 128 bits: NEON
constexpr int W = 4, vector_registers = 32;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef std::int32_t vi __attribute__((vector_size(W * 4)));
typedef std::uint32_t vu __attribute__((vector_size(W * 4)));
typedef std::uint16_t vh __attribute__((vector_size(W * 2)));

static inline vf splat(float x) { return x - vf{}; }

static inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static inline vf load(const bf16* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
static inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
static inline vh round_bf16(vf v) {
  const vu u = (vu)v, rounded = u + 0x7fffu + ((u >> 16) & 1u);
  // Rounding must not carry a NaN's mantissa into an infinity.
  const vu safe = v == v ? rounded : vu{} + 0x7fc00000u;
  return __builtin_convertvector(safe >> 16, vh);
}
static inline void store(bf16* p, vf v) {
  const vh h = round_bf16(v);
  __builtin_memcpy(static_cast<void*>(p), &h, sizeof h);
}

// The first n < W elements; the rest reads as zero and is not written.
#ifdef __AVX512F__
static inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
static inline vf load_part(const float* p, int n) {
  return (vf)_mm512_maskz_loadu_ps(first_lanes(n), p);
}
static inline vf load_part(const bf16* p, int n) {
  const vh h = (vh)_mm256_maskz_loadu_epi16(first_lanes(n), p);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
static inline void store_part(float* p, vf v, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)v);
}
static inline void store_part(bf16* p, vf v, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)round_bf16(v));
}
#else
template <class T>
static inline vf load_part(const T* p, int n) {
  T t[W] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
template <class T>
static inline void store_part(T* p, vf v, int n) {
  T t[W];
  store(t, v);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
#endif

// Horizontal sum and maximum, halving down to one lane. (GCC 12's own 512-bit reductions trigger
// warnings about their internals.)
#ifdef __AVX2__
static inline __m128 lower_lanes(vf v, bool take_max) {
#ifdef __AVX512F__
  const __m256 low = (__m256)__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 high = (__m256)__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256 half = take_max ? _mm256_max_ps(low, high) : _mm256_add_ps(low, high);
#else
  const __m256 half = (__m256)v;
#endif
  const __m128 a = _mm256_castps256_ps128(half), b = _mm256_extractf128_ps(half, 1);
  return take_max ? _mm_max_ps(a, b) : _mm_add_ps(a, b);
}
static inline float hsum(vf v) {
  __m128 s = lower_lanes(v, false);
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline float hmax(vf v) {
  __m128 s = lower_lanes(v, true);
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#else
static inline float hsum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float hmax(vf v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
#endif

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf select_first(vf v, int n, float otherwise) {
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  return lane < n ? v : splat(otherwise);
}

// e^r for |r| <= ln(2)/2: degree-6 polynomial.
static inline vf exp_reduced(vf r) {
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

// e^x to 2 ulp; 0 far below -87, and at most e^88. Cody-Waite reduction by ln 2. A NaN stays one:
// the comparisons are written so that it fails them and goes through.
static inline vf vexp(vf x) {
#ifdef __AVX512F__
  const vf c = (vf)_mm512_max_ps((__m512)splat(-100.0f), (__m512)x);
  const vf n = (vf)_mm512_roundscale_ps((__m512)(c * 1.44269504088896341f), 0x08);
  const vf r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  return (vf)_mm512_scalef_ps((__m512)exp_reduced(r), (__m512)n);
#else
  const vf low = splat(-87.3f), high = splat(88.3f);
  const vf c = x < low ? low : (x > high ? high : x);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (c * 1.44269504088896341f + magic) - magic;
  const vf r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  return (vf)((vi)exp_reduced(r) + (__builtin_convertvector(n, vi) << 23));
#endif
}

// 1 / (1 + e^-x).
static inline vf vsigmoid(vf x) {
#ifdef __AVX512F__
  // A 14-bit reciprocal and one Newton step; the bound keeps the denominator finite, which the step
  // needs.
  const vf d = 1.0f + vexp((vf)_mm512_min_ps((__m512)splat(87.0f), (__m512)(-x)));
  const vf r = (vf)_mm512_rcp14_ps((__m512)d);
  return r * (2.0f - d * r);
#else
  return 1.0f / (1.0f + vexp(-x));
#endif
}

#ifdef __AVX512F__
// 2^x to 18 bits, for results that are rounded to bf16 next.
static inline vf exp2_18_bits(vf x) {
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, 0x08), r = x - n;
  // 2^r for |r| <= 1/2, minimax of degree 4.
  vf p = splat(9.570101276e-3f);
  p = p * r + 5.591785908e-2f;
  p = p * r + 2.402474433e-1f;
  p = p * r + 6.931217909e-1f;
  p = p * r + 9.999992847e-1f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#endif

// e^x for a result that is rounded to T: for bf16 to 18 bits, at two thirds of the work.
template <class T>
static inline vf vexp_for(vf x) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 2)
    return exp2_18_bits(
        (vf)_mm512_max_ps((__m512)splat(-150.0f), (__m512)(x * 1.44269504088896341f)));
#endif
  return vexp(x);
}

// 1 / (1 + e^-x) for a result that is rounded to T: to 2^-13 for bf16, at half the work.
template <class T>
static inline vf vsigmoid_for(vf x) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 2) {
    const vf power = (vf)_mm512_min_ps((__m512)splat(126.0f), (__m512)(x * -1.44269504088896341f));
    return (vf)_mm512_rcp14_ps((__m512)(1.0f + exp2_18_bits(power)));
  }
#endif
  return vsigmoid(x);
}

// Calls f(offset, W) for every whole vector of n elements and f(offset, rest) for what is left.
template <class F>
static inline void for_vectors(std::int64_t n, F&& f) {
  std::int64_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, static_cast<int>(n - i));
}
template <class T>
static inline vf load_n(const T* p, int n) {
  return n == W ? load(p) : load_part(p, n);
}
template <class T>
static inline void store_n(T* p, vf v, int n) {
  if (n == W)
    store(p, v);
  else
    store_part(p, v, n);
}

// Calls f with a value of the activation type that `dtype` names: float or bf16.
template <class F>
static inline void with_type(DType dtype, F&& f) {
  if (dtype == DType::bf16)
    f(bf16{});
  else
    f(float{});
}

// Memory of a thread that stays for the next call: operations allocate nothing in the steady state.
template <class Tag>
static float* scratch(std::size_t floats) {
  static thread_local std::unique_ptr<float[], void (*)(float*)> buffer(
      nullptr, [](float* p) { std::free(p); });
  static thread_local std::size_t capacity = 0;
  if (floats > capacity) {
    capacity = (floats + 1023) / 1024 * 1024;
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, capacity * sizeof(float))));
  }
  return buffer.get();
}
