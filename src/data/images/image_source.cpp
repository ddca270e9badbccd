#include "data/images/image_source.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#ifdef __SSSE3__
#include <tmmintrin.h>
#endif

#include "core/error.h"
#include "core/philox.h"
#include "media/resize.h"

namespace weft {

ImagePlan::ImagePlan(std::vector<ImageSize> sizes, ImagePlanOptions options)
    : sizes_(std::move(sizes)), options_(std::move(options)) {
  WEFT_CHECK(options_.batch_size >= 1, Exit::usage, "set train.batch_size to 1 or more",
             "a micro-batch of {} images", options_.batch_size);
  WEFT_CHECK(options_.micro_batches >= 1, Exit::usage, "set train.micro_batches to 1 or more",
             "{} micro-batches a step", options_.micro_batches);
  WEFT_CHECK(!options_.short_sides.empty(), Exit::usage, "set data.short_sides = [300, 450, 600]",
             "data.short_sides is empty");
  WEFT_ASSERT(!sizes_.empty());
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    auto& images = orientations_[orientation_of(sizes_[i])].images;
    position_.push_back(std::ssize(images));
    images.push_back(static_cast<std::int64_t>(i));
  }
  int bucket = 0;
  for (Orientation& o : orientations_) {
    if (o.images.empty()) continue;
    o.first_bucket = bucket;
    bucket += static_cast<int>(options_.short_sides.size());
  }
  // A stretch has 512 steps or more: over one epoch of 20,000 images, the largest step of 128
  // micro-batches would have a spread of 5 %. The limit bounds the memory of a stretch.
  constexpr std::int64_t least_steps = 512, limit = 1 << 16;
  const std::int64_t G = options_.micro_batches;
  stretch_steps_ = std::max<std::int64_t>(
      1, std::max(micro_batches_per_epoch(), std::min(least_steps * G, limit)) / G);
}

std::int64_t ImagePlan::micro_batches_per_epoch() const {
  return std::max<std::int64_t>(1, std::ssize(sizes_) / options_.batch_size);
}

std::int64_t ImagePlan::before_epoch(std::int64_t epoch) const {
  std::int64_t sum = 0;
  for (const Orientation& o : orientations_)
    sum += epoch * std::ssize(o.images) / options_.batch_size;
  return sum;
}

std::int64_t ImagePlan::epoch_of(std::int64_t micro_batch) const {
  // At most so many micro-batches precede an epoch; rounding makes it two fewer at most.
  std::int64_t e =
      std::max<std::int64_t>(0, micro_batch * options_.batch_size / std::ssize(sizes_) - 1);
  while (before_epoch(e + 1) <= micro_batch) ++e;
  return e;
}

std::vector<std::int64_t> ImagePlan::order(std::int64_t epoch) const {
  std::vector<std::int64_t> images(sizes_.size());
  std::iota(images.begin(), images.end(), 0);
  shuffle(images, options_.seed, epoch, 0);
  return images;
}

std::vector<MicroBatch> ImagePlan::walk(std::int64_t epoch) const {
  const std::int64_t batch = options_.batch_size;
  std::array<std::vector<std::int64_t>, 2> bins;
  // What the epochs before left over, oldest first. An orientation with fewer images than a
  // micro-batch collects them over several epochs.
  std::array<std::int64_t, 2> missing{};
  for (std::size_t o = 0; o < 2; ++o)
    missing[o] = epoch * std::ssize(orientations_[o].images) % batch;
  for (std::int64_t e = epoch - 1; missing[0] + missing[1] > 0; --e) {
    const std::vector<std::int64_t> images = order(e);
    for (auto i = images.rbegin(); i != images.rend(); ++i) {
      const std::size_t o = orientation_of(sizes_[*i]);
      if (missing[o] == 0) continue;
      --missing[o];
      bins[o].push_back(*i);
    }
  }
  for (auto& bin : bins) std::reverse(bin.begin(), bin.end());

  std::vector<MicroBatch> batches;
  const std::int64_t first = before_epoch(epoch);
  for (const std::int64_t image : order(epoch)) {
    const std::size_t o = orientation_of(sizes_[image]);
    bins[o].push_back(image);
    if (std::ssize(bins[o]) < batch) continue;
    MicroBatch& b = batches.emplace_back();
    b.samples = std::exchange(bins[o], {});
    for (const std::int64_t s : b.samples) b.clips.push_back(position_[s]);
    size_up(b, o, first + std::ssize(batches) - 1);
  }
  return batches;
}

void ImagePlan::size_up(MicroBatch& batch, std::size_t orientation, std::int64_t number) const {
  const Philox random(options_.seed, Purpose::image_view, 0, static_cast<std::uint64_t>(number));
  const std::uint32_t which =
      random.below(0, static_cast<std::uint32_t>(options_.short_sides.size()));
  batch.bucket = orientations_[orientation].first_bucket + static_cast<int>(which);
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const ImageSize size =
        training_size(sizes_[batch.samples[i]], options_.short_sides[which], options_.max_side);
    batch.views.push_back(
        {size.height, size.width, random.below(static_cast<std::uint32_t>(i + 1), 2) == 1});
  }
  const ImageSize size = micro_batch_size(batch.views, options_.padding);
  batch.height = size.height;
  batch.width = size.width;
}

std::vector<MicroBatch> ImagePlan::stretch(std::int64_t number) const {
  const std::int64_t G = options_.micro_batches, count = stretch_steps_ * G;
  const std::int64_t first = number * count;
  std::vector<MicroBatch> all;
  for (std::int64_t e = epoch_of(first); before_epoch(e) < first + count; ++e) {
    const std::int64_t begin = before_epoch(e);
    std::vector<MicroBatch> part = walk(e);
    for (std::size_t i = 0; i < part.size(); ++i) {
      const std::int64_t n = begin + static_cast<std::int64_t>(i);
      if (n >= first && n < first + count) all.push_back(std::move(part[i]));
    }
  }
  WEFT_ASSERT(std::ssize(all) == count);
  std::stable_sort(all.begin(), all.end(), [](const MicroBatch& a, const MicroBatch& b) {
    return a.height * a.width < b.height * b.width;
  });
  std::vector<std::int64_t> steps(stretch_steps_);
  std::iota(steps.begin(), steps.end(), 0);
  shuffle(steps, options_.seed, number, 1);  // the steps of a stretch
  std::vector<MicroBatch> shuffled;
  shuffled.reserve(all.size());
  for (const std::int64_t s : steps)
    std::move(all.begin() + s * G, all.begin() + (s + 1) * G, std::back_inserter(shuffled));
  return shuffled;
}

const std::vector<MicroBatch>& ImagePlan::cached(std::int64_t number) const {
  Cached& c = cache_[static_cast<std::size_t>(number) % cache_.size()];
  if (c.number != number) {
    c.batches = stretch(number);
    c.number = number;
  }
  return c.batches;
}

std::vector<MicroBatch> ImagePlan::plan(std::int64_t step) const {
  const std::int64_t G = options_.micro_batches;
  const std::lock_guard lock(mutex_);
  const auto& batches = cached(step / stretch_steps_);
  const auto first = batches.begin() + step % stretch_steps_ * G;
  return {first, first + G};
}

namespace {

void flip_row(const std::uint8_t* in, std::int64_t width, std::uint8_t* out) {
  std::int64_t x = 0;
#ifdef __SSSE3__
  // 5 pixels a shuffle.
  const __m128i order = _mm_setr_epi8(12, 13, 14, 9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2, -1);
  // The load takes 16 bytes, so another pixel has to follow.
  for (; x + 6 <= width; x += 5) {
    const __m128i pixels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 3 * x));
    alignas(16) std::uint8_t five[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(five), _mm_shuffle_epi8(pixels, order));
    std::memcpy(out + 3 * (width - x - 5), five, 15);
  }
#endif
  for (; x < width; ++x) std::memcpy(out + 3 * (width - 1 - x), in + 3 * x, 3);
}

void flip(const LabelledImage& in, LabelledImage& out) {
  const auto [height, width] = in.size;
  out.size = in.size;
  out.rgb.resize(in.rgb.size());
  for (std::int64_t y = 0; y < height; ++y)
    flip_row(in.rgb.data() + y * width * 3, width, out.rgb.data() + y * width * 3);
  out.labels.resize(in.labels.size());
  for (std::int64_t y = 0; y < height; ++y)
    std::reverse_copy(in.labels.begin() + y * width, in.labels.begin() + (y + 1) * width,
                      out.labels.begin() + y * width);
}

class ImageSource : public ClipSource {
 public:
  ImageSource(std::unique_ptr<LabelledImages> images, const DataDeck& data)
      : images_(std::move(images)), data_(data) {
    WEFT_CHECK(data.padding % data.label_rate == 0, Exit::usage,
               "data.padding is a multiple of data.label_rate: 8 and 8, or 32 and 4",
               "data.padding = {} with data.label_rate = {}", data.padding, data.label_rate);
    WEFT_CHECK(!data.short_sides.empty(), Exit::usage, "set data.short_sides = [300, 450, 600]",
               "data.short_sides is empty");
    static constexpr std::array names = {"landscape", "portrait"};
    for (std::int64_t i = 0; i < images_->count(); ++i)
      members_[orientation_of(images_->size(i))].push_back(i);
    for (std::size_t o = 0; o < 2; ++o) {
      if (members_[o].empty()) continue;
      for (const std::int64_t side : data.short_sides) {
        Bucket b;
        b.name = fmt::format("{}-{}", names[o], side);
        b.frames = b.pixel_frames = 1;
        b.clips = std::ssize(members_[o]);
        b.label_rate = data.label_rate;
        b.label_classes = images_->num_classes();
        b.class_names = fmt::format("{}", fmt::join(images_->class_names(), "\n"));
        for (const std::int64_t i : members_[o]) {
          const ImageSize size =
              evaluation_size(images_->size(i), side, data.max_side, data.padding);
          b.height = std::max(b.height, size.height);
          b.width = std::max(b.width, size.width);
        }
        b.pixel_height = b.height;
        b.pixel_width = b.width;
        buckets_.push_back(b);
        orientation_.push_back(o);
        side_.push_back(side);
      }
    }
  }

  const std::vector<Bucket>& buckets() const override { return buckets_; }

  std::string content_id() const override { return images_->content_id(); }
  ClipInfo info(int bucket, std::int64_t index) const override {
    return {120, images_->name(image(bucket, index)), ""};
  }

  void read(int bucket, std::int64_t index, std::span<std::byte> out) const override {
    const Bucket& b = buckets_.at(static_cast<std::size_t>(bucket));
    const ImageSize size =
        training_size(images_->size(image(bucket, index)), side_[bucket], data_.max_side);
    read_view(image(bucket, index), {size.height, size.width, false}, {b.height, b.width}, out);
  }

  void read_sample(const MicroBatch& what, std::size_t i, std::span<std::byte> out) const override {
    read_view(image(what.bucket, what.clips.at(i)), what.views.at(i), {what.height, what.width},
              out);
  }

  // The view stays, so that the micro-batch keeps its size: the next image is stretched to it.
  void take_next(MicroBatch& what, std::size_t i) const override {
    ClipSource::take_next(what, i);
    what.samples[i] = image(what.bucket, what.clips[i]);
  }

  std::unique_ptr<StepPlan> plan_steps(std::vector<std::int64_t> batch_sizes,
                                       std::int64_t micro_batches,
                                       std::uint64_t seed) const override {
    WEFT_CHECK(std::all_of(batch_sizes.begin(), batch_sizes.end(),
                           [&](std::int64_t n) { return n == batch_sizes[0]; }),
               Exit::usage, "leave train.batch_sizes out; train.batch_size holds for all sizes",
               "train.batch_sizes differ, and labelled images have one batch size");
    std::vector<ImageSize> sizes;
    for (std::int64_t i = 0; i < images_->count(); ++i) sizes.push_back(images_->size(i));
    ImagePlanOptions o;
    o.short_sides = data_.short_sides;
    o.max_side = data_.max_side;
    o.padding = data_.padding;
    o.batch_size = batch_sizes.at(0);
    o.micro_batches = micro_batches;
    o.seed = seed;
    return std::make_unique<ImagePlan>(std::move(sizes), std::move(o));
  }

 private:
  std::int64_t image(int bucket, std::int64_t index) const {
    return members_[orientation_.at(static_cast<std::size_t>(bucket))].at(
        static_cast<std::size_t>(index));
  }

  void read_view(std::int64_t number, const ImageView& view, ImageSize canvas,
                 std::span<std::byte> out) const {
    const Bucket& b = buckets_[0];
    WEFT_ASSERT(out.size() == b.clip_bytes(canvas.height, canvas.width));
    WEFT_ASSERT(view.height > 0 && view.height <= canvas.height && view.width > 0 &&
                view.width <= canvas.width);
    // Kept by each reader, as large as its largest image.
    thread_local LabelledImage read, flipped;
    images_->read(number, read);
    if (view.flip) flip(read, flipped);
    const LabelledImage& from = view.flip ? flipped : read;

    auto* const pixels = reinterpret_cast<std::uint8_t*>(out.data());
    const std::int64_t stride = canvas.width * 3;
    pillow_resize({from.rgb.data(), from.size.height, from.size.width, from.size.width * 3},
                  view.height, view.width, PillowFilter::bilinear, pixels, stride);
    for (std::int64_t y = 0; y < view.height; ++y)
      std::memset(pixels + y * stride + view.width * 3, 0,
                  static_cast<std::size_t>((canvas.width - view.width) * 3));
    std::memset(pixels + view.height * stride, 0,
                static_cast<std::size_t>((canvas.height - view.height) * stride));
    write_labels(from, view, canvas, pixels + canvas.height * stride);
  }

  // NEAREST to the view's size, then the pixel behind the middle of each square of `rate`: the same
  // as taking those pixels' samples alone.
  void write_labels(const LabelledImage& from, const ImageView& view, ImageSize canvas,
                    std::uint8_t* out) const {
    const std::int64_t rate = data_.label_rate;
    const auto rows = nearest_samples(from.size.height, view.height);
    const auto columns = nearest_samples(from.size.width, view.width);
    const std::int64_t height = rounded_up(view.height, rate) / rate;
    const std::int64_t width = rounded_up(view.width, rate) / rate;
    std::memset(out, static_cast<int>(data_.pad_label + 1),
                static_cast<std::size_t>((canvas.height / rate) * (canvas.width / rate)));
    for (std::int64_t i = 0; i < height; ++i) {
      std::uint8_t* to = out + i * (canvas.width / rate);
      const std::int64_t y = i * rate + rate / 2;
      for (std::int64_t j = 0; j < width; ++j) {
        const std::int64_t x = j * rate + rate / 2;
        to[j] = y < view.height && x < view.width
                    ? from.labels[rows[y] * from.size.width + columns[x]]
                    : 0;
      }
    }
  }

  std::unique_ptr<LabelledImages> images_;
  DataDeck data_;
  std::array<std::vector<std::int64_t>, 2> members_;  // landscape, portrait: the images' numbers
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> orientation_;  // of a bucket
  std::vector<std::int64_t> side_;        // of a bucket
};

}  // namespace

std::unique_ptr<ClipSource> make_image_source(std::unique_ptr<LabelledImages> images,
                                              const DataDeck& data) {
  return std::make_unique<ImageSource>(std::move(images), data);
}

}  // namespace weft
