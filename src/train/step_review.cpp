#include "train/step_review.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"
#include "ops/optimizer.h"
#include "train/metrics/step_report.h"

namespace weft {
namespace {

constexpr double least_timeout = 60, timeout_in_steps = 10;
constexpr std::size_t remembered_steps = 50, least_steps = 5;

bool finite(const Tensor& squares) { return std::isfinite(squares.to_host().data<double>()[0]); }

}  // namespace

StepReview::StepReview(const Deck& deck, TrainingTask& task, int rank,
                       std::vector<std::string> hosts)
    : deck_(deck),
      task_(task),
      rank_(rank),
      hosts_(std::move(hosts)),
      stragglers_(static_cast<int>(hosts_.size())),
      loss_(deck.train.spike_deviations),
      grad_norm_(deck.train.spike_deviations) {}

std::string StepReview::rank_name(int rank) const {
  return fmt::format("rank {} on {}", rank, hosts_[rank]);
}

void StepReview::sum_up(IssuedStep& step) const {
  StepMetrics& m = step.metrics;
  const auto samples = static_cast<double>(m.samples.size());
  m.loss = step.rows.sum(StepReport::loss) / samples;
  const std::vector<std::string> names = task_.terms();
  for (std::size_t i = 0; i < names.size(); ++i)
    m.terms.emplace_back(
        names[i], step.rows.sum(static_cast<StepReport::Slot>(StepReport::terms + i)) / samples);
  sum_up_stores(step.rows, m);
  // The model's norm, or that of another group which is not finite.
  m.grad_norm = std::sqrt(*step.rows.squared_norm);
  for (int g = task_.model_groups(); g < task_.params().groups(); ++g)
    if (!std::isfinite(step.rows.squared_norm[g])) m.grad_norm = step.rows.squared_norm[g];
}

void StepReview::judge(IssuedStep& step) {
  if (step.compare_weights) compare_weights(step);
  look_for_spikes(step.metrics);
  look_for_stragglers(step);
}

// Ranks hold the same weights to the bit: checksums that differ mean that a bit was lost.
void StepReview::compare_weights(const IssuedStep& step) const {
  std::map<std::vector<double>, std::vector<int>> versions;
  for (int r = 0; r < step.rows.ranks(); ++r) {
    std::vector<double> sums;
    for (int s = StepReport::working_low; s < StepReport::terms; ++s)
      sums.push_back(step.rows.at(r, static_cast<StepReport::Slot>(s)));
    versions[sums].push_back(r);
  }
  if (versions.size() == 1) return;
  const auto right = std::max_element(
      versions.begin(), versions.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  // Without a majority nobody can tell which ranks are right: the error names all.
  const bool majority = 2 * right->second.size() > static_cast<std::size_t>(step.rows.ranks());
  std::vector<std::string> names;
  for (const auto& [sums, ranks] : versions)
    if (!majority || sums != right->first)
      for (const int r : ranks) names.push_back(rank_name(r));
  throw Error(
      Exit::hardware,
      fmt::format(
          "step {}: the ranks' weights differ: {} {} {}", step.metrics.step + 1,
          fmt::join(names, ", "), names.size() == 1 ? "differs" : "differ",
          majority ? fmt::format("from the other {}", right->second.size()) : "from each other"),
      "a bit was lost in memory or on the network: take the node out of the job (weft doctor), "
      "and resume from the last checkpoint",
      __FILE__, __LINE__);
}

void StepReview::look_for_spikes(const StepMetrics& m) {
  const std::pair<const char*, std::optional<SpikeWatch::Spike>> found[] = {
      {"loss", loss_.step(m.loss)}, {"gradient norm", grad_norm_.step(m.grad_norm)}};
  for (const auto& [name, spike] : found) {
    if (!spike) continue;
    const std::string what = fmt::format(
        "step {}: {} spike: {:.5g}, {:.0f} deviations above the median {:.5g} of the last steps "
        "(loss {:.5g}, gradient norm {:.5g}; samples {})",
        m.step + 1, name, std::string_view(name) == "loss" ? m.loss : m.grad_norm,
        spike->deviations, spike->median, m.loss, m.grad_norm, fmt::join(m.samples, " "));
    WEFT_CHECK(deck_.train.loss_spike != "stop", Exit::non_finite,
               "the newest checkpoint is from before it. Look at these samples (weft inspect), "
               "lower the learning rate or train.grad_clip, or set train.loss_spike = \"warn\"",
               "{}", what);
    if (rank_ == 0) log::warn("{}", what);
  }
}

void StepReview::look_for_stragglers(IssuedStep& step) {
  StepMetrics& m = step.metrics;
  // 1. The ranks of a group must have had the same clips.
  const int ranks = step.rows.ranks(), sp = static_cast<int>(deck_.parallel.sp);
  std::vector<double> busy;
  for (int r = 0; r < ranks; ++r) {
    busy.push_back(step.rows.at(r, StepReport::busy));
    const int first = r / sp * sp;
    WEFT_CHECK(step.rows.at(r, StepReport::samples) == step.rows.at(first, StepReport::samples),
               Exit::internal, "this is a bug in weft, please report it with the log",
               "step {}: {} and rank {} share clips, but trained on different ones", m.step,
               rank_name(r), first);
  }

  // 2. Who was busy how long, and who waited for the slowest.
  const auto slowest = std::max_element(busy.begin(), busy.end());
  m.slowest_rank = static_cast<int>(slowest - busy.begin());
  for (int r = 0; r < ranks; ++r) {
    m.rank_busy.push_back(static_cast<float>(busy[r]));
    m.rank_wait.push_back(static_cast<float>(*slowest - busy[r]));
    m.rank_data_wait.push_back(static_cast<float>(step.rows.at(r, StepReport::data_wait)));
  }
  m.spread = spread_of(m.rank_busy);
  const double behind = *slowest - busy[rank_];
  // All of this rank's blocked time, also without overlap: the first part of it, up to `behind`,
  // was spent waiting for the slowest rank.
  const double blocked = step.blocked + step.blocked_in_compute + step.blocked_for_norm;
  m.split.wait_slowest = std::clamp(behind, 0.0, blocked);
  m.split.comm_exposed = blocked - m.split.wait_slowest;

  // 3. Who is slow for the work that the plan gave it, over many steps.
  if (*slowest == 0 || step.expected_of_busy.empty()) return;  // nothing is known yet
  for (const StragglerWatch::Verdict& v : stragglers_.step(busy, step.expected_of_busy)) {
    if (rank_ != 0) continue;
    if (v.recovered)
      log::info("step {}: {} is as fast as the others again", m.step + 1, rank_name(v.rank));
    else
      log::warn(
          "step {}: {} is slow: its work takes {:.2f} times as long as on the others ({:.0f} % of "
          "it waiting for clips)",
          m.step + 1, rank_name(v.rank), v.slower,
          100 * step.rows.at(v.rank, StepReport::data_wait) / busy[v.rank]);
  }
}

// A hang is ten median steps without progress, but at least a minute.
std::optional<double> StepReview::hang_timeout(double step_seconds) {
  if (recent_seconds_.size() == remembered_steps) recent_seconds_.erase(recent_seconds_.begin());
  recent_seconds_.push_back(step_seconds);
  if (recent_seconds_.size() < least_steps) return std::nullopt;
  return std::max(least_timeout, timeout_in_steps * upper_median(recent_seconds_));
}

double StepReview::longest_step() const {
  return recent_seconds_.empty()
             ? 0.0
             : *std::max_element(recent_seconds_.begin(), recent_seconds_.end());
}

// A fault that recurs from the same weights comes from the data or the settings; one that does not
// came from the machine.
void StepReview::throw_non_finite(const IssuedStep& step, const std::string& found) const {
  const StepMetrics& m = step.metrics;
  const std::string what =
      fmt::format("step {}: loss {:.6g} and gradient norm {:.6g}", m.step + 1, m.loss, m.grad_norm);
  if (!found.empty())
    throw Error(Exit::non_finite, what + "; reproduced on re-run:",
                "look at these samples (weft inspect), lower train.lr or raise train.warmup_steps; "
                "the weights were not changed by this step",
                __FILE__, __LINE__)
        .with_below(found.substr(1));
  std::vector<std::string> suspects;
  for (int r = 0; r < step.rows.ranks(); ++r)
    if (!std::isfinite(step.rows.at(r, StepReport::squares)) ||
        !std::isfinite(step.rows.at(r, StepReport::loss)))
      suspects.push_back(rank_name(r));
  throw Error(
      Exit::hardware,
      fmt::format("{}; the step was run again and it was finite: suspected is {}", what,
                  suspects.empty() ? "the network, since every rank's own gradient was finite"
                                   : fmt::format("{}", fmt::join(suspects, ", "))),
      "take the node out of the job (weft doctor), and resume from the last checkpoint; the "
      "weights were not changed by this step",
      __FILE__, __LINE__);
}

void checksum_weights(ParameterTable& table, StepReport& report) {
  std::int64_t low = 0, begin = 0;
  for (const ParameterTable::Bucket& b : table.buckets()) {
    if (b.sharded) begin = b.end;
    if (b.bf16_only && !b.sharded && table.working().defined()) low = b.end - begin;
  }
  Tensor working = report.checksum(StepReport::working_low);
  Tensor values = report.checksum(StepReport::values_low);
  if (low > 0) ops::checksum(table.working().slice(0, low), working);
  ops::checksum(table.values(), values);
}

std::string find_non_finite(const WorkPlan::Work& work, std::int64_t step, float weight,
                            ParameterTable& table, DataParallel& data_parallel,
                            MicroBatchRunner& runner, const std::string& rank_name) {
  data_parallel.begin_passes(true);
  const Tensor squares = Tensor::empty({1}, DType::f64);
  std::string found;
  for (const auto& [index, what] : work) {
    std::vector<Tensor> losses;
    Tensor total = squares;
    std::set<const Parameter*> bad;
    // Bucket by bucket as they are ready: a sharded one makes room for others.
    const auto look = [&](int bucket) {
      // Recurs, as a fault of the data would.
      if (fault::at(fault::Place::gradient_again, step)) spoil_gradient(table, bucket);
      for (const auto& p : table.all()) {
        if (!p->trainable || p->bucket != bucket) continue;
        ops::sum_of_squares(p->grad, total, false);
        if (!finite(total)) bad.insert(p.get());
      }
    };
    runner.run_again(
        index, what, step, weight, [&](const TrainingLoss& loss) { losses.push_back(loss.clips); },
        look);

    std::vector<std::string> names;
    for (auto p = table.all().rbegin(); p != table.all().rend(); ++p)
      if (bad.contains(p->get())) names.push_back((*p)->name);
    bool loss_too = false;
    for (const Tensor& loss : losses) {
      ops::sum_of_squares(loss, total, false);
      loss_too = loss_too || !finite(total);
    }
    if (names.empty() && !loss_too) continue;
    found += fmt::format(
        "\n  {}, samples [{}]: {}{}", rank_name, fmt::join(what.samples, ", "),
        loss_too ? "the loss is not finite" : "",
        names.empty()
            ? std::string()
            : fmt::format("{}gradient of {}{}", loss_too ? "; " : "", names.front(),
                          names.size() == 1 ? std::string()
                                            : fmt::format(" and {} more", names.size() - 1)));
  }
  data_parallel.end_passes();
  return found;
}

}  // namespace weft
