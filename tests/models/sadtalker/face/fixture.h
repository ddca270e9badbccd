// Pictures and landmarks that need no file.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/error.h"
#include "models/sadtalker/face/landmarks.h"

namespace weft::test {

inline ImageFile noisy_picture(std::int64_t height, std::int64_t width) {
  ImageFile p{height, width, {}};
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x)
      for (std::int64_t c = 0; c < 3; ++c)
        p.values.push_back(static_cast<std::uint8_t>(x * 37 + y * 91 + c * 53 + x * y * 7));
  return p;
}

// The sum of the bytes, and of the bytes times their places from 1 on.
inline std::pair<std::int64_t, std::int64_t> sums(const ImageFile& p) {
  std::int64_t sum = 0, weighted = 0;
  for (std::size_t i = 0; i < p.values.size(); ++i) {
    sum += p.values[i];
    weighted += static_cast<std::int64_t>(i + 1) * p.values[i];
  }
  return {sum, weighted};
}

// Eyes `size` apart around (x, y), a nose and a mouth; other points are in the middle.
inline Landmarks face_at(float x, float y, float size, float slant = 0) {
  Landmarks l;
  l.fill({x, y});
  const auto put = [&](std::size_t i, float across, float down) {
    l[i] = {x + size * (across + slant * down), y + size * (down - slant * across)};
  };
  for (std::size_t i = 0; i < 6; ++i) {
    put(36 + i, -0.5f + 0.01f * static_cast<float>(i), -0.25f);
    put(42 + i, 0.5f + 0.01f * static_cast<float>(i), -0.25f);
  }
  put(30, 0, 0.25f);
  put(48, -0.4f, 0.75f);
  put(54, 0.4f, 0.75f);
  return l;
}

// What f() complains about; fails where it does not, or under another code.
template <class F>
std::string complaint(F f, Exit code = Exit::data) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace weft::test
