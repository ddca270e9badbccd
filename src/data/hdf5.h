// HDF5 as the stores use it: handles that close themselves, errors as weft::Error, and the format
// that stores of clips (clip_store.h) and of labelled images (images/image_store.h) share:
//   attributes  whole numbers of 64 bits, texts of a fixed length, lists of f32
//   tables      datasets of one dimension, little-endian, in one piece
//   texts       NAME u8: one behind the other, UTF-8; NAME_end u64: where each of them ends
//   hashes      XXH3-64 (seed 0) of what is read in one go, and of all tables together
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace weft::h5 {

// Owns one HDF5 object; closes it with the function it came with.
class Handle {
 public:
  Handle() = default;
  Handle(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  Handle(Handle&& other) noexcept { swap(other); }
  Handle& operator=(Handle&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Handle() {
    if (id_ >= 0 && close_ != nullptr) close_(id_);
  }

  bool valid() const { return id_ >= 0; }
  operator hid_t() const { return id_; }
  // Closes now, so that a failure (a full disk shows up here) is noticed.
  bool close_now() {
    const hid_t id = std::exchange(id_, -1);
    return id < 0 || close_(id) >= 0;
  }

 private:
  void swap(Handle& other) {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
  }

  hid_t id_ = -1;
  herr_t (*close_)(hid_t) = nullptr;
};

// Keeps HDF5 from printing its error stack, on this thread, for the scope's life.
class QuietErrors {
 public:
  QuietErrors() {
    // At exit HDF5 would close all open objects, and crashes if a full disk kept it from closing
    // one.
    H5dont_atexit();
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~QuietErrors() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }
  QuietErrors(const QuietErrors&) = delete;
  QuietErrors& operator=(const QuietErrors&) = delete;

 private:
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

// How files are opened: without HDF5's own lock. Many jobs may read one store at once, two that
// write one are kept apart by core/file.h, and some file systems have no locks.
Handle file_access();

// HDF5's innermost reason for the last failure on this thread, "" if it gave none.
std::string last_error();
// What to do about that reason, or `otherwise`.
std::string hint_for(const std::string& reason, const std::string& path,
                     const std::string& otherwise);

// Types as stored in the file: little-endian, whatever the host.
Handle half_type();                                    // IEEE binary16, as h5py's float16
Handle string_type(std::size_t bytes = H5T_VARIABLE);  // UTF-8, of variable or that length

// The type of T in the file and in memory.
template <class T>
hid_t stored_type() {
  if constexpr (std::is_same_v<T, float>) return H5T_IEEE_F32LE;
  return sizeof(T) == 1 ? H5T_STD_U8LE : sizeof(T) == 4 ? H5T_STD_U32LE : H5T_STD_U64LE;
}
template <class T>
hid_t memory_type() {
  if constexpr (std::is_same_v<T, float>) return H5T_NATIVE_FLOAT;
  return sizeof(T) == 1 ? H5T_NATIVE_UINT8 : sizeof(T) == 4 ? H5T_NATIVE_UINT32 : H5T_NATIVE_UINT64;
}

}  // namespace weft::h5

namespace weft {

// Texts as the file holds them.
struct PackedTexts {
  std::string bytes;
  std::vector<std::uint64_t> ends;

  void add(const std::string& text) {
    bytes += text;
    ends.push_back(bytes.size());
  }
};

// Reads a store's structure. The file may come from anywhere and may be damaged: sizes are compared
// with the file's before they are used, and every fault is one message: "KIND PATH: WHERE FAULT".
// `where` names a part of the store, such as "bucket 144p-51-0.56"; "" is the store.
class StoreReader {
 public:
  // `bytes` of the file. `alive` is called between HDF5 calls that read tables.
  StoreReader(const std::string& path, std::uint64_t bytes, const std::function<void()>& alive);

  // Whether the attribute `format` of the file is this one.
  bool has_format(const char* format) const;
  // "clip store" or "image store": what messages call it.
  void call_it(const char* kind) { kind_ = kind; }
  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }
  hid_t file() const { return file_; }
  h5::Handle top() const { return {H5Gopen2(file_, "/", H5P_DEFAULT), H5Gclose}; }
  void alive() const { alive_(); }

  void check(bool ok, const std::string& where, const std::string& fault) const;
  void check_hash(const std::string& where, std::uint64_t found, std::uint64_t want) const;
  static bool has(hid_t group, const char* name) { return H5Lexists(group, name, H5P_DEFAULT) > 0; }

  std::int64_t attribute(hid_t object, const std::string& where, const char* name) const;
  std::string text_attribute(hid_t object, const std::string& where, const char* name) const;
  // `n` finite numbers; none if the attribute is missing.
  std::vector<float> float_attribute(hid_t object, const std::string& where, const char* name,
                                     std::int64_t n) const;

  h5::Handle dataset(hid_t group, const std::string& where, const char* name) const;
  static std::vector<hsize_t> dims_of(hid_t dataset);
  // Where a dataset of `count` elements begins in the file, in which it lies in one piece.
  std::uint64_t place_of(hid_t dataset, const std::string& where, const char* name,
                         std::uint64_t count, std::uint64_t element) const;

  // All values of a table; of `n` values where that is said.
  template <class T>
  std::vector<T> table(hid_t group, const std::string& where, const char* name,
                       std::optional<std::size_t> n = {}) const {
    const h5::Handle d = table_dataset(
        group, where, name, std::is_same_v<T, float> ? H5T_FLOAT : H5T_INTEGER, sizeof(T), n);
    std::vector<T> out(dims_of(d)[0]);
    if (!out.empty()) read(d, where, name, h5::memory_type<T>(), out.data());
    return out;
  }
  std::vector<std::string> texts(hid_t group, const std::string& where, const std::string& name,
                                 std::optional<std::size_t> n = {}) const;
  // `n` strings of variable length, which HDF5 keeps in a heap without checksums: of old stores.
  std::vector<std::string> strings(hid_t group, const std::string& where, const char* name,
                                   std::size_t n) const;

 private:
  h5::Handle table_dataset(hid_t group, const std::string& where, const char* name,
                           H5T_class_t kind, std::size_t element,
                           std::optional<std::size_t> n) const;
  void read(hid_t dataset, const std::string& where, const char* name, hid_t memory,
            void* out) const;
  void refuse_links() const;

  std::string path_;
  std::uint64_t bytes_;
  std::function<void()> alive_;
  const char* kind_ = "clip store";
  h5::Handle file_;
};

// Writes a store to PATH.tmp; commit() renames it to PATH. Without commit nothing is left behind.
// The same calls make the same file, byte by byte. Throws Exit::data when the disk is full or the
// directory is not writable.
class StoreWriter {
 public:
  // `aligned`: datasets of 4 MiB and more begin at multiples of 1 MiB, which suits parallel file
  // systems; at most a fifth of the file is padding.
  StoreWriter(const std::string& path, const char* kind, bool aligned);
  ~StoreWriter();
  StoreWriter(const StoreWriter&) = delete;
  StoreWriter& operator=(const StoreWriter&) = delete;

  const std::string& temporary() const { return temporary_; }
  hid_t file() const { return file_; }
  h5::Handle top() const { return {H5Gopen2(file_, "/", H5P_DEFAULT), H5Gclose}; }

  // All failing HDF5 calls are reported here.
  void check(bool ok, const std::string& what) const;
  h5::Handle new_group(hid_t where, const std::string& name) const;
  void attribute(hid_t where, const char* name, std::int64_t value) const;
  void attribute(hid_t where, const char* name, const std::string& text) const;
  void attribute(hid_t where, const char* name, const std::vector<float>& values) const;

  enum class Fill { zeros, none };  // of elements that are not written; none: all will be
  h5::Handle new_dataset(hid_t group, const char* name, hid_t type, std::span<const hsize_t> dims,
                         Fill fill) const;
  // The part of a dataset that begins at `first` and has `count` elements in each dimension.
  void write_part(hid_t dataset, const char* name, hid_t memory, std::span<const hsize_t> first,
                  std::span<const hsize_t> count, const void* values) const;
  template <class T>
  void table(hid_t group, const char* name, std::span<const T> values,
             Fill fill = Fill::zeros) const {
    const hsize_t n = values.size();
    const h5::Handle d = new_dataset(group, name, h5::stored_type<T>(), {&n, 1}, fill);
    check(n == 0 ||
              H5Dwrite(d, h5::memory_type<T>(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) >= 0,
          name);
  }
  void texts(hid_t group, const std::string& name, const PackedTexts& texts,
             Fill fill = Fill::zeros) const;

  // Once 32 MiB are new, they go to the disk while the job goes on, so that commit() finds less to
  // wait for.
  void start_writeback();
  // All handles are closed: closes the file, fsyncs, renames.
  void commit();

 private:
  std::string path_, temporary_, kind_;
  h5::Handle file_;
  std::int64_t written_back_ = 0;  // bytes of the file
  bool committed_ = false;
};

}  // namespace weft
