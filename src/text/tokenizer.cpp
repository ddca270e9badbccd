#include "text/tokenizer.h"

#include <sentencepiece_processor.h>

#include "core/error.h"
#include "core/file.h"
#include "core/file_kind.h"
#include "text/utf8.h"

namespace weft {

Tokenizer::Tokenizer(const std::filesystem::path& model, Ids ids)
    : model_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {
  const auto status = model_->Load(model.string());
  if (!status.ok()) refuse_other_kind(model, Exit::data, "t5.tokenizer names T5's spiece.model");
  WEFT_CHECK(status.ok(), Exit::data, "t5.tokenizer names T5's spiece.model",
             "{} is not a readable SentencePiece model: {}", model.string(), status.ToString());
  const bool fit = model_->pad_id() == 0 && model_->eos_id() == end_mark &&
                   (ids == Ids::t5 ? model_->unk_id() == 2 : model_->unk_id() > end_mark);
  WEFT_CHECK(fit, Exit::data,
             ids == Ids::t5 ? "t5.tokenizer names T5's spiece.model"
                            : "t5.tokenizer names umT5's spiece.model (google/umt5-xxl)",
             "{}: padding, end and unknown have the ids {}, {} and {}; {}", model.string(),
             model_->pad_id(), model_->eos_id(), model_->unk_id(),
             ids == Ids::t5 ? "T5's are 0, 1 and 2" : "umT5's are 0, 1 and a later one");
  marks_ = {{"<pad>", 0}, {"</s>", end_mark}, {"<unk>", model_->unk_id()}};
  if (ids == Ids::t5) extra_ids_ = 100;
  for (std::int32_t i = 0; i < extra_ids_; ++i)
    // T5 numbers its extra ids downward: <extra_id_0> is the last id.
    marks_.emplace_back("<extra_id_" + std::to_string(i) + ">",
                        static_cast<std::int32_t>(size()) - 1 - i);
}

Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

std::int64_t Tokenizer::size() const { return model_->GetPieceSize() + extra_ids_; }

std::vector<std::int32_t> Tokenizer::encode(const std::string& text,
                                            std::int64_t max_length) const {
  WEFT_ASSERT(max_length >= 1);
  std::vector<std::int32_t> ids;
  const auto add = [&](const std::string& part) {
    std::vector<int> pieces;
    const auto status = model_->Encode(part, &pieces);
    WEFT_ASSERT(status.ok());
    ids.insert(ids.end(), pieces.begin(), pieces.end());
  };
  std::size_t done = 0;
  for (std::size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at + 1))
    for (const auto& [mark, id] : marks_)
      if (text.compare(at, mark.size(), mark) == 0) {
        add(strip(text.substr(done, at - done)));
        ids.push_back(id);
        done = at + mark.size();
        at = done - 1;
        break;
      }
  add(done > 0 ? strip(text.substr(done)) : text);
  if (static_cast<std::int64_t>(ids.size()) >= max_length) ids.resize(max_length - 1);
  ids.push_back(end_mark);
  return ids;
}

std::filesystem::path tokenizer_file(const std::string& tokenizer_path,
                                     const std::string& weights_path) {
  namespace fs = std::filesystem;
  fs::path model = tokenizer_path;
  if (model.empty()) {
    const fs::path weights = weights_path;
    std::error_code none;
    const fs::path folder = fs::is_directory(weights, none) ? weights : weights.parent_path();
    model = folder / "spiece.model";
    // Wan's folder has the text encoder's weights in it, diffusers' folders one for each part.
    for (const fs::path& place :
         {folder / "google/umt5-xxl/spiece.model", folder / "../tokenizer/spiece.model"})
      if (!fs::exists(model, none) && fs::exists(place, none)) model = place;
  }
  WEFT_CHECK(is_there(model, Exit::data), Exit::data,
             "set t5.tokenizer to the spiece.model that comes with the weights",
             "tokenizer {} does not exist", model.string());
  WEFT_CHECK(!fs::is_directory(model), Exit::data,
             "set t5.tokenizer to the spiece.model that comes with the weights",
             "the tokenizer {} is a folder", model.string());
  return model;
}

Tokenizer open_tokenizer(const std::string& tokenizer_path, const std::string& weights_path,
                         std::int64_t vocab_size, Tokenizer::Ids ids) {
  const std::filesystem::path model = tokenizer_file(tokenizer_path, weights_path);
  Tokenizer tokenizer(model, ids);
  WEFT_CHECK(tokenizer.size() <= vocab_size, Exit::data,
             "t5.tokenizer and t5.weights must belong together; t5.vocab_size is the rows of "
             "shared.weight (umT5: token_embedding.weight)",
             "{} has {} ids, t5.vocab_size is {}", model.string(), tokenizer.size(), vocab_size);
  return tokenizer;
}

}  // namespace weft
