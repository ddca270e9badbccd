// CLIP's tokenizer (docs/models/clip.md, Tokens): byte-level BPE on cleaned, lower-case text.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

namespace weft {

class ClipTokenizer {
 public:
  // `merges`: a text file whose first line is a header, and every further one a merge, most
  // frequent first: merges.txt of Hugging Face, or bpe_simple_vocab_16e6.txt of OpenAI, which has
  // more than are used. The vocabulary of `size` tokens follows: 256 bytes, the same at the end of
  // a word, size - 514 merges, the marks of beginning and end. Exit::data for a file with fewer
  // merges, or with a merge of unknown tokens.
  ClipTokenizer(const std::filesystem::path& merges, std::int64_t size);

  // The mark of the beginning, the tokens of `text` (UTF-8, cleaned here as OpenAI's basic_clean
  // and whitespace_clean do), the mark of the end: `most` ids at most, of which the last is always
  // that mark.
  std::vector<std::int32_t> encode(const std::string& text, std::int64_t most) const;

  std::int32_t begin_mark() const { return end_mark_ - 1; }
  std::int32_t end_mark() const { return end_mark_; }

 private:
  void add_word(std::string_view word, std::vector<std::int32_t>& ids) const;

  std::int32_t end_mark_;
  std::array<std::int32_t, 256> byte_ids_{};  // of each byte; 256 more at the end of a word
  struct Merge {
    std::int32_t rank, id;
  };
  std::unordered_map<std::uint64_t, Merge> merges_;  // by the two tokens
};

// The tokenizer of [clip]: clip.merges, or merges.txt beside clip.weights. Exit::usage, naming the
// key, if there is no such file.
ClipTokenizer open_clip_tokenizer(const std::string& merges, const std::string& weights,
                                  std::int64_t size);
// The file that is meant.
std::filesystem::path clip_merges_file(const std::string& merges, const std::string& weights);

}  // namespace weft
