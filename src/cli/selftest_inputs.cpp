// The files that the jobs of `weft selftest` read: an installation has none.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/weights.h"
#include "cli/selftest.h"
#include "core/error.h"
#include "core/file.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "models/t5/t5.h"

namespace weft::selftest {
namespace {

namespace fs = std::filesystem;

void write_bytes(const fs::path& path, std::string_view bytes) {
  replace_file(path, bytes, Exit::data, Durable::no);
}

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// A SentencePiece model, which is a message of Protocol Buffers, of pieces alone: field 1 of each
// is its text, 2 its score, 3 its kind.
std::string tokenizer() {
  enum Kind : char { normal = 1, unknown, control };
  std::string model;
  float score = 0;
  const auto add = [&](std::string_view text, Kind kind) {
    const std::string piece = fmt::format("\n{}{}\x15{}\x18{}", static_cast<char>(text.size()),
                                          text, bytes_of(score--), static_cast<char>(kind));
    model += fmt::format("\n{}{}", static_cast<char>(piece.size()), piece);
  };
  add("<pad>", control);
  add("</s>", control);
  add("<unk>", unknown);
  add("\u2581", normal);  // a blank
  for (const char c : std::string_view("abcdefghijklmnopqrstuvwxyz0123456789.,:"))
    add({&c, 1}, normal);
  return model;
}

// A hum whose pitch and loudness change, as a WAV file: 16 bits, mono.
std::string speech(double seconds) {
  constexpr std::uint32_t rate = 16000;
  const auto bytes = 2 * static_cast<std::uint32_t>(seconds * rate);
  // RIFF, WAVE, fmt and data, each with its length; PCM of 1 channel, bytes a second, 2 a sample.
  const std::uint32_t header[] = {0x46464952, 36 + bytes, 0x45564157, 0x20746d66, 16,   0x10001,
                                  rate,       2 * rate,   0x100002,   0x61746164, bytes};
  std::string out(bytes_of(header));
  for (std::uint32_t i = 0; i < bytes / 2; ++i) {
    const double t = static_cast<double>(i) / rate;
    const double pitch = 180 + 40 * std::sin(5 * t), loudness = std::abs(std::sin(30 * t));
    out += bytes_of(
        static_cast<std::int16_t>(9000 * loudness * std::sin(2 * std::numbers::pi * pitch * t)));
  }
  return out;
}

// The landmarks of a face seen from the front in the middle of 64x56 pixels: x and y of jaw, brows,
// nose, eyes and lips.
constexpr std::string_view landmarks =
    "14,24 14,29 15,33 17,37 19,41 22,44 25,46 28,47 32,48 36,47 39,46 42,44 45,41 47,37 49,33 "
    "50,29 50,24 18,16 20,16 23,16 26,16 28,16 36,16 38,16 41,16 44,16 46,16 32,21 32,24 32,27 "
    "32,30 28,32 30,32 32,32 34,32 36,32 21,22 23,21 26,21 27,22 26,22 23,22 37,22 38,21 41,21 "
    "43,22 41,22 38,22 26,39 26,38 29,37 32,36 35,37 38,38 38,39 38,40 35,41 32,41 29,41 26,40 "
    "28,39 29,38 32,38 35,38 36,39 35,40 32,40 29,40";

}  // namespace

void write_text_encoder(const T5Deck& t5) {
  fs::create_directories(t5.weights);
  write_bytes(fs::path(t5.weights) / "spiece.model", tokenizer());
  T5Encoder encoder(t5, 0, t5.num_layers);
  encoder.params().allocate_for_inference(false);
  encoder.params().initialise(3);
  save_weights(fs::path(t5.weights) / "model.safetensors", encoder.params());
}

void write_face_and_speech(const fs::path& folder, double seconds) {
  write_pictures(folder, 1, 56, 64);
  write_bytes(folder / "landmarks.csv", landmarks);
  write_bytes(folder / "speech.wav", speech(seconds));
}

void write_pictures(const fs::path& folder, int count, int height, int width) {
  fs::create_directories(folder);
  const Footage f =
      read_frames({fmt::format("lavfi:testsrc=size={}x{}:rate=1:duration={}", width, height, count),
                   MediaTrust::deck});
  const std::size_t size = f.rgb.size() / static_cast<std::size_t>(f.frames);
  for (int i = 0; i < count; ++i)
    write_png((folder / fmt::format("{:06d}.png", i)).string(), height, width,
              std::span(f.rgb).subspan(static_cast<std::size_t>(i) * size, size));
}

}  // namespace weft::selftest
