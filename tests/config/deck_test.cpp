#include "config/deck.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/json.h"
#include "data/ingest/ingest.h"
#include "jobs/generate/options.h"
#include "jobs/jobs.h"
#include "models/stdit3/options.h"
#include "models/video_vae/options.h"
#include "models/wan/options.h"
#include "ops/ways.h"

namespace weft {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// The tables of the whole program.
const bool registered = (register_deck_tables(), true);

// The message and hint that a deck is refused with; fails the test if it is taken.
std::string refusal(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  try {
    parse_deck(toml, "test.toml", overrides);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_FALSE(e.hint().empty()) << e.what();
    return std::string(e.what()) + " | " + e.hint();
  }
  ADD_FAILURE() << "taken: " << toml;
  return "";
}

std::vector<std::string> changed(const Deck& a, const Deck& b, bool fixed = false) {
  std::vector<std::string> keys;
  for (const ChangedKey& k : changed_keys(a, b, fixed)) keys.push_back(k.key);
  return keys;
}

TEST(Deck, ReadsValuesOfEveryType) {
  const Deck d = parse_deck(R"(
[run]
dir = "runs/a"
resume = false
[train]
steps = 20
lr = 3            # a whole number does for a fraction
[model]
patch_size = [1, 4, 4]
[ingest]
inputs = ["a.mp4", "b*.avi"]
)",
                            "test.toml", {});
  EXPECT_EQ(d.run.dir, "runs/a");
  EXPECT_FALSE(d.run.resume);
  EXPECT_EQ(d.train.steps, 20);
  EXPECT_EQ(d.train.lr, 3.0);
  EXPECT_EQ(d.get<Stdit3Deck>().patch_size, (std::vector<std::int64_t>{1, 4, 4}));
  EXPECT_EQ(d.get<IngestDeck>().inputs, (std::vector<std::string>{"a.mp4", "b*.avi"}));
  EXPECT_EQ(d.get<Stdit3Deck>().hidden_size, 1152) << "what is not named keeps its default";
}

TEST(Deck, OverridesWinInOrderAndNeedNoQuotes) {
  const Deck d = parse_deck(
      "[train]\nsteps = 5\n", "test.toml",
      {"train.steps=6", "train.steps=7", "run.dir=runs/a b", "run.seed = 9",
       "data.path=synthetic:clips=8,frames=4", "run.resume=false",
       "ingest.inputs=[\"x.mp4\", 'y.mp4']", "ingest.frames=17", "ingest.resolutions=240p",
       "generate.output=\"quoted\"", "model.weights=123", "data.text_features="});
  EXPECT_EQ(d.train.steps, 7);
  EXPECT_EQ(d.run.dir, "runs/a b");
  EXPECT_EQ(d.run.seed, 9);
  EXPECT_EQ(d.data.path, "synthetic:clips=8,frames=4");
  EXPECT_FALSE(d.run.resume);
  EXPECT_EQ(d.get<IngestDeck>().inputs, (std::vector<std::string>{"x.mp4", "y.mp4"}));
  EXPECT_EQ(d.get<IngestDeck>().frames, (std::vector<std::int64_t>{17}));
  EXPECT_EQ(d.get<IngestDeck>().resolutions, (std::vector<std::string>{"240p"}));
  EXPECT_EQ(d.get<GenerateDeck>().output, "quoted");
  EXPECT_EQ(d.model.weights, "123");
  EXPECT_EQ(d.data.text_features, "");
}

// data.path is a text, or a list of them.
TEST(Deck, SeveralStores) {
  const auto stores = [](const std::string& toml, const std::vector<std::string>& overrides = {}) {
    return parse_deck(toml, "test.toml", overrides).data;
  };
  const DataDeck two = stores("[data]\npath = [\"a.h5\", \"b.h5\"]\nweights = [3, 0.5]\n");
  EXPECT_EQ(two.paths, (std::vector<std::string>{"a.h5", "b.h5"}));
  EXPECT_EQ(two.path, "[\"a.h5\", \"b.h5\"]");
  EXPECT_EQ(two.weights, (std::vector<double>{3, 0.5}));
  const DataDeck one = stores("[data]\npath = [\"a.h5\"]\n");
  EXPECT_EQ(one.path, "a.h5");
  EXPECT_TRUE(one.paths.empty());
  EXPECT_EQ(stores("", {"data.path=[\"a.h5\", 'b.h5']"}).paths, two.paths);
  EXPECT_EQ(stores("[data]\npath = [\"a.h5\", \"b.h5\"]\n", {"data.path=c.h5"}).all_paths(),
            (std::vector<std::string>{"c.h5"}));

  Deck deck;
  deck.data = two;
  EXPECT_EQ(parse_deck(to_toml(deck), "copy", {}).data.paths, two.paths);
  EXPECT_THAT(changed(deck, Deck{}, true), testing::ElementsAre("data.path", "data.weights"));
  EXPECT_EQ(key_of_value(deck, "cannot open b.h5: no such file"), "data.path");

  EXPECT_THAT(refusal("[data]\npath = []\n"), HasSubstr("data.path is an empty list"));
  EXPECT_THAT(refusal("[data]\npath = [\"a.h5\", \"\"]\n"), HasSubstr("an empty text"));
  EXPECT_THAT(refusal("[data]\npath = 3\n"), HasSubstr("a text in quotes, or a list of them"));
  EXPECT_THAT(refusal("[data]\npath = [\"a.h5\", 3]\n"), HasSubstr("got the whole number 3"));
  EXPECT_THAT(refusal("", {"data.path=[a.h5, b.h5]"}), HasSubstr("quotes around each"));
  const std::string list = "[data]\npath = [\"a.h5\", \"b.h5\"]\n";
  EXPECT_THAT(refusal(list + "weights = [1]\n"),
              HasSubstr("data.weights has 1 entry, and data.path names 2 stores"));
  EXPECT_THAT(refusal(list + "weights = [0, 0]\n"), HasSubstr("data.weights are all 0"));
  EXPECT_THAT(refusal(list + "weights = [1, -1]\n"), HasSubstr("out of range"));
  EXPECT_THAT(refusal(list + "weights = [1, nan]\n"), HasSubstr("out of range"));
  EXPECT_THAT(refusal(list + "prompt_prefixes = [\"a\", \"b\", \"c\"]\n"),
              HasSubstr("data.prompt_prefixes has 3 entries"));
  EXPECT_THAT(refusal(list + "text_features = \"f\"\nprompt_prefixes = [\"a\", \"\"]\n"),
              HasSubstr("features already"));
}

TEST(Deck, SyntaxErrorsNameLineAndColumn) {
  EXPECT_THAT(refusal("[run]\nseed = = 3\n"), HasSubstr("test.toml:2:8: not TOML"));
  EXPECT_THAT(refusal("[run]\nseed = 1\nseed = 2\n"), HasSubstr("test.toml:3:"));
  EXPECT_THAT(refusal("[run]\ndir = \"\xff\"\n"), HasSubstr("not TOML"));
}

TEST(Deck, UnknownNamesSuggestTheNearest) {
  EXPECT_THAT(refusal("[train]\nstesp = 3\n"),
              HasSubstr("test.toml:2: unknown key train.stesp | did you mean train.steps?"));
  EXPECT_THAT(refusal("[trian]\nsteps = 3\n"),
              HasSubstr("test.toml:1: unknown table [trian] | did you mean [train]?"));
  EXPECT_THAT(refusal("[model]\nwarmup_steps = 3\n"), HasSubstr("did you mean train.warmup_steps"));
  EXPECT_THAT(refusal("warmup_steps = 3\n"), HasSubstr("outside any table | did you mean train."));
  EXPECT_THAT(refusal("[zzzzzzzz]\n"), HasSubstr("the tables are: run, device"));
  EXPECT_THAT(refusal("run = 3\n"), HasSubstr("run is a table, not the whole number 3"));
  EXPECT_THAT(refusal("", {"train.stepz=3"}), HasSubstr("did you mean train.steps?"));
}

TEST(Deck, WrongTypesSayWhatWasExpectedAndFound) {
  EXPECT_THAT(refusal("[train]\nbatch_size = \"many\"\n"),
              HasSubstr("test.toml:2: train.batch_size: expected a whole number, got the text"));
  EXPECT_THAT(refusal("[train]\nsteps = 1e3\n"), HasSubstr("write 1000 without a point"));
  EXPECT_THAT(refusal("[train]\nlr = true\n"), HasSubstr("expected a number, got true"));
  EXPECT_THAT(refusal("[run]\nresume = 1\n"), HasSubstr("expected true or false"));
  EXPECT_THAT(refusal("[run]\ndir = 3\n"), HasSubstr("expected a text in quotes"));
  EXPECT_THAT(refusal("[model]\npatch_size = 2\n"), HasSubstr("expected a list of whole numbers"));
  EXPECT_THAT(refusal("[model]\npatch_size = [1, 2.5, 2]\n"), HasSubstr("the fraction 2.5"));
  EXPECT_THAT(refusal("[run]\nseed = 2020-01-01\n"), HasSubstr("got a date or time"));
  EXPECT_THAT(refusal("", {"train.steps=many"}), HasSubstr("expected a whole number"));
  EXPECT_THAT(refusal("", {"train.steps="}), HasSubstr("expected a whole number"));
  EXPECT_THAT(refusal("", {"train.steps=3\nlr = 1"}), HasSubstr("expected a whole number"));
  EXPECT_THAT(refusal("", {"ingest.inputs=[a.mp4, b.mp4]"}), HasSubstr("quotes around each"));
  EXPECT_THAT(refusal("", {"run.dir=\xff"}), HasSubstr("not UTF-8"));
  EXPECT_THAT(refusal("", {"steps"}), HasSubstr("section.key=value"));
  EXPECT_THAT(refusal("", {"steps=3.5"}), HasSubstr("section.key=value"));
}

TEST(Deck, PathsThatNoShellHasSeen) {
  setenv("HOME", "/home/ada", 1);
  const Deck d =
      parse_deck("", "test.toml",
                 {"run.dir=~/a", "ingest.inputs=[\"~/v\", 'c/$d', './~']", "model.weights=~",
                  "data.path=['~/a.h5', 'b.h5']", "generate.adapters=~/ink=0.5",
                  "generate.refine=~/bin/x $HOME", "data.stage=$TMPDIR"});
  EXPECT_EQ(d.run.dir, "/home/ada/a");
  EXPECT_EQ(d.model.weights, "/home/ada");
  EXPECT_EQ(d.get<IngestDeck>().inputs, (std::vector<std::string>{"/home/ada/v", "c/$d", "./~"}));
  EXPECT_EQ(d.data.paths, (std::vector<std::string>{"/home/ada/a.h5", "b.h5"}));
  EXPECT_EQ(d.get<GenerateDeck>().adapters.front(), "/home/ada/ink=0.5");
  EXPECT_EQ(d.get<GenerateDeck>().refine, "~/bin/x $HOME") << "a shell's command is the shell's";
  EXPECT_THAT(refusal("", {"run.dir=$SCRATCH/a"}),
              HasSubstr("run.dir = \"$SCRATCH/a\": $SCRATCH is not replaced here"));
  EXPECT_THAT(refusal("", {"ingest.inputs=['a', '${X}/b']"}), HasSubstr("${X} is not replaced"));
  EXPECT_THAT(refusal("", {"generate.output=~ada/a"}), HasSubstr("~ada is not replaced"));
  unsetenv("HOME");
  EXPECT_THAT(refusal("", {"run.dir=~/a"}), HasSubstr("HOME is not set"));
  // A run that was made before has what it has.
  EXPECT_EQ(parse_deck("[run]\ndir = \"$S/a\"\n", "run/deck.toml", {}).run.dir, "$S/a");
}

// Every text of a deck is a path or one of these.
TEST(Deck, StepsMayBeSoManyMore) {
  for (const Deck& d : {parse_deck("[train]\nsteps = \"+7\"\n", "x", {}),
                        parse_deck("[train]\nsteps = 5\n", "x", {"train.steps=+7"}),
                        parse_deck("", "x", {"train.steps=\"+7\""})})
    EXPECT_EQ(d.train.more_steps, 7);
  EXPECT_EQ(parse_deck("[train]\nsteps = \"+7\"\n", "x", {"train.steps=9"}).train.more_steps, 0);
  for (const char* value : {"+0", "+", "+7x", "many", "-7"})
    EXPECT_THAT(refusal(fmt::format("[train]\nsteps = \"{}\"\n", value)),
                HasSubstr("a whole number, or so many more in quotes, as \"+1000\", got the text"));
  EXPECT_THAT(refusal("[train]\nsteps = \"+7\"\nepochs = 2\n"), HasSubstr("set train.epochs = 0"));
}

TEST(Deck, KnowsWhichTextsArePaths) {
  const std::set<std::string> others = {"animate.name",
                                        "data.keep",
                                        "data.prompt_prefixes",
                                        "data.stage",
                                        "evaluate.measures",
                                        "generate.aspect_ratio",
                                        "generate.camera_motion",
                                        "generate.mask_strategies",
                                        "generate.negative_prompt",
                                        "generate.num_frames",
                                        "generate.prompt_generator",
                                        "generate.prompts",
                                        "generate.refine",
                                        "generate.resolution",
                                        "generate.sample_name",
                                        "ingest.image_suffix",
                                        "ingest.label_suffix",
                                        "ingest.max",
                                        "ingest.min",
                                        "lora.targets",
                                        "samples.prompts",
                                        "score.columns",
                                        "score.shard",
                                        "train.batch_sizes"};
  Deck deck;
  std::set<std::string> found;
  for (const Option& o : option_table(deck))
    if (!o.path && o.choices.empty() &&
        (std::holds_alternative<std::string*>(o.target) ||
         std::holds_alternative<std::vector<std::string>*>(o.target)))
      found.insert(o.key);
  EXPECT_EQ(found, others);
}

TEST(Deck, RefusesZeroBytes) {
  EXPECT_THAT(refusal("[run]\ndir = \"a\\u0000/../b\"\n"),
              HasSubstr("test.toml:2: run.dir = \"a\\x00/../b\" has a zero byte"));
  EXPECT_THAT(refusal("", {"ingest.inputs=[\"a\", \"\\u0000\"]"}), HasSubstr("has a zero byte"));
  EXPECT_THAT(refusal("[device]\nkind = \"cpu\\u0000\"\n"), HasSubstr("has a zero byte"));
  EXPECT_THAT(refusal("[run]\n\"d\\u0000r\" = 1\n"), HasSubstr("unknown key run.d\\x00r"));
}

TEST(Deck, DecimalCommas) {
  EXPECT_THAT(refusal("", {"train.lr=0,5"}), HasSubstr("got '0,5' | write 0.5, with a decimal"));
  EXPECT_THAT(refusal("", {"train.ema_decay=-1,25"}), HasSubstr("write -1.25"));
  EXPECT_THAT(refusal("", {"train.steps=1,5"}), testing::Not(HasSubstr("decimal")));
  for (const char* other : {"", ",", "1,", ",5", "1,5,2", "a,5", "1,b", "1.0,5"})
    EXPECT_EQ(number_hint(other, "else"), "else") << other;
}

TEST(Deck, RangesAndChoices) {
  EXPECT_THAT(refusal("[train]\nsteps = 0\n"), HasSubstr("train.steps = 0 is out of range"));
  EXPECT_THAT(refusal("[train]\nlr = nan\n"), HasSubstr("out of range"));
  EXPECT_THAT(refusal("[train]\nlr = -inf\n"), HasSubstr("out of range"));
  EXPECT_THAT(refusal("[train]\nkeep = 1\n"), HasSubstr("out of range"));
  EXPECT_THAT(refusal("[train]\nadam_beta1 = 1\n"), HasSubstr("out of range"));
  EXPECT_THAT(refusal("[device]\nkind = \"cudda\"\n"),
              HasSubstr("is not one of: auto, cpu, cuda | did you mean \"cuda\"?"));
  EXPECT_THAT(refusal("[ingest]\nresolutions = [\"144p\", \"123q\"]\n"), HasSubstr("not one of"));
}

TEST(Deck, KeysThatMustFitTogether) {
  EXPECT_THAT(refusal("[model]\nhidden_size = 100\nnum_heads = 16\n"),
              HasSubstr("does not divide"));
  EXPECT_THAT(refusal("[model]\nhidden_size = 12\nnum_heads = 4\n"), HasSubstr("even"));
  EXPECT_THAT(refusal("[model]\nhidden_size = 6\nnum_heads = 1\n"), HasSubstr("multiple of 4"));
  EXPECT_THAT(refusal("[model]\npatch_size = [2, 2]\n"), HasSubstr("give three"));
  EXPECT_THAT(refusal("[mask]\nrandom = 0.6\nimage_head = 0.5\n"), HasSubstr("add up to 1.1"));
  EXPECT_THAT(refusal("[ingest]\nwidth = 64\n"), HasSubstr("ingest.height = 0"));
  EXPECT_THAT(refusal("[ingest]\nframes = []\n"), HasSubstr("ingest.frames is empty"));
  EXPECT_THAT(refusal("[run]\ndir = \"\"\n"), HasSubstr("run.dir is empty"));
}

TEST(Deck, SchedulesRefuseKeysThatDoNothingWithThem) {
  EXPECT_THAT(refusal("[train]\nlr_scheduler = \"cosin\"\n"), HasSubstr("did you mean \"cosine\""));
  EXPECT_THAT(refusal("[train]\nlr_scheduler = \"cosine\"\nlr_power = 0.9\n"),
              HasSubstr("train.lr_power = 0.9 has no effect with train.lr_scheduler = \"cosine\""));
  EXPECT_THAT(refusal("[train]\nlr_decay_steps = 10\n"), HasSubstr("warmup_stable_decay"));
  EXPECT_THAT(refusal("[train]\nlr_decay_type = \"sqrt\"\n"), HasSubstr("has no effect"));
  EXPECT_THAT(refusal("[train]\nlr_scheduler = \"constant\"\nmin_lr_factor = 0.1\n"),
              HasSubstr("min_lr_factor = 0.1 has no effect"));
  const std::string stable =
      "[train]\nlr_scheduler = \"warmup_stable_decay\"\nsteps = 100\nwarmup_steps = 60\n";
  EXPECT_THAT(refusal(stable + "lr_decay_steps = 41\n"), HasSubstr("the run's 100 steps"));
  EXPECT_EQ(parse_deck(stable + "lr_decay_steps = 40\n", "x", {}).train.lr_decay_steps, 40);
  // How many steps "+N" makes is known once the run's checkpoint is read.
  const std::vector<std::string> more{"train.steps=+50"};
  EXPECT_EQ(parse_deck(stable + "lr_decay_steps = 60\n", "x", more).train.lr_decay_steps, 60);
}

TEST(Deck, OneDecayOfTheAverageOrSeveral) {
  using testing::ElementsAre;
  // As decks and checkpoints had it before there were lists, and are written still.
  const Deck one = parse_deck("[train]\nema_decay = 0.95\n", "x", {});
  EXPECT_THAT(one.train.ema_decay, ElementsAre(0.95));
  EXPECT_THAT(to_toml(one), HasSubstr("\nema_decay = 0.95\n"));
  const Deck two = parse_deck("[train]\nema_decay = [0.99, 1]\n", "x", {});
  EXPECT_THAT(two.train.ema_decay, ElementsAre(0.99, 1.0));
  EXPECT_THAT(to_toml(two), HasSubstr("\nema_decay = [0.99, 1.0]\n"));
  EXPECT_THAT(changed(one, two), ElementsAre("train.ema_decay"));
  EXPECT_THAT(refusal("[train]\nema_decay = []\n"), HasSubstr("empty list"));
  EXPECT_THAT(refusal("[train]\nema_decay = [0.5, 0.9, 0.5]\n"), HasSubstr("names 0.5 twice"));
  EXPECT_THAT(refusal("[train]\nema_decay = [0.5, 1.5]\n"), HasSubstr("out of range"));
}

TEST(Deck, UnreadableFiles) {
  const auto refused = [](const std::filesystem::path& path) {
    try {
      load_deck(path, {});
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused("no/such/deck.toml"), HasSubstr("no/such/deck.toml does not exist"));
  EXPECT_THAT(refused(testing::TempDir()), HasSubstr("is not a file"));
  const std::filesystem::path file =
      testing::TempDir() + "weft_deck_" + std::to_string(getpid()) + ".toml";
  std::ofstream(file) << "[train]\nsteps = 3\n";
  EXPECT_EQ(load_deck(file, {"train.lr=2"}).train.steps, 3);
  std::filesystem::resize_file(file, 2 << 20);
  EXPECT_THAT(refused(file), HasSubstr("1 MiB"));
  std::filesystem::remove(file);
}

// Checkpoints and run folders of earlier versions hold decks with them, and with the values that
// those versions wrote; others are refused.
TEST(Deck, KeysThatAreNotReadAnyMoreArePassedOver) {
  const std::string old =
      "[model]\nchannels = 8\nmomentum = 0.001\neps = 1e-05\nranks = 1\n[train]\nranks = 1\n"
      "first_iteration = 0\nmax_iterations = 1\nsteps = 7\n";
  const Deck d = parse_deck(old, "old.toml", {});
  EXPECT_EQ(d.train.steps, 7);
  EXPECT_EQ(to_toml(d).find("first_iteration"), std::string::npos);
  EXPECT_THAT(refusal("[train]\nranks = 2\n"), HasSubstr("unknown key train.ranks"));
}

TEST(Deck, AnotherNameOfAKeyIsReadAndTheFirstWritten) {
  const Deck d = parse_deck("[mask]\ninterpolate = 0.25\n", "test.toml", {});
  EXPECT_EQ(d.get<MaskDeck>().intepolate, 0.25);
  EXPECT_THAT(to_toml(d), HasSubstr("\nintepolate = 0.25\n"));
  EXPECT_EQ(parse_deck("", "test.toml", {"mask.interpolate=0.5"}).get<MaskDeck>().intepolate, 0.5);
}

// What a user writes is told; a deck that a checkpoint holds is not.
TEST(Deck, AnOlderNameOfAKeyIsAWarning) {
  const std::string file = testing::TempDir() + "weft_old_" + std::to_string(getpid()) + ".toml",
                    old = "[model]\nname = \"vae\"\nfilters = 16\n";
  std::ofstream(file) << old;
  testing::internal::CaptureStderr();
  const Deck d = load_deck(file, {"model.num_groups=4", "vae.num_res_blocks=1"});
  const std::string said = testing::internal::GetCapturedStderr();
  std::filesystem::remove(file);
  EXPECT_EQ(d.get<VaeDeck>().filters, 16);
  EXPECT_EQ(d.get<VaeDeck>().num_groups, 4);
  EXPECT_THAT(said, HasSubstr(file + ":3: model.filters is an older name of vae.filters"));
  EXPECT_THAT(said, HasSubstr("override 'model.num_groups=4': model.num_groups is an older name"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 2) << said;
  testing::internal::CaptureStderr();
  parse_deck(old, "step_3/manifest.json", {});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Deck, WritesWhatItReadsBackExactly) {
  Deck d;
  d.run.dir = "a \"b\" \\ c\n\t\x01 \xc3\xa9";
  d.train.lr = 0.1 + 0.2;
  d.train.adam_eps = std::numeric_limits<double>::denorm_min();
  d.train.grad_clip = 1.0 / 3.0;
  d.train.weight_decay = 100;
  d.get<IngestDeck>().inputs = {"x", "y\"z"};
  d.get<IngestDeck>().frames = {1, 17};
  const std::string text = to_toml(d);
  const Deck back = parse_deck(text, "copy", {});
  EXPECT_EQ(back.run.dir, d.run.dir);
  EXPECT_EQ(back.train.lr, d.train.lr);
  EXPECT_EQ(back.train.adam_eps, d.train.adam_eps);
  EXPECT_EQ(back.train.grad_clip, d.train.grad_clip);
  EXPECT_EQ(back.get<IngestDeck>().inputs, d.get<IngestDeck>().inputs);
  EXPECT_EQ(back.get<IngestDeck>().frames, d.get<IngestDeck>().frames);
  EXPECT_EQ(to_toml(back), text);
}

// The table of decks cannot ask the operations for their names.
TEST(Deck, TriesTheUntestedWays) {
  Deck deck;
  std::vector<std::string> names;
  for (const kernels::UntestedWay& way : kernels::untested_ways) names.emplace_back(way.name);
  std::vector<std::string> choices;
  for (const Option& o : option_table(deck))
    if (o.key == "device.try") choices = o.choices;
  EXPECT_EQ(choices, names);
}

TEST(Deck, ReferenceIsADeckThatNamesEveryKeyOnce) {
  Deck plain;
  const std::string help = default_deck_with_help();
  EXPECT_EQ(to_toml(parse_deck(help, "help", {})), to_toml(plain));
  std::vector<std::string> keys;
  for (const Option& o : option_table(plain)) {
    keys.push_back(o.key);
    EXPECT_EQ(o.help.back(), '.') << o.key;
    EXPECT_THAT(help, HasSubstr(o.help));
  }
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(std::adjacent_find(keys.begin(), keys.end()), keys.end());
  // Guards against a member of a deck struct that was given no row.
  EXPECT_EQ(keys.size(), 393u);
}

TEST(Deck, ReferenceOfATableOrAKey) {
  const std::string key = deck_help("train.lr");
  EXPECT_THAT(key, StartsWith("[train]\n# "));
  EXPECT_THAT(key, EndsWith(")\nlr = 0.0001\n"));
  EXPECT_THAT(deck_help("train"), HasSubstr("\n" + key.substr(key.find("lr = "))));
  EXPECT_THAT(deck_help("weights"), HasSubstr("\n[vae]\n"));
  for (const auto& [wrong, near] : {std::pair("train.lrr", "train.lr"), {"trian", "train"}}) {
    try {
      deck_help(wrong);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_THAT(e.hint(), HasSubstr(std::string("did you mean ") + near));
    }
  }
}

// model.hidden_size is a key of STDiT3 and of Wan: the row of model.name's model counts, else the
// first.
TEST(Deck, AKeyOfSeveralModelsHasARowForEach) {
  const auto hidden = [](const Deck& d) {
    return std::pair(d.get<Stdit3Deck>().hidden_size, d.get<WanDeck>().hidden_size);
  };
  const std::string wide = "[model]\nhidden_size = 64\nnum_heads = 4\n";
  EXPECT_EQ(hidden(parse_deck(wide, "x", {})), std::pair(std::int64_t{64}, WanDeck().hidden_size));
  EXPECT_EQ(hidden(parse_deck(wide + "name = \"dbnet\"\n", "x", {})),
            std::pair(std::int64_t{64}, WanDeck().hidden_size));
  const auto of_wan = std::pair(Stdit3Deck().hidden_size, std::int64_t{64});
  EXPECT_EQ(hidden(parse_deck(wide + "name = \"wan\"\n", "x", {})), of_wan);
  // An override names the model as well as the deck does, wherever it stands.
  EXPECT_EQ(hidden(parse_deck(wide, "x", {"model.name=wan"})), of_wan);
  EXPECT_EQ(
      hidden(parse_deck("", "x", {"model.hidden_size=64", "model.num_heads=4", "model.name=wan"})),
      of_wan);
  EXPECT_EQ(hidden(parse_deck(wide + "name = \"wan\"\n", "x", {"model.name=stdit3"})).first, 64);

  const Deck wan = parse_deck(wide + "name = \"wan\"\nffn_dim = 96\n", "x", {});
  EXPECT_THAT(to_toml(wan), HasSubstr("\nhidden_size = 64\n"));
  EXPECT_EQ(hidden(parse_deck(to_toml(wan), "copy", {})), of_wan);
  EXPECT_THAT(changed(wan, parse_deck(wide, "x", {})),
              testing::IsSupersetOf({"model.name", "model.ffn_dim", "model.depth"}));
  EXPECT_THAT(refusal("[model]\nname = \"wan\"\nhidden_size = 40\nnum_heads = 12\n"),
              HasSubstr("does not divide"));

  // Keys of the model that another stands in for.
  EXPECT_THAT(
      refusal("[model]\nname = \"wan\"\nmlp_ratio = 2\n"),
      HasSubstr("model.mlp_ratio has no effect with model.name = \"wan\" | leave it out: it "
                "is a key of stdit3"));
  EXPECT_THAT(refusal("[model]\nffn_dim = 96\n"), HasSubstr("it is a key of wan"));

  const auto decides = [](const Deck& d, const std::string& text) {
    const auto lines = identity(d, {"model"});
    return std::ranges::any_of(lines, [&](const DeckLine& l) { return l.text == text; });
  };
  EXPECT_TRUE(decides(wan, "ffn_dim = 96"));
  EXPECT_FALSE(decides(wan, "mlp_ratio = 4.0"));
  EXPECT_TRUE(decides(Deck{}, "mlp_ratio = 4.0"));
  EXPECT_FALSE(decides(Deck{}, "ffn_dim = 8960"));

  const std::string help = deck_help("model.hidden_size");
  EXPECT_THAT(help, HasSubstr(" Default of wan: 1536. (whole number"));
  EXPECT_THAT(help, EndsWith("\nhidden_size = 1152\n"));
}

TEST(NearestName, FindsSlipsAndLeavesStrangersAlone) {
  const std::vector<std::string> known = {"train.steps", "train.lr", "model.depth"};
  EXPECT_EQ(nearest_name("train.step", known), "train.steps");
  EXPECT_EQ(nearest_name("trian.steps", known), "train.steps");
  EXPECT_EQ(nearest_name("Train.Steps", known), "train.steps");
  EXPECT_EQ(nearest_name("completely.different", known), "");
  EXPECT_EQ(nearest_name("", known), "");
  EXPECT_EQ(nearest_name(std::string(100000, 'x'), known), "");
}

TEST(KeyOfValue, NamesTheKeyOfAPath) {
  const Deck d = parse_deck(
      "[score]\ninput = \"a.csv\"\n[ingest]\ninputs = [\"b.mp4\", \"c/b.mp4\"]", "test.toml", {});
  EXPECT_EQ(key_of_value(d, "cannot open a.csv: No such file"), "score.input");
  EXPECT_EQ(key_of_value(d, "cannot open \"c/b.mp4\""), "ingest.inputs");
  EXPECT_EQ(key_of_value(d, "cannot open a.csv/latest: Not a directory"), "score.input");
  EXPECT_EQ(key_of_value(d, "cannot open aa.csv"), "");
  EXPECT_EQ(key_of_value(d, "no word of it"), "");
}

TEST(KeepInputs, RefusesAResultThatReplacesOne) {
  namespace fs = std::filesystem;
  const fs::path dir = fs::temp_directory_path() / ("weft_keep_" + std::to_string(getpid()));
  fs::create_directories(dir / "in");
  std::ofstream(dir / "in/a.png") << "x";
  std::ofstream(dir / "real.png") << "x";
  fs::create_symlink("in", dir / "same");
  fs::create_symlink("../real.png", dir / "in/link.png");
  Deck deck =
      parse_deck("[score]\ninput = \"" + (dir / "table.csv").string() + "\"", "test.toml", {});
  std::ofstream(dir / "table.csv") << "path";
  std::ofstream(dir / "deck.toml") << "";
  deck.file = dir / "deck.toml";
  const std::vector<std::string> inputs = {dir / "in/a.png", dir / "in/link.png",
                                           dir / "missing.png", "lavfi:testsrc2"};
  const auto taken = [&](const fs::path& result) {
    try {
      keep_inputs(deck, "score.output", inputs,
                  [&](const fs::path& path) { return path == absolute_path(result); });
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_THAT(e.hint(), HasSubstr("score.output"));
      return false;
    }
    return true;
  };
  for (const char* result : {"in/a.png", "same/a.png", "in/../in/a.png", "real.png", "in/link.png",
                             "table.csv", "deck.toml"})
    EXPECT_FALSE(taken(dir / result)) << result;
  for (const char* result : {"out.png", "missing.png", "in/b.png", "a.png"})
    EXPECT_TRUE(taken(dir / result)) << result;
  fs::remove_all(dir);
}

// tests/e2e/test_shell.py validates decks by it.
TEST(Schema, SaysWhatARowSays) {
  const auto tables = parse_json(deck_schema()).at("properties");
  const auto key = [&](const char* table, const char* name) {
    return tables.at(table).at("properties").at(name);
  };
  EXPECT_EQ(key("train", "lr").at("type"), "number");
  EXPECT_EQ(key("train", "lr").at("minimum"), 0);
  EXPECT_EQ(key("train", "lr").at("maximum"), 1000);
  EXPECT_EQ(key("train", "lr").at("default"), 1e-4);
  EXPECT_THAT(key("train", "lr").at("description").get<std::string>(), StartsWith("Learning rate"));
  EXPECT_EQ(key("train", "epoch_steps").at("type"), "integer");
  EXPECT_FALSE(key("train", "epoch_steps").contains("maximum")) << "none that anyone meets";
  EXPECT_EQ(key("train", "steps").at("anyOf")[1].at("pattern"), "^\\+[0-9]+$");
  EXPECT_EQ(key("device", "kind").at("enum"), (std::vector<std::string>{"auto", "cpu", "cuda"}));
  EXPECT_EQ(key("model", "patch_size").at("items").at("type"), "integer");
  EXPECT_EQ(key("train", "ema_decay").at("anyOf").size(), 2u) << "a number or a list";
  EXPECT_EQ(key("data", "path").at("anyOf").at(1).at("minItems"), 1);
  // Of several models: what any of them takes, and each one's default.
  EXPECT_THAT(key("model", "hidden_size").at("description").get<std::string>(),
              HasSubstr("Default of wan: 1536."));
  EXPECT_FALSE(key("model", "filters").contains("default")) << "another name of vae.filters";
}

}  // namespace
}  // namespace weft
