#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "formats/safetensors.h"
#include "formats/safetensors_header.h"

namespace weft {

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const SafetensorWrite> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), temporary_(path.string() + ".tmp"), begin_(tensors.size()) {
  // Wide elements first, so that every tensor is aligned for whoever maps the file.
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(tensors[a].dtype) > size_of(tensors[b].dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const std::size_t i : order) {
    const SafetensorWrite& t = tensors[i];
    std::uint64_t bytes = size_of(t.dtype);
    for (const std::int64_t n : t.shape) bytes *= static_cast<std::uint64_t>(n);
    WEFT_ASSERT(t.name != "__metadata__" && !header.contains(t.name));
    header[t.name] = {{"dtype", detail::format_name(t.dtype)},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + bytes}}};
    begin_[i] = offset;
    offset += bytes;
  }
  missing_ = offset;
  // Padded with spaces to eight bytes, as the format's own writer does.
  std::string json = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  WEFT_CHECK(
      json.size() <= detail::longest_header, Exit::data,
      "write fewer tensors to a file (about a million fit)",
      "{}: the names and shapes of {} tensors take {} bytes, a safetensors file has room for {}",
      path_.string(), tensors.size(), json.size(), detail::longest_header);
  const std::uint64_t length = json.size();
  for (std::uint64_t& b : begin_) b += 8 + length;

  ::unlink(temporary_.c_str());  // left over from a crash; nobody else writes this name
  try {
    file_.emplace(File::create(temporary_, Exit::data));
    file_->write(std::as_bytes(std::span(&length, 1)), 0);
    file_->write(std::as_bytes(std::span(json)), 8);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(std::size_t i, std::span<const std::byte> bytes,
                              std::uint64_t first) {
  WEFT_ASSERT(missing_ >= bytes.size());
  file_->write(bytes, begin_.at(i) + first);
  missing_ -= bytes.size();
}

void SafetensorsWriter::finish() {
  WEFT_ASSERT(missing_ == 0);
  file_->sync();
  file_->close();
  rename_file(temporary_, path_, Exit::data);
  temporary_.clear();
  sync_directory(path_.parent_path(), Exit::data);
}

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorWrite> tensors,
                       const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer(path, tensors, metadata);
  for (std::size_t i = 0; i < tensors.size(); ++i) writer.write(i, tensors[i].bytes);
  writer.finish();
}

}  // namespace weft
