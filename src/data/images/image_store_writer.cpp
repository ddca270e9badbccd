#include <unistd.h>

#include <array>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "data/hdf5.h"
#include "data/images/image_store.h"
#include "data/images/image_store_open.h"

namespace weft {

void add_table(ClipHash& hash, std::span<const std::byte> bytes) {
  const std::uint64_t size = bytes.size();
  hash.update(reinterpret_cast<const std::byte*>(&size), sizeof size);
  hash.update(bytes.data(), bytes.size());
}

struct ImageStoreWriter::State {
  std::string path, temporary;
  std::vector<Entry> entries;
  std::int64_t num_classes = 0;
  std::vector<std::string> class_names;
  h5::Handle file, group, pixels, labels;
  std::vector<std::uint64_t> xxh3, labels_xxh3;
  std::vector<std::uint8_t> palette;
  std::vector<std::uint64_t> label_images = std::vector<std::uint64_t>(256);
  std::uint64_t written = 0;  // pixels
  ClipHash tables;
  bool committed = false;

  void check(bool ok, const std::string& what) const {
    if (ok) return;
    const std::string reason = h5::last_error();
    throw Error(Exit::data,
                fmt::format("cannot write image store {}: {}: {}", temporary, what, reason),
                h5::hint_for(reason, temporary, "is the disk full, or the directory not writable?"),
                __FILE__, __LINE__);
  }

  void write_attribute(const char* name, std::int64_t value) {
    const h5::Handle top(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose);
    const h5::Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const h5::Handle a(H5Acreate2(top, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose);
    check(a.valid() && H5Awrite(a, H5T_NATIVE_INT64, &value) >= 0, name);
  }

  h5::Handle new_array(ImageArrayNumber which, std::uint64_t count) {
    const ImageArray& array = image_arrays[which];
    const hid_t type = array.element == 1   ? H5T_STD_U8LE
                       : array.element == 4 ? H5T_STD_U32LE
                                            : H5T_STD_U64LE;
    const hsize_t n = count;
    const h5::Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
    const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_obj_track_times(how, false);
    H5Pset_layout(how, H5D_CONTIGUOUS);
    H5Pset_fill_time(how, H5D_FILL_TIME_NEVER);  // every element is written
    h5::Handle d(H5Dcreate2(group, array.name, type, space, H5P_DEFAULT, how, H5P_DEFAULT),
                 H5Dclose);
    check(d.valid(), array.name);
    return d;
  }

  // Elements [first, first + bytes.size()) of an array of bytes.
  void write_bytes(hid_t array, std::uint64_t first, std::span<const std::uint8_t> bytes) {
    const hsize_t from = first, count = bytes.size();
    const h5::Handle memory(H5Screate_simple(1, &count, nullptr), H5Sclose);
    const h5::Handle space(H5Dget_space(array), H5Sclose);
    check(H5Sselect_hyperslab(space, H5S_SELECT_SET, &from, nullptr, &count, nullptr) >= 0 &&
              H5Dwrite(array, H5T_NATIVE_UINT8, memory, space, H5P_DEFAULT, bytes.data()) >= 0,
          "an image");
  }

  // In the order of image_arrays, which is that of their hash.
  template <class T>
  void write_table(ImageArrayNumber which, const std::vector<T>& values) {
    const h5::Handle d = new_array(which, values.size());
    const hid_t memory = sizeof(T) == 1   ? H5T_NATIVE_UINT8
                         : sizeof(T) == 4 ? H5T_NATIVE_UINT32
                                          : H5T_NATIVE_UINT64;
    check(values.empty() || H5Dwrite(d, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0,
          image_arrays[which].name);
    add_table(tables, std::as_bytes(std::span(values)));
  }
  void write_texts(ImageArrayNumber which, ImageArrayNumber ends_of,
                   const std::vector<std::string>& texts) {
    std::vector<char> all;
    std::vector<std::uint64_t> ends;
    for (const std::string& text : texts) {
      all.insert(all.end(), text.begin(), text.end());
      ends.push_back(all.size());
    }
    write_table(which, all);
    write_table(ends_of, ends);
  }
};

ImageStoreWriter::ImageStoreWriter(const std::string& path, std::vector<Entry> entries,
                                   std::int64_t num_classes, std::vector<std::string> class_names,
                                   std::vector<std::uint8_t> palette)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  s.path = path;
  s.temporary = path + ".tmp";
  s.entries = std::move(entries);
  s.num_classes = num_classes;
  s.class_names = std::move(class_names);
  s.palette = std::move(palette);
  WEFT_ASSERT(s.class_names.empty() || std::ssize(s.class_names) == num_classes);
  const h5::Handle access = h5::file_access();
  // The first HDF5 format with checksums over its structure; readable since HDF5 1.10 (2016).
  H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  const h5::Handle top(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_obj_track_times(top, false);  // the same images make the same file, byte by byte
  unlink(s.temporary.c_str());         // what a killed job has left, or a link
  s.file = {H5Fcreate(s.temporary.c_str(), H5F_ACC_TRUNC, top, access), H5Fclose};
  s.check(s.file.valid(), "create");
  const h5::Handle how(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
  H5Pset_obj_track_times(how, false);
  s.group = {H5Gcreate2(s.file, "images", H5P_DEFAULT, how, H5P_DEFAULT), H5Gclose};
  s.check(s.group.valid(), "create /images");
  {
    const std::string format = image_store_format;
    const h5::Handle root(H5Gopen2(s.file, "/", H5P_DEFAULT), H5Gclose);
    const h5::Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const h5::Handle type = h5::string_type(format.size() + 1);
    const h5::Handle a(H5Acreate2(root, "format", type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
    s.check(a.valid() && H5Awrite(a, type, format.c_str()) >= 0, "format");
  }
  s.write_attribute("schema_version", image_store_version);
  s.write_attribute("num_classes", num_classes);
  std::uint64_t pixels = 0;
  for (const Entry& e : s.entries)
    pixels += static_cast<std::uint64_t>(e.size.height) * static_cast<std::uint64_t>(e.size.width);
  s.pixels = s.new_array(image_pixels, 3 * pixels);
  s.labels = s.new_array(image_labels, pixels);
}

ImageStoreWriter::~ImageStoreWriter() {
  if (state_->committed) return;
  const h5::QuietErrors quiet;
  const std::string temporary = state_->temporary;
  state_.reset();  // closes everything
  unlink(temporary.c_str());
}

void ImageStoreWriter::append(std::span<const std::uint8_t> rgb,
                              std::span<const std::uint8_t> labels) {
  State& s = *state_;
  const h5::QuietErrors quiet;
  const ImageSize size = s.entries.at(s.xxh3.size()).size;
  WEFT_ASSERT(std::ssize(labels) == size.height * size.width && rgb.size() == 3 * labels.size());
  const auto hash = [](std::span<const std::uint8_t> bytes) {
    ClipHash h;
    h.update(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
    return h.digest();
  };
  s.write_bytes(s.pixels, 3 * s.written, rgb);
  s.write_bytes(s.labels, s.written, labels);
  s.xxh3.push_back(hash(rgb));
  s.labels_xxh3.push_back(hash(labels));
  s.written += labels.size();
  std::array<bool, 256> here{};
  for (const std::uint8_t label : labels) here[label] = true;
  for (std::size_t v = 0; v < here.size(); ++v) s.label_images[v] += here[v] ? 1 : 0;
}

const std::vector<std::uint64_t>& ImageStoreWriter::label_images() const {
  return state_->label_images;
}

void ImageStoreWriter::commit() {
  State& s = *state_;
  WEFT_ASSERT(!s.committed && s.xxh3.size() == s.entries.size());
  {
    const h5::QuietErrors quiet;
    std::vector<std::uint32_t> height, width;
    std::vector<std::string> sources;
    for (const Entry& e : s.entries) {
      height.push_back(static_cast<std::uint32_t>(e.size.height));
      width.push_back(static_cast<std::uint32_t>(e.size.width));
      sources.push_back(e.source);
    }
    s.write_table(image_height, height);
    s.write_table(image_width, width);
    s.write_table(image_xxh3, s.xxh3);
    s.write_table(image_labels_xxh3, s.labels_xxh3);
    s.write_texts(image_sources, image_sources_end, sources);
    s.write_texts(image_class_names, image_class_names_end, s.class_names);
    s.write_table(image_palette, s.palette);
    s.write_table(image_label_images, s.label_images);
    s.write_attribute("tables_xxh3", static_cast<std::int64_t>(s.tables.digest()));
    s.check(
        s.pixels.close_now() && s.labels.close_now() && s.group.close_now() && s.file.close_now(),
        "close");
  }
  // Its bytes are on the disk before its name is.
  File::open(s.temporary, Exit::data).sync();
  rename_file(s.temporary, s.path, Exit::data);
  s.committed = true;
  // The rename itself must survive a power cut.
  sync_directory(std::filesystem::absolute(s.path).parent_path(), Exit::data);
}

}  // namespace weft
