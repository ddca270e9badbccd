#include "report/tensorboard.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "core/error.h"
#include "core/file.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? c >> 1 ^ 0x82F63B78u : c >> 1;
    table[i] = c;
  }
  return table;
}

// TFRecord stores checksums rotated and shifted, since sums of data that holds sums are weak.
std::uint32_t masked(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u; }

template <class T>
void put_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> 8 * i & 0xFF);
}

// Fields of protobuf messages: a tag of number and kind, then the value.
enum class Kind : std::uint64_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
void put_tag(std::string& out, std::uint64_t field, Kind kind) {
  put_varint(out, field << 3 | static_cast<std::uint64_t>(kind));
}
void put_double(std::string& out, std::uint64_t field, double value) {
  put_tag(out, field, Kind::fixed64);
  put_little_endian(out, std::bit_cast<std::uint64_t>(value));
}
void put_float(std::string& out, std::uint64_t field, float value) {
  put_tag(out, field, Kind::fixed32);
  put_little_endian(out, std::bit_cast<std::uint32_t>(value));
}
void put_bytes(std::string& out, std::uint64_t field, std::string_view value) {
  put_tag(out, field, Kind::bytes);
  put_varint(out, value.size());
  out += value;
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }
std::string event(double time) {
  std::string out;
  put_double(out, 1, time);
  return out;
}

// Summary { repeated Value value = 1 }, Value { string tag = 1; float simple_value = 2 }
void put_scalar(std::string& summary, std::string_view tag, double value) {
  std::string one;
  put_bytes(one, 1, tag);
  put_float(one, 2, static_cast<float>(value));
  put_bytes(summary, 1, one);
}

void put_record(std::string& out, std::string_view data) {
  std::string length;
  put_little_endian(length, static_cast<std::uint64_t>(data.size()));
  out += length;
  put_little_endian(out, masked(length));
  out += data;
  put_little_endian(out, masked(data));
}

struct Series {
  std::string tag;
  const std::vector<double>* values;
};

std::vector<Series> series_of(const Steps& s) {
  std::vector<Series> all = {{"loss", &s.loss},
                             {"grad_norm", &s.grad_norm},
                             {"lr", &s.lr},
                             {"seconds", &s.seconds},
                             {"memory/resident_bytes", &s.resident},
                             {"memory/arena_peak_bytes", &s.arena},
                             {"ranks/spread", &s.spread}};
  constexpr const char* tags[parts] = {"compute",   "wait_slowest", "comm_exposed", "optimizer",
                                       "data_wait", "checkpoint",   "other"};
  for (int p = 0; p < parts; ++p) all.push_back({fmt::format("split/{}", tags[p]), &s.part[p]});
  for (const auto& [name, values] : s.terms) all.push_back({"terms/" + name, &values});
  return all;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = crc_table();
  std::uint32_t c = ~0u;
  for (const char b : bytes) c = table[(c ^ static_cast<unsigned char>(b)) & 0xFF] ^ c >> 8;
  return ~c;
}

std::string event_file(const Run& run) {
  const Steps& s = run.steps;
  const std::vector<Series> all = series_of(s);
  // The metrics have no times of day: the file's last change is the last step's.
  double time = run.ended;
  for (const double seconds : s.seconds)
    if (std::isfinite(seconds)) time -= seconds;
  std::string out, version = event(time);
  put_bytes(version, 3, "brain.Event:2");
  put_record(out, version);
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (std::isfinite(s.seconds[i])) time += s.seconds[i];
    std::string summary;
    for (const auto& [tag, values] : all)
      // A loss that is not finite is kept: TensorBoard marks it.
      if (i < values->size() && (std::isfinite((*values)[i]) || tag == "loss"))
        put_scalar(summary, tag, (*values)[i]);
    std::string step = event(time);
    put_tag(step, 2, Kind::varint);
    put_varint(step, static_cast<std::uint64_t>(s.step[i]));
    put_bytes(step, 5, summary);
    put_record(out, step);
  }
  return out;
}

std::vector<fs::path> write_event_files(const fs::path& dir, std::span<const Run> runs) {
  std::vector<fs::path> files;
  std::set<std::string> names;
  for (const Run& run : runs) {
    std::string name = run.name;
    for (int n = 2; !names.insert(name).second; ++n) name = fmt::format("{}_{}", run.name, n);
    const fs::path folder = dir / name;
    std::error_code failed;
    fs::create_directories(folder, failed);
    WEFT_CHECK(!failed, Exit::data, "choose another directory for --tensorboard",
               "cannot make {}: {}", folder.string(), failed.message());
    // TensorBoard knows event files by "tfevents" in their names.
    files.push_back(folder / "events.out.tfevents.weft");
    replace_file(files.back(), event_file(run), Exit::data, Durable::no);
  }
  return files;
}

}  // namespace weft::report_page
