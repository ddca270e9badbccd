// Prompts as Open-Sora writes them (docs/generate_reference.md, Prompts;
// opensora/utils/inference_utils.py at v1.2.0): options as JSON at the end, texts that change from
// loop to loop, scores in words.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "config/deck.h"
#include "jobs/generate/options.h"
#include "media/media_source.h"

namespace weft {

struct Prompt {
  std::int64_t index =
      0;  // its line in the file, or place in generate.prompts, from 0: names and noise follow it
  std::string text;  // without options; what prompt_as_path names files by
  struct Segment {
    std::int64_t from_loop = 0;
    std::string text;  // with scores
  };
  std::vector<Segment> segments;        // the first from loop 0 on
  std::vector<std::string> references;  // files
  MediaTrust named_by =
      MediaTrust::untrusted;  // who named them: the prompt, or generate.references
  std::string mask_strategy;
  bool own_references = false, own_mask = false;  // the prompt's, not the deck's
  // weft's own options, so that one file may ask for clips of many sizes; empty: the deck's.
  std::string num_frames, resolution, aspect_ratio;

  // What counts in that loop.
  const std::string& text_of_loop(std::int64_t loop) const;
};

// The prompts [start_index, end_index) of generate.prompt_file or generate.prompts, or
// generate.prompt_generator for each number in [start_index, end_index), each with its place in
// generate.references and generate.mask_strategies. Exit::data names file and line of a prompt that
// is empty, not UTF-8, has broken JSON or an unknown option; Exit::usage where there are no
// prompts, lists of other lengths, or more than generate.max_clips clips; Exit::data for a file
// larger than limits.max_list_mib.
//
// An empty prompt is refused, where the original makes a clip of nothing but the scores: it is
// nearly always a slip.
//
// `refine`, where it is given, gets the texts of all segments and returns what to take instead,
// before scores are added. The same text is refined once, but for prompt_generator, where `numbers`
// has the prompt's number of each and is not empty.
using RefineTexts = std::function<std::vector<std::string>(
    const std::vector<std::string>& texts, const std::vector<std::int64_t>& numbers)>;
std::vector<Prompt> read_prompts(const GenerateDeck& deck, const RefineTexts& refine = {},
                                 const MediaDeck& limits = {});

// The same for a deck. Where no text is encoded (`encoded` false) every text is the null caption,
// and no prompt need be given: then there is one, without text.
std::vector<Prompt> read_prompts(const Deck& deck, bool encoded, const RefineTexts& refine = {});

// Where the user wrote it, for messages.
std::string place_of(const GenerateDeck& deck, const Prompt& prompt);

// One prompt, still without scores. `where` names it in messages.
Prompt parse_prompt(const std::string& line, const std::string& where, const GenerateDeck& deck);

// The scores that the deck asks for behind the text, each unless the text speaks of it already.
std::string append_scores(const std::string& text, const GenerateDeck& deck);

// Files of a list with semicolons between them; none for "".
std::vector<std::string> split_references(const std::string& list);

// `text` as the name of a file: no slashes, control characters or leading dots, at most 180 bytes,
// whole characters.
std::string file_name_of(const std::string& text);

}  // namespace weft
