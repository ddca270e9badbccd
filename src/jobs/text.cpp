// `weft text`.
#include <mpi.h>

#include <fstream>
#include <optional>
#include <sstream>

#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "jobs/jobs.h"
#include "models/registry.h"
#include "models/t5/options.h"
#include "models/t5/t5.h"
#include "models/t5/text_encoder.h"
#include "parallel/rank_device.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace weft {
namespace {

struct TextRequest {
  std::string file;     // UTF-8, a caption a line; or a clip store, whose captions are taken
  std::string cleaned;  // file to write the cleaned captions to, a line each; empty: not wanted
  std::string
      tokens;  // file to write the token ids to, a line each with spaces between; empty: not wanted
  std::string features;  // file for data.text_features: one tensor a caption, named by its line,
                         // from 0; empty: not wanted
};

std::vector<std::string> read_lines(const std::string& path, const MediaDeck& limits) {
  std::istringstream file(read_whole(path,
                                     static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20)),
                                     Exit::data, "split it, or raise media.max_list_mib"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    // Files from Windows end their lines in CR LF.
    if (line.ends_with('\r')) line.pop_back();
    check_utf8(line, fmt::format("{}, line {}", path, lines.size() + 1));
    lines.push_back(line);
  }
  WEFT_CHECK(!lines.empty(), Exit::data, "name a text file with a caption a line", "{} is empty",
             path);
  return lines;
}

void write_lines(const std::string& path, const std::vector<std::string>& lines) {
  std::ofstream file(path, std::ios::binary);
  for (const std::string& line : lines) file << line << '\n';
  file.close();
  WEFT_CHECK(file.good(), Exit::data,
             "name a file in a directory that can be written, on a disk with room",
             "cannot write {}", path);
}

// Collective if features are requested: all ranks then share the encoder. Exit::usage if nothing is
// requested; Exit::data for a file that cannot be read, a line that is not UTF-8, and for the
// errors of encode_texts.
int text(const Deck& deck, const TextRequest& request, MPI_Comm world) {
  WEFT_CHECK(!request.cleaned.empty() || !request.tokens.empty() || !request.features.empty(),
             Exit::usage, "ask for --cleaned, --tokens or --features, each with a file",
             "weft text {}: nothing is asked for", request.file);
  for (const std::string& result : {request.cleaned, request.tokens, request.features})
    WEFT_CHECK(result.empty() || absolute_path(result) != absolute_path(request.file), Exit::usage,
               "name another file", "a result would replace the input {}", result);
  const bool of_store = is_hdf5(request.file);
  const std::vector<std::string> captions =
      of_store ? captions_by_id(*open_clip_store(request.file, false))
               : read_lines(request.file, deck.media);
  const T5Deck t5 = t5_deck(deck);
  if (log::rank() == 0 && (!request.cleaned.empty() || !request.tokens.empty())) {
    std::vector<std::string> cleaned, tokens;
    for (const std::string& caption : captions) cleaned.push_back(t5_clean(t5, caption));
    if (!request.cleaned.empty()) write_lines(request.cleaned, cleaned);
    if (!request.tokens.empty()) {
      for (const auto& ids : t5_ids(t5, captions))
        tokens.push_back(fmt::format("{}", fmt::join(ids, " ")));
      write_lines(request.tokens, tokens);
    }
  }
  if (!request.features.empty()) {
    warn_of_replacing(request.features);
    const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
    set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
    const std::string encoder = log::rank() == 0 ? T5TextEncoder(t5).describe() : "";
    const EncodedTexts done =
        encode_texts(t5, captions,
                     {{request.features,
                       captions.size(),
                       {{"captions", hash_of_texts(captions)}, {"encoder", encoder}}}},
                     {}, world);
    std::int64_t tokens = 0;
    for (const std::int64_t n : done.tokens) tokens += n;
    log::info("{}, {} in {:.1f} s: {}", counted(std::ssize(captions), "caption"),
              counted(tokens, "token"), done.seconds, request.features);
  }
  return 0;
}

}  // namespace

Command text_command() {
  const auto r = std::make_shared<TextRequest>();
  Command c{
      "text",
      "clean, tokenize and encode the captions of a text file, one a line, or of a clip store",
      [r](const Deck& deck, MPI_Comm world) { return text(deck, *r, world); }};
  c.deck_file("deck", "input deck (TOML), with the [t5] table");
  c.path("file", r->file, "text file, one caption per line, or a clip store").required = true;
  c.overrides();
  c.path("--cleaned", r->cleaned, "text file for cleaned captions");
  c.path("--tokens", r->tokens, "text file for token ids");
  c.path("--features", r->features, "safetensors file for T5 features (data.text_features)");
  return c;
}

}  // namespace weft
