// Vectors of one register for the instruction set that the file is compiled for (8 or 16 floats), and the
// few functions that the CPU operations are made of. Included inside WEFT_CPU_BEGIN/END, so that the two
// compilations never share a symbol.

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
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
  vu u = (vu)v;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  // Rounding must not carry a NaN's mantissa into an infinity.
  const vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), vh);
}
static inline void store(bf16* p, vf v) {
  const vh h = round_bf16(v);
  __builtin_memcpy(static_cast<void*>(p), &h, sizeof h);
}

// The first n < W elements; the rest reads as zero and is not written.
template <class T>
static inline vf load_part(const T* p, int n) {
  T t[W] = {};
  __builtin_memcpy(static_cast<void*>(t), p, static_cast<std::size_t>(n) * sizeof(T));
  return load(t);
}
template <class T>
static inline void store_part(T* p, vf v, int n) {
  T t[W];
  store(t, v);
  __builtin_memcpy(static_cast<void*>(p), t, static_cast<std::size_t>(n) * sizeof(T));
}

static inline float hsum(vf v) {
  float t[W];
  store(t, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  return t[0];
}
static inline float hmax(vf v) {
  float t[W];
  store(t, v);
  float m = t[0];
  for (int i = 1; i < W; ++i) m = t[i] > m ? t[i] : m;
  return m;
}
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf select_first(vf v, int n, float otherwise) {
  float t[W];
  store(t, v);
  for (int i = n; i < W; ++i) t[i] = otherwise;
  return load(t);
}

// e^x to 2 ulp on [-87, 88], clamped outside; a NaN stays one. Cody-Waite reduction by ln 2, degree-6 polynomial.
static inline vf vexp(vf x) {
  const vf low = splat(-87.3f), high = splat(88.3f);
  const vf c = x < low ? low : (x > high ? high : x);  // a NaN fails both tests and goes through
  const vf magic = splat(12582912.0f);                 // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (c * 1.44269504088896341f + magic) - magic;
  const vf r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi e = __builtin_convertvector(n, vi) << 23;
  return (vf)((vi)p + e);
}

static inline vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

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
  static thread_local std::unique_ptr<float[], void (*)(float*)> buffer(nullptr, [](float* p) {
    std::free(p);
  });
  static thread_local std::size_t capacity = 0;
  if (floats > capacity) {
    capacity = (floats + 1023) / 1024 * 1024;
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, capacity * sizeof(float))));
  }
  return buffer.get();
}
