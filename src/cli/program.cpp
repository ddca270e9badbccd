#include "cli/cli.h"

#include <mpi.h>
#include <sys/uio.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <ranges>
#include <system_error>

#include "bench/bench.h"
#include "config/deck_table.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/progress.h"
#include "doctor/doctor.h"
#include "ops/dispatch.h"
#include "tensor/device.h"

namespace weft {
namespace {

// What MPICH and its descendants need before a job ends; nothing elsewhere.
namespace mpich {

void before_abort() {
#ifdef MPICH_VERSION
  // Its mpiexec ends the ranks at once and drops what it has not read of a message.
  usleep(200000);
#endif
}

void before_finalize(Exit code) {
#if defined(MPICH_NUMVERSION) && MPICH_NUMVERSION < 40200000
  // MPICH before 4.2 can hang in MPI_Finalize over UCX's TCP: a rank that has closed its
  // connections waits in PMI's barrier, where it answers no rank that closes them later
  // (docs/mpi.md). So let all close them together, once none is in an MPI call any more. If they
  // hang nevertheless: no rank has anything left to do, and each ends by itself.
  MPI_Barrier(MPI_COMM_WORLD);
  usleep(100000);
  std::fflush(nullptr);
  crash::end_within(10, code);
#else
  (void)code;
#endif
}

}  // namespace mpich

// The request of the command line; run() returns the exit code and throws Error.
struct Invocation {
  std::function<int(MPI_Comm world)> run;
  // It takes stop_signals for requests to save its state and stop.
  bool handles_stop_signals = false;
};

// The command line's part of the deck.
struct GivenDeck {
  std::string file;
  std::vector<std::string> overrides;
};

// Throws for a word that is no number in the range; whole numbers CLI11 checks itself.
std::string check_number(const Argument& a, const std::string& word) {
  double value = 0;
  WEFT_CHECK(CLI::detail::lexical_cast(word, value), Exit::usage,
             std::holds_alternative<double*>(a.target) ? number_hint(word, a.help) : a.help,
             "{}: expected a number, got '{}'", a.name, word);
  // This form of the comparison refuses nan too.
  WEFT_CHECK(value >= a.least && value <= a.most, Exit::usage,
             fmt::format("it goes from {} to {}: {}", a.least, a.most, a.help),
             "{} {} is out of range", a.name, word);
  return "";
}

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
  if (a.most > a.least)
    option.check([&a](const std::string& word) { return check_number(a, word); });
  if (a.path || std::holds_alternative<Argument::DeckFile>(a.target))
    option.transform([&a](const std::string& word) { return written_path(word, a.name); });
  if (!a.choices.empty()) option.check(CLI::IsMember(a.choices));
  if (a.key.empty())  // an unset variable of a script is no request
    option.check([](const std::string& word) { return word.empty() ? "is an empty word" : ""; });
}

// run.profile: a table of this command's operations at its end, unless an error ends it.
int run_profiled(const Command& c, Deck deck, MPI_Comm world) {
  deck.device.graphs = false;   // a replayed graph calls no operation that could be timed
  static ops::Profile profile;  // after an error it is still the active one
  const double start = now_seconds();
  ops::set_profile(&profile);
  const int code = c.run(deck, world);
  ops::set_profile(nullptr);
  const double seconds = now_seconds() - start;
  // All ranks measure at once: a rank's share of the machine is its limit.
  if (!c.first_rank_only) MPI_Barrier(world);
  const DeviceRates rates = device_rates();
  if (log::rank() == 0)
    fmt::print("{}", profile_table(profile, rates, 1, seconds, deck.run.profile == "shapes"));
  return code;
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
  if (file == c.arguments.end() && given.overrides.empty()) return c.run(Deck(), world);
  if (file != c.arguments.end())
    if (std::string* path = std::get<Argument::DeckFile>(file->target).path) *path = given.file;
  const bool from_file = file != c.arguments.end() && (file->required || !given.file.empty());
  const Deck deck = from_file ? load_deck(given.file, given.overrides)
                              : parse_deck("", "the command line", given.overrides);
  allow_tf32(deck.device.tf32);
  try {
    return deck.run.profile.empty() ? c.run(deck, world) : run_profiled(c, deck, world);
  } catch (Error& e) {
    const std::string message = std::string(e.what()) + " " + e.hint();
    if (const std::string key = key_of_value(deck, e.what());
        !key.empty() && message.find(key) == message.npos)
      e.add_hint("the deck's " + key + " names it");
    throw;
  }
}

void add_command(CLI::App& app, const Command& c, Invocation& chosen) {
  const auto deck = std::make_shared<GivenDeck>();
  for (const Argument& a : c.arguments) add_argument(app, a, *deck);
  app.callback([&c, deck, &chosen] {
    chosen = {[&c, deck](MPI_Comm world) { return run_command(c, *deck, world); },
              c.handles_stop_signals};
  });
}

void add_commands(CLI::App& app, const std::vector<Command>& commands, Invocation& chosen) {
  app.require_subcommand(1);
  for (const Command& c : commands) {
    CLI::App& sub = *app.add_subcommand(c.name, c.help);
    if (c.commands.empty())
      add_command(sub, c, chosen);
    else
      add_commands(sub, c.commands, chosen);
  }
}

int print(const std::string& text, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  if (rank == 0) fmt::print("{}", text);
  return 0;
}

bool has_command(const Program& program, const std::string& name) {
  return std::ranges::find(program.commands, name, &Command::name) != program.commands.end();
}

// The words of the command line, last first as CLI11 takes them. `weft help` and `weft help
// COMMAND` ask as --help does; deck and the manual pages are topics of their own, and `weft help
// KEY` is short for `weft help deck KEY`.
std::vector<std::string> words_of(const Program& program, int argc, char** argv) {
  constexpr std::string_view topics[] = {"deck", "schema", "man", "man-deck"};
  std::vector<std::string> words(argv + 1, argv + argc);
  const bool help = !words.empty() && words[0] == "help" && has_command(program, "help");
  if (help && (words.size() == 1 || has_command(program, words[1]))) {
    words.erase(words.begin());
    const std::vector<Command>* known = &program.commands;
    for (const std::string& word : words) {  // --help would leave out those that are wrong
      const auto c = std::ranges::find(*known, word, &Command::name);
      WEFT_CHECK(c != known->end(), Exit::usage, "weft help COMMAND takes the command's name alone",
                 "unknown command \"{}\"", fmt::join(words, " "));
      known = &c->commands;
    }
    words.push_back("--help");
  } else if (help && words.size() >= 2 && !words[1].starts_with('-') &&
             std::ranges::find(topics, words[1]) == std::end(topics)) {
    words.insert(words.begin() + 1, "deck");
  }
  std::ranges::reverse(words);
  return words;
}

// Throws for the first word that is no known command or option: CLI11 would instead report an
// argument that is missing because of it.
void refuse_unknown_words(const CLI::App& app, int argc, char** argv) {
  const auto any_command = [](const CLI::App*) { return true; };
  const CLI::App* command = &app;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    std::vector<std::string> known;
    std::string what;
    // "-" and "--" are none, and a negative number is a value.
    if (word.starts_with('-') && word.find_first_not_of('-') != word.npos &&
        word.find_first_of("0123456789.", 1) != 1) {
      known = {"-h"};
      for (const CLI::Option* o : command->get_options())
        for (const std::string& l : o->get_lnames()) known.push_back("--" + l);
      what = "option";
    } else {
      for (const CLI::App* s : command->get_subcommands(any_command))
        known.push_back(s->get_name());
      what = "command";
    }
    if (what == "command" && known.empty()) continue;  // a value, not a command
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      const std::string near = nearest_name(name, known);
      throw Error(Exit::usage, fmt::format("unknown {} \"{}\"", what, name),
                  !near.empty() ? fmt::format("did you mean \"{}\"?", near)
                  : what == "option"
                      ? fmt::format("see {}{} --help; keys of the deck are written without dashes, "
                                    "as in train.steps=10",
                                    app.get_name(),
                                    app.get_subcommands(any_command).empty() ? "" : " COMMAND")
                      : fmt::format("see {} --help", app.get_name()),
                  __FILE__, __LINE__);
    }
    if (what == "command") command = command->get_subcommand(name);
  }
}

// The innermost command given, as it is written: "weft bench comm".
std::string command_given(const CLI::App& app) {
  std::string name = app.get_name();
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

// Throws Exit::usage where this process runs with an MPI of another binary interface than the one
// weft was compiled against: even its start would fail. To be called before MPI_Init.
void check_mpi() {
  const LibraryVersion mpi = mpi_version();
  const std::string found = family(mpi.found), built = family(mpi.built);
  WEFT_CHECK(found == built || found.empty() || built.empty(), Exit::usage,
             "load the MPI that weft was built with (module list, LD_LIBRARY_PATH, LD_PRELOAD), or "
             "build weft with this one",
             "weft was compiled against {} but loaded {}, which is ABI-incompatible with it",
             mpi.built, mpi.found);
}

// Throws Exit::usage for a command line it does not understand. --help and --version become
// invocations too.
Invocation parse_command_line(const Program& program, int argc, char** argv) {
  if (program.register_tables) program.register_tables();
  Invocation chosen;
  CLI::App app{program.help, program.name};
  app.set_version_flag("--version", "")
      ->description("what this program is, its libraries and devices");
  app.footer(program.footer);
  if (program.commands.size() == 1 && program.commands[0].name.empty())
    add_command(app, program.commands[0], chosen);
  else
    add_commands(app, program.commands, chosen);

  try {
    app.parse(words_of(program, argc, argv));
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
    throw Error(Exit::usage, e.what(), fmt::format("see {} --help", command_given(app)), __FILE__,
                __LINE__);
  }
  return chosen;
}

// Reports the error once and aborts all ranks.
int end_with(Error& e, int size) {
  // The launcher sends SIGTERM when another rank has reported the same and ended.
  if (log::rank() != 0) crash::end_on_stop_signal(e.code());
  log::sum_up_warnings();
  log::report(e);
  const int code = static_cast<int>(e.code());
  crash::end_within(10, e.code());  // the status file may lie on what hangs
  note_failure(e);
  alarm(0);
  if (size > 1) {
    std::fflush(nullptr);
    mpich::before_abort();
    MPI_Abort(MPI_COMM_WORLD, code);
  }
  return code;
}

// As the launcher tells it, before MPI does: Open MPI's mpirun, a PMIx server, MPICH's mpiexec or
// srun --mpi=pmi2, Cray's PALS, any srun. Under an mpiexec in a Slurm job the last would be that of
// the node's daemon.
int rank_of_launcher() {
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "SLURM_PROCID"})
    if (const char* rank = std::getenv(name)) return std::atoi(rank);
  return 0;
}

// Seccomp filters of containers forbid processes to read each other's memory, by which Open MPI 4
// moves long messages within a host: it would complain and copy them through shared memory. Open
// MPI 5 does that by itself and, as other MPIs, does not read the variable.
void disable_forbidden_reads() {
  char from = 1, to = 0;
  const iovec local{&to, 1}, remote{&from, 1};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1) return;
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
}

// A launcher of another MPI starts N programs that know nothing of each other.
void warn_if_alone(int size) {
  if (size > 1) return;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const char* tasks = std::getenv(name); tasks != nullptr && std::atoi(tasks) > 1) {
      log::warn(
          "{} tasks were started ({}), but MPI sees 1 rank: each does the whole job. Use the "
          "launcher of the MPI that `weft --version` names; in a Slurm job srun --mpi=pmix (Open "
          "MPI), pmi2 (MPICH) or cray_shasta (Cray MPICH)",
          tasks, name);
      return;
    }
}

}  // namespace

int run_program(int argc, char** argv, const Program& program) {
  // A request to stop that comes from now on is heeded once the command is known. A program that
  // starts anew keeps what is blocked.
  block_stop_signals();
  limit_spinning(argv);
  // A limit on file sizes is an error of write(), not the death of the job.
  std::signal(SIGXFSZ, SIG_IGN);
  crash::watch();
  try {
    check_mpi();
  } catch (Error& e) {
    // MPI_Init has not brought the ranks together yet: rank 0 may start, and report, much later.
    log::set_rank(rank_of_launcher(), 1);
    if (log::rank() != 0) {
      crash::end_on_stop_signal(e.code());
      sleep(8);
    }
    return end_with(e, 1);
  }
  // Step 1: MPI. Background threads reduce gradients and save checkpoints, so they may all call it.
  // A rank started without mpirun spawns no others: Open MPI need not start its daemon first, which
  // takes a third of the time of a short command. Other MPIs do not read it.
  setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
  disable_forbidden_reads();
  int provided = 0, rank = 0, size = 1;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  // MPICH takes it for news of failed ranks. Here it is a request to stop.
  std::signal(SIGUSR1, SIG_DFL);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  log::set_rank(rank, size);

  int code = 0;
  try {
    // Step 2: the command line.
    const Invocation invocation = parse_command_line(program, argc, argv);
    if (invocation.handles_stop_signals)
      warn_if_alone(size);
    else
      unblock_stop_signals();
    // Step 3: the job.
    code = invocation.run(MPI_COMM_WORLD);
    // A GPU's failure that only the end of the job met, in destructors, which do not throw.
    if (on_cuda()) device_runtime().synchronize();
  } catch (Error& e) {
    code = end_with(e, size);
  } catch (const std::bad_alloc&) {
    Error memory(Exit::memory,
                 fmt::format("out of memory{}: {:.2f} GiB are resident and more was refused",
                             crash::place(), gib(resident_bytes())),
                 "fewer ranks a host, a smaller job (docs/errors.md), or a higher limit: "
                 "ulimit -v, the memory of the container or of the Slurm job");
    code = end_with(memory, size);
  } catch (const std::system_error& e) {
    Error failed = error_of(e, Exit::data);
    code = end_with(failed, size);
  } catch (const std::exception& e) {
    Error bug(Exit::internal, e.what() + crash::place(),
              "this is a bug in weft, please report it with the log");
    code = end_with(bug, size);
  }
  log::sum_up_warnings();
  // Step 4: the documented exit code.
  if (size > 1) mpich::before_finalize(static_cast<Exit>(code));
  MPI_Finalize();
  return code;
}

}  // namespace weft
