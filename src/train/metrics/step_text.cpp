#include "train/metrics/step_text.h"

#include <fmt/format.h>

namespace weft {

std::string step_text(const StepMetrics& m, std::int64_t steps) {
  const auto share = [&](double s) { return 100 * s / m.seconds; };
  std::string slowest, mae;
  for (const auto& [name, value] : m.terms)
    if (name == "mae" && value > 0) mae = fmt::format("  MAE {:.2f}/255", value);
  if (m.rank_busy.size() > 1) slowest = fmt::format(", slowest rank {}", m.slowest_rank);
  return fmt::format(
      "step {:>6}/{}  loss {:.5f}{}  grad {:.3f}  lr {:.2e}  {:.3f} s  (data {:.1f} %, comm {:.1f} "
      "%, wait {:.1f} %, save {:.1f} %{})",
      m.step + 1, steps, m.loss, mae, m.grad_norm, m.lr, m.seconds, share(m.split.data_wait),
      share(m.split.comm_exposed), share(m.split.wait_slowest), share(m.split.checkpoint), slowest);
}

}  // namespace weft
