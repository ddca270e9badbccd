// Event files for TensorBoard, made by hand so that neither TensorFlow nor protobuf is needed.
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "core/error.h"
#include "core/file.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "report/data.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;

template <class T>
std::string little_endian(T value) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>(value >> 8 * i & 0xFF);
  return bytes;
}

// A message of protobuf: for each field its number and kind, then the value.
class Message {
 public:
  Message& put(std::uint64_t field, std::int64_t value) {
    return tag(field, 0).varint(static_cast<std::uint64_t>(value));
  }
  Message& put(std::uint64_t field, double value) {
    return tag(field, 1).raw(little_endian(std::bit_cast<std::uint64_t>(value)));
  }
  Message& put(std::uint64_t field, float value) {
    return tag(field, 5).raw(little_endian(std::bit_cast<std::uint32_t>(value)));
  }
  Message& put(std::uint64_t field, std::string_view value) {
    return tag(field, 2).varint(value.size()).raw(value);
  }
  Message& put(std::uint64_t field, const Message& value) {
    return put(field, std::string_view(value.bytes_));
  }
  const std::string& bytes() const { return bytes_; }

 private:
  Message& tag(std::uint64_t field, std::uint64_t kind) { return varint(field << 3 | kind); }
  Message& varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
    return *this;
  }
  Message& raw(std::string_view value) {
    bytes_ += value;
    return *this;
  }
  std::string bytes_;
};

// Summary { repeated Value value = 1 }, Value { string tag = 1; float simple_value = 2 }
void put_scalar(Message& summary, const std::string& tag, double value) {
  summary.put(1, Message().put(1, tag).put(2, static_cast<float>(value)));
}

// The middle frame of a clip, or a still picture; nothing of a file that cannot be read.
// Value { string tag = 1; Image image = 4 }, Image { int32 height = 1, width = 2, colorspace = 3;
// bytes encoded_image_string = 4 }
void put_picture(Message& summary, const std::string& tag, const fs::path& clip) {
  try {
    const Footage all = read_frames({clip.string()});
    const auto bytes = static_cast<std::size_t>(3 * all.height * all.width);
    const auto middle = std::span(all.rgb).subspan(all.frames / 2 * bytes, bytes);
    constexpr std::int64_t rgb = 3;
    const Message image = Message()
                              .put(1, all.height)
                              .put(2, all.width)
                              .put(3, rgb)
                              .put(4, png_bytes(all.height, all.width, middle));
    summary.put(1, Message().put(1, tag).put(4, image));
  } catch (const Error&) {
    return;
  }
}

// TFRecord stores checksums rotated and shifted, since sums of data that holds sums are weak.
std::string masked(std::string_view bytes) {
  return little_endian(std::rotr(crc32c(bytes), 15) + 0xA282EAD8u);
}

void put_record(std::string& out, const Message& event) {
  const std::string length = little_endian(std::uint64_t{event.bytes().size()});
  out += length + masked(length) + event.bytes() + masked(event.bytes());
}

// The name of a column of metrics.jsonl; empty for what is not shown.
std::string tag_of(const std::string& column) {
  if (column == "spread") return "ranks/spread";
  return column == "slowest_rank" || column.starts_with("rank_") ? "" : column;
}

std::string tag_of_held_out(const std::string& column) {
  const bool bucket = column.starts_with("buckets/");
  return "validation/" + (bucket ? column.substr(std::string_view("buckets/").size()) : column);
}

// The values of one line. A loss that is not finite is kept: TensorBoard marks it.
Message summary_of(const Series& series, std::size_t line,
                   std::string (*tag)(const std::string& column)) {
  Message summary;
  for (const auto& [column, values] : series.columns)
    if (const std::string name = tag(column);
        !name.empty() && (std::isfinite(values[line]) || name.ends_with("loss")))
      put_scalar(summary, name, values[line]);
  return summary;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t c = ~0u;
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? c >> 1 ^ 0x82F63B78u : c >> 1;
  }
  return ~c;
}

std::string event_file(const Run& run) {
  // The metrics have no times of day: the file's last change is the last step's.
  double time = run.ended - total(run.steps["seconds"]);
  // Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5 }
  std::string out;
  put_record(out, Message().put(1, time).put(3, "brain.Event:2"));
  const auto put_event = [&](double step, const Message& summary) {
    put_record(out, Message().put(1, time).put(2, static_cast<std::int64_t>(step)).put(5, summary));
  };
  // What was measured and sampled until this step, which may be more than the metrics know of.
  std::size_t measured = 0;
  auto sampled = run.through_time.begin();
  const auto put_until = [&](double step) {
    for (; measured < run.held_out.size() && run.held_out.step[measured] <= step; ++measured)
      put_event(run.held_out.step[measured], summary_of(run.held_out, measured, tag_of_held_out));
    for (; sampled != run.through_time.end() && static_cast<double>(sampled->step) <= step;
         ++sampled) {
      Message summary;
      for (const GalleryClip& clip : sampled->clips)
        put_picture(summary, "samples/" + clip.name, sampled->folder / clip.file);
      if (!summary.bytes().empty()) put_event(static_cast<double>(sampled->step), summary);
    }
  };
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    const double step = run.steps.step[i], seconds = run.steps["seconds"][i];
    if (std::isfinite(seconds)) time += seconds;
    Message summary = summary_of(run.steps, i, tag_of);
    if (const auto norms = run.layer_norms.find(step); norms != run.layer_norms.end())
      each_number(norms->second, "layer_norms/", [&](const std::string& layer, double norm) {
        if (std::isfinite(norm)) put_scalar(summary, layer, norm);
      });
    put_event(step, summary);
    put_until(step);
  }
  put_until(std::numeric_limits<double>::infinity());
  return out;
}

std::vector<fs::path> write_event_files(const fs::path& dir, std::span<const Run> runs) {
  std::vector<fs::path> files;
  std::set<std::string> names;
  for (const Run& run : runs) {
    std::string name = run.name;
    for (int n = 2; !names.insert(name).second; ++n) name = fmt::format("{}_{}", run.name, n);
    const fs::path folder = dir / name;
    make_own_folder(folder, Exit::data);
    // TensorBoard knows event files by "tfevents" in their names.
    files.push_back(folder / "events.out.tfevents.weft");
    replace_file(files.back(), event_file(run), Exit::data, Durable::no);
  }
  return files;
}

}  // namespace weft::report_page
