#include "jobs/generate/prompts.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>
#include <vector>

#include "config/deck_table.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/aspect.h"
#include "jobs/generate/options.h"
#include "text/utf8.h"

namespace weft {

// ---- Sizes

namespace {

const std::vector<std::pair<std::string, std::string>> ratios = {
    {"3:8", "0.38"},   {"9:21", "0.43"}, {"12:25", "0.48"}, {"1:2", "0.50"},  {"9:17", "0.53"},
    {"27:50", "0.54"}, {"9:16", "0.56"}, {"5:8", "0.62"},   {"2:3", "0.67"},  {"3:4", "0.75"},
    {"1:1", "1.00"},   {"4:3", "1.33"},  {"3:2", "1.50"},   {"16:9", "1.78"}, {"17:9", "1.89"},
    {"2:1", "2.00"},   {"50:27", "2.08"}};

// Seconds at 24 frames a second, cut to whole chunks of 17 frames.
const std::vector<std::pair<std::string, std::int64_t>> lengths = {
    {"1x", 51},  {"2s", 51},  {"2x", 102},  {"4s", 102},  {"4x", 204},
    {"8s", 204}, {"8x", 408}, {"16s", 408}, {"16x", 816}, {"32s", 816}};

template <class T>
std::vector<std::string> names_of(const std::vector<std::pair<std::string, T>>& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.push_back(name);
  return names;
}

}  // namespace

std::string aspect_key(const std::string& ratio) {
  for (const auto& [name, key] : ratios)
    if (name == ratio) return key;
  throw Error(Exit::usage, fmt::format("unknown aspect ratio \"{}\"", ratio),
              fmt::format("height:width, one of {}; or set generate.image_size",
                          fmt::join(names_of(ratios), ", ")),
              __FILE__, __LINE__);
}

std::int64_t frame_count(const std::string& text) {
  // A name, or both of a length with a slash between them.
  for (const auto& [name, frames] : lengths)
    for (const auto& [other, same] : lengths)
      if (text == name || (same == frames && text == name + "/" + other)) return frames;
  std::int64_t frames = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), frames);
  WEFT_CHECK(
      failed == std::errc() && end == text.data() + text.size() && frames >= 1 && frames <= 100000,
      Exit::usage,
      fmt::format("a number of at least 1, or one of {}", fmt::join(names_of(lengths), ", ")),
      "unknown length of a clip \"{}\"", text);
  return frames;
}

PixelSize clip_size(const GenerateDeck& deck, const std::string& num_frames,
                    const std::string& resolution, const std::string& aspect_ratio) {
  PixelSize size{frame_count(num_frames), 0, 0};
  if (!deck.image_size.empty()) {
    WEFT_CHECK(deck.image_size.size() == 2, Exit::usage,
               "write height and width, such as [240, 426]", "generate.image_size has {} numbers",
               deck.image_size.size());
    size.height = deck.image_size[0];
    size.width = deck.image_size[1];
    return size;
  }
  const std::string key = aspect_key(aspect_ratio);
  const auto& known = aspect_sizes(resolution);
  const auto found =
      std::find_if(known.begin(), known.end(), [&](const AspectSize& s) { return s.key == key; });
  if (found == known.end()) {
    std::vector<std::string> there;
    for (const auto& [name, k] : ratios)
      for (const AspectSize& s : known)
        if (s.key == k) there.push_back(name);
    throw Error(
        Exit::usage,
        fmt::format("resolution {} has no size for aspect ratio {}", resolution, aspect_ratio),
        fmt::format("it has {}; or set generate.image_size", fmt::join(there, ", ")), __FILE__,
        __LINE__);
  }
  size.height = found->height;
  size.width = found->width;
  return size;
}

// ---- Masks

namespace {

template <class T>
T number(const std::string& field, const std::string& group, const std::string& where) {
  const auto first = field.find_first_not_of(' ');
  const std::string s = first == std::string::npos
                            ? ""
                            : field.substr(first, field.find_last_not_of(' ') - first + 1);
  T value{};
  const auto [end, failed] = std::from_chars(s.data(), s.data() + s.size(), value);
  WEFT_CHECK(
      failed == std::errc() && end == s.data() + s.size(), Exit::data,
      "a group is loop,reference,reference start,target start,length,edit ratio: whole numbers, "
      "and a ratio from 0 to 1",
      "{}: mask strategy group \"{}\": \"{}\" is not a valid number here", where, group, field);
  return value;
}

}  // namespace

std::vector<MaskGroup> parse_mask_strategy(const std::string& text, const std::string& where) {
  std::vector<MaskGroup> groups;
  if (text.empty()) return groups;
  std::istringstream all(text + ";");
  for (std::string group; std::getline(all, group, ';');) {
    std::vector<std::string> fields;
    std::istringstream in(group + ",");
    for (std::string field; std::getline(in, field, ',');) fields.push_back(field);
    WEFT_CHECK(fields.size() <= 6, Exit::data,
               "a group has at most loop,reference,reference start,target start,length,edit ratio",
               "{}: mask strategy group \"{}\" has {} fields", where, group, fields.size());
    MaskGroup g;
    std::int64_t* const whole[] = {&g.loop, &g.reference, &g.reference_start, &g.target_start,
                                   &g.length};
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (i < 5)
        *whole[i] = number<std::int64_t>(fields[i], group, where);
      else
        g.edit = number<double>(fields[i], group, where);
    WEFT_CHECK(g.edit >= 0 && g.edit <= 1, Exit::data, "0 keeps the frames, 1 generates new ones",
               "{}: mask strategy group \"{}\": edit ratio {}", where, group, g.edit);
    WEFT_CHECK(g.length >= 1, Exit::data, "place 1 latent frame or more",
               "{}: mask strategy group \"{}\": length {}", where, group, g.length);
    groups.push_back(g);
  }
  return groups;
}

std::int64_t snap(std::int64_t position, std::int64_t align, std::int64_t frames) {
  if (align == 0) return position;
  std::int64_t t = position / align;
  if (2 * (position % align) > align && t < frames / align - 1) ++t;
  return t * align;
}

namespace {

// A group in a clip of `frames`, of a reference of `given`.
Placement place(const MaskGroup& g, std::int64_t given, std::int64_t frames, std::int64_t align,
                const std::string& where) {
  Placement p{g.reference, g.reference_start, g.target_start, 0, g.edit};
  if (p.from < 0) p.from += given;
  if (p.to < 0) p.to += frames;
  const bool inside = p.from >= 0 && p.to >= 0;
  if (inside) {
    p.from = snap(p.from, align, given);
    p.to = snap(p.to, align, frames);
    p.length = std::min({g.length, frames - p.to, given - p.from});
  }
  WEFT_CHECK(inside && p.length >= 1, Exit::data,
             "starts count latent frames (5 to 17 frames), from the end where they are negative",
             "{}: the mask strategy places latent frame {} of reference {}, which has {}, at {} "
             "of a clip of {}",
             where, g.reference_start, g.reference, given, g.target_start, frames);
  return p;
}

}  // namespace

std::vector<Placement> place_references(const std::vector<MaskGroup>& groups, std::int64_t loop,
                                        std::int64_t frames,
                                        const std::vector<std::int64_t>& references,
                                        std::int64_t align, const std::string& where) {
  std::vector<Placement> placements;
  for (const MaskGroup& g : groups) {
    if (g.loop != loop) continue;
    WEFT_CHECK(g.reference >= 0 && g.reference < static_cast<std::int64_t>(references.size()),
               Exit::data, "references are counted from 0, in the order of their list",
               "{}: the mask strategy asks for reference {}, there are {}", where, g.reference,
               references.size());
    const std::int64_t given = references[g.reference];
    placements.push_back(place(g, given, frames, align, where));
  }
  return placements;
}

LatentRange frames_taken(const std::vector<MaskGroup>& groups, std::int64_t loops,
                         std::int64_t reference, std::int64_t given, std::int64_t frames,
                         std::int64_t align, const std::string& where) {
  LatentRange range;
  for (const MaskGroup& g : groups) {
    if (g.reference != reference || g.loop < 0 || g.loop >= loops) continue;
    const Placement p = place(g, given, frames, align, where);
    const bool none = range.last == 0;
    range.first = none ? p.from : std::min(range.first, p.from);
    range.last = std::max(range.last, p.from + p.length);
  }
  return range;
}

std::vector<float> edit_ratios(const std::vector<Placement>& placements, std::int64_t frames) {
  std::vector<float> edit(frames, 1.0f);
  for (const Placement& p : placements)
    std::fill_n(edit.begin() + p.to, p.length, static_cast<float>(p.edit));
  return edit;
}

// ---- Prompts

namespace {

const std::vector<std::string> options = {"reference_path", "mask_strategy", "num_frames",
                                          "resolution",     "aspect_ratio",  "negative_prompt"};

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
             where, key, dump_json(value));
  return dump_json(value);
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
                fmt::format("{}: broken JSON after the text: {}", where,
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
    if (key == "negative_prompt" && !value.is_null()) p.negative = strip(text);
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
               "{}: \"{}\" is not the number of a loop", where, parts[i]);
    WEFT_CHECK(segments.empty() || s.from_loop > segments.back().from_loop, Exit::data,
               "write the texts in the order of their loops", "{}: loop {} after loop {}", where,
               s.from_loop, segments.back().from_loop);
    WEFT_CHECK(s.from_loop < loops, Exit::data,
               fmt::format("set generate.loop = {} or more, or remove the text", s.from_loop + 1),
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
  for (std::string file; std::getline(in, file, ';');)
    files.push_back(written_path(strip(file), "reference", Exit::data));
  return files;
}

Prompt parse_prompt(const std::string& line, const std::string& where, const GenerateDeck& deck) {
  check_utf8(line, where);
  const std::string whole = strip(line);
  const auto brace = whole.find('{');
  Prompt p;
  p.text = strip(whole.substr(0, brace));
  WEFT_CHECK(!p.text.empty(), Exit::data, "write a text, or delete the line",
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
               "generate.prompt_generator from number {} to {} gives no prompts", deck.start_index,
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
    p = parse_prompt(generated ? deck.prompt_generator : lines[i], place_of(deck, p), deck);
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
