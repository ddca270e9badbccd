#include "data/hdf5.h"

#include <fmt/format.h>

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
