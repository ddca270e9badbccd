#include "ops/rates.h"

#include <algorithm>
#include <cmath>

#include "core/clock.h"
#include "core/philox.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

// Seconds of a call, the mean of so many.
double time_of(const std::function<void()>& f, int calls) {
  if (!on_cuda()) {
    const double start = now_seconds();
    for (int i = 0; i < calls; ++i) f();
    return (now_seconds() - start) / calls;
  }
  DeviceRuntime& gpu = device_runtime();
  const DeviceEvent begin = gpu.record(Stream::compute);
  for (int i = 0; i < calls; ++i) f();
  const DeviceEvent end = gpu.record(Stream::compute);
  gpu.synchronize(end);
  return gpu.seconds(begin, end) / calls;
}

// Seconds of a call in each of so many rounds.
std::vector<double> rounds_of(const std::function<void()>& f, int count) {
  // Two calls to warm up, then rounds of about 50 ms each.
  time_of(f, 2);
  const int calls = static_cast<int>(std::clamp(0.05 / std::max(time_of(f, 1), 1e-6), 1.0, 1000.0));
  std::vector<double> rounds;
  for (int i = 0; i < count; ++i) rounds.push_back(time_of(f, calls));
  return rounds;
}

// What the device can do is what it did when nothing else disturbed it: the best of 15 rounds.
double least_seconds_of(const std::function<void()>& f) {
  return std::ranges::min(rounds_of(f, 15));
}

// Standard normals on this rank's device.
Tensor draw(const Shape& shape, DType dtype, std::uint64_t seed) {
  Tensor t = Tensor::empty(shape, dtype), values = t;
  if (dtype != DType::f32) values = Tensor::empty(shape, DType::f32);
  ops::fill_normal(seed, static_cast<int>(Purpose::noise), 0, 0, values);
  if (dtype != DType::f32) ops::convert(values, t);
  return t;
}

}  // namespace

double seconds_of(const std::function<void()>& f) { return upper_median(rounds_of(f, 5)); }

double product_rate(DType dtype) {
  // A GPU needs a large product to show its rate; a core would take a minute for it.
  for (std::int64_t n = 1024;; n *= 2) {
    const Tensor a = draw({n, n}, dtype, 1), b = draw({n, n}, dtype, 2);
    Tensor y = Tensor::empty({n, n}, dtype);
    const auto product = [&] { ops::linear_forward(a, b, Tensor(), Tensor(), y); };
    time_of(product, 1);
    if (n < 8192 && time_of(product, 1) < 0.02) continue;
    return 2 * std::pow(static_cast<double>(n), 3) / least_seconds_of(product);
  }
}

double product_rate(DType dtype, const std::vector<StepProduct>& products, double seconds) {
  std::int64_t most_x = 0, most_y = 0, most_w = 0;
  double flops = 0;
  for (const StepProduct& p : products) {
    most_x = std::max(most_x, p.rows * p.inputs);
    most_y = std::max(most_y, p.rows * p.outputs);
    most_w = std::max(most_w, p.outputs * p.inputs);
    flops += p.flops();
  }
  const Tensor x = draw({most_x}, dtype, 1), y = draw({most_y}, dtype, 2),
               w = draw({most_w}, dtype, 3),
               result = Tensor::empty({std::max(most_x, most_y)}, dtype),
               dw = Tensor::empty({most_w}, DType::f32);
  const auto part = [](const Tensor& t, std::int64_t rows, std::int64_t columns) {
    return t.slice(0, rows * columns).view({rows, columns});
  };
  const auto run = [&](const StepProduct& p) {
    const Tensor in = part(x, p.rows, p.inputs), out = part(y, p.rows, p.outputs),
                 weight = part(w, p.outputs, p.inputs);
    if (p.of == StepProduct::Of::weight) {
      Tensor none, to = part(dw, p.outputs, p.inputs);
      ops::linear_backward_weight(out, in, to, none, false);
    } else if (p.of == StepProduct::Of::input) {
      Tensor to = part(result, p.rows, p.inputs);
      ops::linear_backward_input(out, weight, to, false);
    } else {
      Tensor to = part(result, p.rows, p.outputs);
      ops::linear_forward(in, weight, Tensor(), Tensor(), to);
    }
  };
  const auto step = [&] {
    for (const StepProduct& p : products)
      for (std::int64_t i = 0; i < p.calls; ++i) run(p);
  };
  time_of(step, 1);
  std::vector<double> rounds;
  for (double all = 0; all < seconds || rounds.empty(); all += rounds.back())
    rounds.push_back(time_of(step, 1));
  return flops / upper_median(rounds);
}

double copy_rate() {
  const std::int64_t elements = 1 << 26;
  Tensor a = Tensor::empty({elements}, DType::f32), b = Tensor::empty({elements}, DType::f32);
  ops::fill_zero(a);
  return 2.0 * static_cast<double>(a.bytes()) / least_seconds_of([&] { ops::convert(a, b); });
}

}  // namespace weft
