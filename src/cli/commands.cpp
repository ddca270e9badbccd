#include "cli/cli.h"

#include <fmt/format.h>
#include <map>
#include <sstream>
#include <utility>

#include "bench/bench.h"
#include "cli/selftest.h"
#include "config/deck.h"
#include "core/error.h"
#include "data/ingest/ingest.h"
#include "data/store_file.h"
#include "doctor/doctor.h"
#include "jobs/animate/animate.h"
#include "jobs/encode/encode.h"
#include "jobs/evaluate/evaluate.h"
#include "jobs/evaluate/reconstruct.h"
#include "jobs/generate/generate.h"
#include "jobs/jobs.h"
#include "jobs/score/score.h"
#include "jobs/segment/segment.h"
#include "plan/plan.h"
#include "report/report.h"
#include "report/status.h"

namespace weft {
namespace {

// Every command, in the order of `weft --help`. Made once: help and completion tell of all.
const std::vector<Command>& all_commands();

Command help_command() {
  const auto topic = std::make_shared<std::string>(), only = std::make_shared<std::string>();
  Command c{
      "help",
      "print deck keys (deck, a table or a key), their JSON schema (schema), or a manual page "
      "(man, man-deck)",
      [topic, only](const Deck&, MPI_Comm) {
        WEFT_CHECK(only->empty() || *topic == "deck", Exit::usage, "keys belong to weft help deck",
                   "weft help {} takes no \"{}\"", *topic, *only);
        fmt::print("{}", *topic == "deck"     ? key_help(*only)
                         : *topic == "schema" ? deck_schema()
                         : *topic == "man"    ? man_page(all_commands())
                                              : deck_man_page());
        return 0;
      }};
  c.first_rank_only = true;
  Argument& a = c.option("topic", *topic, "deck, schema, man or man-deck");
  a.required = true;
  a.choices = {"deck", "schema", "man", "man-deck"};
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
  Command bench{"bench", "measure: step, comm, scaling, read"};
  bench.commands = {bench_step_command(), bench_comm_command(), bench_scaling_command(),
                    bench_read_command()};
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
          selftest_command(),
          plan_command(),
          std::move(bench),
          completion_command(),
          help_command()};
}

const std::vector<Command>& all_commands() {
  static const std::vector<Command> commands = make_commands();
  return commands;
}

}  // namespace

std::optional<int> run_as_child(int argc, char** argv) { return serve_as_store_reader(argc, argv); }

Program weft_program() {
  return {"weft", "weft trains and runs video models on MPI ranks, one rank a device",
          "Run on several ranks with: mpirun -n N weft COMMAND ...\n"
          "Exit codes: " +
              exit_codes_text() +
              "; docs/errors.md.\n"
              "`weft help deck` prints every deck key with its meaning, `weft help train.lr` one.",
          all_commands(), register_deck_tables};
}

// `weft help KEY` and `weft help deck TABLE`: which commands read a table, and where it is
// explained.
namespace {

// Each table's readers and its page in docs/. Commands that plan or measure a job (plan, bench)
// read what the job does. A test holds this to the tables that there are (tests/e2e/test_shell.py).
const std::map<std::string, std::pair<const char*, const char*>> readers = {
    {"run", {"every job", "decks.md"}},
    {"device", {"every job", "gpu.md"}},
    {"memory", {"every job", "plan.md"}},
    {"media", {"whatever reads pictures, videos, sound or lists", "security.md"}},
    {"ingest", {"ingest", "data.md"}},
    {"data", {"train, encode, generate, evaluate, segment", "data.md"}},
    {"model", {"every job that runs a model", "train.md"}},
    {"diffusion", {"train, generate, evaluate", "train.md"}},
    {"mask", {"train of STDiT3", "train.md"}},
    {"lora", {"train", "train.md"}},
    {"train", {"train", "train.md"}},
    {"validation", {"train, evaluate", "train.md"}},
    {"samples", {"train", "train.md"}},
    {"parallel", {"train; sp also generate", "parallel.md"}},
    {"sampler", {"generate, samples of train", "generate.md"}},
    {"vae", {"train, encode, generate, reconstruct", "vae.md"}},
    {"vae_train", {"train of a VAE", "vae.md"}},
    {"postprocess", {"score, evaluate and train of a text detector", "models/dbnet.md"}},
    {"sadtalker", {"animate", "animate.md"}},
    {"t5", {"encode, generate, text", "encode.md"}},
    {"reconstruct", {"reconstruct", "vae.md"}},
    {"clip", {"evaluate of clips", "evaluate_clips.md"}},
    {"encode", {"encode", "encode.md"}},
    {"generate", {"generate, samples of train", "generate.md"}},
    {"evaluate", {"evaluate", "segmentation.md"}},
    {"segment", {"segment", "segmentation.md"}},
    {"score", {"score", "score.md"}},
    {"animate", {"animate", "animate.md"}}};

}  // namespace

std::string key_help(const std::string& name) {
  std::istringstream lines(name.empty() ? default_deck_with_help() : deck_help(name));
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    out += line + "\n";
    if (!line.starts_with('[')) continue;
    if (const auto table = readers.find(line.substr(1, line.size() - 2)); table != readers.end())
      out += fmt::format("# This table is read by: {}. Explained in docs/{}.\n\n",
                         table->second.first, table->second.second);
  }
  return out;
}

}  // namespace weft
