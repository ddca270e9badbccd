#include "jobs/generate/prompts/prompt_features.h"

#include <algorithm>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* key_name = "key";  // in a file's metadata
constexpr std::size_t most_open = 32;

// A hash of all that decides a file's features.
std::string key_of_texts(const std::string& encoder, std::span<const std::string> texts) {
  Hasher hasher;
  const auto add = [&](const std::string& text) {
    const std::uint64_t length = text.size();
    // The length first, so that two lists with the same bytes in sum differ.
    hasher.add(std::as_bytes(std::span(&length, 1)));
    hasher.add(std::as_bytes(std::span(text)));
  };
  add(encoder);
  for (const std::string& text : texts) add(text);
  return to_hex(hasher.value());
}

// "" for a file that is missing or damaged.
std::string stored_key(const fs::path& path) {
  std::error_code none;
  if (!fs::exists(path, none)) return "";
  try {
    const SafetensorsFile file = SafetensorsFile::open(path);
    const auto key = file.metadata().find(key_name);
    return key == file.metadata().end() ? "" : key->second;
  } catch (const Error& e) {
    log::warn("{}: it is made anew", e.what());
    return "";
  }
}

}  // namespace

PromptFeatures::PromptFeatures(TextEncoder* encoder, const std::vector<std::string>& texts,
                               const fs::path& directory, MPI_Comm world,
                               const std::function<bool()>& stop, std::int64_t texts_a_file)
    : texts_a_file_(texts_a_file), directory_(directory) {
  if (encoder == nullptr || !encoder->lacks().empty()) return;
  channels_ = encoder->channels();
  longest_ = encoder->max_tokens();
  // Before its tokenizer, which lies in the same folder, is asked for.
  if (log::rank() == 0) encoder->check_weights();
  there_ = true;
  // Rank 0 knows which files are missing, and their texts.
  std::vector<TextFile> files;
  std::vector<std::string> missing;
  if (log::rank() == 0) {
    const std::string described = encoder->describe();
    const auto step = static_cast<std::size_t>(texts_a_file);
    for (std::size_t first = 0; first == 0 || first < texts.size(); first += step) {
      const auto of_file = std::span(texts).subspan(first, std::min(step, texts.size() - first));
      const fs::path path = file_name(static_cast<std::int64_t>(first / step));
      const std::string key = key_of_texts(described, of_file);
      if (stored_key(path) == key) continue;
      missing.insert(missing.end(), of_file.begin(), of_file.end());
      files.push_back({path, missing.size(), {{key_name, key}}});
    }
    if (missing.size() < texts.size() || files.empty())
      log::info("text      {} of {}, encoded before: {}", texts.size() - missing.size(),
                counted(std::ssize(texts), "text"), file_name(0).string());
  }
  int wait = files.empty() ? 0 : 1;
  MPI_Bcast(&wait, 1, MPI_INT, 0, world);
  if (wait == 0) return;
  encoded_ = encoder->encode(missing, files, stop, world);
  // The others may open the files only once rank 0 has written them.
  MPI_Barrier(world);
}

fs::path PromptFeatures::file_name(std::int64_t file) const {
  return directory_ /
         fmt::format("text_features{}.safetensors", file == 0 ? "" : fmt::format("-{}", file));
}

TextRows PromptFeatures::read(std::int64_t text) const {
  WEFT_ASSERT(there_ && text >= 0);
  const std::int64_t number = text / texts_a_file_;
  auto file = open_.find(number);
  if (file == open_.end()) {
    if (open_.size() == most_open) open_.erase(open_.begin());
    file = open_.emplace(number, SafetensorsFile::open(file_name(number))).first;
  }
  const SafetensorEntry& e = file->second.at(std::to_string(text % texts_a_file_));
  WEFT_CHECK(
      e.shape.size() == 2 && e.shape[1] == channels_ && e.shape[0] >= 1 && e.shape[0] <= longest_,
      Exit::data, "remove the file, it is made again",
      "{}: text {} has shape [{}], wanted [1..{}, {}]", file->second.path().string(), text,
      fmt::join(e.shape, ", "), longest_, channels_);
  return {file->second.read_f32(e), e.shape[0]};
}

}  // namespace weft
