#include "data/text_images/text_source.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "data/step_plan.h"
#include "data/text_images/text_targets.h"
#include "data/text_images/text_view.h"

namespace weft {
namespace {

class TextPlan : public StepPlan {
 public:
  TextPlan(std::int64_t pictures, std::int64_t side, std::int64_t batch_size,
           std::int64_t micro_batches, std::uint64_t seed)
      : pictures_(pictures),
        side_(side),
        batch_size_(batch_size),
        micro_batches_(micro_batches),
        seed_(seed) {
    WEFT_CHECK(batch_size >= 1, Exit::usage, "set train.batch_size to 1 or more",
               "a micro-batch of {} pictures", batch_size);
    WEFT_CHECK(micro_batches >= 1, Exit::usage, "set train.micro_batches to 1 or more",
               "{} micro-batches a step", micro_batches);
    // Philox::below draws 32-bit numbers.
    WEFT_CHECK(pictures < (std::int64_t{1} << 32), Exit::data, "split the list",
               "{} pictures, more than 2^32", pictures);
  }

  std::vector<MicroBatch> plan(std::int64_t step) const override {
    WEFT_ASSERT(step >= 0);
    std::lock_guard lock(mutex_);
    std::vector<MicroBatch> out(static_cast<std::size_t>(micro_batches_));
    std::int64_t next = step * micro_batches_ * batch_size_;
    for (MicroBatch& m : out) {
      m.height = m.width = side_;
      for (std::int64_t i = 0; i < batch_size_; ++i, ++next) {
        const std::int64_t epoch = next / pictures_;
        const std::int64_t picture = order(epoch)[static_cast<std::size_t>(next % pictures_)];
        const auto random = Philox(seed_, Purpose::image_view, static_cast<std::uint64_t>(epoch),
                                   static_cast<std::uint64_t>(picture))
                                .block(0);
        m.clips.push_back(picture);
        m.samples.push_back(picture);
        m.views.push_back(
            {side_, side_, false, std::uint64_t{random[0]} << 32 | std::uint64_t{random[1]}});
      }
    }
    return out;
  }
  std::int64_t micro_batches_per_epoch() const override {
    return std::max<std::int64_t>(1, pictures_ / batch_size_);
  }

 private:
  // The caller holds mutex_. Readers are already in the next epoch while the trainer finishes one.
  const std::vector<std::int64_t>& order(std::int64_t epoch) const {
    auto& [number, pictures] = cached_[static_cast<std::size_t>(epoch % 2)];
    if (number == epoch) return pictures;
    pictures.resize(static_cast<std::size_t>(pictures_));
    std::iota(pictures.begin(), pictures.end(), 0);
    const Philox random(seed_, Purpose::sample_order, static_cast<std::uint64_t>(epoch), 0);
    for (std::size_t i = pictures.size(); i > 1; --i) {
      const auto element = static_cast<std::uint32_t>(i);
      std::swap(pictures[i - 1], pictures[random.below(element, element)]);
    }
    number = epoch;
    return pictures;
  }

  std::int64_t pictures_, side_, batch_size_, micro_batches_;
  std::uint64_t seed_;
  mutable std::mutex mutex_;  // guards the cache below
  mutable std::array<std::pair<std::int64_t, std::vector<std::int64_t>>, 2> cached_ = {
      {{-1, {}}, {-1, {}}}};
};

class TextSource : public ClipSource {
 public:
  TextSource(std::unique_ptr<TextImages> images, const DataDeck& data)
      : images_(std::move(images)), side_(data.crop), augment_(data.augment) {
    WEFT_CHECK(data.crop % 32 == 0, Exit::usage,
               fmt::format("set data.crop = {}", std::max<std::int64_t>(32, data.crop / 32 * 32)),
               "data.crop = {} is no multiple of 32", data.crop);
    Bucket b;
    b.name = fmt::format("text-{}", side_);
    b.frames = b.pixel_frames = 1;
    b.height = b.width = b.pixel_height = b.pixel_width = side_;
    b.clips = images_->count();
    b.label_rate = 1;
    b.label_bytes = text_label_bytes;
    buckets_.push_back(b);
  }

  const std::vector<Bucket>& buckets() const override { return buckets_; }

  std::string content_id() const override { return images_->content_id(); }
  ClipInfo info(int, std::int64_t index) const override { return {120, images_->name(index), ""}; }

  void read(int, std::int64_t index, std::span<std::byte> out) const override {
    read_view(index, nullptr, out);
  }
  void read_sample(const MicroBatch& what, std::size_t i, std::span<std::byte> out) const override {
    read_view(what.clips.at(i), augment_ ? &what.views.at(i).draw : nullptr, out);
  }

  std::unique_ptr<StepPlan> plan_steps(std::vector<std::int64_t> batch_sizes,
                                       std::int64_t micro_batches,
                                       std::uint64_t seed) const override {
    return std::make_unique<TextPlan>(images_->count(), side_, batch_sizes.at(0), micro_batches,
                                      seed);
  }

 private:
  void read_view(std::int64_t index, const std::uint64_t* draw, std::span<std::byte> out) const {
    const auto area = static_cast<std::size_t>(side_ * side_);
    WEFT_ASSERT(out.size() == area * (3 + text_label_bytes));
    // Kept by each reader, as large as its largest picture.
    thread_local TextImage picture, view;
    images_->read(index, picture);
    if (draw != nullptr)
      change_text(picture, side_, *draw, view);
    else
      fit_text(picture, side_, view);
    std::memcpy(out.data(), view.rgb.data(), 3 * area);
    const std::span labels(reinterpret_cast<std::uint8_t*>(out.data()) + 3 * area, 2 * area);
    write_text_targets(view.regions, view.size, labels.first(area), labels.last(area));
  }

  std::unique_ptr<TextImages> images_;
  std::int64_t side_;
  bool augment_;
  std::vector<Bucket> buckets_;
};

}  // namespace

std::unique_ptr<ClipSource> make_text_source(std::unique_ptr<TextImages> images,
                                             const DataDeck& data) {
  return std::make_unique<TextSource>(std::move(images), data);
}

}  // namespace weft
