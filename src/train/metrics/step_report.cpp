#include "train/metrics/step_report.h"

#include <algorithm>
#include <array>

#include "core/error.h"
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

static_assert(StepReport::used_slots <= StepReport::width);

StepReport::StepReport(Communicator& comm, int groups)
    : comm_(comm),
      rows_(Tensor::persistent({static_cast<std::int64_t>(comm.size()) * width}, DType::f64)),
      row_(rows_.slice(comm.rank() * width, (comm.rank() + 1) * width)),
      norm_(Tensor::persistent({groups}, DType::f64)),
      host_(allocate_host(2 * static_cast<std::size_t>(comm.size() * width + groups)), free_host) {
  // The all-gather sends this part: it must be exactly this rank's row.
  const Part mine = part_of(0, rows_.numel(), comm.rank(), comm.size());
  WEFT_ASSERT(mine.begin == comm.rank() * width && mine.size() == width);
}

void StepReport::clear() {
  Tensor device_slots = row_.slice(0, host_slots);
  ops::fill_zero(device_slots);
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
  const auto count = static_cast<std::size_t>(rows_.numel());
  const auto groups = static_cast<std::size_t>(norm_.numel());
  double* to = host_.get() + static_cast<std::size_t>(turn_) * (count + groups);
  turn_ = 1 - turn_;
  if (on_cuda()) {
    device_runtime().copy(to, rows_.raw(), rows_.bytes(), Stream::compute);
    device_runtime().copy(to + count, norm_.raw(), norm_.bytes(), Stream::compute);
  } else {
    std::copy_n(rows_.data<double>(), count, to);
    std::copy_n(norm_.data<double>(), groups, to + count);
  }
  return {{to, count}, to + count};
}

double StepReport::Rows::sum(Slot s) const {
  double total = 0;
  for (int r = 0; r < ranks(); ++r) total += at(r, s);
  return total;
}

}  // namespace weft
