#include "infer/prompt_features.h"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"
#include "formats/hash.h"
#include "infer/references.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// What decides the features.
std::string key_of(const T5Deck& t5, const std::vector<std::string>& texts) {
  nlohmann::json j = {{"texts", texts},
                      {"shape", {t5.d_model, t5.d_kv, t5.num_heads, t5.d_ff, t5.num_layers}},
                      {"length", t5.max_length},
                      {"dtype", t5.dtype},
                      {"clean", t5.clean},
                      {"tokenizer", file_identity(t5.tokenizer)}};
  j["weights"] = folder_identity(t5.weights);
  return to_hex(hash128(std::string_view(j.dump())));
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

PromptFeatures::PromptFeatures(const Deck& deck, const std::vector<std::string>& texts,
                               const fs::path& directory, bool wanted, MPI_Comm world)
    : channels_(deck.model.caption_channels), longest_(deck.model.model_max_length) {
  if (!wanted) return;
  if (deck.t5.weights.empty()) {
    if (log::rank() == 0)
      log::warn(
          "t5.weights is empty: every clip is made with the null caption, whatever its prompt");
    return;
  }
  WEFT_CHECK(deck.t5.d_model == channels_ && deck.t5.max_length <= longest_, Exit::usage,
             "set model.caption_channels = t5.d_model, and t5.max_length no larger than "
             "model.model_max_length",
             "T5's features are [{}, {}], the model takes [{}, {}]", deck.t5.max_length,
             deck.t5.d_model, longest_, channels_);
  const fs::path path = directory / "text_features.safetensors";
  const fs::path key_path = directory / "text_features.key";
  std::string key;
  int there = 0;
  if (log::rank() == 0) {
    key = key_of(deck.t5, texts);
    there = fs::exists(path) && read_file(key_path) == key ? 1 : 0;
  }
  MPI_Bcast(&there, 1, MPI_INT, 0, world);
  if (there == 0) {
    std::error_code none;
    if (log::rank() == 0) fs::remove(key_path, none);  // before the file changes
    encoded_ = encode_texts(deck, texts, path, world);
    if (log::rank() == 0) std::ofstream(key_path) << key;
    // Others open the file when rank 0 has written it.
    MPI_Barrier(world);
  } else {
    log::info("text      {} texts, encoded before: {}", texts.size(), path.string());
  }
  file_ = std::make_unique<SafetensorsFile>(SafetensorsFile::open(path));
}

TextRows PromptFeatures::read(std::int64_t text) const {
  WEFT_ASSERT(file_ != nullptr);
  const SafetensorEntry& e = file_->at(std::to_string(text));
  WEFT_CHECK(
      e.shape.size() == 2 && e.shape[1] == channels_ && e.shape[0] >= 1 && e.shape[0] <= longest_,
      Exit::data, "remove the file, it is made again",
      "{}: text {} has shape [{}], wanted [1..{}, {}]", file_->path().string(), text,
      fmt::join(e.shape, ", "), longest_, channels_);
  return {file_->read_f32(e), e.shape[0]};
}

}  // namespace weft
