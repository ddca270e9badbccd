#include "data/text_images/text_images.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/philox.h"
#include "data/lists/folders.h"
#include "data/step_plan.h"
#include "data/text_images/drawn/drawn_text.h"
#include "data/text_images/polygon.h"
#include "data/text_images/text_list.h"
#include "data/text_images/text_view.h"
#include "media/image_file.h"

namespace weft {
namespace {

class TextList : public TextImages {
 public:
  TextList(const std::string& path, const MediaDeck& limits)
      : path_(path), limits_(limits), entries_(read_text_list(path, limits)) {
    if (log::rank() != 0) return;
    RegionCounts counts;
    for (const TextListEntry& e : entries_) counts.add(e.regions);
    if (counts.without + counts.small + counts.crossing > 0)
      log::warn("{}: {}", path, counts.text());
  }

  std::int64_t count() const override { return std::ssize(entries_); }
  std::string name(std::int64_t i) const override { return entry(i).name; }
  ImageSize size(std::int64_t i) const override {
    const ImageFile file = decode(i);
    return {file.height, file.width};
  }
  std::string identity(std::int64_t i) const override {
    return file_identity(entry(i).path) + limits_.orientation + regions_text(entry(i));
  }
  // Pictures are not opened. Their folders' names change with the place.
  std::string content_id() const override {
    Hasher hash;
    for (const TextListEntry& e : entries_) {
      const std::string text =
          std::filesystem::path(e.name).filename().string() + regions_text(e) + "\n";
      hash.add(std::as_bytes(std::span(text)));
    }
    return to_hex(hash.value());
  }
  void read(std::int64_t i, TextImage& out) const override {
    ImageFile file = decode(i);
    out.size = {file.height, file.width};
    out.rgb = std::move(file.values);
    out.regions = entry(i).regions;
    RegionCounts here;
    here.add(out.regions, out.size);
    if (here.outside > 0 && !outside_.exchange(true))
      log::warn(
          "{}: {} outside {}, {} of {} pixels (picture {}; others are not named): are the "
          "polygons those of another size?",
          path_, counted(here.outside, "region"), name(i), out.size.height, out.size.width, i + 1);
  }

 private:
  static std::string regions_text(const TextListEntry& entry) {
    std::string text;
    for (const TextRegion& r : entry.regions) {
      text += r.ignore ? "\nignored" : "\n";
      for (const Point& p : r.polygon) text += fmt::format(" {} {}", p.x, p.y);
    }
    return text;
  }
  const TextListEntry& entry(std::int64_t i) const {
    return entries_.at(static_cast<std::size_t>(i));
  }
  ImageFile decode(std::int64_t i) const {
    try {
      return read_image_file(entry(i).path, limits_);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{} (picture {} of {})", e.what(), i + 1, path_), e.hint(),
                  e.file(), e.line());
    }
  }

  std::string path_;
  MediaDeck limits_;
  std::vector<TextListEntry> entries_;
  mutable std::atomic<bool> outside_ = false;  // a region of a picture that was read
};

}  // namespace

std::unique_ptr<TextImages> open_text_images(const std::string& path, const MediaDeck& limits) {
  if (is_drawn_text(path)) return make_drawn_text(path, limits);
  return std::make_unique<TextList>(path, limits);
}

bool is_text_list(const std::string& path) {
  return is_drawn_text(path) || path.ends_with(".jsonl") || path.ends_with(".txt") ||
         has_pictures(path);
}

std::string describe_text_images(const TextImages& images, const std::string& path) {
  const std::int64_t read = std::min<std::int64_t>(100, images.count());
  std::int64_t least_height = INT64_MAX, least_width = INT64_MAX, most_height = 0, most_width = 0;
  RegionCounts counts;
  std::vector<double> heights;  // of regions: the shorter side of the least rectangle
  TextImage image;
  for (std::int64_t i = 0; i < read; ++i) {
    images.read(i, image);
    least_height = std::min(least_height, image.size.height);
    most_height = std::max(most_height, image.size.height);
    least_width = std::min(least_width, image.size.width);
    most_width = std::max(most_width, image.size.width);
    counts.add(image.regions, image.size);
    for (const TextRegion& r : image.regions)
      heights.push_back(min_area_rect(r.polygon).shorter_side);
  }
  std::string out = fmt::format(
      "pictures with text {}\n  {}; of the first {}:\n  {} to {} pixels high, {} to {} "
      "wide\n  {}, {:.1f} a picture, {} of them ignored\n  {}\n",
      printable(path), counted(images.count(), "picture"), read, least_height, most_height,
      least_width, most_width, counted(counts.regions, "region"),
      static_cast<double>(counts.regions) / static_cast<double>(read), counts.marked,
      counts.text());
  if (heights.empty()) return out;
  std::ranges::sort(heights);
  const auto at = [&](double share) {
    return heights[share * static_cast<double>(heights.size() - 1)];
  };
  return out + fmt::format(
                   "  shorter sides of regions in pixels: least {:.1f}, 10 % below {:.1f}, "
                   "median {:.1f}, 90 % below {:.1f}, greatest {:.1f}\n",
                   at(0), at(0.1), at(0.5), at(0.9), at(1));
}

std::vector<std::uint8_t> with_outlines(const TextImage& image) {
  std::vector<std::uint8_t> rgb = image.rgb;
  for (const TextRegion& r : image.regions)
    draw_outline(rgb, image.size, r.polygon, r.ignore ? Rgb{255, 0, 0} : Rgb{0, 255, 0}, 1);
  return rgb;
}

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
    std::vector<MicroBatch> out(micro_batches_);
    std::int64_t next = step * micro_batches_ * batch_size_;
    for (MicroBatch& m : out) {
      m.height = m.width = side_;
      for (std::int64_t i = 0; i < batch_size_; ++i, ++next) {
        const std::int64_t epoch = next / pictures_;
        const std::int64_t picture = order(epoch)[next % pictures_];
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
    auto& [number, pictures] = cached_[epoch % 2];
    if (number == epoch) return pictures;
    pictures.resize(pictures_);
    std::iota(pictures.begin(), pictures.end(), 0);
    shuffle(pictures, seed_, epoch, 0);
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
               "data.crop = {} is not a multiple of 32", data.crop);
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
