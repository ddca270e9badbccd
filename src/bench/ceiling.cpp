#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/json.h"
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

DeviceRates device_rates() {
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const ArenaScope scope(*arena);
  return {product_rate(DType::f32), product_rate(DType::bf16), copy_rate()};
}

namespace {

struct Row {
  std::string name;
  std::int64_t calls = 0;
  double seconds = 0, flops = 0, bytes = 0;
  double least = 0;  // seconds
};

// The calls of one entry have the same shapes: each takes at least what its products or its bytes
// take alone, whichever is more.
double least_seconds(const ops::OpTime& t, const DeviceRates& rates) {
  return std::max(t.flops / (t.bf16 ? rates.bf16_products : rates.f32_products),
                  t.bytes / rates.copies);
}

std::vector<Row> rows_of(const ops::Profile& profile, const DeviceRates& rates, bool shapes) {
  std::map<std::string, Row> rows;
  for (const auto& [key, t] : profile) {
    const std::string& name = shapes ? key : t.name;
    Row& row = rows[name];
    row.name = name;
    row.calls += t.calls, row.seconds += t.seconds, row.flops += t.flops, row.bytes += t.bytes;
    row.least += least_seconds(t, rates);
  }
  std::vector<Row> sorted;
  for (auto& [name, row] : rows) sorted.push_back(std::move(row));
  std::ranges::stable_sort(sorted, std::greater<>(), &Row::seconds);
  return sorted;
}

}  // namespace

std::string profile_table(const ops::Profile& profile, const DeviceRates& rates, int steps,
                          double seconds, bool shapes) {
  const std::vector<Row> rows = rows_of(profile, rates, shapes);
  std::size_t width = 30;
  for (const Row& row : rows) width = std::max(width, row.name.size());
  std::string text =
      fmt::format("{:<{}} {:>7} {:>10} {:>7} {:>9} {:>7} {:>9} {:>9}\n", "operation", width,
                  "calls", "ms", "share", "GFLOP/s", "GB/s", "limit ms", "of limit");
  const auto line = [&](const Row& row) {
    const auto rate = [&](double work) {
      return work > 0 && row.seconds > 0 ? fmt::format("{:.1f}", work / row.seconds * 1e-9) : "";
    };
    const std::string calls =
        row.calls > 0 ? fmt::format("{:.4g}", static_cast<double>(row.calls) / steps) : "";
    text +=
        fmt::format("{:<{}} {:>7} {:>10.3f} {:>6.1f}% {:>9} {:>7} {:>9.3f} {:>8.0f}%\n", row.name,
                    width, calls, 1e3 * row.seconds / steps, 100 * row.seconds / steps / seconds,
                    rate(row.flops), rate(row.bytes), 1e3 * row.least / steps,
                    row.seconds > 0 ? 100 * row.least / row.seconds : 0);
  };
  Row inside{.name = "operations"};
  for (const Row& row : rows) {
    line(row);
    inside.seconds += row.seconds, inside.least += row.least;
  }
  line(inside);
  line({.name = "outside operations", .seconds = std::max(0.0, steps * seconds - inside.seconds)});
  line({.name = "all", .seconds = steps * seconds, .least = inside.least});
  const nlohmann::ordered_json totals{{"seconds", seconds},
                                      {"operations", inside.seconds / steps},
                                      {"limit", inside.least / steps},
                                      {"f32_products", rates.f32_products},
                                      {"bf16_products", rates.bf16_products},
                                      {"copies", rates.copies}};
  return text + fmt::format(
                    "limits: products of {:.0f} GFLOP/s in f32, {:.0f} in bf16; copies of {:.1f} "
                    "GB/s, read and written\nprofile: {}\n",
                    rates.f32_products * 1e-9, rates.bf16_products * 1e-9, rates.copies * 1e-9,
                    dump_json(totals));
}

}  // namespace weft
