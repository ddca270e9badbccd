#include "models/sadtalker/face/paste.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace weft {
namespace {

// GCC's vectors: registers of AVX2, which weft needs on x86 anyway, or pairs of NEON's.
#ifdef __x86_64__
#define WEFT_FUSED __attribute__((target("avx2,fma")))
#else
#define WEFT_FUSED
#endif
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(32)));

template <class V, class T>
WEFT_FUSED inline void take(V& v, const T* from) {
  std::memcpy(&v, from, sizeof v);
}
template <class V, class T>
WEFT_FUSED inline void put(T* to, const V& v) {
  std::memcpy(to, &v, sizeof v);
}
// sum += a * b, rounded once.
template <class V, class A>
WEFT_FUSED inline void add_product(V& sum, const A& a, const V& b) {
#ifdef __x86_64__
  sum = a * b + sum;
#else  // where the compiler must not fuse by itself (CMakeLists.txt)
  const V all = a - V{};
  for (std::size_t i = 0; i < sizeof sum / sizeof sum[0]; ++i)
    sum[i] = std::fma(all[i], b[i], sum[i]);
#endif
}

// A panel of the matrix, and the rows that are multiplied by it together.
constexpr std::int64_t panel_columns = 16, row_group = SineTransform::rows_at_once;

// sums [row_group,panel_columns] = rows x [row_group] of `stride` values times a panel's `count`
// rows.
WEFT_FUSED void multiply(const float* x, std::int64_t stride, const float* panel,
                         std::int64_t count, float* sums) {
  Floats low[row_group] = {}, high[row_group] = {};
  for (std::int64_t k = 0; k < count; ++k, panel += panel_columns) {
    Floats a, b;
    take(a, panel);
    take(b, panel + 8);
#pragma GCC unroll 6
    for (std::int64_t r = 0; r < row_group; ++r) {
      const float value = x[r * stride + k];
      add_product(low[r], value, a);
      add_product(high[r], value, b);
    }
  }
#pragma GCC unroll 6
  for (std::int64_t r = 0; r < row_group; ++r) {
    put(sums + r * panel_columns, low[r]);
    put(sums + r * panel_columns + 8, high[r]);
  }
}

}  // namespace

SineTransform::SineTransform(std::int64_t n)
    : n_(n), odd_((n + 1) / 2), sines_(static_cast<std::size_t>(2 * (n + 1))) {
  for (std::int64_t i = 0; i < std::ssize(sines_); ++i)
    sines_[i] = std::sin(M_PI * static_cast<double>(i) / static_cast<double>(n + 1));
  const std::int64_t count = (odd_ + panel_columns - 1) / panel_columns;
  panels_.resize(count * n * panel_columns);
  float* to = panels_.data();
  for (std::int64_t p = 0; p < count; ++p)
    for (std::int64_t place = 0; place < n; ++place)
      for (std::int64_t i = p * panel_columns; i < (p + 1) * panel_columns; ++i)
        *to++ = i < odd_ ? static_cast<float>(sine(number(place) * (i + 1))) : 0.0f;
}

void SineTransform::run(const float* x, std::int64_t rows, float* to) const {
  WEFT_ASSERT(rows % row_group == 0);
  float odd[row_group * panel_columns], even[row_group * panel_columns];
  const float* panel = panels_.data();
  for (std::int64_t first = 0; first < odd_; first += panel_columns, panel += n_ * panel_columns) {
    const std::int64_t last = std::min(first + panel_columns, odd_);
    for (std::int64_t row = 0; row < rows; row += row_group) {
      const float* const own = x + row * n_;
      multiply(own, n_, panel, odd_, odd);
      multiply(own + odd_, n_, panel + odd_ * panel_columns, n_ - odd_, even);
      for (std::int64_t r = 0; r < row_group; ++r) {
        float* const result = to + (row + r) * n_;
        const float *const a = odd + r * panel_columns - first, *const b = even +
                                                                           r * panel_columns -
                                                                           first;
        // The middle one of an odd number is written twice; its even coefficients have sines of 0.
        for (std::int64_t i = first; i < last; ++i) {
          result[n_ - 1 - i] = a[i] - b[i];
          result[i] = a[i] + b[i];
        }
      }
    }
  }
}

namespace {

constexpr std::int64_t channels = 3;
// The region is the box without its outermost ring. The gradients of its `rim` outermost pixels are
// the picture's.
constexpr std::int64_t ring = 1, rim = 3;
// Lines (rows or columns) of the unknowns at which the equation has a right side: three where the
// region begins, two where it ends.
constexpr std::int64_t rim_lines = 5;
// The sines of a column's frequencies are solved some at a time, so that they stay in the cache.
constexpr std::int64_t frequencies = 64;

std::int64_t rim_line(std::int64_t i, std::int64_t count) {  // numbered from 1
  return i < rim ? i + 1 : count + 1 + i - rim_lines;
}
bool in_rim(std::int64_t line, std::int64_t count) { return line <= rim || line >= count - 1; }

}  // namespace

// With f the frame and g the picture in the region, the blended u has u = g on the region's
// outermost ring, and inside  laplace(u) = div(f's gradients, g's in the rim).  For u = f + v that
// is
//   v = e on the ring,  laplace(v) = div(e's gradients in the rim, 0 elsewhere),  e = g - f,
// so that the right side is 0 but for lines next to the ring. Rows are transformed to sines - most
// of them have five values -, which leaves for each frequency a tridiagonal equation along the
// columns, and back. In f64 ahead of the way back: low frequencies add up along a whole column.
//
// The unknowns are numbered 1 to `columns` and 1 to `rows` in the region, whose ring is 0 and
// columns + 1, rows + 1.
class Pasting::Solver {
 public:
  Solver(std::int64_t rows, std::int64_t columns);

  // u of the region with ring, e(row, column, channel) given; put(row, v [columns,3]) is called for
  // each row of unknowns.
  template <class E, class Put>
  void solve(const E& e, const Put& put) const;

 private:
  // The right side at an unknown, with the ring's known values on it.
  template <class E>
  double right_side(const E& e, std::int64_t row, std::int64_t column, std::int64_t channel) const;
  // The frequencies [first, first + count) of all rows, whose right sides are given: whole rows by
  // the frequencies of their values, others by the values of their rim.
  WEFT_FUSED void solve_frequencies(std::int64_t first, std::int64_t count, const double* whole,
                                    const double* sides, double* between, float* to) const;

  std::int64_t rows_, columns_, padded_;  // padded: frequencies, in whole blocks
  SineTransform sines_;
  std::vector<double> rim_sines_;  // [rim_lines, padded]
  // 1 / pivots of the elimination, [padded / frequencies, rows, frequencies]. The matrix is
  // diagonally dominant: no other order of the pivots is needed.
  std::vector<double> pivots_;
};

Pasting::Solver::Solver(std::int64_t rows, std::int64_t columns)
    : rows_(rows),
      columns_(columns),
      padded_((columns + frequencies - 1) / frequencies * frequencies),
      sines_(columns),
      rim_sines_(static_cast<std::size_t>(rim_lines * padded_)),
      pivots_(static_cast<std::size_t>(rows * padded_)) {
  for (std::int64_t place = 0; place < columns; ++place) {
    const std::int64_t number = sines_.number(place);
    for (std::int64_t i = 0; i < rim_lines; ++i)
      rim_sines_[i * padded_ + place] = sines_.sine(number * rim_line(i, columns));
    const double diagonal =
        4.0 - 2.0 * std::cos(M_PI * static_cast<double>(number) / static_cast<double>(columns + 1));
    double* to = pivots_.data() + place / frequencies * frequencies * rows + place % frequencies;
    double pivot = 0.0;
    for (std::int64_t row = 0; row < rows; ++row, to += frequencies)
      *to = pivot = 1.0 / (diagonal - pivot);
  }
}

template <class E>
double Pasting::Solver::right_side(const E& e, std::int64_t row, std::int64_t column,
                                   std::int64_t channel) const {
  const auto kept = [&](std::int64_t y, std::int64_t x) {  // whether the gradient is the picture's
    return y < rim || y >= rows_ + 2 - rim || x < rim || x >= columns_ + 2 - rim;
  };
  const int own = e(row, column, channel), above = e(row - 1, column, channel),
            left = e(row, column - 1, channel), below = e(row + 1, column, channel),
            right = e(row, column + 1, channel);
  int sum = 0;
  if (kept(row, column)) sum += (right - own) + (below - own);
  if (kept(row, column - 1)) sum -= own - left;
  if (kept(row - 1, column)) sum -= own - above;
  if (row == 1) sum -= above;
  if (row == rows_) sum -= below;
  if (column == 1) sum -= left;
  if (column == columns_) sum -= right;
  return sum;
}

WEFT_FUSED void Pasting::Solver::solve_frequencies(std::int64_t first, std::int64_t count,
                                                   const double* whole, const double* sides,
                                                   double* between, float* to) const {
  // -v[row - 1] + diagonal v[row] - v[row + 1] = -(right side)
  const double* const pivots = pivots_.data() + first * rows_;
  constexpr std::int64_t line = channels * frequencies;
  for (std::int64_t row = 1; row <= rows_; ++row) {
    double* const own = between + (row - 1) * line;
    for (std::int64_t c = 0; c < channels; ++c) {
      const double* side = sides + ((row - 1) * channels + c) * rim_lines;
      const std::int64_t number = row <= rim ? row - 1 : row - 1 - rows_ + rim_lines;
      const double* const given = whole + (number * channels + c) * padded_ + first;
      for (std::int64_t k = 0; k < frequencies; k += 4) {
        Doubles sum{}, before{}, pivot;
        if (in_rim(row, rows_))
          take(sum, given + k);
        else
          for (std::int64_t i = 0; i < rim_lines; ++i) {
            Doubles sines;
            take(sines, rim_sines_.data() + i * padded_ + first + k);
            add_product(sum, side[i], sines);
          }
        if (row > 1) take(before, own - line + c * frequencies + k);
        take(pivot, pivots + (row - 1) * frequencies + k);
        const Doubles value = (before - sum) * pivot;
        put(own + c * frequencies + k, value);
      }
    }
  }
  const double scale = 2.0 / static_cast<double>(columns_ + 1);
  for (std::int64_t row = rows_; row >= 1; --row) {
    double* const own = between + (row - 1) * line;
    for (std::int64_t c = 0; c < channels; ++c) {
      if (row < rows_)
        for (std::int64_t k = 0; k < frequencies; k += 4) {
          double* const value = own + c * frequencies + k;
          Doubles sum, pivot, below;
          take(sum, value);
          take(pivot, pivots + (row - 1) * frequencies + k);
          take(below, value + line);
          add_product(sum, pivot, below);
          put(value, sum);
        }
      float* const result = to + ((row - 1) * channels + c) * columns_ + first;
      for (std::int64_t k = 0; k < count; ++k)
        result[k] = static_cast<float>(scale * own[c * frequencies + k]);
    }
  }
}

template <class E, class Put>
void Pasting::Solver::solve(const E& e, const Put& put) const {
  // Right sides: of whole rows at the region's beginning and end, of the others at the rim alone.
  constexpr std::int64_t whole_rows =
      (rim_lines * channels + row_group - 1) / row_group * row_group;
  std::vector<float> values(whole_rows * columns_), found(values.size());
  std::vector<double> whole(rim_lines * channels * padded_),
      sides(static_cast<std::size_t>(rows_ * channels * rim_lines));
  for (std::int64_t row = 1; row <= rows_; ++row)
    for (std::int64_t c = 0; c < channels; ++c) {
      if (!in_rim(row, rows_)) {
        double* const to = sides.data() + ((row - 1) * channels + c) * rim_lines;
        for (std::int64_t i = 0; i < rim_lines; ++i)
          to[i] = right_side(e, row, rim_line(i, columns_), c);
        continue;
      }
      const std::int64_t number = row <= rim ? row - 1 : row - 1 - rows_ + rim_lines;
      float* const to = values.data() + (number * channels + c) * columns_;
      for (std::int64_t place = 0; place < columns_; ++place)
        to[place] = static_cast<float>(right_side(e, row, sines_.number(place), c));
    }
  sines_.run(values.data(), whole_rows, found.data());
  for (std::int64_t i = 0; i < rim_lines * channels; ++i)
    for (std::int64_t place = 0; place < columns_; ++place)
      whole[i * padded_ + place] = found[i * columns_ + sines_.number(place) - 1];

  constexpr std::int64_t rows_at_once = 8;
  static_assert(rows_at_once * channels % row_group == 0);
  const std::int64_t lines = (rows_ + rows_at_once - 1) / rows_at_once * rows_at_once;
  std::vector<float> solved(lines * channels * columns_);
  std::vector<double> between(rows_ * channels * frequencies);
  for (std::int64_t first = 0; first < columns_; first += frequencies)
    solve_frequencies(first, std::min(frequencies, columns_ - first), whole.data(), sides.data(),
                      between.data(), solved.data());
  std::vector<float> back(rows_at_once * channels * columns_);
  for (std::int64_t first = 0; first < rows_; first += rows_at_once) {
    sines_.run(solved.data() + first * channels * columns_, rows_at_once * channels, back.data());
    for (std::int64_t row = first; row < std::min(first + rows_at_once, rows_); ++row)
      put(row + 1, back.data() + (row - first) * channels * columns_);
  }
}

Pasting::Pasting(ImageFile picture, const PixelBox& box) : picture_(std::move(picture)), box_(box) {
  WEFT_ASSERT(std::ssize(picture_.values) == picture_.height * picture_.width * channels);
  WEFT_CHECK(box.x1 >= 0 && box.y1 >= 0 && box.x1 < box.x2 && box.y1 < box.y2 &&
                 box.x2 <= picture_.width && box.y2 <= picture_.height,
             Exit::data,
             "the face's box has to lie inside the picture: use a picture that shows more around "
             "the face, or another preprocess mode",
             "frames cannot be pasted to columns {} to {}, rows {} to {} of a picture of {}x{}",
             box.x1, box.x2, box.y1, box.y2, picture_.width, picture_.height);
  WEFT_CHECK(std::min(box.width(), box.height()) >= least_side, Exit::data,
             "use a picture with a larger face, or another preprocess mode",
             "a face of {}x{} pixels is too small for frames to be pasted there, {} is the least",
             box.width(), box.height(), least_side);
  solver_ =
      std::make_unique<const Solver>(box.height() - 2 * (ring + 1), box.width() - 2 * (ring + 1));
}
Pasting::~Pasting() = default;
Pasting::Pasting(Pasting&&) noexcept = default;
Pasting& Pasting::operator=(Pasting&&) noexcept = default;

ImageFile Pasting::resized(const ImageFile& frame) const {
  WEFT_ASSERT(frame.height > 0 && frame.width > 0 &&
              std::ssize(frame.values) == frame.height * frame.width * channels);
  return resize_bilinear(frame, box_.height(), box_.width());
}

ImageFile Pasting::paste(const ImageFile& frame) const {
  const ImageFile patch = resized(frame);
  ImageFile result = picture_;
  // A pixel of the region: in the picture, and in the patch.
  const auto at = [&](const ImageFile& in, std::int64_t top, std::int64_t left, std::int64_t row,
                      std::int64_t column) {
    return in.values.data() + ((top + ring + row) * in.width + left + ring + column) * channels;
  };
  const auto difference = [&](std::int64_t row, std::int64_t column, std::int64_t c) {
    return static_cast<int>(at(picture_, box_.y1, box_.x1, row, column)[c]) -
           static_cast<int>(at(patch, 0, 0, row, column)[c]);
  };
  const std::int64_t columns = box_.width() - 2 * (ring + 1);
  solver_->solve(difference, [&](std::int64_t row, const float* v) {
    const std::uint8_t* from = at(patch, 0, 0, row, 1);
    std::uint8_t* to =
        result.values.data() + (at(picture_, box_.y1, box_.x1, row, 1) - picture_.values.data());
    for (std::int64_t i = 0; i < columns; ++i)
      for (std::int64_t c = 0; c < channels; ++c) {
        const float u = static_cast<float>(*from++) + v[c * columns + i];
        *to++ = static_cast<std::uint8_t>(std::clamp(u, 0.0f, 255.0f));
      }
  });
  return result;
}

}  // namespace weft
