#include <algorithm>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "tensor/tensor.h"

namespace weft {

std::string profile_table(const ops::Profile& profile, int steps, double seconds) {
  std::vector<std::pair<std::string, ops::OpTime>> rows(profile.begin(), profile.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  const auto uses = [&](bool bf16) {
    return std::ranges::any_of(
        rows, [&](const auto& row) { return row.second.bf16 == bf16 && row.second.flops > 0; });
  };
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const ArenaScope scope(*arena);
  const double copy = copy_rate();
  const double f32 = uses(false) ? product_rate(DType::f32) : 0;
  const double bf16 = uses(true) ? product_rate(DType::bf16) : 0;
  const auto limit = [&](const ops::OpTime& t) {
    const double products = t.flops > 0 ? t.flops / (t.bf16 ? bf16 : f32) : 0;
    return std::max(products, t.bytes / copy);
  };

  std::size_t width = 30;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  std::string text =
      fmt::format("{:<{}} {:>7} {:>10} {:>7} {:>9} {:>7} {:>9} {:>9}\n", "operation", width,
                  "calls", "ms", "share", "GFLOP/s", "GB/s", "limit ms", "of limit");
  double sum = 0, least = 0;
  const auto line = [&](const std::string& name, const std::string& calls, double s,
                        const std::string& flops, const std::string& bytes, double limit_seconds) {
    text += fmt::format("{:<{}} {:>7} {:>10.3f} {:>6.1f}% {:>9} {:>7} {:>9.3f} {:>8.0f}%\n", name,
                        width, calls, 1e3 * s / steps, 100 * s / steps / seconds, flops, bytes,
                        1e3 * limit_seconds / steps, s > 0 ? 100 * limit_seconds / s : 0);
  };
  for (const auto& [name, t] : rows) {
    sum += t.seconds, least += limit(t);
    line(name, fmt::format("{}", t.calls / steps), t.seconds,
         t.flops > 0 ? fmt::format("{:.0f}", t.flops / t.seconds * 1e-9) : "",
         fmt::format("{:.1f}", t.bytes / t.seconds * 1e-9), limit(t));
  }
  line("operations", "", sum, "", "", least);
  line("outside operations", "", steps * seconds - sum, "", "", 0);
  return text +
         fmt::format("limits: copies of {:.1f} GB/s{}{}\n", copy * 1e-9,
                     f32 > 0 ? fmt::format(", products of {:.0f} GFLOP/s in f32", f32 * 1e-9) : "",
                     bf16 > 0 ? fmt::format(", {:.0f} in bf16", bf16 * 1e-9) : "");
}

}  // namespace weft
