// The checks of `weft selftest`: small jobs with known results.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "cli/cli.h"
#include "cli/selftest.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/ingest/ingest.h"
#include "doctor/doctor.h"
#include "jobs/animate/animate.h"
#include "jobs/encode/encode.h"
#include "jobs/evaluate/evaluate.h"
#include "jobs/generate/generate.h"
#include "jobs/jobs.h"
#include "jobs/score/score.h"
#include "media/audio.h"
#include "media/video_reader.h"
#include "parallel/communicator.h"
#include "report/against.h"
#include "report/report.h"
#include "tensor/tensor.h"
#include "text/cleaning.h"

namespace weft::selftest {

namespace fs = std::filesystem;

Deck Context::deck(const std::string& name, const std::vector<std::string>& keys) const {
  const std::vector<InputDeck>& decks =
      name.starts_with("reference/") ? reference_files() : input_decks();
  const auto found = std::ranges::find(decks, name, &InputDeck::name);
  WEFT_ASSERT(found != decks.end());
  Deck d = parse_deck(found->text, name + ".toml", keys);
  d.device = given.device;
  d.memory = given.memory;
  d.run.threads = given.run.threads;
  return d;
}

namespace {

// As the command line runs it. Throws where the job ends with another exit code than 0.
void run(const Command& command, const Deck& deck, const Context& context) {
  const int code = command.run(deck, context.world);
  WEFT_CHECK(code == 0, static_cast<Exit>(code), "", "weft {} ended with exit code {}",
             command.name, code);
}

// Results that differ from the known ones are Exit::hardware, as in weft doctor.
void check(bool holds, const std::string& wrong) {
  WEFT_CHECK(holds, Exit::hardware, "", "{}", wrong);
}

// `wanted` was computed on one rank with AVX-512 (tests/e2e/test_selftest.py says how to do that
// again). Other instruction sets, numbers of ranks and GPUs sum in other orders, which changes f32
// results in the fifth digit or later; a wrong operation changes the second.
void check_close(const char* what, double got, double wanted, double tolerance = 1e-3) {
  check(std::abs(got - wanted) <= tolerance * std::abs(wanted),
        fmt::format("{}: expected {:.7g}, got {:.7g}", what, wanted, got));
}

double root_mean_square(std::span<const float> values) {
  double sum = 0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// ---- Trainings

// Bits of the run: its losses, and a hash of weights, averages and moments in the newest
// checkpoint.
std::pair<std::vector<double>, std::string> state_of(const fs::path& run_dir) {
  std::vector<double> losses;
  std::ifstream lines(run_dir / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);)
    losses.push_back(parse_json(line).at("loss").get<double>());
  const std::string text = read_whole(run_dir / "latest" / "manifest.json", 1 << 26,
                                      Exit::checkpoint, "is it a manifest?");
  return {losses, parse_json(text).at("state_hash").get<std::string>()};
}

Deck reference_deck(const Context& context, const std::string& name,
                    const std::vector<std::string>& keys) {
  return context.deck("reference/" + name + ".1/deck", keys);
}

// The training of a reference (docs/doctor.md), and the same with a restart half-way, at its
// checkpoint.
void train_twice(const Context& context, const std::string& name) {
  const auto train = [&](const std::string& run_dir, std::vector<std::string> keys) {
    keys.push_back("run.dir=" + context.path(run_dir));
    run(train_command(), reference_deck(context, name, keys), context);
  };
  const std::int64_t half = reference_deck(context, name, {}).train.checkpoint_every;
  train(name + "_whole", {});
  train(name + "_parts", {fmt::format("train.steps={}", half)});
  train(name + "_parts", {});
}

// Whether both ended with the same bits, and the results are those of the reference.
void check_trainings(const Context& context, const std::string& name) {
  if (context.rank != 0) return;
  const fs::path whole = context.path(name + "_whole"), parts = context.path(name + "_parts");
  const std::string folder = "reference/" + name + ".1";
  for (const InputDeck& file : reference_files())
    if (file.name.starts_with(folder + "/")) {
      const fs::path copy =
          context.folder / (file.name.ends_with("/deck") ? file.name + ".toml" : file.name);
      make_folders(copy.parent_path(), Exit::data, "choose another --dir");
      replace_file(copy, file.text, Exit::data, Durable::no);
    }
  const Comparison c = compare_results(whole, context.folder / folder);
  check(c.wrong.empty(), fmt::format("{}", fmt::join(c.wrong, "; ")));
  check(state_of(parts) == state_of(whole),
        "a training that was stopped and resumed ended with other bits than one that was not");
}

// ---- The checks

void operations(const Context&) {
  RankFacts facts;
  check_operations(facts);
  for (const auto& [name, wrong] : facts.operations)
    check(wrong == 0, fmt::format("{}: {}", name, counted(wrong, "wrong value")));
}

// Whole numbers of at most 15, whose sums are exact in f32 in any order.
void collectives(const Context& context) {
  const auto comm = make_communicator(context.world);
  const auto term = [](std::int64_t element, int rank) {
    return static_cast<float>((element % 31 * 7 + rank * 13) % 31 - 15);
  };
  std::vector<float> sums(31);
  for (std::int64_t e = 0; e < 31; ++e)
    for (int r = 0; r < context.ranks; ++r) sums[e] += term(e, r);
  std::string wrong;  // told at the end: the other ranks may have nothing to complain of
  for (const std::int64_t n : {1, 1000, 300'007}) {
    std::vector<float> mine(n);
    for (std::int64_t i = 0; i < n; ++i) mine[i] = term(i, context.rank);
    for (const bool in_parts : {false, true}) {
      Tensor t = Tensor::persistent({n}, DType::f32);
      t.set(std::span<const float>(mine));
      if (in_parts) {
        comm->wait(comm->reduce_scatter_sum(t));
        comm->wait(comm->all_gather(t));
      } else {
        comm->wait(comm->all_reduce_sum(t));
      }
      const Tensor got = t.to_host();
      comm->check();
      std::int64_t bad = 0;
      for (std::int64_t i = 0; i < n; ++i) bad += got.data<float>()[i] != sums[i % 31] ? 1 : 0;
      if (bad > 0 && wrong.empty())
        wrong = fmt::format("{} of {} sums over all ranks ({}) are wrong", bad, n,
                            in_parts ? "reduce-scatter and all-gather" : "all-reduce");
    }
  }
  check(wrong.empty(), wrong);
}

// A red picture and a moving one, to clips.
void ingest_footage(const Context& context) {
  const std::string store = context.path("clips.h5");
  run(ingest_command(),
      context.deck("smoke", {"ingest.inputs=[\"lavfi:color=c=red:size=96x64:rate=10:duration=2\", "
                             "\"lavfi:testsrc2=size=96x64:rate=10:duration=2\"]",
                             "ingest.output=" + store, "ingest.frames=[5]", "ingest.height=32",
                             "ingest.width=48"}),
      context);
  if (context.rank != 0) return;
  const auto clips = open_clip_store(store, true);
  const Bucket& bucket = clips->buckets().front();
  check(clips->buckets().size() == 1 && bucket.clips == 8,
        fmt::format("expected 8 clips in 1 bucket, got {} in {}", bucket.clips,
                    clips->buckets().size()));
  constexpr double red[] = {254, 0, 0};
  std::vector<std::byte> clip(bucket.clip_bytes());
  for (std::int64_t i = 0; i < bucket.clips; ++i) {
    clips->read(0, i, clip);  // which compares its hash
    double mean[3] = {}, most = 0, least = 255;
    for (std::size_t at = 0; at < clip.size(); ++at) {
      const double value = std::to_integer<int>(clip[at]);
      mean[at % 3] += 3 * value / static_cast<double>(clip.size());
      most = std::max(most, value);
      least = std::min(least, value);
    }
    for (int c = 0; c < 3 && i < 4; ++c)
      check(
          std::abs(mean[c] - red[c]) < 4,
          fmt::format("channel {} of a red picture: expected {}, got {:.1f}", c, red[c], mean[c]));
    check(i < 4 || most - least > 150,
          fmt::format("the values of a test picture go from {} to {}", least, most));
  }
}

void clean_captions(const Context&) {
  const std::pair<std::string, std::string> texts[] = {
      {clean_text("Café & Bar &amp; Grill &lt;b&gt;bold&lt;/b&gt; 你好 world"),
       "café bar grill bold< b> world"},
      {clean_text("A  Soaring drone footage; captures (the) majestic beauty — of a “cliff”, 4K!"),
       "a soaring drone footage; captures the majestic beauty - of a \"cliff\", 4k!"},
      {clean_basic("full\uff37idth \uff0c\u3000space"), "fullWidth , space"}};
  for (const auto& [got, wanted] : texts)
    check(got == wanted,
          fmt::format("a cleaned caption: expected \"{}\", got \"{}\"", wanted, got));
}

void encode_clips(const Context& context) {
  const std::string store = context.path("latents.h5");
  run(encode_command(),
      context.deck("demo", {fmt::format("data.path=synthetic:clips={},frames=9,height=32,width=48",
                                        context.items()),
                            "vae.weights=random:2", "t5.weights=", "encode.text=false",
                            "encode.dtype=f32", "encode.output=" + store}),
      context);
  if (context.rank != 0) return;
  const auto clips = open_clip_store(store, true);
  const Bucket& bucket = clips->buckets().front();
  check(bucket.clips == context.items(),
        fmt::format("expected {} clips, got {}", context.items(), bucket.clips));
  std::vector<float> latent(bucket.clip_bytes() / sizeof(float));
  for (std::int64_t i = 0; i < bucket.clips; ++i) {
    clips->read(0, i, std::as_writable_bytes(std::span(latent)));
    if (i == 0) check_close("RMS of a latent", root_mean_square(latent), 0.301631);
  }
}

void generate_clips(const Context& context) {
  const int samples = (context.items() + 1) / 2;  // of two prompts
  const Deck deck = context.deck(
      "demo",
      {"data.path=synthetic:", "generate.weights=random:1", "vae.weights=random:2",
       "vae.scale=[1, 1, 1, 1]", "vae.shift=[0, 0, 0, 0]", "t5.weights=" + context.path("t5"),
       "sampler.steps=3", "generate.tensors=true", fmt::format("generate.num_samples={}", samples),
       "generate.output=" + context.path("generated")});
  if (context.rank == 0) write_text_encoder(deck.get<T5Deck>());
  MPI_Barrier(context.world);
  run(generate_command(), deck, context);
  if (context.rank != 0) return;
  for (int prompt = 0; prompt < 2; ++prompt)
    for (int sample = 0; sample < samples; ++sample) {
      const std::string name =
          context.path(fmt::format("generated/sample_{:04d}-{}", prompt, sample));
      const std::int64_t frames = read_frames({name + ".mp4"}).frames;
      check(frames == 9, fmt::format("frames of a clip: expected 9, got {}", frames));
      if (sample > 0) continue;
      const auto file = SafetensorsFile::open(name + ".safetensors");
      const bool first = prompt == 0;
      check_close("RMS of a clip's latent", root_mean_square(file.read_f32(file.at("latent_0"))),
                  first ? 2.055525 : 1.938002);
      check_close("RMS of a clip's pixels", root_mean_square(file.read_f32(file.at("frames"))),
                  first ? 0.348821 : 0.349861);
    }
}

void train_open_sora(const Context& context) {
  train_twice(context, "smoke");
  check_trainings(context, "smoke");
  if (context.rank != 0) return;
  report({context.path("smoke_whole")});
  const std::string page = read_whole(context.folder / "smoke_whole" / "report.html", 1 << 26,
                                      Exit::data, "is it the report?");
  check(page.find("</html>") != page.npos, "report.html is incomplete");
}

void train_wan(const Context& context) {
  train_twice(context, "wan");
  check_trainings(context, "wan");
}

void train_vae(const Context& context) {
  train_twice(context, "vae");
  check_trainings(context, "vae");
}

void train_segmentation(const Context& context) {
  train_twice(context, "segmentation");
  const std::string whole = context.path("segmentation_whole");
  run(evaluate_command({report_page::segmentation_page, report_page::detection_page}),
      reference_deck(context, "segmentation",
                     {"run.dir=" + whole, "evaluate.output=" + whole + "/evaluation"}),
      context);
  check_trainings(context, "segmentation");
}

// The untrained network finds regions everywhere; how many, rounding may change by a few. Clipper
// moves outlines by a pixel on another processor, so narrow ones count too.
void score_pictures(const Context& context) {
  if (context.rank == 0) write_pictures(context.folder / "pictures", context.items(), 64, 64);
  MPI_Barrier(context.world);
  run(score_command(report_page::score_page),
      context.deck(
          "dbnet_demo",
          {"score.input=" + context.path("pictures"), "score.output=" + context.path("ocr.csv"),
           "score.weights=random:3", "score.side=64", "postprocess.mask_threshold=0.01",
           "postprocess.min_text_score=0.01", "postprocess.min_text_width=1"}),
      context);
  if (context.rank != 0) return;
  std::ifstream table(context.folder / "ocr.csv");
  std::string line;
  std::getline(table, line);
  int rows = 0, regions = 0;
  for (; std::getline(table, line); ++rows)
    if (rows < 4) regions += std::atoi(line.c_str() + line.rfind(',') + 1);
  check(rows == context.items(), fmt::format("expected {} rows, got {}", context.items(), rows));
  check_close("the number of text regions in four pictures", regions, 2281, 0.01);
}

void animate_face(const Context& context) {
  if (context.rank == 0) write_face_and_speech(context.folder / "face", 0.2);
  MPI_Barrier(context.world);
  std::vector<std::string> keys = {"animate.picture=" + context.path("face/000000.png"),
                                   "animate.speech=" + context.path("face/speech.wav"),
                                   "animate.landmarks=" + context.path("face/landmarks.csv"),
                                   "animate.output=" + context.path("heads"), "animate.piece=2"};
  // Half the width of the demo's networks, or less.
  for (const char* key :
       {"size=32", "kp_block_expansion=4", "kp_max_features=16", "kp_num_blocks=2",
        "kp_reshape_channel=64", "gen_max_features=16", "gen_reshape_channel=4",
        "motion_block_expansion=4", "motion_max_features=16", "motion_num_blocks=2",
        "mapping_descriptor_nc=16"})
    keys.push_back(std::string("sadtalker.") + key);
  run(animate_command(), context.deck("animate_demo", keys), context);
  if (context.rank != 0) return;
  const std::string clip = context.path("heads/000000_speech.mp4");
  const Footage heads = read_frames({clip});
  check(heads.frames == 5 && heads.height == 28 && heads.width == 32,
        fmt::format("frames of the clip: expected 5 of 32x28, got {} of {}x{}", heads.frames,
                    heads.width, heads.height));
  double mean = 0;
  for (const std::uint8_t value : heads.rgb)
    mean += static_cast<double>(value) / static_cast<double>(heads.rgb.size());
  check_close("the mean of the clip's pixels", mean, 111.20, 0.02);
  check(!read_speech(clip).empty(), "the clip has no sound");
}

}  // namespace

const std::vector<Check>& all_checks() {
  static const std::vector<Check> checks = {
      {"operations", "products against plain loops; on a GPU against the CPU", operations},
      {"collectives", "exact sums over all ranks, and parts gathered", collectives},
      {"ingest", "FFmpeg's test pictures to clips, hashes, colours", ingest_footage},
      {"captions", "cleaned as the original cleans them", clean_captions},
      {"encode", "clips to latents by a random VAE", encode_clips},
      {"generate", "prompts to clips by random T5, STDiT3 and VAE", generate_clips},
      {"open_sora", "train STDiT3, stop, resume to the same bits; report", train_open_sora},
      {"wan", "train Wan, stop, resume to the same bits", train_wan},
      {"vae", "train a VAE, stop, resume to the same bits", train_vae},
      {"segmentation", "train, stop, resume to the same bits; evaluate", train_segmentation},
      {"score", "text regions of pictures", score_pictures},
      {"animate", "a face and speech to a clip with sound", animate_face}};
  return checks;
}

}  // namespace weft::selftest
