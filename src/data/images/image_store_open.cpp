#include "data/images/image_store_open.h"

#include <span>

#include "core/error.h"
#include "data/hdf5.h"

namespace weft {
namespace {

constexpr const char* remake = "make the store again with `weft ingest`";

bool has_format(hid_t top) {
  if (H5Aexists(top, "format") <= 0) return false;
  const h5::Handle a(H5Aopen(top, "format", H5P_DEFAULT), H5Aclose);
  const h5::Handle type(a.valid() ? H5Aget_type(a) : H5I_INVALID_HID, H5Tclose);
  const h5::Handle space(a.valid() ? H5Aget_space(a) : H5I_INVALID_HID, H5Sclose);
  constexpr std::size_t longest = 64;
  if (!type.valid() || H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) > 0 ||
      H5Tget_size(type) >= longest || H5Sget_simple_extent_npoints(space) != 1)
    return false;
  char text[longest] = {};
  return H5Aread(a, type, text) >= 0 && std::string(text) == image_store_format;
}

}  // namespace

std::optional<StoreFacts> open_images_checked(const std::string& path, std::uint64_t bytes,
                                              const std::function<void()>& alive) {
  const h5::Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, h5::file_access()), H5Fclose);
  if (!file.valid()) return std::nullopt;
  const h5::Handle top(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose);
  if (!top.valid() || !has_format(top)) return std::nullopt;

  const auto check = [&](bool ok, const std::string& fault) {
    WEFT_CHECK(ok, Exit::data, remake, "image store {} {}", path, fault);
  };
  const auto attribute = [&](const char* name) {
    std::int64_t value = 0;
    const h5::Handle a(H5Aopen(top, name, H5P_DEFAULT), H5Aclose);
    check(a.valid(), fmt::format("has no attribute {}", name));
    const h5::Handle space(H5Aget_space(a), H5Sclose);
    const h5::Handle type(H5Aget_type(a), H5Tclose);
    check(H5Sget_simple_extent_npoints(space) == 1 && H5Tget_class(type) == H5T_INTEGER &&
              H5Aread(a, H5T_NATIVE_INT64, &value) >= 0,
          fmt::format("has an attribute {} that is not one whole number", name));
    return value;
  };
  const std::int64_t version = attribute("schema_version");
  check(
      version == 1 || version == image_store_version,
      fmt::format("has schema version {}, this weft reads 1 and {}", version, image_store_version));
  StoreFacts facts;
  facts.images = true;
  facts.num_classes = attribute("num_classes");
  check(facts.num_classes >= 0 && facts.num_classes <= 255,
        fmt::format("has {} classes", facts.num_classes));
  facts.tables_xxh3 = static_cast<std::uint64_t>(attribute("tables_xxh3"));
  check(H5Lexists(file, "images", H5P_DEFAULT) > 0, "has no group /images");
  const h5::Handle group(H5Gopen2(file, "images", H5P_DEFAULT), H5Gclose);
  check(group.valid(), "has no group /images");
  for (const ImageArray& array :
       std::span(image_arrays).first(version == 1 ? image_arrays_v1 : image_arrays.size())) {
    alive();
    check(H5Lexists(group, array.name, H5P_DEFAULT) > 0,
          fmt::format("has no dataset {}", array.name));
    const h5::Handle d(H5Dopen2(group, array.name, H5P_DEFAULT), H5Dclose);
    check(d.valid(), fmt::format("has an unreadable dataset {}: {}", array.name, h5::last_error()));
    const h5::Handle type(H5Dget_type(d), H5Tclose);
    const h5::Handle space(H5Dget_space(d), H5Sclose);
    const h5::Handle how(H5Dget_create_plist(d), H5Pclose);
    check(H5Tget_class(type) == H5T_INTEGER && H5Tget_size(type) == array.element &&
              H5Tget_sign(type) == H5T_SGN_NONE &&
              (array.element == 1 || H5Tget_order(type) == H5T_ORDER_LE) &&
              H5Sget_simple_extent_ndims(space) == 1,
          fmt::format("has a dataset {} that is not a row of whole numbers of {} bytes", array.name,
                      array.element));
    hsize_t count = 0;
    H5Sget_simple_extent_dims(space, &count, nullptr);
    check(H5Pget_layout(how) == H5D_CONTIGUOUS && H5Pget_external_count(how) == 0,
          fmt::format("does not store {} in one piece", array.name));
    StoredArray& stored = facts.arrays.emplace_back();
    if (count == 0) continue;  // it has no place in the file
    check(count <= bytes / array.element,
          fmt::format("claims {} elements of {}, more than the file's {} bytes: damaged or "
                      "truncated",
                      count, array.name, bytes));
    stored.bytes = count * array.element;
    stored.offset = H5Dget_offset(d);
    check(stored.offset != HADDR_UNDEF && stored.offset <= bytes &&
              stored.bytes <= bytes - stored.offset,
          fmt::format("has {} beyond the end of the file: truncated", array.name));
  }
  return facts;
}

}  // namespace weft
