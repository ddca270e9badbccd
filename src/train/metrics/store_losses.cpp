#include "train/metrics/store_losses.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"

namespace weft {

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
