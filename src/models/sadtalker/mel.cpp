#include "models/sadtalker/mel.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <unsupported/Eigen/FFT>

#include "core/error.h"
#include "models/sadtalker/speech_motion.h"

namespace weft {
namespace {

constexpr std::int64_t fft_size = 800, hop = 200, bins = fft_size / 2 + 1;
constexpr double lowest_hz = 55, highest_hz = 7600;

// Slaney's scale: linear below 1 kHz, logarithmic above.
constexpr double linear_hz = 200.0 / 3, log_start_hz = 1000,
                 log_start_mel = log_start_hz / linear_hz;
const double log_step = std::log(6.4) / 27;

double to_mel(double hz) {
  return hz < log_start_hz ? hz / linear_hz
                           : log_start_mel + std::log(hz / log_start_hz) / log_step;
}
double to_hz(double mel) {
  return mel < log_start_mel ? mel * linear_hz
                             : log_start_hz * std::exp(log_step * (mel - log_start_mel));
}

// A band's triangle over the bins from `first` on, of equal area in every band.
struct Band {
  std::int64_t first = 0;
  std::vector<double> weights;
};

std::array<Band, mel_bands> make_bands() {
  std::array<double, mel_bands + 2> hz{};
  const double low = to_mel(lowest_hz), high = to_mel(highest_hz);
  for (std::size_t i = 0; i < hz.size(); ++i)
    hz[i] = to_hz(low + (high - low) * static_cast<double>(i) / (mel_bands + 1));
  std::array<Band, mel_bands> bands;
  for (std::size_t b = 0; b < bands.size(); ++b) {
    const double area = 2 / (hz[b + 2] - hz[b]);
    for (std::int64_t k = 0; k < bins; ++k) {
      const double f = static_cast<double>(k * speech_rate) / fft_size;
      const double rise = (f - hz[b]) / (hz[b + 1] - hz[b]);
      const double fall = (hz[b + 2] - f) / (hz[b + 2] - hz[b + 1]);
      // librosa keeps its basis in f32, before and after the scaling.
      const auto height = static_cast<float>(std::max(0.0, std::min(rise, fall)));
      if (height <= 0) continue;
      if (bands[b].weights.empty()) bands[b].first = k;
      bands[b].weights.push_back(static_cast<float>(height * area));
    }
  }
  return bands;
}

// Decibels above -120, scaled so that 0 dB is 4 and -100 dB is -4.
float normalised(double magnitude) {
  const double decibels = 20 * std::log10(std::max(1e-5, magnitude)) - 20;
  return static_cast<float>(std::clamp(8 * ((decibels + 100) / 100) - 4, -4.0, 4.0));
}

}  // namespace

struct Mel::Plan {
  std::array<Band, mel_bands> bands = make_bands();
  std::array<double, fft_size> hann{};
  Eigen::FFT<double> fft;

  Plan() {
    fft.SetFlag(Eigen::FFT<double>::HalfSpectrum);
    for (std::int64_t i = 0; i < fft_size; ++i)
      hann[i] = 0.5 - 0.5 * std::cos(2 * M_PI * static_cast<double>(i) / fft_size);
  }
};

Mel::Mel(std::span<const float> samples)
    : samples_(samples.first(samples.size() / speech_samples_per_frame * speech_samples_per_frame)),
      plan_(std::make_unique<Plan>()) {}
Mel::~Mel() = default;

std::int64_t Mel::frames() const { return std::ssize(samples_) / speech_samples_per_frame; }
std::int64_t Mel::rows() const { return samples_.empty() ? 0 : 1 + std::ssize(samples_) / hop; }

std::vector<float> Mel::rows(std::int64_t first, std::int64_t count) const {
  WEFT_ASSERT(first >= 0 && count >= 0 && first + count <= rows());
  constexpr double emphasis = 0.97;
  std::vector<float> out(count * mel_bands);
  std::vector<double> piece(fft_size);
  std::vector<std::complex<double>> spectrum(bins);
  std::array<double, bins> magnitude{};
  for (std::int64_t row = 0; row < count; ++row) {
    // Centred on the row's sample; zeros beyond both ends of the speech.
    const std::int64_t begin = (first + row) * hop - fft_size / 2;
    for (std::int64_t i = 0; i < fft_size; ++i) {
      const std::int64_t t = begin + i;
      double value = 0;
      if (t >= 0 && t < std::ssize(samples_)) {
        value = samples_[t];
        if (t > 0) value -= emphasis * samples_[t - 1];
      }
      piece[i] = value * plan_->hann[i];
    }
    plan_->fft.fwd(spectrum.data(), piece.data(), fft_size);
    for (std::size_t k = 0; k < bins; ++k) magnitude[k] = std::abs(spectrum[k]);
    for (std::size_t b = 0; b < mel_bands; ++b) {
      const Band& band = plan_->bands[b];
      double sum = 0;
      for (std::size_t k = 0; k < band.weights.size(); ++k)
        sum += band.weights[k] * magnitude[static_cast<std::size_t>(band.first) + k];
      out[static_cast<std::size_t>(row) * mel_bands + b] = normalised(sum);
    }
  }
  return out;
}

std::vector<float> Mel::windows(std::int64_t first, std::int64_t count) const {
  WEFT_ASSERT(first >= 0 && count > 0 && first + count <= frames());
  const auto clamped = [this](std::int64_t row) {
    return std::clamp<std::int64_t>(row, 0, rows() - 1);
  };
  const std::int64_t begin = clamped(mel_window_start(first));
  const std::int64_t end = clamped(mel_window_start(first + count - 1) + mel_window - 1) + 1;
  const std::vector<float> mel = rows(begin, end - begin);
  std::vector<float> out;
  out.reserve(count * mel_bands * mel_window);
  for (std::int64_t frame = first; frame < first + count; ++frame)
    for (std::int64_t band = 0; band < mel_bands; ++band)
      for (std::int64_t i = 0; i < mel_window; ++i) {
        const std::int64_t row = clamped(mel_window_start(frame) + i) - begin;
        out.push_back(mel[row * mel_bands + band]);
      }
  return out;
}

}  // namespace weft
