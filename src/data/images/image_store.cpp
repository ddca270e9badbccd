#include "data/images/image_store.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/images/image_store_open.h"

namespace weft {
namespace {

class ImageStore : public LabelledImages {
 public:
  ImageStore(StoreFile file, bool verify) : file_(std::move(file)), verify_(verify) {
    const StoreFacts& facts = file_.facts();
    check(facts.arrays.size() == image_arrays.size() || facts.arrays.size() == image_arrays_v1,
          "has no tables");
    num_classes_ = facts.num_classes;
    read_table(image_height, height_);
    read_table(image_width, width_);
    read_table(image_xxh3, xxh3_);
    read_table(image_labels_xxh3, labels_xxh3_);
    sources_ = read_texts(image_sources, image_sources_end);
    class_names_ = read_texts(image_class_names, image_class_names_end);
    if (facts.arrays.size() > image_arrays_v1) {
      read_table(image_palette, palette_);
      read_table(image_label_images, label_images_);
    }
    check(hash_.digest() == facts.tables_xxh3,
          fmt::format("has damaged tables: their XXH3 is {:016x}, expected {:016x}", hash_.digest(),
                      facts.tables_xxh3));

    const std::size_t n = height_.size();
    check(n > 0, "holds no image");
    check(
        width_.size() == n && xxh3_.size() == n && labels_xxh3_.size() == n && sources_.size() == n,
        "has tables of different lengths");
    check(label_images_.empty() || label_images_.size() == 256, "has no count for each label");
    check(class_names_.empty() || std::ssize(class_names_) == num_classes_,
          fmt::format("has {} names for {} classes", class_names_.size(), num_classes_));
    first_pixel_.push_back(0);
    const std::uint64_t pixels = facts.arrays[image_labels].bytes;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t size = std::uint64_t{height_[i]} * width_[i];  // of 32 bits each
      check(size > 0 && size <= pixels - first_pixel_.back(),
            fmt::format("claims {}x{} pixels for image {}, more than it has", height_[i], width_[i],
                        i));
      first_pixel_.push_back(first_pixel_.back() + size);
    }
    check(first_pixel_.back() == pixels && facts.arrays[image_pixels].bytes / 3 == pixels &&
              facts.arrays[image_pixels].bytes % 3 == 0,
          "has pixels or labels that do not fit its images' sizes");
  }

  std::int64_t count() const override { return std::ssize(height_); }
  ImageSize size(std::int64_t i) const override {
    const auto n = static_cast<std::size_t>(i);
    return {height_.at(n), width_.at(n)};
  }
  std::string name(std::int64_t i) const override {
    return sources_.at(static_cast<std::size_t>(i));
  }
  std::int64_t num_classes() const override { return num_classes_; }
  const std::vector<std::string>& class_names() const override { return class_names_; }

  std::vector<std::uint8_t> palette() const override { return palette_; }
  std::vector<std::uint64_t> label_images() const override { return label_images_; }

  std::string content_id() const override { return fmt::format("{:016x}", hash_.digest()); }

  void read(std::int64_t i, LabelledImage& out) const override {
    const auto n = static_cast<std::size_t>(i);
    out.size = size(i);
    const std::uint64_t first = first_pixel_[n], pixels = first_pixel_[n + 1] - first;
    out.rgb.resize(pixels * 3);
    out.labels.resize(pixels);
    read_bytes("image", n, place(image_pixels) + first * 3, xxh3_[n], out.rgb);
    read_bytes("labels", n, place(image_labels) + first, labels_xxh3_[n], out.labels);
  }

  std::string describe() const;

 private:
  void check(bool ok, const std::string& fault) const {
    WEFT_CHECK(ok, Exit::data, "make the store again with `weft ingest`", "image store {} {}",
               file_.path(), fault);
  }
  std::uint64_t place(ImageArrayNumber array) const { return arrays_[array].offset; }

  template <class T>
  void read_table(ImageArrayNumber which, std::vector<T>& out) {
    const StoredArray& array = file_.facts().arrays[which];
    out.resize(array.bytes / sizeof(T));
    const auto bytes = std::as_writable_bytes(std::span(out));
    file_.read(fmt::format("table {}", image_arrays[which].name), array.offset, bytes, false);
    add_table(hash_, bytes);
  }
  std::vector<std::string> read_texts(ImageArrayNumber texts, ImageArrayNumber ends_of) {
    std::vector<char> all;
    std::vector<std::uint64_t> ends;
    read_table(texts, all);
    read_table(ends_of, ends);
    check(std::is_sorted(ends.begin(), ends.end()) &&
              (ends.empty() ? all.empty() : ends.back() == all.size()),
          fmt::format("has a table {} that does not divide {}", image_arrays[ends_of].name,
                      image_arrays[texts].name));
    std::vector<std::string> out;
    std::uint64_t begin = 0;
    for (const std::uint64_t end : ends) {
      out.emplace_back(all.data() + begin, end - begin);
      begin = end;
    }
    return out;
  }

  void read_bytes(const char* what, std::size_t image, std::uint64_t offset, std::uint64_t xxh3,
                  std::vector<std::uint8_t>& out) const {
    const std::uint64_t found = file_.read(fmt::format("{} {}", what, image), offset,
                                           std::as_writable_bytes(std::span(out)), verify_);
    if (!verify_ || found == xxh3) return;
    throw DamagedClip(
        Exit::data,
        fmt::format("{} {} in {} is damaged: XXH3 is {:016x}, expected {:016x} ({})", what, image,
                    file_.path(), found, xxh3, sources_[image]),
        "the file was damaged after it was made: copy it again, or make it again; or let "
        "data.max_damaged skip such images",
        __FILE__, __LINE__);
  }

  // Written only by the constructor, so reading needs no lock.
  StoreFile file_;
  bool verify_;
  std::vector<StoredArray> arrays_ = file_.facts().arrays;
  std::int64_t num_classes_ = 0;
  std::vector<std::uint32_t> height_, width_;
  std::vector<std::uint64_t> xxh3_, labels_xxh3_, label_images_;
  std::vector<std::uint8_t> palette_;
  std::vector<std::string> sources_, class_names_;
  std::vector<std::uint64_t> first_pixel_;  // of each image, and the end
  ClipHash hash_;                           // of the tables
};

// "smallest / median / largest" of a list that is not empty.
std::string spread(std::vector<std::uint32_t> values) {
  std::sort(values.begin(), values.end());
  return fmt::format("{} / {} / {}", values.front(), values[values.size() / 2], values.back());
}

std::string ImageStore::describe() const {
  std::array<std::uint64_t, 256> pixels{};  // by value of the label
  std::array<std::int64_t, 256> images{};   // in which it occurs
  std::int64_t portraits = 0;
  LabelledImage image;
  std::vector<std::uint32_t> shorter, longer;
  for (std::int64_t i = 0; i < count(); ++i) {
    read(i, image);  // throws when damaged
    portraits += image.size.height > image.size.width ? 1 : 0;
    const auto [low, high] = std::minmax(image.size.height, image.size.width);
    shorter.push_back(static_cast<std::uint32_t>(low));
    longer.push_back(static_cast<std::uint32_t>(high));
    std::array<std::uint64_t, 256> here{};
    for (const std::uint8_t label : image.labels) ++here[label];
    for (std::size_t v = 0; v < here.size(); ++v) {
      pixels[v] += here[v];
      images[v] += here[v] > 0 ? 1 : 0;
    }
  }
  const double all = static_cast<double>(first_pixel_.back());
  std::string out = fmt::format("store of labelled images {}\n", printable(file_.path()));
  out += fmt::format("  {}, {} of them portrait, {:.1f} MB of pixels and {:.1f} of labels\n",
                     counted(count(), "image"), portraits, 3e-6 * all, 1e-6 * all);
  out += fmt::format("  shorter side {}, longer side {} (smallest / median / largest)\n",
                     spread(std::move(shorter)), spread(std::move(longer)));
  out += fmt::format("  {}\n", num_classes_ > 0 ? counted(num_classes_, "class", "classes")
                                                : "number of classes not given");
  out += fmt::format("  {:>9.5f} % of the pixels in {:>7} images: unlabelled\n",
                     100 * static_cast<double>(pixels[0]) / all, images[0]);
  for (std::size_t v = 1; v < pixels.size(); ++v) {
    if (static_cast<std::int64_t>(v) > num_classes_ && pixels[v] == 0) continue;
    out += fmt::format("  {:>9.5f} % of the pixels in {:>7} images: class {}{}\n",
                       100 * static_cast<double>(pixels[v]) / all, images[v], v - 1,
                       v <= class_names_.size() ? " " + printable(class_names_[v - 1]) : "");
  }
  return out + "  every hash verified\n";
}

}  // namespace

std::unique_ptr<LabelledImages> make_image_store(StoreFile file, bool verify) {
  return std::make_unique<ImageStore>(std::move(file), verify);
}

std::unique_ptr<LabelledImages> open_image_store(const std::string& path, bool verify) {
  StoreFile file(path);
  WEFT_CHECK(file.facts().images, Exit::data, "make it from labelled images, with ingest.images",
             "{} holds clips, not labelled images", path);
  return make_image_store(std::move(file), verify);
}

std::string describe_image_store(StoreFile file) {
  return ImageStore(std::move(file), true).describe();
}

}  // namespace weft
