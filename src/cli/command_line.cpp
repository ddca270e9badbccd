#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <ranges>

#include "bench/bench.h"
#include "cli/init.h"
#include "cli/shell.h"
#include "config/deck_help.h"
#include "config/named_key.h"
#include "core/error.h"
#include "data/clip_store_child.h"
#include "data/ingest/ingest.h"
#include "doctor/doctor.h"
#include "doctor/library_versions.h"
#include "jobs/animate/animate.h"
#include "jobs/deck_tables.h"
#include "jobs/encode/encode.h"
#include "jobs/evaluate/evaluate.h"
#include "jobs/export_weights.h"
#include "jobs/generate/generate.h"
#include "jobs/inspect.h"
#include "jobs/probe/probe.h"
#include "jobs/reconstruct/reconstruct.h"
#include "jobs/score/score.h"
#include "jobs/segment/segment.h"
#include "jobs/text.h"
#include "jobs/train.h"
#include "plan/command.h"
#include "report/evaluation_page.h"
#include "report/report.h"
#include "report/score_page.h"
#include "report/status.h"
#include "tensor/tf32.h"

namespace weft {
namespace {

// Every command, in the order of `weft --help`. Made once: help and completion tell of all.
const std::vector<Command>& all_commands();

Command help_command() {
  const auto topic = std::make_shared<std::string>(), only = std::make_shared<std::string>();
  Command c{"help", "print deck keys (deck, a table or a key), or a manual page (man, man-deck)",
            [topic, only](const Deck&, MPI_Comm) {
              fmt::print("{}", *topic == "deck"
                                   ? only->empty() ? default_deck_with_help() : deck_help(*only)
                               : *topic == "man" ? man_page(all_commands())
                                                 : deck_man_page());
              return 0;
            }};
  c.first_rank_only = true;
  Argument& a = c.option("topic", *topic, "deck, man or man-deck");
  a.required = true;
  a.choices = {"deck", "man", "man-deck"};
  c.option("keys", *only, "of deck: a table or a key, as in help deck train, help train.lr");
  return c;
}

Command completion_command() {
  const auto shell = std::make_shared<std::string>();
  Command c{"completion", "print a script that completes this command line in a shell",
            [shell](const Deck&, MPI_Comm) {
              fmt::print("{}", completion_script(*shell, all_commands()));
              return 0;
            }};
  c.first_rank_only = true;
  Argument& a = c.option("shell", *shell, "bash, zsh or fish");
  a.required = true;
  a.choices = {"bash", "zsh", "fish"};
  return c;
}

std::vector<Command> make_commands() {
  Command bench{"bench", "measure: kernels, step, comm, scaling, t5, read"};
  bench.commands = {bench_step_command(),    bench_kernels_command(), bench_comm_command(),
                    bench_scaling_command(), bench_t5_command(),      bench_read_command()};
  return {init_command(),
          ingest_command(),
          train_command(),
          encode_command(),
          generate_command(),
          reconstruct_command(),
          evaluate_command({report_page::segmentation_page, report_page::detection_page}),
          segment_command(),
          score_command(report_page::score_page),
          animate_command(),
          report_command(),
          status_command(),
          inspect_command(),
          export_command(),
          text_command(),
          doctor_command(),
          probe_command(),
          plan_command(),
          simulate_command(),
          std::move(bench),
          completion_command(),
          help_command()};
}

const std::vector<Command>& all_commands() {
  static const std::vector<Command> commands = make_commands();
  return commands;
}

// The command line's part of the deck.
struct GivenDeck {
  std::string file;
  std::vector<std::string> overrides;
};

void add_argument(CLI::App& app, const Argument& a, GivenDeck& deck) {
  const auto add = [&](auto target) {
    using T = decltype(target);
    if constexpr (std::is_same_v<T, Argument::DeckFile>)
      return app.add_option(a.name, deck.file, a.help);
    else if constexpr (std::is_same_v<T, Argument::Overrides>)
      return app.add_option(a.name, deck.overrides, a.help);
    else if constexpr (std::is_same_v<T, bool*>)
      return app.add_flag(a.name, *target, a.help);
    else
      return app.add_option(a.name, *target, a.help);
  };
  CLI::Option& option = *std::visit(add, a.target);
  if (a.required) option.required();
  // One word holds the whole list: the next may be a key of the deck.
  if (a.commas) option.delimiter(',')->allow_extra_args(false);
  if (a.not_negative) option.check(CLI::NonNegativeNumber);
  if (!a.choices.empty()) option.check(CLI::IsMember(a.choices));
}

int run_command(const Command& c, GivenDeck given, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  if (c.first_rank_only && rank != 0) return 0;
  for (const Argument& a : c.arguments) {
    // An option that stands for a deck key becomes an override of it.
    if (a.key.empty()) continue;
    const auto* flag = std::get_if<bool*>(&a.target);
    const std::string value = flag == nullptr ? *std::get<std::string*>(a.target)
                              : **flag        ? "true"
                                              : "";
    if (!value.empty()) given.overrides.push_back(a.key + "=" + value);
  }
  const auto file = std::find_if(c.arguments.begin(), c.arguments.end(), [](const auto& a) {
    return std::holds_alternative<Argument::DeckFile>(a.target);
  });
  if (file == c.arguments.end()) return c.run(Deck(), world);
  if (std::string* path = std::get<Argument::DeckFile>(file->target).path) *path = given.file;
  const Deck deck = given.file.empty() && !file->required
                        ? parse_deck("", "the command line", given.overrides)
                        : load_deck(given.file, given.overrides);
  allow_tf32(deck.device.tf32);
  try {
    return c.run(deck, world);
  } catch (Error& e) {
    const std::string message = std::string(e.what()) + " " + e.hint();
    if (const std::string key = key_of_value(deck, e.what());
        !key.empty() && message.find(key) == message.npos)
      e.add_hint("the deck's " + key + " names it");
    throw;
  }
}

void add_commands(CLI::App& app, const std::vector<Command>& commands, Invocation& chosen) {
  app.require_subcommand(1);
  for (const Command& c : commands) {
    CLI::App& sub = *app.add_subcommand(c.name, c.help);
    if (!c.commands.empty()) {
      add_commands(sub, c.commands, chosen);
      continue;
    }
    const auto deck = std::make_shared<GivenDeck>();
    for (const Argument& a : c.arguments) add_argument(sub, a, *deck);
    sub.callback([&c, deck, &chosen] {
      chosen = {[&c, deck](MPI_Comm world) { return run_command(c, *deck, world); }, c.heeds_stops};
    });
  }
}

int print(const std::string& text, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  if (rank == 0) fmt::print("{}", text);
  return 0;
}

// The words of the command line, last first as CLI11 takes them. `weft help` and `weft help
// COMMAND` ask as --help does; deck and the manual pages are topics of their own, and `weft help
// KEY` is short for `weft help deck KEY`.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words[0] == "help" &&
      (words.size() == 1 ||
       std::ranges::any_of(all_commands(), [&](const Command& c) { return c.name == words[1]; }))) {
    words.erase(words.begin());
    words.push_back("--help");
  } else if (words.size() == 2 && words[0] == "help" &&
             (words[1].find('.') != std::string::npos || names_deck_keys(words[1]))) {
    words.insert(words.begin() + 1, "deck");
  }
  std::ranges::reverse(words);
  return words;
}

// Throws for the first word that is no known command or option: CLI11 would instead report an
// argument that is missing because of it.
void refuse_unknown_words(const CLI::App& app, int argc, char** argv) {
  const CLI::App* command = &app;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    std::vector<std::string> known;
    std::string what;
    if (word.rfind("--", 0) == 0 && word.size() > 2) {
      for (const CLI::Option* o : command->get_options())
        for (const std::string& l : o->get_lnames()) known.push_back("--" + l);
      what = "option";
    } else {
      for (const CLI::App* s : command->get_subcommands([](const CLI::App*) { return true; }))
        known.push_back(s->get_name());
      what = "command";
    }
    if (what == "command" && known.empty()) continue;  // a value, not a command
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      const std::string near = nearest_name(name, known);
      throw Error(Exit::usage, fmt::format("unknown {} \"{}\"", what, name),
                  !near.empty() ? fmt::format("did you mean \"{}\"?", near)
                  : what == "option"
                      ? "see weft COMMAND --help; keys of the deck are written without "
                        "dashes, as in train.steps=10"
                      : "see weft --help",
                  __FILE__, __LINE__);
    }
    if (what == "command") command = command->get_subcommand(name);
  }
}

// Every command is a topic of `weft help`, which CLI11 does not know.
void refuse_unknown_topic(int argc, char** argv) {
  if (argc < 3 || std::string_view(argv[1]) != "help") return;
  const std::string topic = argv[2];
  std::vector<std::string> known = {"deck", "man", "man-deck"};
  for (const Command& c : all_commands()) known.push_back(c.name);
  if (topic.starts_with('-') || std::ranges::find(known, topic) != known.end()) return;
  const std::string near = nearest_name(topic, known);
  throw Error(Exit::usage, fmt::format("unknown topic \"{}\"", topic),
              near.empty() ? "topics are deck, man, man-deck, keys, and the commands in weft --help"
                           : fmt::format("did you mean \"{}\"?", near),
              __FILE__, __LINE__);
}

// The innermost command given, as it is written: "weft bench comm".
std::string command_given(const CLI::App& app) {
  std::string name = "weft";
  for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
    at = at->get_subcommands().front();
    name += " " + at->get_name();
  }
  return name;
}

// MPIs of one family share their binary interface: handles are pointers in Open MPI and numbers in
// MPICH. "" for one that is not known.
std::string family(const std::string& mpi) {
  if (mpi.find("Open MPI") != std::string::npos) return "Open MPI";
  for (const char* name : {"MPICH", "Intel", "MVAPICH"})
    if (mpi.find(name) != std::string::npos) return "MPICH";
  return "";
}

}  // namespace

std::optional<int> run_as_child(int argc, char** argv) { return serve_as_store_reader(argc, argv); }

void check_mpi() {
  const LibraryVersion mpi = mpi_version();
  const std::string found = family(mpi.found), built = family(mpi.built);
  WEFT_CHECK(found == built || found.empty() || built.empty(), Exit::usage,
             "load the MPI that weft was built with (module list, LD_LIBRARY_PATH, LD_PRELOAD), or "
             "build weft with this one",
             "weft was compiled against {} and runs with {}, whose binary interface is another",
             mpi.built, mpi.found);
}

Invocation parse_command_line(int argc, char** argv) {
  register_deck_tables();
  Invocation chosen;
  CLI::App app{"weft trains and runs video models on MPI ranks, one rank a device", "weft"};
  app.set_version_flag("--version", "")
      ->description("what this program is, its libraries and devices");
  app.footer(
      "Run on several ranks with: mpirun -n N weft COMMAND ...\n"
      "Exit codes: " +
      exit_codes_text() +
      "; docs/errors.md.\n"
      "`weft help deck` prints every deck key with its meaning, `weft help train.lr` one.");
  add_commands(app, all_commands(), chosen);

  try {
    app.parse(words_of(argc, argv));
  } catch (const CLI::CallForHelp&) {
    const CLI::App* asked = &app;
    std::string before;
    // The help of the innermost command given: `weft bench comm --help` is about comm.
    for (; !asked->get_subcommands().empty(); asked = asked->get_subcommands().front())
      before += (before.empty() ? "" : " ") + asked->get_name();
    const std::string text = asked->help(before);
    chosen.run = [text](MPI_Comm world) { return print(text, world); };
  } catch (const CLI::CallForVersion&) {
    chosen.run = [](MPI_Comm world) { return print(version_text(), world); };
  } catch (const CLI::ParseError& e) {
    refuse_unknown_words(app, argc, argv);
    refuse_unknown_topic(argc, argv);
    throw Error(Exit::usage, e.what(), fmt::format("see {} --help", command_given(app)), __FILE__,
                __LINE__);
  }
  return chosen;
}

}  // namespace weft
