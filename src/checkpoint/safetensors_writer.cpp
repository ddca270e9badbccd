#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_header.h"

namespace weft {

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const SafetensorWrite> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), temporary_(path.string() + ".tmp"), tensors_(tensors.size()) {
  // Wide elements first, so that every tensor is aligned for whoever maps the file.
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(tensors[a].dtype) > size_of(tensors[b].dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  // Room for the hashes, which are known at the end alone. The file's own metadata first, as before.
  const std::string zeros(32, '0'), key(detail::hash_key);
  nlohmann::ordered_json& texts = header["__metadata__"] = metadata;
  texts[key] = zeros;
  for (const std::size_t i : order) texts[key + ":" + tensors[i].name] = zeros;
  std::uint64_t offset = 0;
  for (const std::size_t i : order) {
    const SafetensorWrite& t = tensors[i];
    std::uint64_t bytes = size_of(t.dtype);
    for (const std::int64_t n : t.shape) bytes *= static_cast<std::uint64_t>(n);
    WEFT_ASSERT(t.name != "__metadata__" && !header.contains(t.name));
    header[t.name] = {{"dtype", detail::format_name(t.dtype)},
                      {"shape", t.shape},
                      {"data_offsets", {offset, offset + bytes}}};
    tensors_[i].begin = offset;
    tensors_[i].bytes = bytes;
    offset += bytes;
  }
  missing_ = offset;
  // Padded with spaces to eight bytes, as the format's own writer does.
  std::string json = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  WEFT_CHECK(
      json.size() <= detail::longest_header, Exit::data,
      "write fewer tensors to a file (some hundred thousand fit)",
      "{}: the names and shapes of {} tensors take {} bytes, a safetensors file has room for {}",
      path_.string(), tensors.size(), json.size(), detail::longest_header);
  const std::uint64_t length = json.size();
  for (Written& t : tensors_) t.begin += 8 + length;
  // Where the digits go: the keys stand in the order in which they were put in.
  std::size_t at = json.find(detail::header_hash_json(zeros));
  WEFT_ASSERT(at != json.npos);
  for (const std::size_t i : order) {
    at = json.find("\":\"" + zeros + "\"", at + 1);
    if (i == order.front()) at = json.find("\":\"" + zeros + "\"", at + 1);
    WEFT_ASSERT(at != json.npos);
    tensors_[i].digits = at + 3;
  }

  ::unlink(temporary_.c_str());  // left over from a crash; nobody else writes this name
  try {
    file_.emplace(File::create(temporary_, Exit::data));
    file_->write(std::as_bytes(std::span(&length, 1)), 0);
    file_->write(std::as_bytes(std::span(json)), 8);
    header_ = std::move(json);
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
  Written& t = tensors_.at(i);
  WEFT_ASSERT(missing_ >= bytes.size() && first == t.next);
  file_->write(bytes, t.begin + first);
  missing_ -= bytes.size();
  t.next += bytes.size();
  if (bytes.size() == t.bytes) {
    t.hash = hash128(bytes);
    return;
  }
  if (!t.hasher) t.hasher = std::make_unique<Hasher>();
  t.hasher->add(bytes);
  if (t.next < t.bytes) return;
  t.hash = t.hasher->value();
  t.hasher.reset();
}

void SafetensorsWriter::finish() {
  WEFT_ASSERT(missing_ == 0);
  for (const Written& t : tensors_) header_.replace(t.digits, 32, to_hex(t.hash));
  const std::string zeros = detail::header_hash_json(std::string(32, '0'));
  const std::string digits = detail::header_hash_json(to_hex(hash128(header_)));
  header_.replace(header_.find(zeros), zeros.size(), digits);
  file_->write(std::as_bytes(std::span(header_)), 8);
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
