#include "jobs/generate/sample.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/safetensors.h"
#include "checkpoint/state.h"
#include "checkpoint/weights.h"
#include "config/deck_table.h"
#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "data/clip_source.h"
#include "media/writers.h"
#include "models/stdit3/clip_latents.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "models/stdit3/text_features.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tensor/arena.h"
#include "tensor/device.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct Shape5 {
  std::int64_t frames, height, width;
};

// What is asked for, or the first bucket's size where the deck leaves it open.
struct Target {
  Shape5 latent;
  ClipSize pixels;
};

Target choose_target(const Deck& deck, const ClipLatents& latents, const ClipSource& source) {
  const Bucket b = latents.seen(source.buckets().at(0));
  const SampleDeck& s = deck.get<SampleDeck>();
  Target t;
  t.latent = {s.frames > 0 ? s.frames : b.frames, s.height > 0 ? s.height : b.height,
              s.width > 0 ? s.width : b.width};
  // Latents keep the pixel size per latent of the bucket that they are like.
  const auto scaled = [](std::int64_t asked, std::int64_t of, std::int64_t pixels) {
    return static_cast<double>(asked) * static_cast<double>(pixels) / static_cast<double>(of);
  };
  t.pixels.height = scaled(t.latent.height, b.height, b.pixel_height);
  t.pixels.width = scaled(t.latent.width, b.width, b.pixel_width);
  t.pixels.num_frames = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(scaled(t.latent.frames, b.frames, b.pixel_frames)));
  return t;
}

// Copies the first frames of a clip of the data into z, as clean frames to go on from.
void place_condition(const Deck& deck, const ClipLatents& latents, const ClipSource& source,
                     const Shape5& shape, std::int64_t clip, Tensor& z) {
  const Bucket& stored = source.buckets().at(0);
  const Bucket b = latents.seen(stored);
  const std::int64_t count = deck.get<SampleDeck>().condition_frames;
  WEFT_CHECK(b.height == shape.height && b.width == shape.width && count <= b.frames &&
                 count < shape.frames && clip < b.clips,
             Exit::usage,
             "sample.height and width must be the data's, and sample.condition_frames smaller than "
             "both clips",
             "cannot take {} frames of clip {} ({} clips of {}x{}x{}) as the start of {}x{}x{}",
             count, clip, b.clips, b.frames, b.height, b.width, shape.frames, shape.height,
             shape.width);
  std::vector<std::byte> bytes(stored.clip_bytes());
  source.read(0, clip, bytes);
  Tensor x = Tensor::empty({b.channels, b.frames, b.height, b.width}, DType::f32);
  const Shape size{static_cast<std::int64_t>(bytes.size())};
  latents.make(stored, Tensor::borrow(bytes.data(), size, DType::u8).to_device(), 0,
               static_cast<std::uint64_t>(clip), x);
  const std::int64_t frame = b.height * b.width;
  const Tensor from = x.view({x.numel()}), to = z.view({z.numel()});
  for (std::int64_t c = 0; c < b.channels; ++c) {
    Tensor start = to.slice(c * shape.frames * frame, (c * shape.frames + count) * frame);
    ops::convert(from.slice(c * b.frames * frame, (c * b.frames + count) * frame), start);
  }
}

std::vector<std::uint8_t> to_frames(const Tensor& latent) {
  const Tensor z = latent.to_host();
  const std::int64_t C = z.dim(1), pixels = z.numel() / C;
  std::vector<std::uint8_t> frames(static_cast<std::size_t>(z.numel()));
  for (std::int64_t i = 0; i < pixels; ++i)
    for (std::int64_t c = 0; c < C; ++c) {
      const float v = std::clamp(z.data<float>()[c * pixels + i], -1.0f, 1.0f);
      frames[static_cast<std::size_t>(i * C + c)] =
          static_cast<std::uint8_t>((v + 1.0f) * 127.5f + 0.5f);
    }
  return frames;
}

// The frames that the contact sheet shows of a clip, evenly spaced: the rest of it need not be kept.
constexpr std::int64_t columns = 8;
std::vector<std::uint8_t> shown_of(const std::vector<std::uint8_t>& frames, const Shape5& s) {
  const std::int64_t count = std::min(columns, s.frames), size = s.height * s.width * 3;
  std::vector<std::uint8_t> shown;
  for (std::int64_t k = 0; k < count; ++k) {
    const auto first = frames.begin() + (count == 1 ? 0 : k * (s.frames - 1) / (count - 1)) * size;
    shown.insert(shown.end(), first, first + size);
  }
  return shown;
}

// All clips at rank 0 in order, from the ranks that made them; nothing elsewhere. Clips go round the groups of `sp` ranks,
// and the first rank of a group has its clips.
std::vector<std::vector<std::uint8_t>> gather_clips(
    const std::vector<std::vector<std::uint8_t>>& made, std::int64_t clips, const Shape5& s, int sp,
    MPI_Comm world) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  const auto bytes = static_cast<int>(std::min(columns, s.frames) * s.height * s.width * 3);
  std::vector<std::vector<std::uint8_t>> all;
  const int groups = ranks / sp;
  if (rank != 0)
    for (const auto& clip : made) MPI_Send(clip.data(), bytes, MPI_BYTE, 0, 0, world);
  else
    for (std::int64_t i = 0; i < clips; ++i) {
      if (i % groups == 0) {
        if (i / groups < static_cast<std::int64_t>(made.size()))
          all.push_back(made[static_cast<std::size_t>(i / groups)]);
        continue;
      }
      if (made.empty()) break;  // latents: no pictures to show
      all.emplace_back(static_cast<std::size_t>(bytes));
      MPI_Recv(all.back().data(), bytes, MPI_BYTE, static_cast<int>(i % groups) * sp, 0, world,
               MPI_STATUS_IGNORE);
    }
  return all;
}

void load_model(const Deck& deck, Stdit3& model, MPI_Comm world) {
  model.params().allocate_for_inference(deck.model.dtype == "bf16");
  if (!deck.get<SampleDeck>().weights.empty()) {
    load_weights(deck.get<SampleDeck>().weights, model.params());
    return;
  }
  const auto checkpoint = Checkpoint::newest(deck.run.dir, world);
  WEFT_CHECK(checkpoint.has_value(), Exit::checkpoint,
             "train first, or name weights with sample.weights=FILE.safetensors",
             "{} has no checkpoint to sample from", deck.run.dir);
  if (deck.get<SampleDeck>().ema)
    restore_ema(*checkpoint, model.params());
  else
    restore_state(*checkpoint, model.params());
  log::info("weights   {} of {}", deck.get<SampleDeck>().ema ? "EMA" : "weights",
            checkpoint->dir().string());
}

// A clip of that size, but for its noise, prompt and condition; captions of `rows` rows.
SampleRequest make_request(const Deck& deck, const Target& target, std::int64_t rows) {
  const Shape5& s = target.latent;
  SampleRequest r;
  r.z = Tensor::empty({1, deck.get<Stdit3Deck>().in_channels, s.frames, s.height, s.width},
                      DType::f32);
  r.captions = pack_captions({}, rows, 1, deck.data.text_features.empty());
  r.fps = {s.frames == 1 ? 120.0f : static_cast<float>(deck.get<SampleDeck>().fps)};
  r.size = target.pixels;
  if (deck.get<SampleDeck>().condition_frames > 0) {
    r.edit.assign(static_cast<std::size_t>(s.frames), 1.0f);
    std::fill_n(r.edit.begin(), deck.get<SampleDeck>().condition_frames, 0.0f);
  }
  return r;
}

// Peak arena bytes of a clip's steps with captions of full length, walked through without computing.
std::size_t plan_steps(const Deck& deck, const Target& target, Stdit3& model) {
  const auto plan = Arena::planning();
  const ArenaScope scope(*plan);
  const std::int64_t rows = deck.get<Stdit3Deck>().model_max_length;
  SampleRequest request = make_request(deck, target, rows);
  if (!deck.data.text_features.empty())
    request.y = Tensor::empty({1, rows, deck.get<Stdit3Deck>().caption_channels}, DType::f32);
  SamplerDeck sampler = deck.get<SamplerDeck>();
  sampler.steps = 1;
  flow_sample(model, sampler, deck.get<DiffusionDeck>(), request);
  return plan->peak();
}

}  // namespace

int sample(const Deck& deck, MPI_Comm world) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  const auto source = open_clip_source(deck.data.path, deck.data.verify);
  const int sp = static_cast<int>(deck.parallel.sp);
  // Made last but let go of after the group, which may be at work in it when something fails.
  std::unique_ptr<Arena> arena;
  const auto group = nn::make_sequence_group(world, sp, deck.parallel.hang_timeout);
  Stdit3 model(stdit3_config(deck));
  model.set_sequence_group(group.get());
  ClipLatents latents(deck);
  latents.check(source->buckets().at(0));
  if (deck.get<SampleDeck>().condition_frames > 0)
    latents.load(std::span(source->buckets()).first(1));
  const Target target = choose_target(deck, latents, *source);
  const Shape5& s = target.latent;
  model.check_sequence(s.height, s.width, sp);
  load_model(deck, model, world);
  const std::size_t planned = plan_steps(deck, target, model);
  std::size_t taken = 0;
  arena = Arena::reserve(arena_capacity(deck.memory, device));
  const ArenaScope scope(*arena);
  std::unique_ptr<TextFeatures> features;
  if (!deck.data.text_features.empty())
    features = std::make_unique<TextFeatures>(deck.data.text_features, deck.get<SampleDeck>().clips,
                                              deck.get<Stdit3Deck>().caption_channels,
                                              deck.get<Stdit3Deck>().model_max_length);
  const fs::path out = deck.get<SampleDeck>().output.empty()
                           ? fs::path(deck.run.dir) / "samples"
                           : fs::path(deck.get<SampleDeck>().output);
  std::error_code failed;
  fs::create_directories(out, failed);
  WEFT_CHECK(!failed, Exit::usage, "name a directory that can be written with sample.output",
             "cannot make {}: {}", out.string(), failed.message());
  const bool pixels = deck.get<Stdit3Deck>().in_channels == 3;
  std::vector<std::vector<std::uint8_t>> made;  // of this rank's clips, for the contact sheet

  // A group makes its clips together, and its first rank writes them.
  const bool writes = rank % sp == 0;
  for (std::int64_t i = rank / sp; i < deck.get<SampleDeck>().clips; i += ranks / sp) {
    const std::int64_t rows =
        features ? features->length(i) : deck.get<Stdit3Deck>().model_max_length;
    SampleRequest request = make_request(deck, target, rows);
    const auto seed = static_cast<std::uint64_t>(deck.run.seed), id = static_cast<std::uint64_t>(i);
    ops::fill_normal(seed, static_cast<int>(Purpose::sampler), 0, id, request.z);
    if (deck.get<SampleDeck>().condition_frames > 0)
      place_condition(deck, latents, *source, s, deck.get<SampleDeck>().condition_clip + i,
                      request.z);
    if (features) {
      const std::vector<float> values = features->read(i);
      request.y = Tensor::from_host(std::span<const float>(values),
                                    {1, rows, deck.get<Stdit3Deck>().caption_channels});
    }
    request.progress = [&](int step, int steps) {
      if (step == steps || step % 10 == 0) log::info("clip {}: step {}/{}", i, step, steps);
    };
    arena->reset_peak();
    const Tensor z =
        flow_sample(model, deck.get<SamplerDeck>(), deck.get<DiffusionDeck>(), request);
    taken = std::max(taken, arena->peak());
    if (!writes) continue;

    const std::string name = fmt::format("sample_{:04d}", i);
    if (!pixels) {
      const Tensor on_host = z.to_host();
      const SafetensorWrite latent{"latent",
                                   DType::f32,
                                   {z.dim(1), z.dim(2), z.dim(3), z.dim(4)},
                                   std::as_bytes(on_host.span<float>())};
      write_safetensors(out / (name + ".safetensors"), std::span(&latent, 1));
      continue;
    }
    const std::vector<std::uint8_t> frames = to_frames(z);
    const fs::path file = out / (name + (s.frames == 1 ? ".png" : ".mp4"));
    if (s.frames == 1)
      write_png(file.string(), s.height, s.width, frames);
    else
      write_mp4(file.string(), {frames.data(), s.frames, s.height, s.width},
                deck.get<SampleDeck>().fps);
    log::info("clip      {}", file.string());
    made.push_back(shown_of(frames, s));
  }
  log::info("memory    weights {} bytes; a clip's steps {} of {} planned",
            model.params().inference_bytes(deck.model.dtype == "bf16"), taken, planned);
  const auto shown = gather_clips(made, deck.get<SampleDeck>().clips, s, sp, world);
  if (!shown.empty()) {
    std::vector<ClipView> views;
    for (const auto& frames : shown)
      views.push_back({frames.data(), std::min(columns, s.frames), s.height, s.width});
    const Image sheet = contact_sheet(views, static_cast<int>(columns));
    write_png((out / "contact_sheet.png").string(), sheet.height, sheet.width, sheet.rgb);
    log::info("sheet     {}", (out / "contact_sheet.png").string());
  }
  return 0;
}

namespace {

void sample_rows(Rows& r, SampleDeck& d) {
  r.text("weights", d.weights,
         "Safetensors file or checkpoint to sample from; empty takes the newest of run.dir.");
  r.flag("ema", d.ema, "Use the moving average of the weights.");
  r.number("clips", d.clips, 1, 1e6, "Clips to make.");
  r.number("frames", d.frames, 0, 100000, "Frames of a clip; 0 takes those of the training data.");
  r.number("height", d.height, 0, 16384, "Height in pixels; 0 takes that of the training data.");
  r.number("width", d.width, 0, 16384, "Width in pixels; 0 takes that of the training data.");
  r.number("fps", d.fps, 0.01, 1000, "Frames a second that the model is told.");
  r.number("condition_frames", d.condition_frames, 0, 100000,
           "First frames that are given from a clip of the data.");
  r.number("condition_clip", d.condition_clip, 0, many, "Sample id of the clip that gives them.");
  r.text("output", d.output, "Directory of the results; empty is RUN/samples.");
}

void check_sample(const SampleDeck& d, const DeckDemand& demand) {
  demand((d.height == 0) == (d.width == 0),
         fmt::format("sample.height = {} but sample.width = {}", d.height, d.width),
         "give both in pixels, or neither");
  demand(d.frames == 0 || d.condition_frames < d.frames,
         fmt::format("sample.condition_frames = {} leaves nothing to make of sample.frames = {}",
                     d.condition_frames, d.frames),
         "lower sample.condition_frames");
}

}  // namespace

DeckTable sample_table() {
  DeckTable table = deck_table("sample", sample_rows, check_sample);
  table.next = "vae";
  return table;
}

Command sample_command() {
  Command c{"sample", "make clips with a trained model", sample};
  c.takes_deck();
  return c;
}

}  // namespace weft
