// Drives a fuzz target without libFuzzer: weft_fuzz CORPUS RUNS [SEED]. The folder CORPUS has the
// target's name. Runs every file of it, then RUNS mutations of them, the same ones for the same
// seed. CORPUS.dict, where there is one, holds words to insert, as libFuzzer reads them. An input
// that ends the process is kept as finding_NAME in the directory the driver was started in.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz.h"

// abort() is a finding as any other; what cannot be allocated is refused, as it is outside of the
// sanitizer.
extern "C" const char* __asan_default_options() {
  return "handle_abort=1:allocator_may_return_null=1:max_allocation_size_mb=1024";
}

namespace {

namespace fs = std::filesystem;

constexpr std::size_t longest = 4096;  // bytes: short inputs reach as much, and are faster

std::string current, finding;

void keep() {
  std::ofstream(finding, std::ios::binary) << current;
  std::fprintf(stderr, "fuzz: the input is in %s\n", finding.c_str());
}

void run(std::string input) {
  current = std::move(input);
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
}

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> read_corpus(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<std::string> corpus;
  for (const fs::path& file : files) corpus.push_back(read(file));
  return corpus;
}

// Lines such as "word" or "\x00\"": backslashes before hexadecimal bytes, quotes and backslashes.
std::vector<std::string> read_dictionary(const fs::path& path) {
  std::vector<std::string> words;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with('"')) continue;
    std::string word;
    for (std::size_t i = 1; i < line.size() && line[i] != '"'; ++i) {
      int byte = 0;
      if (line[i] == '\\' && line[i + 1] == 'x') {
        std::from_chars(&line[i + 2], &line[i + 4], byte, 16);
        i += 3;
        word += static_cast<char>(byte);
      } else {
        if (line[i] == '\\') ++i;
        word += line[i];
      }
    }
    words.push_back(word);
  }
  return words;
}

class Mutator {
 public:
  Mutator(std::vector<std::string> corpus, std::vector<std::string> words, std::uint64_t seed)
      : corpus_(std::move(corpus)), words_(std::move(words)), random_(seed) {}

  // A file of the corpus with one to four changes.
  std::string next() {
    std::string s = any(corpus_);
    for (std::size_t n = 1 + below(4); n > 0; --n) change(s);
    if (s.size() > longest) s.resize(longest);
    return s;
  }

 private:
  // Not std::uniform_int_distribution, which differs between libraries.
  std::size_t below(std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(random_() % n); }
  const std::string& any(const std::vector<std::string>& list) { return list[below(list.size())]; }

  void change(std::string& s) {
    const std::size_t at = below(s.size() + 1), length = 1 + below(16);
    switch (below(words_.empty() ? 6 : 8)) {
      case 0:
        if (at < s.size()) s[at] = static_cast<char>(s[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < s.size()) s[at] = static_cast<char>(below(256));
        break;
      case 2:
        s.insert(at, 1, static_cast<char>(below(256)));
        break;
      case 3:
        s.erase(at, length);
        break;
      case 4:  // a piece of it once more
        s.insert(at, s.substr(below(s.size() + 1), length));
        break;
      case 5: {  // its beginning, and the end of another
        const std::string& other = any(corpus_);
        s = s.substr(0, at) + other.substr(below(other.size() + 1));
        break;
      }
      default: {
        const std::string& word = any(words_);
        if (below(2) == 0)
          s.insert(at, word);
        else
          s.replace(at, word.size(), word);
      }
    }
  }

  std::vector<std::string> corpus_, words_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s CORPUS RUNS [SEED]\n", argv[0]);
    return 2;
  }
  const fs::path folder = argv[1];
  const long runs = std::atol(argv[2]);
  const std::string name = folder.filename().string();
  finding = "finding_" + name;
  weft::fuzz::choose(name);
  __sanitizer_set_death_callback(keep);
  const std::vector<std::string> corpus = read_corpus(folder);
  weft::fuzz::require(!corpus.empty(), folder.string() + " is empty");
  for (const std::string& input : corpus) run(input);
  run("");
  Mutator mutator(corpus, read_dictionary(folder.string() + ".dict"),
                  argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  for (long i = 0; i < runs; ++i) run(mutator.next());
  std::printf("%s: %zu files, %ld mutations\n", name.c_str(), corpus.size(), runs);
  return 0;
}
