#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "bench/bench.h"
#include "config/deck.h"
#include "core/error.h"
#include "core/version.h"
#include "data/clip_store_child.h"
#include "data/ingest/ingest.h"
#include "doctor/doctor.h"
#include "jobs/deck_tables.h"
#include "jobs/encode/encode.h"
#include "jobs/export_weights.h"
#include "jobs/generate/generate.h"
#include "jobs/inspect.h"
#include "jobs/probe/probe.h"
#include "jobs/reconstruct/reconstruct.h"
#include "jobs/text.h"
#include "jobs/train.h"
#include "plan/command.h"
#include "report/report.h"
#include "tensor/tf32.h"

namespace weft {
namespace {

// Everything that the options write to; one command fills its own part.
struct Arguments {
  std::string deck, file, output, device, dtype;
  std::vector<std::string> overrides, runs;
  ProbeRequest probe;
  BenchStepRequest bench;
  DoctorRequest doctor;
  BenchKernelsRequest kernels;
  BenchCommRequest comm;
  SimulateRequest simulation;
  PlanCommand planning;
  BenchScalingRequest scaling;
  TextRequest captions;
  BenchT5Request bench_text;
  ExportRequest exported;
  std::int64_t readers = 0;
  bool ema = false, json = false, strict = false, trace = false;
  std::string topic;
};

int on_first_rank(MPI_Comm world, const std::function<int()>& f) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  return rank == 0 ? f() : 0;
}

Deck read_deck(const std::string& path, const std::vector<std::string>& overrides) {
  Deck deck = load_deck(path, overrides);
  allow_tf32(deck.device.tf32);
  return deck;
}

void add_deck(CLI::App& command, Arguments& a) {
  command.add_option("deck", a.deck, "input deck (TOML)")->required();
  command.add_option("overrides", a.overrides, "section.key=value, applied over the deck in order");
}

void add_scaling(CLI::App& command, BenchScalingRequest& r) {
  command.add_option("--ranks", r.ranks, "rank counts, such as 1,2,4 (else 1, 2, 4, ... and all)")
      ->delimiter(',');
  command.add_option("--mode", r.mode, "weak: as much work a rank; strong: as much in all")
      ->check(CLI::IsMember({"weak", "strong"}));
  command.add_option("--mix", r.mix, "mixed: the deck's buckets; uniform: the largest alone")
      ->check(CLI::IsMember({"uniform", "mixed"}));
  command.add_option("--steps", r.steps, "timed steps a round at the greatest rank count");
  command.add_option("--warmup", r.warmup, "steps before them");
  command.add_option("--rounds", r.rounds, "rounds; medians over them count");
  command.add_flag("--no-overlap", r.no_overlap, "also with parallel.overlap = false");
  command.add_flag("--paced", r.paced, "before each round, wait for a line on stdin");
  command.add_option("--json", r.json, "file for the results (scaling.json)");
  command.add_option("--plot", r.plot, "file for a plot (SVG)");
}

// Names the word of the command line that no command or option knows, if there is one: CLI11 would rather speak of
// what is missing because of it.
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
    if (what == "command" && known.empty()) continue;  // a value
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      const std::string near = nearest_name(name, known);
      throw Error(Exit::usage, fmt::format("unknown {} \"{}\"", what, name),
                  near.empty() ? "see weft --help" : fmt::format("did you mean \"{}\"?", near),
                  __FILE__, __LINE__);
    }
    if (what == "command") command = command->get_subcommand(name);
  }
}

}  // namespace

std::optional<int> run_as_child(int argc, char** argv) { return serve_as_store_reader(argc, argv); }

Invocation parse_command_line(int argc, char** argv) {
  register_deck_tables();
  const auto a = std::make_shared<Arguments>();
  const auto chosen = std::make_shared<Invocation>();
  CLI::App app{"weft trains and runs video models on MPI ranks, one rank a device", "weft"};
  app.set_version_flag("--version", version_line());
  app.require_subcommand(1);
  app.footer(
      "Run on several ranks with: mpirun -n N weft COMMAND ...\n"
      "Exit codes: 0 done, 2 usage or deck, 3 data, 4 checkpoint, 5 non-finite, 6 hardware "
      "suspected,\n"
      "7 no progress, 70 a bug of weft's, 75 stopped early (state saved: submit again); "
      "docs/errors.md.\n"
      "`weft help deck` prints every deck key with its meaning.");
  const auto command = [&](const char* name, const char* help, std::function<int(MPI_Comm)> run,
                           bool heeds_stops = false) -> CLI::App& {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->callback([=] { *chosen = {run, heeds_stops}; });
    return *sub;
  };
  constexpr bool heeds_stops = true;
  const auto deck = [a] { return read_deck(a->deck, a->overrides); };

  CLI::App& ingest_command =
      command("ingest", "cut videos into a clip store (HDF5)", [=](MPI_Comm w) {
        if (a->strict) a->overrides.push_back("ingest.strict=true");
        return ingest(deck(), w);
      });
  add_deck(ingest_command, *a);
  ingest_command.add_flag("--strict", a->strict, "exit code 3 if any video breaks");
  CLI::App& train_command = command(
      "train", "train; goes on from RUN/latest if there is one",
      [=](MPI_Comm w) {
        if (a->trace) a->overrides.push_back("run.trace=true");
        return train(deck(), w);
      },
      heeds_stops);
  add_deck(train_command, *a);
  train_command.add_flag("--trace", a->trace, "write RUN/trace.json, for Perfetto");
  add_deck(command(
               "encode", "turn a clip store of pixels into one of latents and text features",
               [=](MPI_Comm w) { return encode(deck(), w); }, heeds_stops),
           *a);
  add_deck(command(
               "generate", "make clips from prompts: T5, STDiT3 and VAE over all ranks",
               [=](MPI_Comm w) { return generate(deck(), w); }, heeds_stops),
           *a);

  add_deck(command("reconstruct", "send footage through the VAE and back: PSNR, SSIM, statistics",
                   [=](MPI_Comm w) { return reconstruct(deck(), w); }),
           *a);

  CLI::App& report_command =
      command("report", "write RUN/report.html: loss, time of every rank, memory, scaling, samples",
              [=](MPI_Comm w) { return on_first_rank(w, [&] { return report(a->runs); }); });
  report_command
      .add_option("runs", a->runs, "run directories, and .json files of weft bench scaling")
      ->required();

  CLI::App& inspect_command =
      command("inspect", "check and describe a clip store, a checkpoint or a safetensors file",
              [=](MPI_Comm w) { return on_first_rank(w, [&] { return inspect(a->file); }); });
  inspect_command.add_option("file", a->file, "file or checkpoint directory")->required();

  CLI::App& export_command = command(
      "export", "write a run's weights as safetensors under the released names",
      [=](MPI_Comm w) { return on_first_rank(w, [&] { return export_weights(a->exported); }); });
  export_command.add_option("run", a->exported.run, "run or checkpoint directory")->required();
  export_command.add_option("output", a->exported.output, "safetensors file to write")->required();
  export_command.add_flag("--ema", a->exported.ema, "the averaged weights");
  export_command.add_option("--dtype", a->exported.dtype, "number format (f32)")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  export_command
      .add_option("--shard-size", a->exported.shard_size,
                  "GB of a file; more make shards with an index (else one file)")
      ->check(CLI::NonNegativeNumber);

  export_command.add_option(
      "--latents", a->exported.latents,
      "of a VAE: the store of latents whose measured scale and shift go along");

  CLI::App& text_command =
      command("text", "clean, tokenize and encode the captions of a text file, one a line",
              [=](MPI_Comm w) { return text(deck(), a->captions, w); });
  text_command.add_option("deck", a->deck, "input deck (TOML), with the [t5] table")->required();
  text_command.add_option("file", a->captions.file, "text file, a caption a line")->required();
  text_command.add_option("overrides", a->overrides, "section.key=value");
  text_command.add_option("--cleaned", a->captions.cleaned, "text file for cleaned captions");
  text_command.add_option("--tokens", a->captions.tokens, "text file for token ids");
  text_command.add_option("--features", a->captions.features,
                          "safetensors file for T5 features (data.text_features)");

  CLI::App& doctor_command =
      command("doctor", "examine machine, ranks and devices; say what is wrong and what to do",
              [=](MPI_Comm w) { return doctor(a->doctor, w); });
  doctor_command.add_option("deck", a->doctor.deck, "input deck (TOML); its data path is read");
  doctor_command.add_option("overrides", a->doctor.overrides, "section.key=value");
  doctor_command.add_option("--json", a->doctor.json, "file for everything that was found");

  CLI::App& probe_command = command(
      "probe", "run one forward, loss or sample on given weights and inputs", [=](MPI_Comm w) {
        std::vector<std::string> set = a->overrides;
        if (!a->device.empty()) set.push_back("device.kind=" + a->device);
        if (!a->dtype.empty()) set.push_back("model.dtype=" + a->dtype);
        return on_first_rank(w, [&] { return probe(read_deck(a->deck, set), a->probe); });
      });
  probe_command.add_option("what", a->probe.what, "forward, loss or sample")
      ->required()
      ->check(CLI::IsMember({"forward", "loss", "sample"}));
  probe_command.add_option("--deck", a->deck, "deck with the [model] table")->required();
  probe_command.add_option("--weights", a->probe.weights, "safetensors")->required();
  probe_command.add_option("--inputs", a->probe.inputs, "safetensors")->required();
  probe_command.add_option("--outputs", a->probe.outputs, "safetensors to write")->required();
  probe_command.add_flag("--backward", a->probe.backward, "also gradients");
  probe_command.add_option("--device", a->device, "cpu or cuda");
  probe_command.add_option("--dtype", a->dtype, "f32 or bf16");
  probe_command.add_option("overrides", a->overrides, "section.key=value");

  CLI::App& plan_command =
      command("plan", "memory, time and communication of the deck on a described machine",
              [=](MPI_Comm w) { return plan(deck(), a->planning, w); });
  add_deck(plan_command, *a);
  PlanRequest& planned = a->planning.request;
  plan_command.add_option("--job", a->planning.job, "train, encode or generate")
      ->check(CLI::IsMember({"train", "encode", "generate"}));
  plan_command.add_option("--gpus", planned.gpus, "ranks (default: those it runs on)");
  plan_command.add_option("--memory", planned.memory_gb, "GB of a rank's device");
  plan_command.add_option("--fabric", planned.fabric,
                          "cards x Gb/s a node: 8x400, 1x200, ...; local measures this host");
  plan_command.add_option("--rates", planned.rates, "rates of the device to predict from (JSON)");
  plan_command.add_option("--mtbf", planned.mtbf_hours, "hours between failures of one device");
  plan_command.add_option("--json", a->planning.json, "file for the plan");

  CLI::App& simulate_command =
      command("simulate", "play the deck's steps on many ranks of a described machine (SimGrid)",
              [=](MPI_Comm w) {
                return on_first_rank(w, [&] { return simulate(deck(), a->simulation); });
              });
  add_deck(simulate_command, *a);
  SimulateRequest& sim = a->simulation;
  simulate_command.add_option("--gpus", sim.gpus, "rank counts, with commas")->delimiter(',');
  simulate_command
      .add_option("--fabric", sim.fabrics, "8x400, 1x200, any CARDSxGBITS, or local; with commas")
      ->delimiter(',');
  simulate_command.add_option("--style", sim.styles, "weft, barrier (as Open-Sora 1.2), or both")
      ->delimiter(',');
  simulate_command.add_option("--memory", sim.memory_gb, "GB of a GPU: decides what is recomputed");
  simulate_command.add_option("--per-gpu", sim.per_gpu,
                              "micro-batches a rank (0: train.micro_batches, over all ranks)");
  simulate_command.add_option("--costs", sim.costs, "measured: run directory or JSON file");
  simulate_command.add_option("--rates", sim.rates, "rates of the device to predict from (JSON)");
  simulate_command.add_option("--cores", sim.cores, "processors of the host, for --fabric local");
  simulate_command.add_option("--link-rate", sim.link_rate,
                              "GB/s between its ranks (weft bench comm)");
  simulate_command.add_option("--steps", sim.steps, "steps that count");
  simulate_command.add_option("--warmup", sim.warmup, "steps before them");
  simulate_command.add_option("--cv", sim.variation,
                              "how much a rank's time for a step varies, as a share of it");
  simulate_command.add_option("--barrier-tflops", sim.barrier_tflops,
                              "rate that --style barrier computes at");
  simulate_command.add_option("--json", sim.json, "file for the results");
  simulate_command.add_option("--plot", sim.plot, "SVG file of the curves");

  CLI::App* bench = app.add_subcommand("bench", "measure: kernels, step, comm, scaling, t5, read");
  bench->require_subcommand(1);
  CLI::App* bench_step_command =
      bench->add_subcommand("step", "a training step on given weights and inputs");
  bench_step_command->callback([=] {
    chosen->run = [=](MPI_Comm w) {
      return on_first_rank(w, [&] { return bench_step(deck(), a->bench); });
    };
  });
  add_deck(*bench_step_command, *a);
  bench_step_command->add_option("--weights", a->bench.weights, "safetensors (else fresh ones)");
  bench_step_command->add_option("--inputs", a->bench.inputs, "safetensors (else noise)");
  bench_step_command->add_option("--shape", a->bench.shape,
                                 "without --inputs: clips x latent frames x height x width");
  bench_step_command->add_option("--captions", a->bench.captions, "and caption rows a clip");
  bench_step_command->add_option("--outputs", a->bench.outputs, "weights after all steps");
  bench_step_command->add_option("--steps", a->bench.steps, "timed steps");
  bench_step_command->add_option("--warmup", a->bench.warmup, "steps before them");
  bench_step_command->add_option("--json", a->bench.json, "file for the results");
  bench_step_command->add_flag("--profile", a->bench.profile, "time every operation");
  CLI::App* bench_kernels_command = bench->add_subcommand(
      "kernels", "every operation on the device: checked against the CPU side, then timed");
  bench_kernels_command->callback([=] {
    chosen->run = [=](MPI_Comm w) {
      return on_first_rank(w, [&] { return bench_kernels(a->kernels); });
    };
  });
  bench_kernels_command->add_option("--size", a->kernels.size, "small or real")
      ->check(CLI::IsMember({"small", "real"}));
  bench_kernels_command->add_option("--filter", a->kernels.filter, "part of the operation's name");
  bench_kernels_command->add_option("--device", a->kernels.device, "auto, cpu or cuda");
  bench_kernels_command->add_option("--json", a->kernels.json, "file for the results");
  bench_kernels_command->add_flag("--check-only", a->kernels.check_only, "no timing");
  CLI::App* bench_comm_command =
      bench->add_subcommand("comm", "all-reduce over all ranks, checked and timed");
  bench_comm_command->callback(
      [=] { chosen->run = [=](MPI_Comm w) { return bench_comm(a->comm, w); }; });
  bench_comm_command->add_option("--device", a->comm.device, "auto, cpu or cuda");
  bench_comm_command->add_flag("--share", a->comm.share, "let several ranks use one GPU");
  bench_comm_command->add_option("--mib", a->comm.largest_mib, "largest size");
  bench_comm_command->add_option("--json", a->comm.json, "file for the results");
  CLI::App* bench_scaling_command = bench->add_subcommand(
      "scaling", "training on 1, 2, ... ranks in one job: checked against each other, then timed");
  bench_scaling_command->callback(
      [=] { chosen->run = [=](MPI_Comm w) { return bench_scaling(deck(), a->scaling, w); }; });
  add_deck(*bench_scaling_command, *a);
  add_scaling(*bench_scaling_command, a->scaling);
  CLI::App* bench_t5_command = bench->add_subcommand("t5", "the layers of the T5 encoder");
  bench_t5_command->callback([=] {
    chosen->run = [=](MPI_Comm w) {
      return on_first_rank(w, [&] { return bench_t5(deck(), a->bench_text); });
    };
  });
  add_deck(*bench_t5_command, *a);
  bench_t5_command->add_option("--lengths", a->bench_text.lengths, "tokens of each caption")
      ->delimiter(',');
  bench_t5_command->add_option("--rounds", a->bench_text.rounds, "timed passes");
  bench_t5_command->add_option("--warmup", a->bench_text.warmup, "passes before them");
  bench_t5_command->add_flag("--paced", a->bench_text.paced,
                             "before each, wait for a line on stdin");
  CLI::App* bench_read_command =
      bench->add_subcommand("read", "prefetch against plain reads of the same clips");
  bench_read_command->callback([=] {
    chosen->run = [=](MPI_Comm w) {
      return on_first_rank(
          w, [&] { return bench_read(a->file, static_cast<int>(a->readers), a->json); });
    };
  });
  bench_read_command->add_option("store", a->file, "clip store")->required();
  bench_read_command->add_option("--readers", a->readers, "reader threads (0: chosen)");
  bench_read_command->add_flag("--json", a->json, "JSON on stdout");

  CLI::App& help_command = command("help", "`weft help deck`: every deck key", [=](MPI_Comm w) {
    return on_first_rank(w, [&] {
      fmt::print("{}", default_deck_with_help());
      return 0;
    });
  });
  help_command.add_option("topic", a->topic, "deck")->required()->check(CLI::IsMember({"deck"}));

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const CLI::App* asked = &app;
    while (!asked->get_subcommands().empty()) asked = asked->get_subcommands().front();
    const std::string text = asked->help();
    chosen->run = [text](MPI_Comm w) {
      return on_first_rank(w, [&] { return fmt::print("{}", text), 0; });
    };
  } catch (const CLI::CallForVersion&) {
    chosen->run = [](MPI_Comm w) {
      return on_first_rank(w, [] { return fmt::print("{}\n", version_line()), 0; });
    };
  } catch (const CLI::ParseError& e) {
    refuse_unknown_words(app, argc, argv);
    throw Error(Exit::usage, e.what(), "see weft --help", __FILE__, __LINE__);
  }
  return *chosen;
}

}  // namespace weft
