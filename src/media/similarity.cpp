#include "media/similarity.h"

#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "core/error.h"

namespace weft {
namespace {

constexpr std::int64_t window = 7;
constexpr std::int64_t colours = 3;

// Sums from which a window's means and variances follow: exact in 64-bit integers, so that adding
// and removing rows leaves no rounding error.
struct Sums {
  std::int64_t a = 0, b = 0, aa = 0, bb = 0, ab = 0;
  void add(std::int64_t x, std::int64_t y, std::int64_t sign) {
    a += sign * x, b += sign * y;
    aa += sign * x * x, bb += sign * y * y, ab += sign * x * y;
  }
  void add(const Sums& s, std::int64_t sign) {
    a += sign * s.a, b += sign * s.b;
    aa += sign * s.aa, bb += sign * s.bb, ab += sign * s.ab;
  }
};

double similarity(const Sums& s) {
  constexpr double n = window * window, unbiased = n / (n - 1);
  constexpr double c1 = (0.01 * 255) * (0.01 * 255), c2 = (0.03 * 255) * (0.03 * 255);
  const double ma = static_cast<double>(s.a) / n, mb = static_cast<double>(s.b) / n;
  const double va = unbiased * (static_cast<double>(s.aa) / n - ma * ma);
  const double vb = unbiased * (static_cast<double>(s.bb) / n - mb * mb);
  const double vab = unbiased * (static_cast<double>(s.ab) / n - ma * mb);
  return (2 * ma * mb + c1) * (2 * vab + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2));
}

}  // namespace

double psnr(const std::uint8_t* a, const std::uint8_t* b, std::int64_t height, std::int64_t width) {
  const std::int64_t count = height * width * colours;
  std::int64_t squares = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t d = std::int64_t{a[i]} - b[i];
    squares += d * d;
  }
  const double mean = static_cast<double>(squares) / static_cast<double>(count);
  return 10 * std::log10(255.0 * 255.0 / mean);
}

double ssim(const std::uint8_t* a, const std::uint8_t* b, std::int64_t height, std::int64_t width) {
  WEFT_CHECK(height >= window && width >= window, Exit::data, "take larger frames",
             "SSIM looks at windows of {0}x{0}, a frame of {1}x{2} has none", window, height,
             width);
  // Keep sums over the last seven rows of each column and slide the window over them.
  double total = 0;
  for (std::int64_t c = 0; c < colours; ++c) {
    std::vector<Sums> columns(width);
    for (std::int64_t y = 0; y < height; ++y) {
      for (std::int64_t x = 0; x < width; ++x) {
        const std::int64_t i = (y * width + x) * colours + c, gone = i - window * width * colours;
        Sums& column = columns[x];
        column.add(a[i], b[i], 1);
        if (y >= window) column.add(a[gone], b[gone], -1);
      }
      if (y + 1 < window) continue;
      Sums s;
      for (std::int64_t x = 0; x < width; ++x) {
        s.add(columns[x], 1);
        if (x >= window) s.add(columns[x - window], -1);
        if (x + 1 >= window) total += similarity(s);
      }
    }
  }
  const std::int64_t windows = (height - window + 1) * (width - window + 1) * colours;
  return total / static_cast<double>(windows);
}

void FrameChanges::add(std::vector<std::uint8_t> frame) {
  WEFT_CHECK(frames_ == 0 || frame.size() == last_.size(), Exit::data,
             "cut it where the size of its frames changes",
             "frame {} has another size than those before it", frames_);
  for (std::size_t i = 0; frames_ >= 1 && i < frame.size(); ++i) {
    const int d = int{frame[i]} - last_[i];
    first_ += std::abs(d);
    if (frames_ >= 2) second_ += std::abs(d - (int{last_[i]} - before_[i]));
  }
  before_ = std::move(last_);
  last_ = std::move(frame);
  ++frames_;
}

double FrameChanges::motion() const {
  return static_cast<double>(first_) /
         (static_cast<double>(frames_ - 1) * static_cast<double>(last_.size()));
}

double FrameChanges::flicker() const {
  return static_cast<double>(second_) /
         (2 * static_cast<double>(frames_ - 2) * static_cast<double>(last_.size()));
}

}  // namespace weft
