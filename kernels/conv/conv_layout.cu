// Layouts around cuDNN's convolutions (conv_layout.cuh). CPU twin src/ops/cpu/conv/, cases
// tests/kernels/conv.cpp.
//
// Bound by memory. Weights are small: the largest of the VAE (512 x 512 x 27) is 14 MB in bf16,
// three microseconds each way beside a convolution of milliseconds, so they are put in order for
// every call and no copy of them can grow stale. join_phases reads and writes the frame once, and
// once more a residual: 4 to 6 bytes an element in bf16, where the convolution folded to phases
// saves 5 of 9 products. 16 bytes an access where the channels allow it.
#include "conv/conv_layout.cuh"

#include <algorithm>

#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

// A thread takes the taps of an output and an input channel, those of a block lie side by side in
// w. They are read as they lie, 16 bytes an access where w is aligned (`whole`), and turned in
// shared memory.
template <class T, bool whole>
__global__ void __launch_bounds__(threads)
    to_library_kernel(const T* w, T* to, Divisor in, std::int64_t inputs, int taps,
                      std::int64_t count) {
  constexpr int unit = whole ? Pack<T>::size : 1;
  T* const staged = shared_memory<T>();  // [threads of the block,taps]
  const int block = static_cast<int>(blockDim.x), own = static_cast<int>(threadIdx.x);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * block;
  const int pairs = count - first < block ? static_cast<int>(count - first) : block;
  const int values = pairs * taps, accesses = values / unit;
#pragma unroll 4
  for (int j = own; j < accesses; j += block)
    store_vec<unit>(staged, j, load_vec<unit>(w + first * taps, j));
  for (int j = accesses * unit + own; j < values; j += block) staged[j] = w[first * taps + j];
  __syncthreads();
  if (own >= pairs) return;
  // (o taps + tap) in + c, where i = o in + c.
  const std::int64_t i = first + own;
  const T* const from = staged + own * taps;
  T* at = to + i + in.divide(static_cast<unsigned>(i)) * (taps - 1) * inputs;
#pragma unroll 9
  for (int tap = 0; tap < taps; ++tap, at += inputs) *at = from[tap];
}

template <class T>
__global__ void __launch_bounds__(threads)
    from_library_kernel(const T* from, float* dw, Divisor in, std::int64_t inputs, Divisor taps,
                        std::int64_t all_taps, bool accumulate, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned tap = static_cast<unsigned>(i), c = taps.split(tap);
  const unsigned o = in.split(c);
  const float v = to_float(from[(o * all_taps + tap) * inputs + c]);
  dw[i] = accumulate ? dw[i] + v : v;
}

// The 2x2 element of phase `parity` that kernel row (or column) k falls on: rows {0},{1,2} of
// parity 0, {0,1},{2} of 1.
__device__ __forceinline__ int phase_tap(int parity, int k) { return (k + 1 - parity) / 2; }

template <class T>
__global__ void phase_weights_kernel(const T* w, T* to, PhaseWeights s, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t c = i % s.in, tap = i / s.in % 4, a = i / s.in / 4 % s.kt,
                     o = i / s.in / 4 / s.kt % s.out;
  const int phase = static_cast<int>(i / s.in / 4 / s.kt / s.out);
  const T* const from = w + ((o * s.in + c) * s.kt + a) * 9;
  float sum = 0.0f;
  for (int row = 0; row < 3; ++row)
    for (int column = 0; column < 3; ++column)
      if (phase_tap(phase / 2, row) * 2 + phase_tap(phase % 2, column) == tap)
        sum += to_float(from[row * 3 + column]);
  to[i] = from_float<T>(sum);
}

template <class T>
__global__ void phase_weights_backward_kernel(const T* from, float* dw, PhaseWeights s,
                                              bool accumulate, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const int row = static_cast<int>(i % 9 / 3), column = static_cast<int>(i % 3);
  const std::int64_t a = i / 9 % s.kt, c = i / 9 / s.kt % s.in, o = i / 9 / s.kt / s.in;
  float sum = accumulate ? dw[i] : 0.0f;
  for (int phase = 0; phase < 4; ++phase) {
    const int tap = phase_tap(phase / 2, row) * 2 + phase_tap(phase % 2, column);
    sum += to_float(from[(((phase * s.out + o) * s.kt + a) * 4 + tap) * s.in + c]);
  }
  dw[i] = sum;
}

// A row of the large frames within the band, and where it comes from: of [frames, 2 rows, 2W, C /
// V].
struct PhaseElement {
  std::int64_t large, small;  // elements of y and of phases, in units of V
  std::int64_t channel;       // in units of V
};
struct PhaseDivisors {
  Divisor channels, columns, rows;  // C / V, 2 W and 2 rows of y; W + 1 and H + 1 of phases
};
template <int V>
__device__ __forceinline__ PhaseElement phase_element(unsigned c, const PhaseRows& at,
                                                      const PhaseDivisors& by) {
  unsigned X = by.channels.split(c), Y = by.columns.split(X);
  const unsigned f = by.rows.split(Y);
  const std::int64_t C = at.C / V;
  const std::int64_t row = Y / 2 + Y % 2, column = X / 2 + X % 2, phase = Y % 2 * 2 + X % 2;
  return {((f * 2 * at.H + 2 * at.first + Y) * 2 * at.W + X) * C + c,
          (((f * (at.rows + 1) + row) * (at.W + 1) + column) * 4 + phase) * C + c, c};
}

template <class T, int V>
__global__ void join_phases_kernel(const T* phases, PhaseRows at, PhaseDivisors by,
                                   const float* bias, const T* residual, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const PhaseElement e = phase_element<V>(static_cast<unsigned>(i), at, by);
  float v[V];
  unpack(load_vec<V>(phases, e.small), v);
  if (bias != nullptr)
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += bias[e.channel * V + k];
  if (residual != nullptr) {
    float r[V];
    unpack(load_vec<V>(residual, e.large), r);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += r[k];
  }
  store_vec<V>(y, e.large, pack<T, V>(v));
}

template <class T, int V>
__global__ void split_phases_kernel(const T* dy, PhaseRows at, PhaseDivisors by, T* phases,
                                    std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i), column = by.channels.split(c);
  const int phase = static_cast<int>(column % 4);
  column /= 4;
  unsigned row = by.columns.split(column);
  const unsigned f = by.rows.split(row);
  const std::int64_t C = at.C / V, y = static_cast<std::int64_t>(row) - phase / 2,
                     x = static_cast<std::int64_t>(column) - phase % 2;
  float v[V] = {};
  if (y >= 0 && y < at.H && x >= 0 && x < at.W)
    unpack(load_vec<V>(dy,
                       ((f * 2 * at.H + 2 * y + phase / 2) * 2 * at.W + 2 * x + phase % 2) * C + c),
           v);
  store_vec<V>(phases, i, pack<T, V>(v));
}

template <class T, int V>
__global__ void add_behind_kernel(const T* from, const float* bias, const T* residual, Divisor C,
                                  T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float v[V];
  unpack(load_vec<V>(from, i), v);
  unsigned channel = static_cast<unsigned>(i);
  C.split(channel);
  if (bias != nullptr)
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += bias[channel * V + k];
  if (residual != nullptr) {
    float r[V];
    unpack(load_vec<V>(residual, i), r);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += r[k];
  }
  store_vec<V>(y, i, pack<T, V>(v));
}

}  // namespace

void weights_to_library(const Tensor& w, const WeightShape& s, const Tensor& to) {
  const std::int64_t pairs = s.out * s.in,
                     bytes = s.taps * static_cast<std::int64_t>(size_of(w.dtype()));
  WEFT_ASSERT(pairs < std::int64_t{1} << 31);
  // 7 x 7 x 7 taps of as many pairs as usual would be too much for shared memory.
  const std::int64_t fitting = (std::int64_t{48} << 10) / bytes / 32 * 32;
  const int block = static_cast<int>(std::clamp<std::int64_t>(fitting, 32, threads));
  by_type(w, [&]<class T>() {
    launch(aligned<Pack<T>::size>(w) ? to_library_kernel<T, true> : to_library_kernel<T, false>,
           dim3(blocks_for(pairs, block)), dim3(block), static_cast<std::size_t>(block * bytes),
           data<T>(w), data<T>(to), Divisor(s.in), s.in, static_cast<int>(s.taps), pairs);
  });
}

void weights_from_library(const Tensor& from, const WeightShape& s, const Tensor& dw,
                          bool accumulate) {
  by_type(from, [&]<class T>() {
    launch_items(from_library_kernel<T>, dividend(s.numel()), data<T>(from), data<float>(dw),
                 Divisor(s.in), s.in, Divisor(s.taps), s.taps, accumulate);
  });
}

void phase_weights(const Tensor& w, const PhaseWeights& s, const Tensor& to) {
  by_type(w, [&]<class T>() {
    launch_items(phase_weights_kernel<T>, dividend(s.numel()), data<T>(w), data<T>(to), s);
  });
}

void phase_weights_backward(const Tensor& from, const PhaseWeights& s, const Tensor& dw,
                            bool accumulate) {
  by_type(from, [&]<class T>() {
    launch_items(phase_weights_backward_kernel<T>, dividend(9 * s.out * s.in * s.kt), data<T>(from),
                 data<float>(dw), s, accumulate);
  });
}

void join_phases(const Tensor& phases, const PhaseRows& at, const Tensor& bias,
                 const Tensor& residual, const Tensor& y) {
  by_access(
      at.C,
      [&]<class T, int V>() {
        launch_items(join_phases_kernel<T, V>, dividend(at.frames * 4 * at.rows * at.W * at.C / V),
                     data<T>(phases), at,
                     PhaseDivisors{Divisor(at.C / V), Divisor(2 * at.W), Divisor(2 * at.rows)},
                     data_or_null<float>(bias), data_or_null<T>(residual), data<T>(y));
      },
      phases, residual, y);
}

void split_phases(const Tensor& dy, const PhaseRows& at, const Tensor& phases) {
  by_access(
      at.C,
      [&]<class T, int V>() {
        launch_items(split_phases_kernel<T, V>, dividend(phases.numel() / V), data<T>(dy), at,
                     PhaseDivisors{Divisor(at.C / V), Divisor(at.W + 1), Divisor(at.H + 1)},
                     data<T>(phases));
      },
      dy, phases);
}

void add_behind(const Tensor& from, const Tensor& bias, const Tensor& residual, std::int64_t C,
                const Tensor& y) {
  by_access(
      C,
      [&]<class T, int V>() {
        launch_items(add_behind_kernel<T, V>, dividend(y.numel() / V), data<T>(from),
                     data_or_null<float>(bias), data_or_null<T>(residual), Divisor(C / V),
                     data<T>(y));
      },
      from, residual, y);
}

}  // namespace weft::kernels
