// Whether products and convolutions in f32 may round their factors to TF32 (10 bits of mantissa) on
// GPUs, so that tensor cores multiply them: deck key device.tf32. One setting per process, made
// before the first operation; sums stay in f32.
#pragma once

namespace weft {

inline bool& tf32_setting() {
  static bool allowed = false;
  return allowed;
}
inline void allow_tf32(bool allowed) { tf32_setting() = allowed; }
inline bool tf32_allowed() { return tf32_setting(); }

}  // namespace weft
