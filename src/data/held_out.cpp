#include "data/held_out.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "data/clip_store.h"
#include "data/images/image_source.h"
#include "data/step_plan.h"
#include "data/store_file.h"
#include "data/synthetic.h"

namespace weft {
namespace {

using Numbers = std::vector<std::int64_t>;

// ---- Parts of a source ----

// The steps of a part name its samples as the whole source does.
class PartPlan : public StepPlan {
 public:
  PartPlan(const ClipSource& part, std::unique_ptr<StepPlan> plan)
      : part_(part), plan_(std::move(plan)) {}
  std::vector<MicroBatch> plan(std::int64_t step) const override {
    std::vector<MicroBatch> batches = plan_->plan(step);
    for (MicroBatch& m : batches)
      for (std::size_t i = 0; i < m.clips.size(); ++i)
        m.samples[i] = part_.sample_id(m.bucket, m.clips[i]);
    return batches;
  }
  std::int64_t micro_batches_per_epoch() const override { return plan_->micro_batches_per_epoch(); }

 private:
  const ClipSource& part_;
  std::unique_ptr<StepPlan> plan_;
};

// Some clips of a source, in its buckets.
class ClipPart : public ClipSource {
 public:
  ClipPart(std::shared_ptr<const ClipSource> all, std::vector<Numbers> clips)
      : all_(std::move(all)), clips_(std::move(clips)), buckets_(all_->buckets()) {
    std::int64_t before = 0, left = 0;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      before += buckets_[b].clips;
      left += std::ssize(clips_[b]);
    }
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      buckets_[b].clips = std::ssize(clips_[b]);
      // What is left of each of several stores. Their shares of an epoch stay what they were.
      std::int64_t begin = 0;
      for (Bucket::Part& p : buckets_[b].parts) {
        p.clips = std::ranges::count_if(
            clips_[b], [&](std::int64_t i) { return i >= p.begin && i < p.begin + p.clips; });
        p.begin = std::exchange(begin, begin + p.clips);
        p.samples *= static_cast<double>(left) / static_cast<double>(before);
      }
    }
  }
  const std::vector<Bucket>& buckets() const override { return buckets_; }
  std::string content_id() const override { return all_->content_id(); }
  std::vector<std::string> store_names() const override { return all_->store_names(); }
  ClipInfo info(int bucket, std::int64_t index) const override {
    return all_->info(bucket, at(bucket, index));
  }
  void read(int bucket, std::int64_t index, std::span<std::byte> out) const override {
    all_->read(bucket, at(bucket, index), out);
  }
  std::int64_t sample_id(int bucket, std::int64_t index) const override {
    return all_->sample_id(bucket, at(bucket, index));
  }
  void take_next(MicroBatch& what, std::size_t i) const override {
    ClipSource::take_next(what, i);
    what.samples[i] = sample_id(what.bucket, what.clips[i]);
  }
  std::unique_ptr<StepPlan> plan_steps(std::vector<std::int64_t> batch_sizes,
                                       std::int64_t micro_batches,
                                       std::uint64_t seed) const override {
    return std::make_unique<PartPlan>(
        *this, ClipSource::plan_steps(std::move(batch_sizes), micro_batches, seed));
  }
  std::int64_t text_tokens(int bucket, std::int64_t index) const override {
    return all_->text_tokens(bucket, at(bucket, index));
  }
  std::vector<float> read_text(int bucket, std::int64_t index) const override {
    return all_->read_text(bucket, at(bucket, index));
  }

 private:
  std::int64_t at(int bucket, std::int64_t index) const {
    return clips_.at(static_cast<std::size_t>(bucket)).at(static_cast<std::size_t>(index));
  }
  std::shared_ptr<const ClipSource> all_;
  std::vector<Numbers> clips_;  // [bucket]
  std::vector<Bucket> buckets_;
};

class ImagePart : public LabelledImages {
 public:
  ImagePart(std::shared_ptr<const LabelledImages> all, Numbers images)
      : all_(std::move(all)), images_(std::move(images)) {}
  std::int64_t count() const override { return std::ssize(images_); }
  ImageSize size(std::int64_t i) const override { return all_->size(images_.at(i)); }
  std::string name(std::int64_t i) const override { return all_->name(images_.at(i)); }
  std::string content_id() const override { return all_->content_id(); }
  void read(std::int64_t i, LabelledImage& out) const override { all_->read(images_.at(i), out); }
  std::int64_t num_classes() const override { return all_->num_classes(); }
  const std::vector<std::string>& class_names() const override { return all_->class_names(); }
  std::vector<std::uint8_t> palette() const override { return all_->palette(); }
  LabelCounts label_counts() const override { return all_->label_counts(); }  // of all

 private:
  std::shared_ptr<const LabelledImages> all_;
  Numbers images_;
};

class TextPart : public TextImages {
 public:
  TextPart(std::shared_ptr<const TextImages> all, Numbers images)
      : all_(std::move(all)), images_(std::move(images)) {}
  std::int64_t count() const override { return std::ssize(images_); }
  ImageSize size(std::int64_t i) const override { return all_->size(images_.at(i)); }
  std::string name(std::int64_t i) const override { return all_->name(images_.at(i)); }
  std::string identity(std::int64_t i) const override { return all_->identity(images_.at(i)); }
  std::string content_id() const override { return all_->content_id(); }
  void read(std::int64_t i, TextImage& out) const override { all_->read(images_.at(i), out); }

 private:
  std::shared_ptr<const TextImages> all_;
  Numbers images_;
};

// ---- What a path holds ----

HeldOut open_by_kind(const DataDeck& data, const MediaDeck& limits) {
  HeldOut all;
  if (!data.paths.empty() || !data.keep.empty())
    all.clips = open_clip_source(data, limits);  // which refuses all but clips
  else if (is_text_list(data.path))
    all.texts = open_text_images(data.path, limits);
  else if (is_shapes(data.path) ||
           (!is_synthetic(data.path) && StoreFile(data.path).facts().holds_images))
    all.images = open_labelled_images(data.path, data.verify);
  else
    all.clips = open_clip_source(data, limits);
  return all;
}

Numbers others(std::int64_t count, const Numbers& without) {
  Numbers all(count), rest;
  std::iota(all.begin(), all.end(), 0);
  std::ranges::set_difference(all, without, std::back_inserter(rest));
  return rest;
}

void check_share(std::int64_t held_out, std::int64_t count, const char* noun,
                 const HeldOutChoice& choice, const DataDeck& data) {
  WEFT_CHECK(held_out > 0, Exit::usage, "raise it, or name a store in validation.path",
             "validation.share = {} of the {} of {} is not even one", choice.share,
             counted(count, noun), data.path);
}

TrainingData split(const DataDeck& data, const MediaDeck& limits, const HeldOutChoice& choice) {
  TrainingData parts;
  HeldOut opened = open_by_kind(data, limits);
  if (opened.clips) {
    const std::shared_ptr<const ClipSource> all = std::move(opened.clips);
    std::vector<Numbers> held, rest;
    std::int64_t count = 0, sum = 0;
    for (const Bucket& b : all->buckets()) {
      held.push_back(held_out_of(b.clips, choice.share, choice.seed, std::ssize(held)));
      rest.push_back(others(b.clips, held.back()));
      count += b.clips;
      sum += std::ssize(held.back());
    }
    check_share(sum, count, "clip", choice, data);
    parts.training = std::make_unique<ClipPart>(all, std::move(rest));
    parts.held_out.clips = std::make_unique<ClipPart>(all, std::move(held));
    return parts;
  }
  const std::int64_t count = opened.images ? opened.images->count() : opened.texts->count();
  const Numbers held = held_out_of(count, choice.share, choice.seed, 0);
  const Numbers rest = others(count, held);
  check_share(std::ssize(held), count, "image", choice, data);
  if (opened.images) {
    const std::shared_ptr<const LabelledImages> all = std::move(opened.images);
    parts.training = make_image_source(std::make_unique<ImagePart>(all, rest), data);
    parts.held_out.images = std::make_unique<ImagePart>(all, held);
  } else {
    const std::shared_ptr<const TextImages> all = std::move(opened.texts);
    parts.training = make_text_source(std::make_unique<TextPart>(all, rest), data);
    parts.held_out.texts = std::make_unique<TextPart>(all, held);
  }
  return parts;
}

}  // namespace

std::string HeldOut::content_id() const {
  return clips ? clips->content_id() : images ? images->content_id() : texts->content_id();
}

std::vector<std::int64_t> held_out_of(std::int64_t count, double share, std::uint64_t seed,
                                      std::int64_t list) {
  const auto wanted =
      static_cast<std::int64_t>(std::floor(share * static_cast<double>(count) + 0.5));
  const std::int64_t held = std::min(wanted, std::max<std::int64_t>(count - 1, 0));
  // Those with the smallest draws.
  std::vector<std::pair<std::uint32_t, std::int64_t>> draws;
  for (std::int64_t i = 0; i < count; ++i)
    draws.emplace_back(Philox(seed, Purpose::held_out, static_cast<std::uint64_t>(list),
                              static_cast<std::uint64_t>(i))
                           .u32(0),
                       i);
  std::ranges::sort(draws);
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < held; ++i) numbers.push_back(draws[i].second);
  std::ranges::sort(numbers);
  return numbers;
}

TrainingData open_training_data(const DataDeck& data, const MediaDeck& limits,
                                const HeldOutChoice& choice) {
  if (choice.share > 0) return split(data, limits, choice);
  TrainingData parts;
  parts.training = open_clip_source(data, limits);
  if (choice.path.empty()) return parts;
  DataDeck other = data;
  other.path = choice.path;
  other.paths.clear(), other.weights.clear(), other.prompt_prefixes.clear(), other.keep.clear();
  other.text_features.clear();
  std::vector<std::string> stores = data.all_paths();
  stores.push_back(choice.path);
  check_encoders(stores);
  parts.held_out = open_by_kind(other, limits);
  return parts;
}

}  // namespace weft
