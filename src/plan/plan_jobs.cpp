// `weft plan --job encode | generate`, and animate (plan_animate.cpp): each job's own dry runs,
// with the weights' memory around them and the rates that turn them into seconds.
#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "jobs/encode/encode.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/options.h"
#include "jobs/generate/samples.h"
#include "models/flow_sampler.h"
#include "models/registry.h"
#include "models/t5/options.h"
#include "models/t5/placement.h"
#include "models/t5/t5.h"
#include "plan/plan.h"
#include "tensor/tensor.h"
#include "train/step_cost.h"

namespace weft {
namespace {

// What a rank may take: as in a run, a sixteenth stays free for libraries.
std::size_t usable(const PlanRequest& request) {
  return arena_share(static_cast<std::size_t>(request.memory_gb * 1e9), 1);
}

// The text encoder over the ranks, captions of full length.
struct TextPlan {
  T5Placement placement;
  std::size_t work = 0;          // bytes of a part beside its weights
  double seconds_a_caption = 0;  // of all parts together
};

TextPlan plan_text(const Deck& deck, const PlanRequest& request, int ranks) {
  const T5Deck t5 = t5_deck(deck);
  TextPlan plan;
  plan.work = t5_arena_bytes(t5, t5.micro_batch * t5.max_length, t5.max_length);
  const auto place = [&](int count) {
    const std::vector<std::size_t> memory(count, usable(request));
    return place_t5(t5, memory, plan.work);
  };
  plan.placement = place(ranks);
  if (plan.placement.parts.empty()) {
    int enough = ranks;
    while (enough < 4096 && place(enough).parts.empty()) enough *= 2;
    throw Error(
        Exit::usage,
        fmt::format("T5 in {} does not fit into {} ranks of {:.1f} GB: {:.2f} GB are missing",
                    t5.dtype, ranks, request.memory_gb,
                    gb(static_cast<double>(plan.placement.missing))),
        enough < 4096
            ? fmt::format("{} such ranks are enough{}", enough,
                          t5.dtype == "f32" ? ", or t5.dtype = \"bf16\", half the size" : "")
            : "a single layer is too large for a rank: more memory, or a smaller "
              "t5.micro_batch",
        __FILE__, __LINE__);
  }
  const Rates rates = rates_of(request);
  const T5Encoder::Sizes sizes = T5Encoder::sizes(t5);
  // sizes.layer is bytes, nearly all of matrices in t5.dtype. Counts their products alone, two
  // operations a parameter and token.
  const double parameters = static_cast<double>(sizes.layer) * static_cast<double>(t5.num_layers) /
                            (t5.dtype == "bf16" ? 2 : 4);
  plan.seconds_a_caption = 2 * parameters * static_cast<double>(t5.max_length) / rates.products;
  return plan;
}

// Sizes of clips that a job has, and the codec's needs for each.
using ClipShape = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // frames, height, width

struct CodecPlan {
  std::int64_t micro_batch = 0;
  std::size_t bytes = 0;
  double encoding = 0, decoding = 0;  // seconds a clip
};

// Chooses the micro-batch as a run does; 0: the clip does not fit even frame by frame.
CodecPlan fit_codec(VideoCodec& codec, const ClipShape& shape, std::size_t capacity, bool decode,
                    const Rates& rates) {
  const auto [frames, height, width] = shape;
  CodecPlan plan;
  plan.micro_batch = codec.largest_micro_batch(frames, height, width, capacity, decode);
  // A clip that does not fit is planned frame by frame all the same: the message names what it
  // takes.
  const std::int64_t at_once = std::max<std::int64_t>(plan.micro_batch, 1);
  {
    const OpTimes times(rates);
    plan.bytes = codec.plan_encode(frames, height, width, at_once).bytes;
    plan.encoding = times.seconds();
  }
  if (!decode) return plan;
  const OpTimes times(rates);
  plan.bytes = std::max(plan.bytes, codec.plan_decode(frames, height, width, at_once).bytes);
  plan.decoding = times.seconds();
  return plan;
}

std::string size_name(const ClipShape& s) {
  return fmt::format("{}x{}x{}", std::get<0>(s), std::get<1>(s), std::get<2>(s));
}

void row(nlohmann::ordered_json& j, const std::string& kind, std::size_t bytes,
         const std::string& note) {
  fmt::print("  {:<20} {:>9.3f} GB  {}\n", kind, gb(static_cast<double>(bytes)), note);
  j["memory"][kind] = bytes;
}

// Bytes of a part's weights, which it has from now on.
std::size_t allocate_weights(auto& part) {
  const auto planned = Arena::planning();  // they may be more than this host has
  const ArenaScope scope(*planned);
  part.params().allocate_for_inference(part.bf16());
  return part.params().inference_bytes(part.bf16());
}

std::string dtype_name(const auto& part) { return part.bf16() ? "bf16" : "f32"; }

void print_text(const Deck& deck, const TextPlan& text, nlohmann::ordered_json& j) {
  const T5Deck t5 = t5_deck(deck);
  fmt::print("\ntext encoder, {} layers in {}, before the others are loaded\n  {}\n", t5.num_layers,
             t5.dtype, describe(text.placement));
  row(j, "t5 beside weights", text.work,
      fmt::format("of each part: {} captions of {} tokens", t5.micro_batch, t5.max_length));
  fmt::print("  {:.2f} ms a caption of full length, all parts together\n",
             1e3 * text.seconds_a_caption);
  for (const T5Part& p : text.placement.parts)
    j["t5"].push_back(
        {{"rank", p.rank}, {"first", p.first}, {"last", p.last}, {"weights", p.weights}});
  j["t5_seconds_a_caption"] = text.seconds_a_caption;
}

// One rank's clips of that size: sampling, so many together, then decoding.
struct ClipPlan {
  ClipShape shape;
  std::int64_t clips = 0, together = 1;
  std::size_t sampling = 0;
  CodecPlan codec;
  double seconds = 0;  // of sampling one
};

ClipPlan plan_clip(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                   std::int64_t limit, std::size_t capacity, const Rates& rates, double link) {
  ClipPlan plan;
  plan.together = fit_batch(deck, parts, item, limit, capacity);
  plan.shape = {item.pixels.frames, item.pixels.height, item.pixels.width};
  {
    // One step of the sampler, with and without the caption.
    const OpTimes step(rates);
    plan.sampling = plan_sampling(deck, parts, item, plan.together).bytes;
    plan.seconds = static_cast<double>(parts.denoiser->sampler(deck).count()) *
                   (step.seconds() + step.bytes_sent() / link) / static_cast<double>(plan.together);
  }
  // Clips that were sampled together are decoded one by one: the others wait in memory meanwhile.
  const std::size_t waiting = bytes_of_waiting(*parts.denoiser, item, plan.together);
  plan.codec = fit_codec(*parts.codec, plan.shape, capacity - waiting, true, rates);
  plan.codec.bytes += waiting;
  return plan;
}

void plan_encode_job(const Deck& deck, const PlanRequest& request, int ranks,
                     nlohmann::ordered_json& j) {
  const auto source = open_clip_source(deck.data, deck.media);
  const std::unique_ptr<VideoCodec> codec = make_codec(deck);
  const std::size_t weights = allocate_weights(*codec);
  WEFT_CHECK(weights < usable(request), Exit::usage,
             fmt::format("give ranks more memory, or {} = \"bf16\"", codec->dtype_key()),
             "the {}'s weights alone take {:.2f} GB of {:.1f}", codec->name(),
             gb(static_cast<double>(weights)), request.memory_gb);
  const std::size_t capacity = usable(request) - weights;
  const Rates rates = rates_of(request);
  const std::unique_ptr<Denoiser> beside = with_condition(deck);
  fmt::print("\nencoding, every rank\n");
  row(j, codec->name() + " weights", weights, dtype_name(*codec));
  fmt::print("  {:<20} {:>6} {:>10} {:>12} {:>14} {:>12}\n", "bucket", "clips", "memory",
             "frames/time", "bytes stored", "time a clip");
  std::string largest;  // that fits
  double seconds = 0;
  for (const Bucket& b : source->buckets()) {
    const Bucket stored = encoded_bucket(b, deck.get<EncodeDeck>(), *codec, 0,
                                         beside ? beside->condition_channels() : 0);
    CodecPlan plan = fit_codec(*codec, {b.frames, b.height, b.width}, capacity, false, rates);
    if (beside) plan.encoding *= 2;
    WEFT_CHECK(plan.micro_batch > 0, Exit::usage,
               largest.empty() ? "give ranks more memory, or ingest at a lower resolution"
                               : fmt::format("{} still fits", largest),
               "encoding bucket {} takes {:.2f} GB, frame by frame; a rank has {:.2f} for it",
               b.name, gb(static_cast<double>(plan.bytes)), gb(static_cast<double>(capacity)));
    largest = b.name;
    fmt::print("  {:<20} {:>6} {:>7.3f} GB {:>12} {:>14} {:>10.3f} s\n", b.name, b.clips,
               gb(static_cast<double>(plan.bytes)), plan.micro_batch, stored.clip_bytes(),
               plan.encoding);
    seconds += plan.encoding * static_cast<double>(b.clips) / ranks;
    j["buckets"].push_back({{"name", b.name},
                            {"clips", b.clips},
                            {"memory", plan.bytes},
                            {"micro_batch", plan.micro_batch},
                            {"clip_bytes", stored.clip_bytes()},
                            {"seconds", plan.encoding}});
  }
  fmt::print("  {:.1f} s for all clips on {}, without reading and writing ({})\n", seconds,
             counted(ranks, "rank"), rates.origin);
  j["seconds"] = seconds;
}

// The longest of the usual lengths at which the deck's clips fit, for the hint.
std::string longest_that_fits(const Deck& deck, const ClipParts& parts, std::size_t capacity,
                              const Rates& rates) {
  for (const char* frames : {"408", "204", "102", "51", "1"}) {
    Deck shorter = deck;
    shorter.get<GenerateDeck>().num_frames = frames;
    const GenerateJob job = plan_generate_job(
        shorter, read_prompts(shorter.get<GenerateDeck>(), {}, deck.media), parts, "");
    bool fits = true;
    for (const ClipItem& item : job.items) {
      // Only the memory counts here: one clip at a time, and any bandwidth for the links.
      const ClipPlan p = plan_clip(shorter, parts, item, 1, capacity, rates, 1);
      fits = fits && p.sampling <= capacity && p.codec.micro_batch > 0;
    }
    if (fits)
      return fmt::format(
          "generate.num_frames = \"{}\" fits; so may a lower resolution, or "
          "parallel.sp, which shares a clip's tokens",
          frames);
  }
  return "choose a lower generate.resolution, parallel.sp, or ranks with more memory";
}

void plan_generate(const Deck& written, const PlanRequest& request, int ranks,
                   nlohmann::ordered_json& j) {
  const Deck deck = with_model_defaults(written);
  const int sp = static_cast<int>(deck.parallel.sp);
  const int together = sp * static_cast<int>(deck.get<GenerateDeck>().cfg_ranks);
  WEFT_CHECK(ranks % together == 0, Exit::usage,
             "choose parallel.sp and generate.cfg_ranks so that they divide the ranks",
             "parallel.sp = {} and generate.cfg_ranks = {} do not divide {} ranks", sp,
             deck.get<GenerateDeck>().cfg_ranks, ranks);
  const Machine machine = machine_of(request);
  const Rates rates = rates_of(request, false, deck.model.dtype);
  const ClipParts parts(deck);
  Denoiser& model = *parts.denoiser;
  VideoCodec& codec = *parts.codec;
  WEFT_CHECK(!parts.on_pixels, Exit::usage, "name a deck of a model on latents",
             "weft plan --job generate plans models with a codec, this one works on {} channels of "
             "pixels",
             model.channels());
  const GenerateJob job =
      plan_generate_job(deck, read_prompts(deck.get<GenerateDeck>(), {}, deck.media), parts, "");
  // For the exchanges' memory, the last rank of a group has the largest share.
  AbsentRanks sharing(sp - 1, sp);
  if (sp > 1) model.set_sequence_group(&sharing);
  const bool in_turn = experts_in_turn(deck, job, parts, usable(request));
  if (const std::vector<WeightSet> sets = model.weight_sets(); in_turn)
    model.params().share_memory(sets[0].names.prefix, sets[1].names.prefix);
  const std::size_t of_model = allocate_weights(model), of_codec = allocate_weights(codec);
  // Clips have what the weights of both models leave.
  WEFT_CHECK(of_model + of_codec < usable(request), Exit::usage,
             fmt::format("set model.dtype and {} to \"bf16\"{}, or give ranks more memory",
                         codec.dtype_key(),
                         model.weight_sets().empty() ? "" : ", generate.experts to \"in_turn\""),
             "the weights of {} and {} take {:.2f} GB of {:.1f}", model.name(), codec.name(),
             gb(static_cast<double>(of_model + of_codec)), request.memory_gb);
  const std::size_t capacity = usable(request) - of_model - of_codec;
  fmt::print("\ngeneration, every rank{}\n", sp > 1 ? fmt::format(", {} to a clip", sp) : "");
  row(j, model.name() + " weights", of_model,
      dtype_name(model) +
          (in_turn ? ", one expert at a time, read again for its steps (not in the times below)"
                   : ""));
  row(j, codec.name() + " weights", of_codec, dtype_name(codec));
  const BatchLimits limits = limit_batches(deck, job, job.longest_first(), ranks / sp);
  std::map<ClipShape, ClipPlan> sizes;
  for (const ClipItem& item : job.items) {
    const ClipShape shape{item.pixels.frames, item.pixels.height, item.pixels.width};
    if (!sizes.contains(shape))
      sizes[shape] = plan_clip(deck, parts, item, limits.at(item.pixels), capacity, rates,
                               machine.link_bandwidth);
    ++sizes[shape].clips;
  }
  fmt::print("  {:<16} {:>6} {:>9} {:>12} {:>12} {:>12} {:>14} {:>14}\n", "clip", "clips",
             "together", "sampling", codec.name(), "frames/time", "sampling time", "decoding time");
  double seconds = 0, longest = 0;
  for (const auto& [shape, p] : sizes) {
    WEFT_CHECK(
        p.sampling <= capacity && p.codec.micro_batch > 0, Exit::usage,
        longest_that_fits(deck, parts, capacity, rates),
        "a clip of {} takes {:.2f} GB to sample and {:.2f} to decode; a rank has {:.2f} for it",
        size_name(shape), gb(static_cast<double>(p.sampling)),
        gb(static_cast<double>(p.codec.bytes)), gb(static_cast<double>(capacity)));
    fmt::print("  {:<16} {:>6} {:>9} {:>9.3f} GB {:>9.3f} GB {:>12} {:>12.2f} s {:>12.2f} s\n",
               size_name(shape), p.clips, p.together, gb(static_cast<double>(p.sampling)),
               gb(static_cast<double>(p.codec.bytes)), p.codec.micro_batch, p.seconds,
               p.codec.decoding);
    const double a_clip =
        (p.seconds + p.codec.decoding) * static_cast<double>(deck.get<GenerateDeck>().loop);
    seconds += a_clip * static_cast<double>(p.clips);
    // A group takes at least as long as its largest batch.
    longest = std::max(longest, a_clip * static_cast<double>(std::min(p.together, p.clips)));
    j["clips"].push_back({{"size", size_name(shape)},
                          {"clips", p.clips},
                          {"together", p.together},
                          {"sampling", p.sampling},
                          {"vae", p.codec.bytes},
                          {"micro_batch", p.codec.micro_batch},
                          {"sampling_seconds", p.seconds},
                          {"decoding_seconds", p.codec.decoding}});
  }
  std::int64_t at_once = 1;
  // One codec decodes clips of all sizes: frames on the host are planned for its largest
  // micro-batch.
  for (const auto& [shape, p] : sizes) at_once = std::max(at_once, p.codec.micro_batch);
  codec.set_micro_batch(at_once);
  row(j, "frames on the host", plan_frames(deck, job, job.longest_first(), codec).bytes,
      "between codec and encoder, whatever the clips' lengths");
  fmt::print("  at least {:.1f} s of sampling and decoding on {} ({})\n",
             std::max(longest, seconds * together / ranks),
             counted(ranks / together, "group of ranks", "groups of ranks"), rates.origin);
  j["seconds"] = std::max(longest, seconds * together / ranks);
}

}  // namespace

SamplesPlan::SamplesPlan(const Deck& deck)
    : deck_(complete_deck(samples_deck(deck), MPI_COMM_SELF)),
      parts_(std::make_shared<ClipParts>(deck_)) {
  weights_ = allocate_weights(*parts_->denoiser) + allocate_weights(*parts_->codec);
}

std::size_t SamplesPlan::arena(std::size_t capacity) const {
  AbsentRanks sharing(static_cast<int>(deck_.parallel.sp) - 1, static_cast<int>(deck_.parallel.sp));
  if (sharing.size() > 1) parts_->denoiser->set_sequence_group(&sharing);
  const GenerateJob job = plan_generate_job(
      deck_, read_prompts(deck_.get<GenerateDeck>(), {}, deck_.media), *parts_, "");
  std::size_t most = 0;
  for (const ClipItem& item : job.items) {
    // Only the memory counts: whatever the rates.
    const ClipPlan p = plan_clip(deck_, *parts_, item, 1, capacity, h200_targets(), 1);
    WEFT_CHECK(p.sampling <= capacity && p.codec.micro_batch > 0, Exit::usage,
               "choose smaller samples (generate.resolution, generate.num_frames)",
               "a sample clip of {} takes {:.2f} GB to sample and {:.2f} to decode; a rank has "
               "{:.2f} for it",
               size_name(p.shape), gb(static_cast<double>(p.sampling)),
               gb(static_cast<double>(p.codec.bytes)), gb(static_cast<double>(capacity)));
    most = std::max({most, p.sampling, p.codec.bytes});
  }
  if (sharing.size() > 1) parts_->denoiser->set_sequence_group(nullptr);
  return most;
}

int plan_job(const Deck& deck, const PlanRequest& request, const std::string& job,
             const std::string& json, int world_ranks) {
  const int ranks = request.gpus == 0 ? world_ranks : request.gpus;
  WEFT_CHECK(request.fabric != "local", Exit::usage, "describe a machine: --memory, --fabric",
             "--fabric local measures training steps, not {}", job);
  WEFT_CHECK(request.memory_gb > 0, Exit::usage, "say --memory 141 for an H200, or --gpu",
             "a described machine needs --memory GB");
  nlohmann::ordered_json j;
  j["build"] = version_line();
  j["job"] = job;
  j["ranks"] = ranks;
  j["memory_gb"] = request.memory_gb;
  fmt::print("{}\nweft {} on {} of {:.1f} GB, of which a sixteenth stays free\n", version_line(),
             job, counted(ranks, "rank"), request.memory_gb);
  const std::unique_ptr<TextEncoder> encoder = job == "animate" ? nullptr : make_text_encoder(deck);
  const bool text = encoder != nullptr && encoder->lacks().empty() &&
                    (job == "generate" || deck.get<EncodeDeck>().text);
  if (text) print_text(deck, plan_text(deck, request, ranks), j);
  if (job == "encode")
    plan_encode_job(deck, request, ranks, j);
  else if (job == "animate")
    plan_animate(deck, request, ranks, j);
  else
    plan_generate(deck, request, ranks, j);
  if (json.empty()) return 0;
  std::ofstream out(json, std::ios::trunc);
  out << dump_json(j, 2) << "\n";
  out.close();
  WEFT_CHECK(bool(out), Exit::usage, "name a file in a folder that can be written",
             "cannot write {}", json);
  return 0;
}

}  // namespace weft
