// The tokenizers of T5 and umT5 (docs/models/t5.md, Tokens, umT5): SentencePiece pieces, then </s>.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace weft {

class Tokenizer {
 public:
  static constexpr std::int32_t end_mark = 1;  // </s>

  // t5: padding, </s> and unknown are 0, 1 and 2, and 100 extra ids follow the pieces. of_file
  // (umT5): padding and </s> are 0 and 1, unknown is as the file says, and there are no extra ids.
  enum class Ids { t5, of_file };

  // Exit::data unless `model` is a SentencePiece model with these ids.
  explicit Tokenizer(const std::filesystem::path& model, Ids ids = Ids::t5);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  // The pieces of `text` (UTF-8) and </s>, `max_length` ids at most, of which </s> is always the
  // last; "" is </s> alone. Where the file has pieces for bytes, characters that it does not know
  // are their bytes. </s>, <pad>, <unk> and T5's <extra_id_0> ... <extra_id_99> in the text are ids
  // of their own, together with the white space around them.
  std::vector<std::int32_t> encode(const std::string& text, std::int64_t max_length) const;

  // The model's pieces and the extra ids after them: every id is below this.
  std::int64_t size() const;

 private:
  std::int64_t extra_ids_ = 0;
  std::vector<std::pair<std::string, std::int32_t>> marks_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> model_;
};

// The deck's tokenizer: t5.tokenizer, or where released folders have it for t5.weights:
// spiece.model next to them, in google/umt5-xxl below, or in the folder `tokenizer` beside theirs.
// Exit::data if there is none.
std::filesystem::path tokenizer_file(const std::string& tokenizer, const std::string& weights);
// Opens it. Exit::data also if it has more ids than t5.vocab_size.
Tokenizer open_tokenizer(const std::string& tokenizer, const std::string& weights,
                         std::int64_t vocab_size, Tokenizer::Ids ids = Tokenizer::Ids::t5);

}  // namespace weft
