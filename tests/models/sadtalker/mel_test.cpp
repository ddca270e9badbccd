// The mel spectrogram against its definition, and the windows that are cut out of it.
#include "models/sadtalker/speech/mel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>

namespace weft {
namespace {

std::vector<float> tone(double hz, std::size_t count) {
  std::vector<float> samples;
  for (std::size_t i = 0; i < count; ++i)
    samples.push_back(0.5f *
                      static_cast<float>(std::sin(2 * M_PI * hz * static_cast<double>(i) / 16000)));
  return samples;
}
std::vector<float> noise(std::size_t count) {
  std::vector<float> samples;
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    samples.push_back(static_cast<float>(state >> 8) * 0x1p-24f - 0.5f);
  }
  return samples;
}

TEST(Mel, SilenceIsTheLowestValue) {
  const std::vector<float> samples(6400, 0.0f);
  const Mel mel(samples);
  EXPECT_EQ(mel.frames(), 10);
  EXPECT_EQ(mel.rows(), 33);
  for (const float v : mel.rows(0, mel.rows())) EXPECT_EQ(v, -4.0f);
}

// Band 40 of one row, by a plain Fourier sum.
TEST(Mel, IsWhatItsDefinitionSays) {
  const std::vector<float> samples = noise(3200);
  const Mel mel(samples);
  constexpr int row = 1, band = 40;  // reaches before the first sample
  const auto hz = [](double mels) {
    return mels < 15 ? mels * 200 / 3 : 1000 * std::pow(6.4, (mels - 15) / 27);
  };
  const double low = 55 * 3.0 / 200, high = 15 + 27 * std::log(7.6) / std::log(6.4);
  const auto edge = [&](int i) { return hz(low + (high - low) * i / 81); };
  double sum = 0;
  for (int k = 0; k <= 400; ++k) {
    const double f = 20.0 * k;
    const double height = std::min((f - edge(band)) / (edge(band + 1) - edge(band)),
                                   (edge(band + 2) - f) / (edge(band + 2) - edge(band + 1)));
    if (height <= 0) continue;
    std::complex<double> bin = 0;
    for (int i = 0; i < 800; ++i) {
      const int t = row * 200 - 400 + i;
      if (t < 0) continue;
      const auto at = static_cast<std::size_t>(t);
      const double value = samples[at] - (t > 0 ? 0.97 * samples[at - 1] : 0.0);
      bin += value * (0.5 - 0.5 * std::cos(2 * M_PI * i / 800)) *
             std::polar(1.0, -2 * M_PI * k * i / 800);
    }
    sum += height * 2 / (edge(band + 2) - edge(band)) * std::abs(bin);
  }
  const double expected = 8 * ((20 * std::log10(sum) - 20 + 100) / 100) - 4;
  ASSERT_LT(std::abs(expected), 4);
  EXPECT_NEAR(mel.rows(row, 1)[band], expected, 1e-5);
}

TEST(Mel, ATonesBandIsTheLoudest) {
  const std::vector<float> samples = tone(1000, 16000);
  const Mel mel(samples);
  const std::vector<float> row = mel.rows(40, 1);
  const auto loudest = std::ranges::max_element(row) - row.begin();
  // 1 kHz is 15 mels; the bands' centres lie 81 to the range of 0.825 to 44.5 mels.
  EXPECT_NEAR(static_cast<double>(loudest), (15 - 0.825) / (44.5 - 0.825) * 81 - 1, 1.0);
}

TEST(Mel, WindowsStartWhereTheyShould) {
  const std::int64_t starts[] = {-6, -3, 0, 3, 6, 9, 12, 16};
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(mel_window_start(i), starts[i]) << i;
  const std::vector<float> samples = noise(640 * 30);
  const Mel mel(samples);
  const std::vector<float> rows = mel.rows(0, mel.rows());
  const std::vector<float> windows = mel.windows(0, mel.frames());
  for (std::int64_t frame = 0; frame < mel.frames(); ++frame)
    for (std::int64_t band = 0; band < mel_bands; ++band)
      for (std::int64_t i = 0; i < mel_window; ++i) {
        const std::int64_t row =
            std::clamp<std::int64_t>(mel_window_start(frame) + i, 0, mel.rows() - 1);
        ASSERT_EQ(windows[static_cast<std::size_t>((frame * mel_bands + band) * mel_window + i)],
                  rows[static_cast<std::size_t>(row * mel_bands + band)]);
      }
}

TEST(Mel, PiecesAreTheWhole) {
  const std::vector<float> samples = noise(640 * 50 + 333);  // with a part of a frame
  const Mel mel(samples);
  ASSERT_EQ(mel.frames(), 50);
  const std::vector<float> whole = mel.windows(0, 50);
  std::vector<float> pieces;
  for (const auto& [first, count] : {std::pair(0, 1), {1, 31}, {32, 18}}) {
    const std::vector<float> some = mel.windows(first, count);
    pieces.insert(pieces.end(), some.begin(), some.end());
  }
  EXPECT_EQ(pieces, whole);
  const std::vector<float> cut(samples.begin(), samples.begin() + 640 * 50);
  EXPECT_EQ(Mel(cut).windows(0, 50), whole);
}

}  // namespace
}  // namespace weft
