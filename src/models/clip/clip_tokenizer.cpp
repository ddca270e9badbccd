#include "models/clip/clip_tokenizer.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/file.h"
#include "core/file_kind.h"
#include "core/log.h"
#include "data/lists/table.h"
#include "text/cleaning.h"
#include "text/utf8.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t bytes = 256, marks = 2;
constexpr std::string_view word_end = "</w>";

std::uint64_t pair_of(std::int32_t a, std::int32_t b) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(a)) << 32 |
         static_cast<std::uint32_t>(b);
}

// The character that stands for a byte in a file of merges: itself where it is printable, else one
// of those from U+0100 on. In the order of their ids: the printable ones come first.
struct ByteCharacter {
  int byte;
  char32_t character;
};
std::vector<ByteCharacter> byte_characters() {
  const auto printable_byte = [](int b) {
    return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
  };
  std::vector<ByteCharacter> all;
  for (int b = 0; b < bytes; ++b)
    if (printable_byte(b)) all.push_back({b, static_cast<char32_t>(b)});
  char32_t next = 0x100;
  for (int b = 0; b < bytes; ++b)
    if (!printable_byte(b)) all.push_back({b, next++});
  return all;
}

// OpenAI's basic_clean, whitespace_clean and lower().
std::string cleaned(const std::string& text) { return lower_case(clean_basic(text)); }

// Marks, English contractions, runs of letters, single digits, runs of anything else but spaces.
const Pattern& word_pattern() {
  static const Pattern words(
      R"((?i)<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+)");
  return words;
}

}  // namespace

ClipTokenizer::ClipTokenizer(const fs::path& merges, std::int64_t size)
    : end_mark_(static_cast<std::int32_t>(size) - 1) {
  const std::int64_t wanted = size - 2 * bytes - marks;
  WEFT_CHECK(wanted >= 0 && size < (std::int64_t{1} << 31), Exit::data,
             "clip.weights must be a CLIP model with a byte-level tokenizer",
             "a vocabulary of {} tokens, CLIP's have more than {}", size, 2 * bytes + marks);
  std::unordered_map<std::string, std::int32_t> ids;
  std::int32_t next = 0;
  for (const auto& [byte, character] : byte_characters()) {
    byte_ids_[static_cast<std::size_t>(byte)] = next;
    const std::string token = to_utf8(std::u32string(1, character));
    ids[token] = next;
    ids[token + std::string(word_end)] = next + static_cast<std::int32_t>(bytes);
    ++next;
  }
  next = static_cast<std::int32_t>(2 * bytes);

  const std::string text = read_text_file(
      merges.string(), std::uint64_t{16} << 20,
      "name merges.txt, or bpe_simple_vocab_16e6.txt unpacked with gunzip, in clip.merges");
  refuse_other_kind(merges, Exit::data, "unpack it, and name it in clip.merges");
  std::int64_t line = 0, rank = 0;
  for (std::size_t at = 0; at < text.size() && rank < wanted;) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view row = trimmed(std::string_view(text).substr(at, end - at));
    at = end + 1;
    if (++line == 1 || row.empty()) continue;  // the header
    const std::size_t blank = row.find(' ');
    const std::string first(row.substr(0, blank)),
        second(blank == row.npos ? std::string_view() : row.substr(blank + 1));
    const auto a = ids.find(first), b = ids.find(second);
    WEFT_CHECK(a != ids.end() && b != ids.end(), Exit::data,
               "name the merges of this model's tokenizer in clip.merges",
               "{}, line {}: \"{}\" is not a merge of two known tokens", merges.string(), line,
               printable(row));
    const std::int32_t left = a->second, right = b->second;
    ids[first + second] = next;
    merges_.try_emplace(pair_of(left, right), Merge{static_cast<std::int32_t>(rank), next});
    ++next, ++rank;
  }
  WEFT_CHECK(rank == wanted, Exit::data, "name the merges of this model's tokenizer in clip.merges",
             "{} has {} merges, the vocabulary of {} tokens needs {}", merges.string(), rank, size,
             wanted);
}

// Joins the pair that comes first in the list of merges, everywhere in the word, until none is in
// it.
void ClipTokenizer::add_word(std::string_view word, std::vector<std::int32_t>& ids) const {
  std::vector<std::int32_t> parts;
  for (const char c : word) parts.push_back(byte_ids_[static_cast<unsigned char>(c)]);
  parts.back() += static_cast<std::int32_t>(bytes);
  while (parts.size() > 1) {
    const Merge* best = nullptr;
    std::uint64_t best_pair = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = merges_.find(pair_of(parts[i], parts[i + 1]));
      if (found == merges_.end() || (best != nullptr && found->second.rank >= best->rank)) continue;
      best = &found->second;
      best_pair = found->first;
    }
    if (best == nullptr) break;
    std::size_t to = 0;
    for (std::size_t i = 0; i < parts.size(); ++to) {
      const bool joins = i + 1 < parts.size() && pair_of(parts[i], parts[i + 1]) == best_pair;
      parts[to] = joins ? best->id : parts[i];
      i += joins ? 2 : 1;
    }
    parts.resize(to);
  }
  ids.insert(ids.end(), parts.begin(), parts.end());
}

std::vector<std::int32_t> ClipTokenizer::encode(const std::string& text, std::int64_t most) const {
  WEFT_ASSERT(most >= 2);
  const std::string clean = cleaned(text);
  std::vector<std::int32_t> ids{begin_mark()};
  for (std::size_t at = 0; at < clean.size() && std::ssize(ids) < most;) {
    const std::size_t end = word_pattern().match(clean, at);
    if (end == std::string::npos) {
      ++at;  // a space
      continue;
    }
    const std::string_view word = std::string_view(clean).substr(at, end - at);
    if (word == "<|startoftext|>")
      ids.push_back(begin_mark());
    else if (word == "<|endoftext|>")
      ids.push_back(end_mark_);
    else
      add_word(word, ids);
    at = end;
  }
  ids.push_back(end_mark_);
  if (std::ssize(ids) > most) {
    ids.resize(static_cast<std::size_t>(most));
    ids.back() = end_mark_;
  }
  return ids;
}

fs::path clip_merges_file(const std::string& merges, const std::string& weights) {
  if (!merges.empty()) return merges;
  std::error_code none;
  return (fs::is_directory(weights, none) ? fs::path(weights) : fs::path(weights).parent_path()) /
         "merges.txt";
}

ClipTokenizer open_clip_tokenizer(const std::string& merges, const std::string& weights,
                                  std::int64_t size) {
  const fs::path file = clip_merges_file(merges, weights);
  std::error_code none;
  WEFT_CHECK(fs::is_regular_file(file, none), Exit::usage,
             "name the tokenizer's merges with clip.merges=FILE: merges.txt of Hugging Face, or "
             "bpe_simple_vocab_16e6.txt of OpenAI, unpacked",
             "clip.merges: there is no file {}", file.string());
  return ClipTokenizer(file, size);
}

}  // namespace weft
