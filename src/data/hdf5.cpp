#include "data/hdf5.h"

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
  const std::string mark = "error message = '";
  const auto begin = reason.find(mark);
  if (begin != std::string::npos) {
    const auto end = reason.find('\'', begin + mark.size());
    reason = reason.substr(begin + mark.size(), end - begin - mark.size());
  }
  return reason;
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
