#include "train/metrics/step_report.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {

namespace {

void free_host(double* p) {
  if (on_cuda())
    device_runtime().free_pinned(p);
  else
    delete[] p;
}

double* allocate_host(std::size_t count) {
  return on_cuda() ? static_cast<double*>(device_runtime().allocate_pinned(count * sizeof(double)))
                   : new double[count];
}

}  // namespace

HostCopy::HostCopy(std::int64_t count)
    : count_(static_cast<std::size_t>(count)), memory_(allocate_host(2 * count_), free_host) {}

std::span<const double> HostCopy::fetch(const Tensor& t) {
  WEFT_ASSERT(t.dtype() == DType::f64 && static_cast<std::size_t>(t.numel()) == count_);
  double* to = memory_.get() + (second_ ? count_ : 0);
  second_ = !second_;
  if (on_cuda())
    device_runtime().copy(to, t.raw(), t.bytes(), Stream::compute);
  else
    std::copy_n(t.data<double>(), count_, to);
  return {to, count_};
}

// Whole units of slots, as an all-gather cuts them.
StepReport::StepReport(Communicator& comm, int groups, int stores)
    : comm_(comm),
      stores_(stores),
      width_((used_slots + stores + int{part_unit} - 1) / int{part_unit} * int{part_unit}),
      rows_(Tensor::persistent({static_cast<std::int64_t>(comm.size()) * width_}, DType::f64)),
      row_(rows_.slice(comm.rank() * width_, (comm.rank() + 1) * width_)),
      norm_(Tensor::persistent({groups}, DType::f64)),
      host_rows_(rows_.numel()),
      host_norm_(groups) {
  // The all-gather sends this part: it must be exactly this rank's row.
  const Part mine = part_of(0, rows_.numel(), comm.rank(), comm.size());
  WEFT_ASSERT(mine.begin == comm.rank() * width_ && mine.size() == width_);
}

void StepReport::clear() {
  Tensor device_slots = row_.slice(0, host_slots);
  ops::fill_zero(device_slots);
  if (stores_ == 0) return;
  Tensor of_stores = row_.slice(used_slots, used_slots + stores_);
  ops::fill_zero(of_stores);
}

Communicator::Ticket StepReport::send(unsigned request_bits, double busy_seconds,
                                      double data_seconds, double sample_checksum) {
  std::array<double, used_slots - host_slots> values{};
  values[requests - host_slots] = request_bits;
  values[busy - host_slots] = busy_seconds;
  values[data_wait - host_slots] = data_seconds;
  values[samples - host_slots] = sample_checksum;
  row_.slice(host_slots, used_slots).set(std::span<const double>(values));
  return comm_.all_gather(rows_);
}

StepReport::Rows StepReport::fetch() {
  return {host_rows_.fetch(rows_), host_norm_.fetch(norm_).data(), width_};
}

double StepReport::Rows::sum(int slot) const {
  double total = 0;
  for (int r = 0; r < ranks(); ++r) total += at(r, slot);
  return total;
}

StoreLosses::StoreLosses(const ClipSource& source, std::span<const std::int64_t> batch_sizes)
    : source_(source), stores_(std::ssize(source.store_names())), most_(1) {
  if (stores_ == 0) return;
  for (std::size_t b = 0; b < batch_sizes.size(); ++b)
    most_ = std::max(most_, samples_in_batch(source.buckets()[b], batch_sizes[b]));
  masks_ = Tensor::persistent({stores_ * most_}, DType::f32);
  masked_ = Tensor::persistent({most_}, DType::f32);
}

void StoreLosses::begin(const MicroBatch& clips) {
  if (stores_ == 0) return;
  std::vector<float> masks(masks_.numel());
  const Bucket& bucket = source_.buckets()[clips.bucket];
  for (std::size_t i = 0; i < clips.clips.size(); ++i)
    masks[bucket.part_of(clips.clips[i]).store * most_ + static_cast<std::int64_t>(i)] = 1;
  masks_.set(std::span<const float>(masks));
  done_ = 0;
}

void StoreLosses::add(const Tensor& losses, StepReport& report) {
  const std::int64_t n = losses.numel();
  for (std::int64_t s = 0; s < stores_; ++s) {
    const std::int64_t at = s * most_ + done_;
    Tensor masked = masked_.slice(0, n), sum = report.store_slot(static_cast<int>(s));
    ops::scale_channels(losses.view({1, n}), masks_.slice(at, at + n), masked);
    ops::add_sum(masked, sum);
  }
  done_ += n;
}

void sum_up_stores(const StepReport::Rows& rows, StepMetrics& metrics) {
  for (std::size_t s = 0; s < metrics.stores.size(); ++s) {
    StoreMetrics& store = metrics.stores[s];
    if (store.samples > 0)
      store.loss = rows.store_sum(static_cast<int>(s)) / static_cast<double>(store.samples);
  }
}

}  // namespace weft
