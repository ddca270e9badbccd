// The Fourier transform of a real 16x16 tile and back, a vector of channels at a time. Included
// inside an unnamed namespace, behind simd.h.

#pragma once

constexpr int ft_size = 16;
// Of the transform's 256 values those that the others follow from: 7 columns of 16, and 9 each of
// the columns 0 and 8, which belong to real sequences.
constexpr int ft_points = 7 * ft_size + 2 * 9;

// The discrete transform of 4 values `step` apart.
template <int step>
static inline void transform_four(vf* re, vf* im) {
  const vf sr = re[0] + re[2 * step], si = im[0] + im[2 * step];
  const vf dr = re[0] - re[2 * step], di = im[0] - im[2 * step];
  const vf tr = re[step] + re[3 * step], ti = im[step] + im[3 * step];
  const vf er = re[step] - re[3 * step], ei = im[step] - im[3 * step];
  re[0] = sr + tr, im[0] = si + ti;
  re[step] = dr + ei, im[step] = di - er;
  re[2 * step] = sr - tr, im[2 * step] = si - ti;
  re[3 * step] = dr - ei, im[3 * step] = di + er;
}

// X[k] = sum of x[n] e^(-2 pi i n k / 16), in place, by 4 x 4. With re and im exchanged the way
// back, times 16.
[[gnu::noinline]] static void transform_sixteen(vf* re, vf* im) {
  constexpr float c1 = 0.92387953251128676f, s1 = 0.38268343236508977f, h = 0.70710678118654752f;
  // cos and sin of 2 pi n k / 16.
  constexpr float cosine[4][4] = {{1, 1, 1, 1}, {1, c1, h, s1}, {1, h, 0, -h}, {1, s1, -h, -c1}};
  constexpr float sine[4][4] = {{0, 0, 0, 0}, {0, s1, h, c1}, {0, h, 1, h}, {0, c1, h, -s1}};
  vf ar[ft_size], ai[ft_size];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    vf xr[4] = {re[n], re[n + 4], re[n + 8], re[n + 12]};
    vf xi[4] = {im[n], im[n + 4], im[n + 8], im[n + 12]};
    transform_four<1>(xr, xi);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const float c = cosine[n][k], s = sine[n][k];
      ar[4 * n + k] = n * k == 0 ? xr[k] : xr[k] * c + xi[k] * s;
      ai[4 * n + k] = n * k == 0 ? xi[k] : xi[k] * c - xr[k] * s;
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    transform_four<4>(ar + k, ai + k);
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) re[k + 4 * m] = ar[k + 4 * m], im[k + 4 * m] = ai[k + 4 * m];
  }
}

// to (re, im) = twice the transform of the tile [16][16], of which only the first `rows` rows, an
// even number, are not zero. Two real rows are one complex one, and so are columns 0 and 8.
static inline void tile_to_points(const vf* tile, int rows, vf* re, vf* im) {
  vf cr[8 * ft_size] = {}, ci[8 * ft_size] = {};  // [column][row], columns 0 and 8 together
  for (int i = 0; i < rows; i += 2) {
    vf zr[ft_size], zi[ft_size];
    for (int j = 0; j < ft_size; ++j) {
      zr[j] = tile[i * ft_size + j];
      zi[j] = tile[(i + 1) * ft_size + j];
    }
    transform_sixteen(zr, zi);
    cr[i] = zr[0], ci[i] = zr[8];
    cr[i + 1] = zi[0], ci[i + 1] = zi[8];
    for (int k = 1; k < 8; ++k) {
      vf *to_r = cr + k * ft_size + i, *to_i = ci + k * ft_size + i;
      to_r[0] = zr[k] + zr[16 - k], to_i[0] = zi[k] - zi[16 - k];
      to_r[1] = zi[k] + zi[16 - k], to_i[1] = zr[16 - k] - zr[k];
    }
  }
  for (int k = 0; k < 8; ++k) transform_sixteen(cr + k * ft_size, ci + k * ft_size);
  for (int p = 0; p < 7 * ft_size; ++p) re[p] = cr[ft_size + p], im[p] = ci[ft_size + p];
  vf *r0 = re + 7 * ft_size, *i0 = im + 7 * ft_size;
  for (int k = 0; k < 9; ++k) {
    const int other = (ft_size - k) % ft_size;
    r0[k] = cr[k] + cr[other], i0[k] = ci[k] - ci[other];
    r0[9 + k] = ci[k] + ci[other], i0[9 + k] = cr[other] - cr[k];
  }
}

// tile [16][16] = 256 times the real tile with the transform (re, im).
static inline void points_to_tile(const vf* re, const vf* im, vf* tile) {
  vf cr[8 * ft_size], ci[8 * ft_size];
  for (int p = 0; p < 7 * ft_size; ++p) cr[ft_size + p] = re[p], ci[ft_size + p] = im[p];
  const vf *r0 = re + 7 * ft_size, *i0 = im + 7 * ft_size;
  for (int k = 0; k < 9; ++k) {
    const int other = (ft_size - k) % ft_size;
    cr[k] = r0[k] - i0[9 + k], ci[k] = i0[k] + r0[9 + k];
    if (other != k) cr[other] = r0[k] + i0[9 + k], ci[other] = r0[9 + k] - i0[k];
  }
  // Of the values that are real by their place the other part is not taken.
  for (const int k : {0, 8}) cr[k] = r0[k], ci[k] = r0[9 + k];
  for (int k = 0; k < 8; ++k) transform_sixteen(ci + k * ft_size, cr + k * ft_size);
  for (int i = 0; i < ft_size; i += 2) {
    vf *zr = tile + i * ft_size, *zi = zr + ft_size;
    zr[0] = cr[i], zr[8] = ci[i];
    zi[0] = cr[i + 1], zi[8] = ci[i + 1];
    for (int k = 1; k < 8; ++k) {
      const vf *from_r = cr + k * ft_size + i, *from_i = ci + k * ft_size + i;
      zr[k] = from_r[0] - from_i[1], zi[k] = from_i[0] + from_r[1];
      zr[16 - k] = from_r[0] + from_i[1], zi[16 - k] = from_r[1] - from_i[0];
    }
    transform_sixteen(zi, zr);
  }
}
