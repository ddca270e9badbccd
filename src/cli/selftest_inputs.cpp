// The files that the jobs of `weft selftest` read: an installation has none.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <numbers>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "cli/selftest.h"
#include "core/error.h"
#include "core/file.h"
#include "core/philox.h"
#include "media/writers.h"

namespace weft::selftest {
namespace {

namespace fs = std::filesystem;

void write_bytes(const fs::path& path, std::string_view bytes) {
  replace_file(path, bytes, Exit::data, Durable::no);
}

// ---- The tokenizer, a SentencePiece model: a message of Protocol Buffers

std::string varint(std::uint64_t n) {
  std::string out;
  for (; n > 127; n >>= 7) out += static_cast<char>((n & 127) | 128);
  return out + static_cast<char>(n);
}

std::string field(int number, std::uint64_t value) { return varint(number << 3) + varint(value); }

std::string field(int number, std::string_view bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}

std::string field(int number, float value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return varint(number << 3 | 5) + out;
}

std::string tokenizer() {
  constexpr std::uint64_t normal = 1, unknown = 2, control = 3, none = ~std::uint64_t{0};
  std::string model;
  int number = 0;
  const auto add = [&](std::string_view piece, std::uint64_t kind) {
    model += field(1, field(1, piece) + field(2, -static_cast<float>(number++)) + field(3, kind));
  };
  add("<pad>", control);
  add("</s>", control);
  add("<unk>", unknown);
  add("\u2581", normal);
  for (const char c : std::string_view("abcdefghijklmnopqrstuvwxyz0123456789.,:"))
    add({&c, 1}, normal);
  // The trainer's settings say what the first pieces are; the normalizer's, that a text begins with
  // a blank and that blanks are one.
  const std::string trainer = field(3, std::uint64_t{1}) + field(40, std::uint64_t{2}) +
                              field(41, none) + field(42, std::uint64_t{1}) +
                              field(43, std::uint64_t{0});
  const std::string normalizer = field(1, "identity") + field(3, std::uint64_t{1}) +
                                 field(4, std::uint64_t{1}) + field(5, std::uint64_t{1});
  return model + field(2, trainer) + field(3, normalizer);
}

// ---- The face

struct Point {
  double x = 0, y = 0;
};
constexpr int face_width = 64, face_height = 56;

// Skin, eyes and a mouth before a slope; u and v are distances from the middle in half widths.
std::array<std::uint8_t, 3> face_at(int x, int y) {
  const double half = 0.36 * face_height, u = (x - face_width / 2) / half,
               v = (y - face_height / 2) / half;
  const auto byte = [](double value) { return static_cast<std::uint8_t>(value); };
  if (std::hypot(u / 0.95, v / 1.25) > 1) return {byte(40 + 2 * x % 90), byte(70 + y % 100), 120};
  if (std::min(std::hypot(u - 0.4, v + 0.3), std::hypot(u + 0.4, v + 0.3)) < 0.13)
    return {30, 30, 40};
  if (std::abs(v - 0.6) < 0.1 && std::abs(u) < 0.35) return {160, 50, 60};
  return {byte(210 - 30 * v), 180, 150};
}

// The 68 landmarks of a face seen from the front, in widths of it from its middle.
std::vector<Point> landmarks() {
  std::vector<Point> all;
  const auto line = [&](int count, Point a, Point b) {
    for (int i = 0; i < count; ++i) {
      const double t = static_cast<double>(i) / (count - 1);
      all.push_back({a.x + (b.x - a.x) * t, a.y + (b.y - a.y) * t});
    }
  };
  const auto ring = [&](int count, Point middle, double across, double up) {
    for (int i = 0; i < count; ++i) {
      const double angle = 2 * std::numbers::pi * i / count;
      all.push_back({middle.x - across * std::cos(angle), middle.y - up * std::sin(angle)});
    }
  };
  for (int i = 0; i <= 16; ++i) {  // the jaw
    const double angle = std::numbers::pi * i / 16;
    all.push_back({-0.5 * std::cos(angle), -0.1 + 0.65 * std::sin(angle)});
  }
  line(5, {-0.4, -0.32}, {-0.1, -0.34});  // brows
  line(5, {0.1, -0.34}, {0.4, -0.32});
  line(4, {0, -0.2}, {0, 0.05});  // nose
  line(5, {-0.1, 0.1}, {0.1, 0.1});
  ring(6, {-0.22, -0.18}, 0.08, 0.03);  // eyes
  ring(6, {0.22, -0.18}, 0.08, 0.03);
  ring(12, {0, 0.3}, 0.18, 0.07);  // lips
  ring(8, {0, 0.3}, 0.12, 0.03);
  return all;
}

// A hum whose pitch and loudness change, as 16-bit mono WAV.
std::string speech(double seconds) {
  constexpr std::uint32_t rate = 16000;
  const auto count = static_cast<std::uint32_t>(seconds * rate);
  std::string out;
  const auto put = [&](std::uint32_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
  };
  out += "RIFF";
  put(36 + 2 * count, 4);
  out += "WAVEfmt ";
  put(16, 4);
  put(1, 2);  // PCM
  put(1, 2);  // channels
  put(rate, 4);
  put(2 * rate, 4);
  put(2, 2);
  put(16, 2);
  out += "data";
  put(2 * count, 4);
  for (std::uint32_t i = 0; i < count; ++i) {
    const double t = static_cast<double>(i) / rate;
    const double pitch = 180 + 40 * std::sin(5 * t), loudness = std::abs(std::sin(30 * t));
    put(static_cast<std::uint16_t>(static_cast<std::int16_t>(
            9000 * loudness * std::sin(2 * std::numbers::pi * pitch * t))),
        2);
  }
  return out;
}

void write_picture(const fs::path& path, int height, int width,
                   const std::function<std::array<std::uint8_t, 3>(int x, int y)>& pixel) {
  std::vector<std::uint8_t> rgb;
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x)
      for (const std::uint8_t value : pixel(x, y)) rgb.push_back(value);
  write_png(path.string(), height, width, rgb);
}

}  // namespace

void write_text_encoder(const fs::path& folder) {
  constexpr std::int64_t d_model = 16, inner = 16, d_ff = 32, heads = 2, layers = 2, words = 144;
  fs::create_directories(folder);
  write_bytes(folder / "spiece.model", tokenizer());
  std::deque<std::vector<float>> values;  // whose places stay
  std::vector<SafetensorWrite> tensors;
  // Normal deviates; ones where `deviation` is 0.
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, float deviation) {
    std::int64_t count = 1;
    for (const std::int64_t n : shape) count *= n;
    const Philox random(3, Purpose::init, 0, tensors.size());
    std::vector<float>& v = values.emplace_back();
    for (std::int64_t i = 0; i < count; ++i)
      v.push_back(deviation == 0 ? 1 : deviation * random.normal(static_cast<std::uint32_t>(i)));
    tensors.push_back({name, DType::f32, std::move(shape), std::as_bytes(std::span(v))});
  };
  add("shared.weight", {words, d_model}, 1);
  for (int i = 0; i < layers; ++i) {
    const std::string block = fmt::format("encoder.block.{}.layer.", i);
    const std::string attention = block + "0.SelfAttention.", mlp = block + "1.DenseReluDense.";
    for (const char* name : {"q", "k", "v"})
      add(fmt::format("{}{}.weight", attention, name), {inner, d_model}, 0.2f);
    add(attention + "o.weight", {d_model, inner}, 0.2f);
    if (i == 0) add(attention + "relative_attention_bias.weight", {32, heads}, 0.5f);
    add(block + "0.layer_norm.weight", {d_model}, 0);
    for (const char* name : {"wi_0", "wi_1"})
      add(fmt::format("{}{}.weight", mlp, name), {d_ff, d_model}, 0.2f);
    add(mlp + "wo.weight", {d_model, d_ff}, 0.2f);
    add(block + "1.layer_norm.weight", {d_model}, 0);
  }
  add("encoder.final_layer_norm.weight", {d_model}, 0);
  write_safetensors(folder / "model.safetensors", tensors);
}

void write_face_and_speech(const fs::path& folder, double seconds) {
  fs::create_directories(folder);
  write_picture(folder / "face.png", face_height, face_width, face_at);
  std::string rows;
  for (const Point& p : landmarks())
    rows += fmt::format("{:.3f},{:.3f}\n", face_width / 2 + 36 * p.x, face_height / 2 + 36 * p.y);
  write_bytes(folder / "landmarks.csv", rows);
  write_bytes(folder / "speech.wav", speech(seconds));
}

void write_pictures(const fs::path& folder, int count) {
  fs::create_directories(folder);
  for (int i = 0; i < count; ++i)
    write_picture(folder / fmt::format("{}.png", i), 64, 64, [&](int x, int y) {
      return std::array<std::uint8_t, 3>{static_cast<std::uint8_t>(37 * i + 11 * x * y),
                                         static_cast<std::uint8_t>(x * (i + 3)),
                                         static_cast<std::uint8_t>(y * i * 7)};
    });
}

}  // namespace weft::selftest
