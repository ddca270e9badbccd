#include "data/images/image_store.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/hdf5.h"

namespace weft {
namespace {

PackedTexts packed(const std::vector<std::string>& texts) {
  PackedTexts out;
  for (const std::string& text : texts) out.add(text);
  return out;
}

// XXH3-64 of all tables, each behind its size in bytes.
std::uint64_t hash_of_tables(const StoredImages& images, std::int64_t version) {
  ClipHash hash;
  const auto add = [&](const auto& table) {
    const auto bytes = std::as_bytes(std::span(table));
    const std::uint64_t size = bytes.size();
    hash.update(reinterpret_cast<const std::byte*>(&size), sizeof size);
    hash.update(bytes.data(), bytes.size());
  };
  const auto add_texts = [&](const std::vector<std::string>& texts) {
    const PackedTexts all = packed(texts);
    add(all.bytes), add(all.ends);
  };
  add(images.height), add(images.width), add(images.xxh3), add(images.labels_xxh3);
  add_texts(images.sources), add_texts(images.class_names);
  if (version > 1) add(images.palette), add(images.label_images);
  if (version > 2) add(images.label_pixels), add(images.label_image_pixels);
  return hash.digest();
}

}  // namespace

void read_image_facts(StoreReader& r, StoreFacts& facts) {
  r.call_it("image store");
  StoredImages& s = facts.images;
  const h5::Handle top = r.top();
  const std::int64_t version = r.attribute(top, "", "schema_version");
  r.check(
      version >= 1 && version <= image_store_version, "",
      fmt::format("has schema version {}, this weft reads 1 to {}", version, image_store_version));
  s.num_classes = r.attribute(top, "", "num_classes");
  r.check(s.num_classes >= 0 && s.num_classes <= 255, "",
          fmt::format("has {} classes", s.num_classes));
  r.check(r.has(r.file(), "images"), "", "has no group /images");
  const h5::Handle group(H5Gopen2(r.file(), "images", H5P_DEFAULT), H5Gclose);
  r.check(group.valid(), "", "has no group /images");

  // Pixels and labels are read later, by pread: here only where they lie.
  const auto place = [&](const char* name, std::uint64_t& begin) {
    r.alive();
    const h5::Handle d = r.dataset(group, "", name);
    const h5::Handle type(H5Dget_type(d), H5Tclose);
    const auto dims = r.dims_of(d);
    r.check(H5Tequal(type, H5T_STD_U8LE) > 0 && dims.size() == 1, "",
            fmt::format("has a dataset {} that is not a row of bytes", name));
    begin = r.place_of(d, "", name, dims[0], 1);
    return dims[0];
  };
  const std::uint64_t pixels_bytes = place("pixels", s.pixels_begin);
  s.labels_bytes = place("labels", s.labels_begin);
  s.height = r.table<std::uint32_t>(group, "", "height");
  s.width = r.table<std::uint32_t>(group, "", "width");
  s.xxh3 = r.table<std::uint64_t>(group, "", "xxh3");
  s.labels_xxh3 = r.table<std::uint64_t>(group, "", "labels_xxh3");
  s.sources = r.texts(group, "", "sources");
  s.class_names = r.texts(group, "", "class_names");
  if (version > 1) {
    s.palette = r.table<std::uint8_t>(group, "", "palette");
    s.label_images = r.table<std::uint64_t>(group, "", "label_images");
  }
  if (version > 2) {
    s.label_pixels = r.table<std::uint64_t>(group, "", "label_pixels");
    s.label_image_pixels = r.table<std::uint64_t>(group, "", "label_image_pixels");
  }
  s.tables_xxh3 = static_cast<std::uint64_t>(r.attribute(top, "", "tables_xxh3"));
  r.check_hash("", hash_of_tables(s, version), s.tables_xxh3);

  const std::size_t n = s.height.size();
  r.check(n > 0, "", "holds no image");
  r.check(s.width.size() == n && s.xxh3.size() == n && s.labels_xxh3.size() == n &&
              s.sources.size() == n,
          "", "has tables of different lengths");
  for (const auto* counts : {&s.label_images, &s.label_pixels, &s.label_image_pixels})
    r.check(counts->empty() || counts->size() == 256, "", "has no count for each label");
  r.check(s.label_pixels.size() == s.label_image_pixels.size(), "", "has no count for each label");
  r.check(s.class_names.empty() || std::ssize(s.class_names) == s.num_classes, "",
          fmt::format("has {} names for {} classes", s.class_names.size(), s.num_classes));
  std::uint64_t left = s.labels_bytes;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t size = std::uint64_t{s.height[i]} * s.width[i];  // of 32 bits each
    r.check(size > 0 && size <= left, "",
            fmt::format("claims {}x{} pixels for image {}, more than it has", s.height[i],
                        s.width[i], i));
    left -= size;
  }
  r.check(left == 0 && pixels_bytes / 3 == s.labels_bytes && pixels_bytes % 3 == 0, "",
          "has pixels or labels that do not fit its images' sizes");
}

namespace {

class ImageStore : public LabelledImages {
 public:
  ImageStore(StoreFile file, bool verify)
      : file_(std::move(file)), verify_(verify), s_(std::move(file_.facts().images)) {
    for (std::size_t i = 0; i < s_.height.size(); ++i)
      first_pixel_.push_back(first_pixel_.back() + std::uint64_t{s_.height[i]} * s_.width[i]);
  }

  std::int64_t count() const override { return std::ssize(s_.height); }
  ImageSize size(std::int64_t i) const override {
    const auto n = static_cast<std::size_t>(i);
    return {s_.height.at(n), s_.width.at(n)};
  }
  std::string name(std::int64_t i) const override {
    return s_.sources.at(static_cast<std::size_t>(i));
  }
  std::int64_t num_classes() const override { return s_.num_classes; }
  const std::vector<std::string>& class_names() const override { return s_.class_names; }
  std::vector<std::uint8_t> palette() const override { return s_.palette; }
  LabelCounts label_counts() const override {
    return {s_.label_images, s_.label_pixels, s_.label_image_pixels};
  }
  // The tables hold the images' hashes.
  std::string content_id() const override { return fmt::format("{:016x}", s_.tables_xxh3); }

  void read(std::int64_t i, LabelledImage& out) const override {
    const auto n = static_cast<std::size_t>(i);
    out.size = size(i);
    const std::uint64_t first = first_pixel_[n], pixels = first_pixel_[n + 1] - first;
    out.rgb.resize(pixels * 3);
    out.labels.resize(pixels);
    read_bytes("image", n, s_.pixels_begin + first * 3, s_.xxh3[n], out.rgb);
    read_bytes("labels", n, s_.labels_begin + first, s_.labels_xxh3[n], out.labels);
  }

  std::string describe() const;

 private:
  void read_bytes(const char* what, std::size_t image, std::uint64_t offset, std::uint64_t xxh3,
                  std::vector<std::uint8_t>& out) const {
    const std::uint64_t found = file_.read(fmt::format("{} {}", what, image), offset,
                                           std::as_writable_bytes(std::span(out)), verify_);
    if (!verify_ || found == xxh3) return;
    throw DamagedClip(Exit::data,
                      fmt::format("{} {} in {} is damaged: XXH3 is {:016x}, expected {:016x} ({})",
                                  what, image, file_.path(), found, xxh3, s_.sources[image]),
                      file_.damage_hint() + "; or let data.max_damaged skip such images", __FILE__,
                      __LINE__);
  }

  // Written only by the constructor, so reading needs no lock.
  StoreFile file_;
  bool verify_;
  StoredImages s_;
  std::vector<std::uint64_t> first_pixel_ = {0};  // of each image, and the end
};

// "smallest / median / largest" of a list that is not empty.
std::string spread(std::vector<std::uint32_t> values) {
  std::sort(values.begin(), values.end());
  return fmt::format("{} / {} / {}", values.front(), values[values.size() / 2], values.back());
}

std::string ImageStore::describe() const {
  LabelCounts counts;
  std::int64_t portraits = 0;
  LabelledImage image;
  std::vector<std::uint32_t> shorter, longer;
  for (std::int64_t i = 0; i < count(); ++i) {
    read(i, image);  // throws when damaged
    portraits += image.size.height > image.size.width ? 1 : 0;
    const auto [low, high] = std::minmax(image.size.height, image.size.width);
    shorter.push_back(static_cast<std::uint32_t>(low));
    longer.push_back(static_cast<std::uint32_t>(high));
    counts.add(image.labels);
  }
  const auto& [images, pixels, of_images, blank] = counts;
  const double all = static_cast<double>(first_pixel_.back());
  std::string out = fmt::format("store of labelled images {}\n", printable(file_.path()));
  out += fmt::format("  {}, {} of them portrait, {:.1f} MB of pixels and {:.1f} of labels\n",
                     counted(count(), "image"), portraits, 3e-6 * all, 1e-6 * all);
  out += fmt::format("  shorter side {}, longer side {} (smallest / median / largest)\n",
                     spread(std::move(shorter)), spread(std::move(longer)));
  out += fmt::format("  {}\n", s_.num_classes > 0 ? counted(s_.num_classes, "class", "classes")
                                                  : "number of classes not given");
  out += fmt::format("  {:>9.5f} % of the pixels in {:>7} images: unlabelled\n",
                     100 * static_cast<double>(pixels[0]) / all, images[0]);
  if (blank > 0) out += fmt::format("  no labelled pixel in {} of them\n", blank);
  for (std::size_t v = 1; v < pixels.size(); ++v) {
    if (static_cast<std::int64_t>(v) > s_.num_classes && pixels[v] == 0) continue;
    out += fmt::format("  {:>9.5f} % of the pixels in {:>7} images: class {}{}\n",
                       100 * static_cast<double>(pixels[v]) / all, images[v], v - 1,
                       v <= s_.class_names.size() ? " " + printable(s_.class_names[v - 1]) : "");
  }
  return out + "  every hash verified\n";
}

}  // namespace

std::unique_ptr<LabelledImages> make_image_store(StoreFile file, bool verify) {
  const std::string path = file.path();
  auto store = std::make_unique<ImageStore>(std::move(file), verify);
  const std::string missing =
      missing_classes(store->label_counts().images, store->num_classes(), store->class_names());
  if (!missing.empty() && log::rank() == 0)
    log::warn("{}: {}; label 0 is unlabelled (ingest.first_label = 0 where it is a class)", path,
              missing);
  return store;
}

std::unique_ptr<LabelledImages> open_image_store(const std::string& path, bool verify) {
  StoreFile file(path);
  WEFT_CHECK(file.facts().holds_images, Exit::data,
             "make it from labelled images, with ingest.images",
             "{} holds clips, not labelled images", path);
  return make_image_store(std::move(file), verify);
}

std::string describe_image_store(StoreFile file) {
  return ImageStore(std::move(file), true).describe();
}

struct ImageStoreWriter::State {
  explicit State(const std::string& path) : file(path, "image store", false) {}

  StoreWriter file;  // outlives all handles
  std::vector<Entry> entries;
  h5::Handle group, pixels, labels;
  StoredImages images;
  LabelCounts counts;
  std::uint64_t written = 0;  // pixels

  // An array of `bytes` bytes; all will be written.
  h5::Handle new_array(const char* name, std::uint64_t bytes) const {
    const hsize_t n = bytes;
    return file.new_dataset(group, name, H5T_STD_U8LE, {&n, 1}, StoreWriter::Fill::none);
  }
  // The bytes from `first` on; returns their hash.
  std::uint64_t write(hid_t array, std::uint64_t first, std::span<const std::uint8_t> bytes) const {
    const hsize_t from = first, count = bytes.size();
    file.write_part(array, "an image", H5T_NATIVE_UINT8, {&from, 1}, {&count, 1}, bytes.data());
    ClipHash hash;
    hash.update(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
    return hash.digest();
  }
  template <class T>
  void table(const char* name, const std::vector<T>& values) const {
    file.table<T>(group, name, values, StoreWriter::Fill::none);
  }
};

ImageStoreWriter::ImageStoreWriter(const std::string& path, std::vector<Entry> entries,
                                   std::int64_t num_classes, std::vector<std::string> class_names,
                                   std::vector<std::uint8_t> palette) {
  WEFT_ASSERT(class_names.empty() || std::ssize(class_names) == num_classes);
  const h5::QuietErrors quiet;
  state_ = std::make_unique<State>(path);
  State& s = *state_;
  s.entries = std::move(entries);
  s.images.num_classes = num_classes;
  s.images.class_names = std::move(class_names);
  s.images.palette = std::move(palette);
  s.group = s.file.new_group(s.file.file(), "images");
  const h5::Handle top = s.file.top();
  s.file.attribute(top, "format", image_store_format);
  s.file.attribute(top, "schema_version", image_store_version);
  s.file.attribute(top, "num_classes", num_classes);
  std::uint64_t pixels = 0;
  for (const Entry& e : s.entries) {
    s.images.height.push_back(static_cast<std::uint32_t>(e.size.height));
    s.images.width.push_back(static_cast<std::uint32_t>(e.size.width));
    s.images.sources.push_back(e.source);
    pixels += static_cast<std::uint64_t>(e.size.height) * static_cast<std::uint64_t>(e.size.width);
  }
  s.pixels = s.new_array("pixels", 3 * pixels);
  s.labels = s.new_array("labels", pixels);
}

ImageStoreWriter::~ImageStoreWriter() {
  const h5::QuietErrors quiet;
  state_.reset();
}

void ImageStoreWriter::append(std::span<const std::uint8_t> rgb,
                              std::span<const std::uint8_t> labels) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  const ImageSize size = s.entries.at(s.images.xxh3.size()).size;
  WEFT_ASSERT(std::ssize(labels) == size.height * size.width && rgb.size() == 3 * labels.size());
  s.images.xxh3.push_back(s.write(s.pixels, 3 * s.written, rgb));
  s.images.labels_xxh3.push_back(s.write(s.labels, s.written, labels));
  s.written += labels.size();
  s.counts.add(labels);
}

const LabelCounts& ImageStoreWriter::label_counts() const { return state_->counts; }

void ImageStoreWriter::commit() {
  State& s = *state_;
  s.images.label_images = s.counts.images;
  s.images.label_pixels = s.counts.pixels;
  s.images.label_image_pixels = s.counts.pixels_of_images;
  const StoredImages& images = s.images;
  WEFT_ASSERT(images.xxh3.size() == s.entries.size());
  const h5::QuietErrors quiet;
  s.table("height", images.height);
  s.table("width", images.width);
  s.table("xxh3", images.xxh3);
  s.table("labels_xxh3", images.labels_xxh3);
  s.file.texts(s.group, "sources", packed(images.sources), StoreWriter::Fill::none);
  s.file.texts(s.group, "class_names", packed(images.class_names), StoreWriter::Fill::none);
  s.table("palette", images.palette);
  s.table("label_images", images.label_images);
  s.table("label_pixels", images.label_pixels);
  s.table("label_image_pixels", images.label_image_pixels);
  s.file.attribute(s.file.top(), "tables_xxh3",
                   static_cast<std::int64_t>(hash_of_tables(images, image_store_version)));
  s.file.check(s.pixels.close_now() && s.labels.close_now() && s.group.close_now(), "close");
  s.file.commit();
}

}  // namespace weft
