// Small owning handles for HDF5's C library, and its errors as weft::Error.
#pragma once

#include <hdf5.h>

#include <string>
#include <utility>

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

}  // namespace weft::h5
