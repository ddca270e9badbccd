// Prompts as Open-Sora writes them: texts, options, sizes and masks.
#include "jobs/generate/prompts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "core/error.h"
#include "jobs/generate/options.h"

namespace weft {
namespace {

// ---- Prompts

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The message and hint of the Error that `f` throws, with its exit code in front.
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return fmt::format("{}: {} ({})", static_cast<int>(e.code()), e.what(), e.hint());
  }
  return "no error";
}

GenerateDeck plain() {
  GenerateDeck d;
  d.aes = 0;
  d.loop = 4;
  return d;
}

std::string refused(const std::string& line, const GenerateDeck& deck = plain()) {
  return error_of([&] { parse_prompt(line, "p.txt:3", deck); });
}

TEST(Prompts, TakesOptionsFromJson) {
  const Prompt p = parse_prompt(
      "  a cat { \"reference_path\": \"a.png; b.mp4\", \"mask_strategy\": \"0;0,1,0,-1,1\" } ", "",
      plain());
  EXPECT_EQ(p.text, "a cat");
  EXPECT_EQ(p.text_of_loop(3), "a cat");
  EXPECT_THAT(p.references, ElementsAre("a.png", "b.mp4"));
  EXPECT_EQ(p.mask_strategy, "0;0,1,0,-1,1");
  EXPECT_EQ(parse_prompt("\u3000a cat\u00a0", "", plain()).text, "a cat");  // Unicode's blanks too
  EXPECT_EQ(parse_prompt("a {\"num_frames\": 17}", "", plain()).num_frames, "17");
  EXPECT_EQ(parse_prompt("a {\"num_frames\": \"4s\"}", "", plain()).num_frames, "4s");
  EXPECT_TRUE(parse_prompt("a {\"mask_strategy\": null}", "", plain()).mask_strategy.empty());
}

TEST(Prompts, RefusesWhatIsBroken) {
  EXPECT_THAT(refused("a {\"mask_strategy\": "), HasSubstr("3: p.txt:3: broken JSON"));
  EXPECT_THAT(refused("a {\"mask_strategy\": \"0\"} b"), HasSubstr("broken JSON"));
  EXPECT_THAT(refused("a {\"mask_stratgy\": \"0\"}"),
              HasSubstr("unknown option \"mask_stratgy\" (did you mean mask_strategy?)"));
  EXPECT_THAT(refused("a {\"mask_strategy\": 0}"), HasSubstr("option \"mask_strategy\" is 0"));
  EXPECT_THAT(refused("a {} {}"), HasSubstr("more than one \"{\""));
  EXPECT_THAT(refused(" \t"), HasSubstr("3: p.txt:3: the prompt is empty"));
  EXPECT_THAT(refused("{\"mask_strategy\": \"0\"}"), HasSubstr("the prompt is empty"));
  EXPECT_THAT(refused("caf\xE9"), HasSubstr("p.txt:3 is not UTF-8"));
  // Deep enough to end the stack of whoever walks through it.
  const std::string deep = std::string(50'000, '[') + std::string(50'000, ']');
  EXPECT_THAT(refused("a {\"num_frames\": " + deep + "}"), HasSubstr("nested deeper than 64"));
}

TEST(Prompts, OnlyTheDeckIsTrustedWithItsReferences) {
  GenerateDeck d = plain();
  d.prompts = {"a {\"reference_path\": \"p.png\"}", "b"};
  d.references = {"x.png", "y.png"};
  const auto prompts = read_prompts(d);
  EXPECT_THAT(prompts[0].references, ElementsAre("p.png"));
  EXPECT_EQ(prompts[0].named_by, MediaTrust::untrusted);
  EXPECT_THAT(prompts[1].references, ElementsAre("y.png"));
  EXPECT_EQ(prompts[1].named_by, MediaTrust::deck);
  // Nothing, said by the prompt, goes before the deck's list, as in the original.
  d.mask_strategies = {"0", "0"};
  d.prompts = {"a {\"reference_path\": \"\", \"mask_strategy\": \"\"}",
               "b {\"reference_path\": null, \"mask_strategy\": null}"};
  const auto again = read_prompts(d);
  EXPECT_TRUE(again[0].references.empty());
  EXPECT_EQ(again[0].mask_strategy, "");
  EXPECT_THAT(again[1].references, ElementsAre("y.png"));
  EXPECT_EQ(again[1].mask_strategy, "0");
}

TEST(Prompts, LinesEndAsPythonReadsThem) {
  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("weft_lines_{}.txt", getpid());
  std::ofstream(path, std::ios::binary) << "one\rtwo\r\nthree\nfour\r";
  GenerateDeck d = plain();
  d.prompt_file = path.string();
  std::vector<std::string> texts;
  for (const Prompt& p : read_prompts(d)) texts.push_back(p.text);
  EXPECT_THAT(texts, ElementsAre("one", "two", "three", "four"));
  std::filesystem::remove(path);
}

TEST(Prompts, HaveLimits) {
  GenerateDeck d = plain();
  d.prompts = {"a", "b", "c"};
  d.num_samples = 4;
  d.max_clips = 12;
  EXPECT_EQ(read_prompts(d).size(), 3u);
  d.max_clips = 11;
  EXPECT_THAT(error_of([&] { read_prompts(d); }),
              HasSubstr("2: 3 prompts of 4 samples are more clips than generate.max_clips = 11"));
  d.prompt_file = "/dev/zero";
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("3: /dev/zero is a pipe or device"));
  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("weft_long_{}.txt", getpid());
  std::ofstream(path) << std::string(2 << 20, 'a');
  d.prompt_file = path.string();
  MediaDeck limits;
  limits.max_list_mib = 1;
  EXPECT_THAT(error_of([&] { read_prompts(d, {}, limits); }),
              HasSubstr("has 2.000 MiB, 1.000 are allowed (split it"));
  std::filesystem::remove(path);
}

TEST(Prompts, ChangesTextsFromLoopToLoop) {
  const Prompt p = parse_prompt("|0| a sunny day |2|a rainy day", "", plain());
  EXPECT_EQ(p.text_of_loop(0), "a sunny day");
  EXPECT_EQ(p.text_of_loop(1), "a sunny day");
  EXPECT_EQ(p.text_of_loop(2), "a rainy day");
  EXPECT_EQ(p.text_of_loop(9), "a rainy day");
  EXPECT_THAT(refused("|0|a|2"), HasSubstr("loop 2 has no text"));
  EXPECT_THAT(refused("|0|a|x|b"), HasSubstr("\"x\" is not the number of a loop"));
  EXPECT_THAT(refused("|0|a|2|b|1|c"), HasSubstr("loop 1 after loop 2"));
  EXPECT_THAT(refused("|0|a|4|b"), HasSubstr("generate.loop = 4"));
  EXPECT_THAT(refused("|0||1|b"), HasSubstr("the text of loop 0 is empty"));
}

TEST(Prompts, AppendsScoresThatAreNotThere) {
  GenerateDeck d = plain();
  EXPECT_EQ(append_scores("a cat", d), "a cat");
  d.aes = 6.5;
  d.flow = 10;
  d.camera_motion = "pan left";
  EXPECT_EQ(append_scores("a cat", d),
            "a cat aesthetic score: 6.5. motion score: 10.0. camera motion: pan left.");
  EXPECT_EQ(append_scores("a cat, motion score: 3", d),
            "a cat, motion score: 3 aesthetic score: 6.5. camera motion: pan left.");
  d.prompts = {"|0|a|1|b"};
  const Prompt p = read_prompts(d).at(0);
  EXPECT_THAT(p.text_of_loop(1), ::testing::StartsWith("b aesthetic score: 6.5."));
  EXPECT_EQ(p.text, "|0|a|1|b");
}

TEST(Prompts, TextsAreRefinedBeforeScores) {
  GenerateDeck d = plain();
  d.aes = 6.5;
  d.prompts = {"a cat", "|0|a|1|b"};
  std::vector<std::string> seen;
  std::vector<std::int64_t> numbers;
  const auto refine = [&](const std::vector<std::string>& texts,
                          const std::vector<std::int64_t>& of_texts) {
    seen = texts;
    numbers = of_texts;
    return std::vector<std::string>{"one", "two", "three"};
  };
  const auto prompts = read_prompts(d, refine);
  EXPECT_THAT(seen, ElementsAre("a cat", "a", "b"));
  EXPECT_TRUE(numbers.empty());
  EXPECT_EQ(prompts[0].text, "a cat") << "names of files stay";
  EXPECT_EQ(prompts[0].text_of_loop(0), "one aesthetic score: 6.5.");
  EXPECT_EQ(prompts[1].text_of_loop(1), "three aesthetic score: 6.5.");
  // One text for many numbers is refined for each.
  d.prompts.clear();
  d.prompt_generator = "a dog {\"num_frames\": 1}";
  d.start_index = 7;
  d.end_index = 10;
  const auto dogs = read_prompts(d, refine);
  EXPECT_THAT(seen, ElementsAre("a dog", "a dog", "a dog"));
  EXPECT_THAT(numbers, ElementsAre(7, 8, 9));
  ASSERT_EQ(dogs.size(), 3u);
  EXPECT_EQ(dogs[2].index, 9);
  EXPECT_EQ(dogs[2].text_of_loop(0), "three aesthetic score: 6.5.");
  EXPECT_EQ(dogs[2].num_frames, "1");
}

TEST(Prompts, AGeneratorEndsAndIsAlone) {
  GenerateDeck d = plain();
  d.prompt_generator = "a dog";
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("2: generate.prompt_generator from"));
  d.end_index = 2;
  EXPECT_EQ(read_prompts(d).size(), 2u);
  // It goes before a list, and not together with a file.
  d.prompts = {"a cat"};
  EXPECT_EQ(read_prompts(d).front().text, "a dog");
  d.prompt_file = "prompts.txt";
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("generate.prompt_file are both given"));
  d.prompt_file.clear();
  d.end_index = 1'000'001;
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("2: generate.prompt_generator from"));
  d.end_index = 2;
  d.prompt_generator = " {}";
  EXPECT_THAT(error_of([&] { read_prompts(d); }),
              HasSubstr("3: generate.prompt_generator: the prompt is empty"));
}

TEST(Prompts, ReadsASliceOfAFile) {
  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("weft_prompts_{}.txt", getpid());
  std::ofstream(path) << "\xEF\xBB\xBF"
                         "first\r\nsecond {\"mask_strategy\": \"0\"}\n\nfourth";
  GenerateDeck d = plain();
  d.prompts = {"of the deck"};  // the file goes before it
  d.prompt_file = path.string();
  d.end_index = 2;
  d.references = {"x.png", "y.png;z.png"};
  const auto prompts = read_prompts(d);
  ASSERT_EQ(prompts.size(), 2u);
  EXPECT_EQ(prompts[0].text, "first");
  EXPECT_EQ(prompts[1].index, 1);
  EXPECT_THAT(prompts[1].references, ElementsAre("y.png", "z.png"));
  EXPECT_EQ(prompts[1].mask_strategy, "0");

  d.references.clear();
  d.start_index = 2;
  d.end_index = 0;
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr(".txt:3: the prompt is empty"));
  d.start_index = 3;
  EXPECT_EQ(read_prompts(d).at(0).index, 3);
  d.start_index = 4;
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("2: no prompts: numbers 4 to"));
  d.start_index = 3;
  d.mask_strategies = {"", ""};
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("has 2 entries for 1 prompt"));
  GenerateDeck list = plain();
  list.prompts = {"one", "two", "three"};
  list.start_index = 1;
  EXPECT_EQ(read_prompts(list).size(), 2u);
  EXPECT_EQ(read_prompts(list).front().text, "two");
  d.prompt_file += ".not";
  EXPECT_THAT(error_of([&] { read_prompts(d); }), HasSubstr("3: cannot open"));
  EXPECT_THAT(error_of([] { read_prompts(GenerateDeck()); }), HasSubstr("2: no prompts"));
  std::filesystem::remove(path);
}

TEST(Prompts, MakesNamesOfFiles) {
  EXPECT_EQ(file_name_of("../a/b\tc"), "_._a_b_c");
  const std::string e = "\xC3\xA9";  // two bytes
  std::string longer = "x";
  for (int i = 0; i < 200; ++i) longer += e;
  EXPECT_EQ(file_name_of(longer).size(), 179u);  // whole characters alone
}

TEST(Prompts, KnowsUtf8) {
  EXPECT_EQ(parse_prompt("caf\xC3\xA9 \xE4\xB8\xAD \xF0\x9F\x90\x88", "p:1", plain()).text,
            "caf\xC3\xA9 \xE4\xB8\xAD \xF0\x9F\x90\x88");
  for (const char* bad : {"\x80", "\xC3", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80",
                          "\xF4\x90\x80\x80", "\xFF", "\xE4\xB8"})
    EXPECT_THAT(error_of([&] { parse_prompt(bad, "p:1", plain()); }),
                HasSubstr("3: p:1 is not UTF-8"))
        << bad;
}

// A model without captions makes clips without being given any; with a text encoder a prompt is
// needed.
TEST(ReadPrompts, NoneIsNeededWithoutATextEncoder) {
  Deck d;
  d.get<GenerateDeck>().num_samples = 2;
  d.get<GenerateDeck>().references = {"first.png"};
  const auto prompts = read_prompts(d, false);
  ASSERT_EQ(prompts.size(), 1u);
  EXPECT_EQ(prompts[0].text, "");
  EXPECT_EQ(prompts[0].text_of_loop(0), "");
  EXPECT_EQ(prompts[0].references, std::vector<std::string>{"first.png"});
  d.get<GenerateDeck>().prompts = {"a cat"};
  d.get<GenerateDeck>().aes = 0;
  EXPECT_EQ(read_prompts(d, false).at(0).text_of_loop(0), "a cat");
  d.get<GenerateDeck>().prompts = {};
  EXPECT_THAT(error_of([&] { read_prompts(d, true); }), HasSubstr("2: no prompts"));
}

// ---- Sizes, against docs/generate.md, Sizes

PixelSize size_of(const std::string& resolution, const std::string& ratio) {
  return clip_size(GenerateDeck(), "1", resolution, ratio);
}

TEST(Sizes, FindsOpenSorasSizes) {
  const std::vector<std::pair<const char*, PixelSize>> wide = {
      {"144p", {1, 144, 256}}, {"240p", {1, 240, 426}},  {"360p", {1, 360, 640}},
      {"480p", {1, 480, 854}}, {"720p", {1, 720, 1280}}, {"1080p", {1, 1080, 1920}}};
  for (const auto& [name, size] : wide) {
    EXPECT_EQ(size_of(name, "9:16"), size) << name;
    EXPECT_EQ(size_of(name, "16:9"), (PixelSize{1, size.width, size.height})) << name;
  }
  EXPECT_EQ(size_of("256", "1:1"), (PixelSize{1, 256, 256}));
  EXPECT_EQ(size_of("512", "12:25"), (PixelSize{1, 352, 736}));
  GenerateDeck deck;
  deck.image_size = {100, 33};
  EXPECT_EQ(clip_size(deck, "2s", "nothing", "nothing"), (PixelSize{51, 100, 33}));
}

TEST(Sizes, RefusesOthers) {
  EXPECT_THROW(size_of("241p", "9:16"), Error);
  EXPECT_THROW(size_of("240p", "9:15"), Error);
  GenerateDeck deck;
  deck.image_size = {100};
  EXPECT_THROW(clip_size(deck, "1", "240p", "9:16"), Error);
  try {
    size_of("256", "9:16");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "resolution 256 has no size for aspect ratio 9:16");
    EXPECT_THAT(e.hint(), ::testing::HasSubstr("12:25, 1:2, 1:1, 2:1"));
  }
}

TEST(Sizes, CountsFrames) {
  const std::vector<std::pair<const char*, int>> known = {
      {"1", 1},    {"16", 16},   {"1x", 51},       {"2s", 51},    {"4s", 102}, {"2x", 102},
      {"8s", 204}, {"16s", 408}, {"16x/32s", 816}, {"2s/1x", 51}, {"32s", 816}};
  for (const auto& [text, frames] : known) EXPECT_EQ(frame_count(text), frames) << text;
  for (const char* bad :
       {"", "0", "-3", "3s", "two", "1.5", "51f", "2x/junk", "2x/", "/2x", "2x/2s", "2x/4s/4s"})
    EXPECT_THROW(frame_count(bad), Error) << bad;
}

// ---- Masks

using ::testing::HasSubstr;

std::vector<Placement> place(const std::string& text, std::int64_t frames,
                             const std::vector<std::int64_t>& references, std::int64_t align = 5,
                             std::int64_t loop = 0) {
  return place_references(parse_mask_strategy(text, "p"), loop, frames, references, align, "p");
}

void expect(const Placement& p, std::int64_t reference, std::int64_t from, std::int64_t to,
            std::int64_t length, double edit) {
  EXPECT_EQ(p.reference, reference);
  EXPECT_EQ(p.from, from);
  EXPECT_EQ(p.to, to);
  EXPECT_EQ(p.length, length);
  EXPECT_EQ(p.edit, edit);
}

TEST(MaskStrategy, TheExamples) {
  // Image to video.
  auto p = place("0", 15, {1});
  ASSERT_EQ(p.size(), 1u);
  expect(p[0], 0, 0, 0, 1, 0);
  // Two images connected: the last latent frame becomes the start of the last chunk.
  p = place("0;0,1,0,-1,1", 15, {1, 1});
  ASSERT_EQ(p.size(), 2u);
  expect(p[1], 1, 0, 10, 1, 0);
  // A video edited, as far as it reaches.
  p = place("0,0,0,0,30,0.5", 15, {20});
  expect(p[0], 0, 0, 0, 15, 0.5);
  // A video continued backwards: its first frames are the last of the clip.
  p = place("0,0,0,-5,5", 15, {5});
  expect(p[0], 0, 0, 10, 5, 0);
  // What the next loop gets of the clip before.
  EXPECT_TRUE(place("1,0,-5,0,5,0.25", 15, {15}).empty());
  p = place("1,0,-5,0,5,0.25", 15, {15}, 5, 1);
  expect(p[0], 0, 10, 0, 5, 0.25);
}

TEST(MaskStrategy, EditRatios) {
  EXPECT_EQ(edit_ratios(place("0;0,1,0,-1,1,0.5", 7, {1, 1}, 0), 7),
            (std::vector<float>{0, 1, 1, 1, 1, 1, 0.5}));
  EXPECT_EQ(edit_ratios({}, 3), (std::vector<float>{1, 1, 1}));
}

TEST(MaskStrategy, FramesThatAreTaken) {
  const auto taken = [](const std::string& text, std::int64_t reference, std::int64_t align) {
    const LatentRange r =
        frames_taken(parse_mask_strategy(text, "p"), 2, reference, 12, 15, align, "p");
    return std::pair(r.first, r.last);
  };
  EXPECT_EQ(taken("0,0,-5,0,5", 0, 0), std::pair(std::int64_t{7}, std::int64_t{12}));
  EXPECT_EQ(taken("0,0,-5,0,5", 0, 5), std::pair(std::int64_t{5}, std::int64_t{10}));
  // All groups of the loops that there are, of this reference alone.
  EXPECT_EQ(taken("0,1,9,0,1;1,1,2,0,2;2,1,0;0,0,11", 1, 0),
            std::pair(std::int64_t{2}, std::int64_t{10}));
  EXPECT_EQ(taken("0,1;2,0", 0, 5), std::pair(std::int64_t{0}, std::int64_t{0}));
  EXPECT_THROW(taken("0,0,0,20", 0, 0), Error);
}

TEST(MaskStrategy, SnapsToChunks) {
  const std::int64_t expected[] = {0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10, 10, 10};
  for (std::int64_t v = 0; v < 15; ++v) EXPECT_EQ(snap(v, 5, 15), expected[v]) << v;
  EXPECT_EQ(snap(14, 0, 15), 14);
  EXPECT_EQ(snap(3, 4, 12), 4);  // more than the half of 4
  EXPECT_EQ(snap(2, 4, 12), 0);  // the half itself stays
}

TEST(MaskStrategy, RefusesWhatIsBroken) {
  const auto error = [](const std::string& text, const std::vector<std::int64_t>& references) {
    try {
      place(text, 15, references);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error("0;", {1}), HasSubstr("group \"\""));
  EXPECT_THAT(error("a", {1}), HasSubstr("\"a\" is not"));
  EXPECT_THAT(error("0,0,0.5", {1}), HasSubstr("\"0.5\" is not"));
  EXPECT_THAT(error("0,0,0,0,1,0,9", {1}), HasSubstr("has 7 fields"));
  EXPECT_THAT(error("0,0,0,0,1,1.5", {1}), HasSubstr("edit ratio 1.5"));
  EXPECT_THAT(error("0,0,0,0,0", {1}), HasSubstr("length 0"));
  EXPECT_THAT(error("0,1", {1}), HasSubstr("asks for reference 1, there are 1"));
  EXPECT_THAT(error("0", {}), HasSubstr("there are 0"));
  EXPECT_THAT(error("0,0,-7", {5}), HasSubstr("places latent frame -7"));
  EXPECT_THAT(error("0,0,0,20", {5}), HasSubstr("at 20 of a clip of 15"));
  EXPECT_EQ(error("", {}), "no error");
}

}  // namespace
}  // namespace weft
