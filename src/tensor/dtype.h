// Element types of tensors, and bf16 arithmetic helpers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace weft {

enum class DType : std::uint8_t { f32, bf16, f16, i64, i32, u8, boolean, f64 };

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i64:
    case DType::f64:
      return 8;
    case DType::u8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"f32", "bf16", "f16", "i64", "i32", "u8", "bool", "f64"};
  return names[static_cast<int>(t)];
}

// The upper half of an IEEE binary32. Conversion from float rounds to nearest, ties to even.
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float f) {
    std::uint32_t u = std::bit_cast<std::uint32_t>(f);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    u += 0x7fffu + ((u >> 16) & 1u);
    bits = nan ? 0x7fc0u : static_cast<std::uint16_t>(u >> 16);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

// IEEE binary16. Conversion from float rounds to nearest, ties to even; what is too large becomes
// infinite.
struct f16 {
  std::uint16_t bits = 0;

  f16() = default;
  explicit f16(float f) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
    const auto sign = static_cast<std::uint16_t>(u >> 16 & 0x8000u);
    const std::uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
      bits = 0x7e00u;  // NaN
    } else if (a >= 0x38800000u) {
      // Normal, or past the largest finite one: 13 bits of mantissa go, and the exponent's bias
      // changes.
      const std::uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
      bits = static_cast<std::uint16_t>(
          sign | (rounded >= 0x47800000u ? 0x7c00u : (rounded - 0x38000000u) >> 13));
    } else {
      // A multiple of 2^-24: adding 0.5 leaves the rounded multiple in the lowest bits.
      const float shifted = std::bit_cast<float>(a) + 0.5f;
      bits = static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) & 0x7ffu));
    }
  }
  explicit operator float() const {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16, a = bits & 0x7fffu;
    const std::uint32_t magnitude =
        a >= 0x7c00u  ? 0x7f800000u | (a & 0x3ffu) << 13
        : a >= 0x400u ? (a << 13) + 0x38000000u
                      : std::bit_cast<std::uint32_t>(static_cast<float>(a) * 0x1p-24f);
    return std::bit_cast<float>(sign | magnitude);
  }
};

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct dtype_of<bool> {
  static constexpr DType value = DType::boolean;
};

}  // namespace weft
