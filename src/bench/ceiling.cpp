#include "bench/bench.h"

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/json.h"
#include "ops/rates.h"
#include "tensor/tensor.h"

namespace weft {

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
