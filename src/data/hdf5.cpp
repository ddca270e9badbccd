#include "data/hdf5.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"

namespace weft::h5 {

std::string last_error() {
  std::string reason;
  const auto keep = [](unsigned, const H5E_error2_t* e, void* out) -> herr_t {
    if (e->desc != nullptr) *static_cast<std::string*>(out) = e->desc;
    return 0;
  };
  // Walk downward, from the call that was made to the innermost one, whose text says most.
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep, &reason);
  // "file write failed: time = ..., filename = ..., errno = 28, error message = 'No space left on
  // device', buf = 0x...": the system's own words are all that a reader needs.
  const bool lock = reason.find("unable to lock file") != std::string::npos;
  const std::string mark = "error message = '";
  const auto begin = reason.find(mark);
  if (begin != std::string::npos) {
    const auto end = reason.find('\'', begin + mark.size());
    reason = reason.substr(begin + mark.size(), end - begin - mark.size());
  }
  if (lock) return "cannot lock it: " + reason;
  if (reason.find("already open for") != std::string::npos)
    return "it is open for writing in another program, or one has ended without closing it";
  return reason;
}

Handle file_access() {
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  // Not in older versions, nor in 1.12.0.
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0))
  H5Pset_file_locking(access, false, true);
#endif
  return access;
}

std::string hint_for(const std::string& reason, const std::string& path,
                     const std::string& otherwise) {
  if (reason.starts_with("cannot lock it"))
    return "set HDF5_USE_FILE_LOCKING=FALSE in the environment of all ranks, or close the program "
           "that has it open";
  if (reason.starts_with("it is open for writing"))
    return fmt::format("close that program; if none has it open, h5clear -s {} takes the mark away",
                       path);
  return otherwise;
}

Handle half_type() {
  const hid_t t = H5Tcopy(H5T_IEEE_F32LE);
  // 1 sign, 5 exponent and 10 mantissa bits. The fields shrink before the size, which must always
  // hold them.
  H5Tset_fields(t, 15, 10, 5, 0, 10);
  H5Tset_size(t, 2);
  H5Tset_ebias(t, 15);
  return {t, H5Tclose};
}

Handle string_type(std::size_t bytes) {
  const hid_t t = H5Tcopy(H5T_C_S1);
  H5Tset_size(t, bytes);
  H5Tset_cset(t, H5T_CSET_UTF8);
  return {t, H5Tclose};
}

}  // namespace weft::h5

namespace weft {
namespace {

constexpr const char* remake = "make the store again with `weft ingest` or `weft encode`";

}  // namespace

StoreReader::StoreReader(const std::string& path, std::uint64_t bytes,
                         const std::function<void()>& alive)
    : path_(path), bytes_(bytes), alive_(alive) {
  const h5::Handle access = h5::file_access();  // its end would clear the reason of a failure
  file_ = {H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), H5Fclose};
  if (file_.valid()) {
    refuse_links();
    return;
  }
  const std::string reason = h5::last_error();
  const bool cut = reason.find("truncated") != std::string::npos;
  throw Error(
      Exit::data,
      fmt::format("clip store {} {}: {}", path, cut ? "is truncated" : "cannot be opened", reason),
      cut ? "copy it again, or make it again with `weft ingest`"
          : h5::hint_for(reason, path, remake),
      __FILE__, __LINE__);
}

// HDF5 follows an external link into any file, or waits for ever where it leads to a pipe. No
// writer of stores makes other links than hard ones.
void StoreReader::refuse_links() const {
  std::pair<const StoreReader*, std::string> found(this, "");
  const auto look = [](hid_t, const char* name, const H5L_info_t* link, void* out) -> herr_t {
    auto& [reader, text] = *static_cast<std::pair<const StoreReader*, std::string>*>(out);
    reader->alive();
    if (link->type == H5L_TYPE_HARD) return 0;
    text = fmt::format("has {} link, {}", link->type == H5L_TYPE_SOFT ? "a soft" : "an external",
                       name);
    return 1;
  };
  const herr_t done = H5Lvisit(file_, H5_INDEX_NAME, H5_ITER_NATIVE, look, &found);
  check(done >= 0, "", "has unreadable groups: " + h5::last_error());
  check(found.second.empty(), "", found.second + ", which may lead out of the file");
}

bool StoreReader::has_format(const char* format) const {
  const h5::Handle root = top();
  if (!root.valid() || H5Aexists(root, "format") <= 0) return false;
  const h5::Handle a(H5Aopen(root, "format", H5P_DEFAULT), H5Aclose);
  const h5::Handle type(a.valid() ? H5Aget_type(a) : H5I_INVALID_HID, H5Tclose);
  const h5::Handle space(a.valid() ? H5Aget_space(a) : H5I_INVALID_HID, H5Sclose);
  constexpr std::size_t longest = 64;
  if (!type.valid() || H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) > 0 ||
      H5Tget_size(type) >= longest || H5Sget_simple_extent_npoints(space) != 1)
    return false;
  char text[longest] = {};
  return H5Aread(a, type, text) >= 0 && std::string(text) == format;
}

void StoreReader::check(bool ok, const std::string& where, const std::string& fault) const {
  WEFT_CHECK(ok, Exit::data, remake, "{} {}{}{} {}", kind_, path_, where.empty() ? "" : ": ", where,
             fault);
}

void StoreReader::check_hash(const std::string& where, std::uint64_t found,
                             std::uint64_t want) const {
  check(found == want, where,
        fmt::format("has damaged tables: their XXH3 is {:016x}, expected {:016x}", found, want));
}

std::int64_t StoreReader::attribute(hid_t object, const std::string& where,
                                    const char* name) const {
  std::int64_t value = 0;
  const h5::Handle a(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
  check(a.valid(), where, fmt::format("has no attribute {}", name));
  const h5::Handle space(H5Aget_space(a), H5Sclose);
  const h5::Handle type(H5Aget_type(a), H5Tclose);
  check(H5Sget_simple_extent_npoints(space) == 1 && H5Tget_class(type) == H5T_INTEGER &&
            H5Aread(a, H5T_NATIVE_INT64, &value) >= 0,
        where, fmt::format("has an attribute {} that is not one whole number", name));
  return value;
}

std::string StoreReader::text_attribute(hid_t object, const std::string& where,
                                        const char* name) const {
  const h5::Handle a(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
  const h5::Handle type(a.valid() ? H5Aget_type(a) : H5I_INVALID_HID, H5Tclose);
  const h5::Handle space(a.valid() ? H5Aget_space(a) : H5I_INVALID_HID, H5Sclose);
  check(
      type.valid() && H5Tget_class(type) == H5T_STRING && H5Sget_simple_extent_npoints(space) == 1,
      where, fmt::format("has an attribute {} that is not one text", name));
  const auto refuse = [&](bool ok) {
    check(ok, where, fmt::format("has an unreadable attribute {}", name));
  };
  if (H5Tis_variable_str(type) > 0) {  // as version 2 of clip stores has it
    const h5::Handle memory = h5::string_type();
    H5Tset_cset(memory, H5Tget_cset(type));
    char* text = nullptr;
    refuse(H5Aread(a, memory, &text) >= 0);
    const std::string value = text == nullptr ? "" : text;
    H5free_memory(text);
    return value;
  }
  refuse(H5Tget_size(type) <= bytes_);
  std::string value(H5Tget_size(type), '\0');
  refuse(H5Aread(a, type, value.data()) >= 0);
  value.resize(std::min(value.size(), value.find('\0')));
  return value;
}

std::vector<float> StoreReader::float_attribute(hid_t object, const std::string& where,
                                                const char* name, std::int64_t n) const {
  if (H5Aexists(object, name) <= 0) return {};
  std::vector<float> values(n);
  const h5::Handle a(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
  check(a.valid(), where, fmt::format("has an unreadable attribute {}", name));
  const h5::Handle space(H5Aget_space(a), H5Sclose);
  const h5::Handle type(H5Aget_type(a), H5Tclose);
  check(H5Sget_simple_extent_npoints(space) == n && H5Tget_class(type) == H5T_FLOAT &&
            H5Aread(a, H5T_NATIVE_FLOAT, values.data()) >= 0 &&
            std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }),
        where, fmt::format("has an attribute {} that is not {} finite numbers", name, n));
  return values;
}

h5::Handle StoreReader::dataset(hid_t group, const std::string& where, const char* name) const {
  check(has(group, name), where, fmt::format("has no dataset {}", name));
  h5::Handle d(H5Dopen2(group, name, H5P_DEFAULT), H5Dclose);
  check(d.valid(), where, fmt::format("has an unreadable dataset {}: {}", name, h5::last_error()));
  const h5::Handle how(H5Dget_create_plist(d), H5Pclose);
  check(how.valid() && H5Pget_layout(how) != H5D_VIRTUAL && H5Pget_external_count(how) == 0, where,
        fmt::format("keeps {} in other files", name));
  return d;
}

std::vector<hsize_t> StoreReader::dims_of(hid_t dataset) {
  const h5::Handle space(H5Dget_space(dataset), H5Sclose);
  const int rank = H5Sget_simple_extent_ndims(space);
  std::vector<hsize_t> dims(std::max(rank, 0));
  if (rank > 0) H5Sget_simple_extent_dims(space, dims.data(), nullptr);
  return dims;
}

std::uint64_t StoreReader::place_of(hid_t dataset, const std::string& where, const char* name,
                                    std::uint64_t count, std::uint64_t element) const {
  check(count <= bytes_ / element, where,
        fmt::format("claims {} elements of {}, more than the file's {} bytes: damaged or truncated",
                    count, name, bytes_));
  const h5::Handle how(H5Dget_create_plist(dataset), H5Pclose);
  check(H5Pget_layout(how) == H5D_CONTIGUOUS, where,
        fmt::format("does not store {} in one piece", name));
  if (count == 0) return 0;  // it has no place in the file
  const haddr_t begin = H5Dget_offset(dataset);
  check(begin != HADDR_UNDEF && begin <= bytes_ && count * element <= bytes_ - begin, where,
        fmt::format("has {} beyond the end of the file: truncated", name));
  return begin;
}

// The shape is compared before anything is read, so that a table of another length cannot run over.
h5::Handle StoreReader::table_dataset(hid_t group, const std::string& where, const char* name,
                                      H5T_class_t kind, std::size_t element,
                                      std::optional<std::size_t> n) const {
  alive_();
  h5::Handle d = dataset(group, where, name);
  const auto dims = dims_of(d);
  check(dims.size() == 1, where, fmt::format("has a table {} that is not a row of values", name));
  check(!n || dims[0] == *n, where,
        fmt::format("has a table {} of {} values, expected {}", name, dims[0], n.value_or(0)));
  check(dims[0] <= bytes_ / element, where,
        fmt::format("claims {} values of {}, more than the file's {} bytes: damaged or truncated",
                    dims[0], name, bytes_));
  const h5::Handle type(H5Dget_type(d), H5Tclose);
  check(H5Tget_class(type) == kind, where, fmt::format("has a table {} of a wrong type", name));
  return d;
}

void StoreReader::read(hid_t dataset, const std::string& where, const char* name, hid_t memory,
                       void* out) const {
  check(H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, out) >= 0, where,
        fmt::format("has an unreadable table {}: {}", name, h5::last_error()));
}

std::vector<std::string> StoreReader::texts(hid_t group, const std::string& where,
                                            const std::string& name,
                                            std::optional<std::size_t> n) const {
  const auto ends = table<std::uint64_t>(group, where, (name + "_end").c_str(), n);
  const auto all = table<char>(group, where, name.c_str());
  check(std::is_sorted(ends.begin(), ends.end()) &&
            (ends.empty() ? all.empty() : ends.back() == all.size()),
        where, fmt::format("has a table {}_end that does not divide {}", name, name));
  std::vector<std::string> out;
  std::uint64_t begin = 0;
  for (const std::uint64_t end : ends) {
    out.emplace_back(all.data() + begin, end - begin);
    begin = end;
  }
  return out;
}

std::vector<std::string> StoreReader::strings(hid_t group, const std::string& where,
                                              const char* name, std::size_t n) const {
  const h5::Handle d = table_dataset(group, where, name, H5T_STRING, 1, n);
  // The file may hold ASCII or UTF-8: read as what it is.
  const h5::Handle stored(H5Dget_type(d), H5Tclose);
  check(H5Tis_variable_str(stored) > 0, where,
        fmt::format("has a table {} that is not of variable-length strings", name));
  const h5::Handle type = h5::string_type();
  H5Tset_cset(type, H5Tget_cset(stored));
  std::vector<char*> pointers(n, nullptr);
  read(d, where, name, type, pointers.data());
  std::vector<std::string> out;
  for (const char* p : pointers) out.emplace_back(p == nullptr ? "" : p);
  const h5::Handle space(H5Dget_space(d), H5Sclose);
  H5Dvlen_reclaim(type, space, H5P_DEFAULT, pointers.data());
  return out;
}

StoreWriter::StoreWriter(const std::string& path, const char* kind, bool aligned)
    : path_(path), temporary_(path + ".tmp"), kind_(kind) {
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty())
    make_folders(folder, Exit::data, "name a path in a folder that can be made");
  const h5::Handle access = h5::file_access();
  if (aligned) H5Pset_alignment(access, hsize_t{4} << 20, hsize_t{1} << 20);
  // The first HDF5 format with checksums over its structure; readable since HDF5 1.10 (2016).
  H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  const h5::Handle how(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_obj_track_times(how, false);
  unlink(temporary_.c_str());  // what a killed job has left, or a link
  file_ = {H5Fcreate(temporary_.c_str(), H5F_ACC_TRUNC, how, access), H5Fclose};
  check(file_.valid(), "create");
}

StoreWriter::~StoreWriter() {
  if (committed_) return;
  file_.close_now();
  unlink(temporary_.c_str());
}

void StoreWriter::check(bool ok, const std::string& what) const {
  if (ok) return;
  const std::string reason = h5::last_error();
  throw Error(Exit::data,
              fmt::format("cannot write {} {}: {}: {}", kind_, temporary_, what, reason),
              h5::hint_for(reason, temporary_, "is the disk full, or the directory not writable?"),
              __FILE__, __LINE__);
}

h5::Handle StoreWriter::new_group(hid_t where, const std::string& name) const {
  const h5::Handle how(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
  H5Pset_obj_track_times(how, false);
  h5::Handle group(H5Gcreate2(where, name.c_str(), H5P_DEFAULT, how, H5P_DEFAULT), H5Gclose);
  check(group.valid(), "create " + name);
  return group;
}

void StoreWriter::attribute(hid_t where, const char* name, std::int64_t value) const {
  const h5::Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  const h5::Handle a(H5Acreate2(where, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT),
                     H5Aclose);
  check(a.valid() && H5Awrite(a, H5T_NATIVE_INT64, &value) >= 0, name);
}

void StoreWriter::attribute(hid_t where, const char* name, const std::string& text) const {
  const h5::Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  const h5::Handle type = h5::string_type(text.size() + 1);
  const h5::Handle a(H5Acreate2(where, name, type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  check(a.valid() && H5Awrite(a, type, text.c_str()) >= 0, name);
}

void StoreWriter::attribute(hid_t where, const char* name, const std::vector<float>& values) const {
  const hsize_t n = values.size();
  const h5::Handle space(H5Screate_simple(1, &n, nullptr), H5Sclose);
  const h5::Handle a(H5Acreate2(where, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT),
                     H5Aclose);
  check(a.valid() && H5Awrite(a, H5T_NATIVE_FLOAT, values.data()) >= 0, name);
}

h5::Handle StoreWriter::new_dataset(hid_t group, const char* name, hid_t type,
                                    std::span<const hsize_t> dims, Fill fill) const {
  const h5::Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr),
                         H5Sclose);
  const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(how, false);
  if (fill == Fill::none) H5Pset_fill_time(how, H5D_FILL_TIME_NEVER);
  h5::Handle d(H5Dcreate2(group, name, type, space, H5P_DEFAULT, how, H5P_DEFAULT), H5Dclose);
  check(d.valid(), name);
  return d;
}

void StoreWriter::write_part(hid_t dataset, const char* name, hid_t memory,
                             std::span<const hsize_t> first, std::span<const hsize_t> count,
                             const void* values) const {
  const h5::Handle space(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr),
                         H5Sclose);
  const h5::Handle into(H5Dget_space(dataset), H5Sclose);
  check(H5Sselect_hyperslab(into, H5S_SELECT_SET, first.data(), nullptr, count.data(), nullptr) >=
                0 &&
            H5Dwrite(dataset, memory, space, into, H5P_DEFAULT, values) >= 0,
        name);
}

void StoreWriter::texts(hid_t group, const std::string& name, const PackedTexts& texts,
                        Fill fill) const {
  table(group, name.c_str(), std::span<const char>(texts.bytes), fill);
  table(group, (name + "_end").c_str(), std::span<const std::uint64_t>(texts.ends), fill);
}

void StoreWriter::start_writeback() {
  void* fd = nullptr;
  if (H5Fget_vfd_handle(file_, H5P_DEFAULT, &fd) < 0 || fd == nullptr) return;
  // What is new is at the end of the file.
  const off_t end = lseek(*static_cast<int*>(fd), 0, SEEK_END);
  if (end - written_back_ < off_t{32} << 20) return;
  // Advice: where it fails, commit() does all of it.
  sync_file_range(*static_cast<int*>(fd), written_back_, end - written_back_,
                  SYNC_FILE_RANGE_WRITE);
  written_back_ = end;
}

void StoreWriter::commit() {
  check(file_.close_now(), "close");
  // The file's bytes are on the disk before its name is, and the name survives a power cut too.
  File::open(temporary_, Exit::data).sync();
  rename_file(temporary_, path_, Exit::data);
  committed_ = true;
  sync_directory(std::filesystem::absolute(path_).parent_path(), Exit::data);
}

}  // namespace weft
