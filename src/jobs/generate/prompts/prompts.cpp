#include "jobs/generate/prompts/prompts.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "jobs/generate/options.h"
#include "text/utf8.h"

namespace weft {
namespace {

const std::vector<std::string> options = {"reference_path", "mask_strategy", "num_frames",
                                          "resolution", "aspect_ratio"};

bool whole_number(const std::string& s, std::int64_t& value) {
  const std::string t = strip(s);
  const auto [end, failed] = std::from_chars(t.data(), t.data() + t.size(), value);
  return failed == std::errc() && end == t.data() + t.size() && !t.empty();
}

// The text of an option: a string, a number where `numbers`, or null for nothing.
std::string option_text(const nlohmann::json& value, const std::string& key,
                        const std::string& where) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  const bool number = (key == "num_frames" && value.is_number_integer());
  WEFT_CHECK(number, Exit::data, "write it as text in double quotes", "{}: option \"{}\" is {}",
             where, key, value.dump());
  return value.dump();
}

void read_options(const std::string& json, const std::string& where, Prompt& p) {
  nlohmann::json j;
  try {
    j = parse_json(json);
  } catch (const nlohmann::json::exception& e) {
    // Leaves out the library's number of the error.
    const std::string said = e.what();
    const auto begin = said.find("] ");
    throw Error(Exit::data,
                fmt::format("{}: broken JSON behind the text: {}", where,
                            begin == std::string::npos ? said : said.substr(begin + 2)),
                "options end a prompt, such as: a cat {\"reference_path\": \"cat.png\", "
                "\"mask_strategy\": \"0\"}; no other braces",
                __FILE__, __LINE__);
  }
  for (const auto& [key, value] : j.items()) {
    const std::string near = nearest_name(key, options);
    WEFT_CHECK(std::find(options.begin(), options.end(), key) != options.end(), Exit::data,
               near.empty() ? fmt::format("there are {}", fmt::join(options, ", "))
                            : "did you mean " + near + "?",
               "{}: unknown option \"{}\"", where, key);
    const std::string text = option_text(value, key, where);
    if (key == "reference_path") p.references = split_references(text);
    if (key == "mask_strategy") p.mask_strategy = text;
    // An empty text also overrides the deck's, null does not.
    if (key == "reference_path") p.own_references = !value.is_null();
    if (key == "mask_strategy") p.own_mask = !value.is_null();
    if (key == "num_frames") p.num_frames = text;
    if (key == "resolution") p.resolution = text;
    if (key == "aspect_ratio") p.aspect_ratio = text;
  }
}

// "|0|text|2|text": texts and the loops from which they count. Anything else is one text.
std::vector<Prompt::Segment> split_segments(const std::string& text, const std::string& where,
                                            std::int64_t loops) {
  if (!text.starts_with("|0|")) return {{0, text}};
  std::vector<std::string> parts;
  std::istringstream in(text.substr(1));
  for (std::string part; std::getline(in, part, '|');) parts.push_back(part);
  WEFT_CHECK(parts.size() % 2 == 0, Exit::data,
             "texts for loops are written |0|first text|2|text from loop 2 on",
             "{}: loop {} has no text", where, parts.back());
  std::vector<Prompt::Segment> segments;
  for (std::size_t i = 0; i < parts.size(); i += 2) {
    Prompt::Segment s{0, strip(parts[i + 1])};
    WEFT_CHECK(whole_number(parts[i], s.from_loop), Exit::data,
               "texts for loops are written |0|first text|2|text from loop 2 on",
               "{}: \"{}\" is no number of a loop", where, parts[i]);
    WEFT_CHECK(segments.empty() || s.from_loop > segments.back().from_loop, Exit::data,
               "write the texts in the order of their loops", "{}: loop {} behind loop {}", where,
               s.from_loop, segments.back().from_loop);
    WEFT_CHECK(
        s.from_loop < loops, Exit::data,
        fmt::format("set generate.loop = {} or more, or leave the text out", s.from_loop + 1),
        "{}: a text from loop {} on, but generate.loop = {}", where, s.from_loop, loops);
    segments.push_back(s);
  }
  return segments;
}

std::vector<std::string> read_lines(const std::string& path, const MediaDeck& limits) {
  std::string text = read_whole(path, static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20)),
                                Exit::data, "split it, or raise media.max_list_mib");
  // Lines end in \n, \r\n or \r, as Python reads them.
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\r') text[i] = text.substr(i + 1, 1) == "\n" ? ' ' : '\n';
  std::istringstream in(std::move(text));
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  if (!lines.empty() && lines.front().starts_with("\xEF\xBB\xBF"))  // a byte order mark
    lines.front().erase(0, 3);
  return lines;
}

}  // namespace

const std::string& Prompt::text_of_loop(std::int64_t loop) const {
  const Segment* found = &segments.front();
  for (const Segment& s : segments)
    if (s.from_loop <= loop) found = &s;
  return found->text;
}

std::string append_scores(const std::string& text, const GenerateDeck& deck) {
  std::string scored = text;
  const auto append = [&](bool wanted, const char* marker, const std::string& value) {
    if (wanted && text.find(std::string(marker) + ":") == std::string::npos)
      scored += fmt::format(" {}: {}.", marker, value);
  };
  append(deck.aes > 0, "aesthetic score", fmt::format("{:.1f}", deck.aes));
  append(deck.flow > 0, "motion score", fmt::format("{:.1f}", deck.flow));
  append(!deck.camera_motion.empty(), "camera motion", deck.camera_motion);
  return scored;
}

std::vector<std::string> split_references(const std::string& list) {
  std::vector<std::string> files;
  std::istringstream in(list);
  for (std::string file; std::getline(in, file, ';');) files.push_back(strip(file));
  return files;
}

Prompt parse_prompt(const std::string& line, const std::string& where, const GenerateDeck& deck) {
  check_utf8(line, where);
  const std::string whole = strip(line);
  const auto brace = whole.find('{');
  Prompt p;
  p.text = strip(whole.substr(0, brace));
  WEFT_CHECK(!p.text.empty(), Exit::data, "write a text, or take the line out",
             "{}: the prompt is empty", where);
  if (brace != std::string::npos) {
    WEFT_CHECK(whole.find('{', brace + 1) == std::string::npos, Exit::data,
               "options are one pair of braces at the end; the text itself can have none",
               "{}: more than one \"{{\"", where);
    read_options(whole.substr(brace), where, p);
  }
  p.segments = split_segments(p.text, where, deck.loop);
  for (const Prompt::Segment& s : p.segments)
    WEFT_CHECK(!s.text.empty(), Exit::data, "write a text for it",
               "{}: the text of loop {} is empty", where, s.from_loop);
  return p;
}

std::string place_of(const GenerateDeck& deck, const Prompt& prompt) {
  if (!deck.prompt_generator.empty()) return "generate.prompt_generator";
  return deck.prompt_file.empty() ? fmt::format("generate.prompts[{}]", prompt.index)
                                  : fmt::format("{}:{}", deck.prompt_file, prompt.index + 1);
}

std::vector<Prompt> read_prompts(const GenerateDeck& deck, const RefineTexts& refine,
                                 const MediaDeck& limits) {
  const bool generated = !deck.prompt_generator.empty(), listed = deck.prompt_file.empty();
  WEFT_CHECK(generated || !listed || !deck.prompts.empty(), Exit::usage,
             "set generate.prompts = [\"a cat\"] or generate.prompt_file = \"prompts.txt\"",
             "no prompts");
  std::vector<std::string> lines;
  if (!generated) lines = listed ? deck.prompts : read_lines(deck.prompt_file, limits);
  std::int64_t end = static_cast<std::int64_t>(lines.size());
  if (generated) {
    WEFT_CHECK(listed, Exit::usage, "leave one of the two empty",
               "generate.prompt_generator and generate.prompt_file are both given");
    end = deck.end_index;
    constexpr std::int64_t many = 1'000'000, last = std::int64_t{1} << 32;  // of ClipItem::noise_id
    WEFT_CHECK(deck.start_index < end && end - deck.start_index <= many && end <= last, Exit::usage,
               "set generate.end_index: a prompt is made for each number from generate.start_index "
               "up to it, a million a job at most",
               "generate.prompt_generator from number {} to {} makes no job", deck.start_index,
               end);
  } else if (deck.end_index > 0) {
    end = std::min(end, deck.end_index);
  }
  const std::int64_t begin = deck.start_index;
  WEFT_CHECK(begin < end, Exit::usage, "check generate.start_index and end_index",
             "no prompts: numbers {} to {} of {}, which has {}", begin, deck.end_index,
             listed ? "generate.prompts" : deck.prompt_file, lines.size());
  const auto count = static_cast<std::size_t>(end - begin);
  WEFT_CHECK(end - begin <= deck.max_clips / deck.num_samples, Exit::usage,
             "take a slice by generate.start_index and end_index, or raise generate.max_clips",
             "{} of {} are more clips than generate.max_clips = {}", counted(count, "prompt"),
             counted(deck.num_samples, "sample"), deck.max_clips);
  const auto check_list = [&](const std::vector<std::string>& list, const char* key) {
    WEFT_CHECK(list.empty() || list.size() == count, Exit::usage,
               "one entry a prompt, \"\" for none", "{} has {} for {}", key,
               counted(std::ssize(list), "entry", "entries"), counted(count, "prompt"));
  };
  check_list(deck.references, "generate.references");
  check_list(deck.mask_strategies, "generate.mask_strategies");
  std::vector<Prompt> prompts;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto at = static_cast<std::size_t>(i - begin);
    Prompt p;
    p.index = i;
    p = parse_prompt(generated ? deck.prompt_generator : lines[static_cast<std::size_t>(i)],
                     place_of(deck, p), deck);
    p.index = i;
    // The prompt's own options override the deck's lists.
    if (!p.own_references && !deck.references.empty()) {
      p.references = split_references(deck.references[at]);
      p.named_by = MediaTrust::deck;
    }
    if (!p.own_mask && !deck.mask_strategies.empty()) p.mask_strategy = deck.mask_strategies[at];
    prompts.push_back(p);
  }
  std::vector<std::string> texts;
  std::vector<std::int64_t> numbers;
  for (const Prompt& p : prompts)
    for (const Prompt::Segment& s : p.segments) {
      texts.push_back(s.text);
      if (generated) numbers.push_back(p.index);
    }
  if (refine) texts = refine(texts, numbers);
  auto text = texts.begin();
  for (Prompt& p : prompts)
    for (Prompt::Segment& s : p.segments) s.text = append_scores(*text++, deck);
  return prompts;
}

std::vector<Prompt> read_prompts(const Deck& deck, bool encoded, const RefineTexts& refine) {
  GenerateDeck g = deck.get<GenerateDeck>();
  const bool none = g.prompts.empty() && g.prompt_file.empty() && g.prompt_generator.empty();
  if (!none || encoded) return read_prompts(g, refine, deck.media);
  g.prompts = {"no text"};
  std::vector<Prompt> prompts = read_prompts(g, {}, deck.media);
  for (Prompt& p : prompts) {
    p.text.clear();
    p.segments = {{0, ""}};
  }
  return prompts;
}

std::string file_name_of(const std::string& text) {
  std::string name;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    name += byte < 0x20 || byte == 0x7f || c == '/' || c == '\\' ? '_' : c;
  }
  if (name.starts_with('.')) name.front() = '_';
  constexpr std::size_t longest = 180;
  if (name.size() > longest) {
    std::size_t end = longest;
    while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80) --end;
    name.resize(end);
  }
  return strip(name);
}

}  // namespace weft
