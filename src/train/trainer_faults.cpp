// Faults of a step: gradients that are not finite, replicas that differ, and injected faults.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <thread>

#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"
#include "ops/optimizer.h"
#include "tensor/device.h"
#include "train/trainer.h"

namespace weft {
namespace {

bool finite(const Tensor& squares) { return std::isfinite(squares.to_host().data<double>()[0]); }

// Texts of all ranks, in order, on every rank.
std::string all_texts(const std::string& mine, MPI_Comm world) {
  int size = 1;
  MPI_Comm_size(world, &size);
  int length = static_cast<int>(mine.size());
  std::vector<int> lengths(static_cast<std::size_t>(size)), starts(lengths.size(), 0);
  MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, world);
  for (std::size_t r = 1; r < lengths.size(); ++r) starts[r] = starts[r - 1] + lengths[r - 1];
  std::string all(static_cast<std::size_t>(starts.back() + lengths.back()), '\0');
  MPI_Allgatherv(mine.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR,
                 world);
  return all;
}

// Flips a bit of a weight in the copy that this rank's forward reads: of the largest parameter that
// is trained, for a place in the flat space may be padding.
void flip_a_bit(ParameterTable& table) {
  const auto trained = [](const auto& p) { return p->trainable ? p->shape.numel() : 0; };
  const auto largest =
      std::max_element(table.all().begin(), table.all().end(),
                       [&](const auto& a, const auto& b) { return trained(a) < trained(b); });
  const Parameter& p = **largest;
  const std::int64_t n = p.shape.numel(), at = n / 3;
  const Tensor weights = (p.working.defined() ? p.working : p.value).view({n});
  const Tensor one = weights.slice(at, at + 1), host = one.to_host();
  std::vector<std::byte> bytes(host.bytes());
  std::copy_n(static_cast<const std::byte*>(host.raw()), bytes.size(), bytes.data());
  bytes[0] ^= std::byte{4};
  Tensor(one).set(std::span<const std::byte>(bytes));
}

}  // namespace

void Trainer::begin_faults() {
  crash::at("step", done_ + 1);
  fault::crash_if_ordered(done_);
  if (fault::ordered(fault::Kind::stop, done_))
    for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
  if (fault::ordered(fault::Kind::flip, done_)) {
    // Weights that arrive later would overwrite the flipped bit.
    data_parallel_->settle();
    flip_a_bit(params());
  }
  data_parallel_->spoil(fault::ordered(fault::Kind::nan, done_).has_value());
}

void Trainer::end_faults(double compute_seconds) {
  if (const auto share = fault::ordered(fault::Kind::slow, done_))
    std::this_thread::sleep_for(std::chrono::duration<double>(*share * compute_seconds));
}

// Checksums of the weights that every rank holds: all in f32, or the bf16 copies and those that a
// bf16 model reads in f32.
void Trainer::checksum_weights() {
  ParameterTable& table = params();
  std::int64_t low = 0;
  for (const ParameterTable::Bucket& b : table.buckets())
    if (b.bf16_only && table.working().defined()) low = b.end;
  Tensor working = report_->checksum(StepReport::working_low);
  Tensor values = report_->checksum(StepReport::values_low);
  if (low > 0) ops::checksum(table.working().slice(0, low), working);
  ops::checksum(table.values(), values);
}

void Trainer::compare_weights(const Issued& step) const {
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
      for (const int r : ranks) names.push_back(name_of_rank(r));
  throw Error(
      Exit::hardware,
      fmt::format(
          "step {}: the weights of the ranks are no longer the same: {} {} {}",
          step.metrics.step + 1, fmt::join(names, ", "), names.size() == 1 ? "differs" : "differ",
          majority ? fmt::format("from the other {}", right->second.size()) : "from each other"),
      "a bit was lost in memory or on the way: take the node out of the job (weft doctor), "
      "and go on from the last checkpoint",
      __FILE__, __LINE__);
}

// Runs the step again, on every rank, from the same weights: a fault that recurs comes from the
// data or the settings, one that does not came from the machine.
void Trainer::explain_non_finite(const Issued& step) {
  // The next step may be issued already; it changes no weights, since its norm is NaN too
  // (DataParallel::norm).
  if (on_cuda()) device_runtime().synchronize(device_runtime().record(Stream::compute));
  comm_->progress(step.metrics.step, "non-finite step again");
  under_way_.reset();
  const StepMetrics& m = step.metrics;
  const std::string what =
      fmt::format("step {}: loss {} and gradient norm {}", m.step + 1, m.loss, m.grad_norm);
  std::vector<std::string> then;
  for (int r = 0; r < step.rows.ranks(); ++r)
    if (!std::isfinite(step.rows.at(r, StepReport::squares)) ||
        !std::isfinite(step.rows.at(r, StepReport::loss)))
      then.push_back(name_of_rank(r));
  std::string mine;
  {
    const ArenaScope scope(*arena_);
    mine = find_non_finite(m.step, 1.0f / static_cast<float>(m.samples.size()));
  }
  const std::string found = all_texts(mine, world_);
  if (!found.empty())
    throw Error(Exit::non_finite, what + "; reproduced on re-run:",
                "look at these samples (weft inspect), lower train.lr or raise train.warmup_steps; "
                "the weights were not changed by this step",
                __FILE__, __LINE__)
        .with_below(found.substr(1));
  throw Error(
      Exit::hardware,
      fmt::format("{}; the step was run again and it was finite: suspected is {}", what,
                  then.empty() ? "the network, since every rank's own gradient was finite"
                               : fmt::format("{}", fmt::join(then, ", "))),
      "take the node out of the job (weft doctor), and go on from the last checkpoint; the weights "
      "were not changed by this step",
      __FILE__, __LINE__);
}

// Runs this rank's micro-batches of a step one by one. Returns a line for each whose gradient or
// loss is not finite. The backward goes from the last layer to the first, so the last layer with a
// fault is where it entered: that one is named.
std::string Trainer::find_non_finite(std::int64_t step, float weight) {
  ParameterTable& table = params();
  data_parallel_->settle();
  const Tensor squares = Tensor::empty({1}, DType::f64);
  std::string found;
  const std::vector<MicroBatch> plan = planner_->plan(step);
  for (const auto& [index, what] : my_work(plan, owners(plan, step))) {
    const Bucket& bucket = source_->buckets()[static_cast<std::size_t>(what.bucket)];
    const std::size_t each = source_->clip_bytes(what);
    std::vector<std::byte> bytes(what.clips.size() * each);
    LoadedBatch clips;
    clips.bytes = bytes;
    clips.step = step;
    clips.index = index;
    clips.what = what;
    for (std::size_t i = 0; i < what.clips.size(); ++i) {
      clips.info.push_back(source_->info(what.bucket, what.clips[i]));
      if (bucket.text_channels > 0)
        clips.text.push_back(source_->read_text(what.bucket, what.clips[i]));
      source_->read_sample(what, i, std::span(bytes).subspan(i * each, each));
    }
    const TrainingWork work =
        task_->prepare(bucket, clips, staging_->stage(bytes),
                       memory_[static_cast<std::size_t>(what.bucket)].recompute, weight);
    staging_->consumed();
    table.begin_step([](int) {});
    std::vector<Tensor> losses;
    run_parts(work, table, false, [&](const TrainingLoss& loss) { losses.push_back(loss.clips); });
    table.finish_step();
    // An injected NaN with the value 0 recurs, as a fault of the data would.
    if (fault::ordered(fault::Kind::nan, step).value_or(1) == 0) data_parallel_->spoil_now();

    Tensor total = squares;
    std::vector<std::string> names;
    for (auto p = table.all().rbegin(); p != table.all().rend(); ++p) {
      if (!(*p)->trainable) continue;
      ops::sum_of_squares((*p)->grad, total, false);
      if (!finite(total)) names.push_back((*p)->name);
    }
    bool loss_too = false;
    for (const Tensor& loss : losses) {
      ops::sum_of_squares(loss, total, false);
      loss_too = loss_too || !finite(total);
    }
    if (names.empty() && !loss_too) continue;
    found += fmt::format(
        "\n  {}, samples [{}]: {}{}", name_of_rank(comm_->rank()), fmt::join(what.samples, ", "),
        loss_too ? "the loss is not finite" : "",
        names.empty()
            ? std::string()
            : fmt::format("{}gradient of {}{}", loss_too ? "; " : "", names.front(),
                          names.size() == 1 ? std::string()
                                            : fmt::format(" and {} more", names.size() - 1)));
  }
  return found;
}

}  // namespace weft
