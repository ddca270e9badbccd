// T5's tokenizer (docs/models/t5.md, Tokens): SentencePiece pieces, then </s>.
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

  // Exit::data unless `model` is a SentencePiece model with T5's ids for padding, </s> and unknown:
  // 0, 1, 2.
  explicit Tokenizer(const std::filesystem::path& model);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  // The pieces of `text` (UTF-8) and </s>, `max_length` ids at most, of which </s> is always the
  // last; "" is </s> alone. <extra_id_0> ... <extra_id_99>, </s>, <pad> and <unk> in the text are
  // ids of their own, together with the white space around them.
  std::vector<std::int32_t> encode(const std::string& text, std::int64_t max_length) const;

  // The model's pieces plus the 100 extra ids after them: every id is below this.
  std::int64_t size() const;

 private:
  std::vector<std::pair<std::string, std::int32_t>> marks_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> model_;
};

// Opens the deck's tokenizer: t5.tokenizer, or spiece.model next to t5.weights. Exit::data if there
// is none, or if it has more ids than t5.vocab_size.
Tokenizer open_tokenizer(const std::string& tokenizer, const std::string& weights,
                         std::int64_t vocab_size);

}  // namespace weft
