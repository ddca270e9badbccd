#include "jobs/generate/clip_maker.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"
#include "core/mpi.h"
#include "core/philox.h"
#include "jobs/generate/options.h"
#include "models/flow_sampler.h"
#include "models/pixels.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

// Copies latent frames of a reference, numbered from its beginning, into z [1,C,T,h,w].
void copy_frames(const LatentReference& reference, const Placement& p, Tensor& z,
                 const std::string& name) {
  const std::int64_t channels = z.dim(1), frame = z.dim(3) * z.dim(4);
  WEFT_CHECK(
      static_cast<std::int64_t>(reference.values.size()) == channels * reference.latents * frame,
      Exit::internal, "this is a bug in weft, please report it with the log",
      "{}: a reference of {} values for frames of {}", name, reference.values.size(), frame);
  const Tensor from = Tensor::from_host(std::span<const float>(reference.values),
                                        {static_cast<std::int64_t>(reference.values.size())});
  const Tensor to = z.view({z.numel()});
  for (std::int64_t c = 0; c < channels; ++c) {
    const std::int64_t first = c * reference.latents + p.from - reference.first,
                       target = c * z.dim(2) + p.to;
    Tensor part = to.slice(target * frame, (target + p.length) * frame);
    ops::convert(from.slice(first * frame, (first + p.length) * frame), part);
  }
}

// From the group's first rank to the others.
void share(TextRows& text, MPI_Comm group) {
  MPI_Bcast(&text.tokens, 1, MPI_INT64_T, 0, group);
  broadcast_sized(text.values, group);
}

void share(LatentReference& reference, MPI_Comm group) {
  std::int64_t sizes[] = {reference.frames, reference.first, reference.latents};
  MPI_Bcast(sizes, 3, MPI_INT64_T, 0, group);
  reference.frames = sizes[0];
  reference.first = sizes[1];
  reference.latents = sizes[2];
  broadcast_sized(reference.values, group);
}

}  // namespace

SampleRequest make_request(const Deck& deck, const ClipItem& item, std::int64_t clips) {
  SampleRequest r;
  r.fps.assign(clips,
               item.pixels.frames == 1 ? 120.0f : static_cast<float>(deck.get<GenerateDeck>().fps));
  r.size.height = static_cast<double>(item.pixels.height);
  r.size.width = static_cast<double>(item.pixels.width);
  r.size.num_frames = item.pixels.frames;
  return r;
}

Shape latent_shape(const Denoiser& model, const ClipItem& item, std::int64_t clips) {
  return {clips, model.channels(), item.latent_frames, item.latent_height, item.latent_width};
}

std::vector<MaskGroup> all_masks(const Deck& deck, const GenerateJob& job, const ClipItem& item) {
  std::vector<MaskGroup> masks = item.masks;
  const auto given = static_cast<std::int64_t>(job.prompts[item.prompt].references.size());
  const std::int64_t length = job.loops.condition_latents;
  for (std::int64_t loop = 1; loop < deck.get<GenerateDeck>().loop && length > 0; ++loop)
    masks.push_back({loop, given + loop - 1, -length, 0, length,
                     deck.get<GenerateDeck>().condition_frame_edit});
  return masks;
}

VideoCodec::Part part_to_go_on_from(const Deck& deck, const GenerateJob& job,
                                    const VideoCodec& codec, const ClipItem& item,
                                    std::int64_t loop) {
  if (job.loops.condition_latents == 0 || loop + 1 >= deck.get<GenerateDeck>().loop) return {};
  const auto given = static_cast<std::int64_t>(job.prompts[item.prompt].references.size());
  const LatentRange taken = frames_taken(all_masks(deck, job, item), deck.get<GenerateDeck>().loop,
                                         given + loop, item.latent_frames, item.latent_frames,
                                         deck.get<GenerateDeck>().align, item.name);
  return codec.part_with(item.pixels.frames, taken.first, taken.last);
}

ClipMaker::ClipMaker(const Deck& deck, const GenerateJob& job, Denoiser& model, VideoCodec& codec,
                     const PromptFeatures& features, MPI_Comm group, Communicator* branches,
                     std::function<void(bool)> expert)
    : deck_(deck),
      job_(job),
      model_(model),
      codec_(codec),
      features_(features),
      group_(group),
      branches_(branches),
      expert_(std::move(expert)) {
  if (group_ == MPI_COMM_NULL) return;
  MPI_Comm_rank(group_, &rank_);
  MPI_Comm_size(group_, &ranks_);
}

// Makes the clips of a batch, loop after loop. In a group all ranks sample; the first alone reads
// texts and references, decodes and writes, so errors of a clip happen there: what the others must
// know of them goes through on_first(), at the beginning of each loop.
std::int64_t ClipMaker::make(const ClipBatch& batch, ClipWriter& writer, const Failed& failed) {
  crash::at("clip", item_of(batch.front()).name.c_str());
  fault::at(fault::Place::clip, batch.front());
  references_.clear();
  masks_ = all_masks(deck_, job_, item_of(batch.front()));
  const std::int64_t loops = deck_.get<GenerateDeck>().loop;
  std::int64_t made = 0;
  // The clip that is being finished; with several loops, in which it is alone, it stays over all of
  // them. Empty once it has failed.
  std::optional<InHand> clip(std::in_place, writer);
  for (std::int64_t loop = 0; loop < loops; ++loop) {
    const double start = now_seconds();
    if (!prepare(batch, loop, clip)) break;
    clip->last_frames = std::vector<float>();  // frees the memory before sampling
    const Tensor z = sample(batch, loop);
    const double share = (now_seconds() - start) / static_cast<double>(batch.size());
    for (std::int64_t b = 0; b < std::ssize(batch) && first(); ++b) {
      const std::int64_t number = batch[b];
      if (loop == 0) clip.emplace(writer);
      clip->seconds += share;
      try {
        finish_loop(item_of(number), loop, z.slice(b, b + 1), *clip);
        if (loop + 1 == loops) ++made;
      } catch (const Error& e) {
        clip.reset();
        failed(number, e);
      }
    }
  }
  return made;
}

// Runs `work` on the group's first rank. Whether it was done and returned true, on all ranks; its
// exceptions are thrown on the first rank, but only after the others know.
bool ClipMaker::on_first(const std::function<bool()>& work) {
  std::exception_ptr failure;
  int good = 0;
  if (first()) try {
      good = work() ? 1 : 0;
    } catch (...) {
      failure = std::current_exception();
    }
  if (ranks_ > 1) MPI_Bcast(&good, 1, MPI_INT, 0, group_);
  if (failure) std::rethrow_exception(failure);
  return good != 0;
}

// Brings the texts and references of a loop to every rank of the group. False where there is
// nothing to make any more, since the first rank has failed or `clip` has.
bool ClipMaker::prepare(const ClipBatch& batch, std::int64_t loop,
                        const std::optional<InHand>& clip) {
  // The first clip stands for all: clips of a larger batch have no references.
  const ClipItem& item = item_of(batch.front());
  const std::size_t before = references_.size();
  // References of the prompt, then one of each loop before, from which the next one continues.
  const bool continues = loop > 0 && job_.loops.condition_latents > 0;
  references_.resize(before + (loop == 0 ? prompt_of(item).references.size() : continues ? 1 : 0));
  texts_.assign(batch.size(), TextRows());
  // All clips of a batch have negative prompts or none has.
  negatives_.assign(item.negative >= 0 ? batch.size() : 0, TextRows());
  const auto read = [&] {
    if (!clip) return false;
    for (std::size_t b = 0; b < batch.size() && !features_.null_captions(); ++b)
      texts_[b] = features_.read(item_of(batch[b]).texts[loop]);
    for (std::size_t b = 0; b < negatives_.size(); ++b)
      negatives_[b] = features_.read(item_of(batch[b]).negative);
    const double begin = now_seconds();
    for (std::size_t i = before; i < references_.size(); ++i)
      references_[i] = encode(item, loop, i, clip->last_frames);
    times_.encode += now_seconds() - begin;
    return true;
  };
  if (!on_first(read)) return false;
  if (ranks_ == 1) return true;
  for (TextRows& text : texts_) share(text, group_);
  for (TextRows& text : negatives_) share(text, group_);
  for (std::size_t i = before; i < references_.size(); ++i) share(references_[i], group_);
  return true;
}

// Latents of reference `i`: of a file that the prompt names, or of the frames of the loop before.
LatentReference ClipMaker::encode(const ClipItem& item, std::int64_t loop, std::size_t i,
                                  const std::vector<float>& last_frames) {
  // A draw of its own for every reference of every clip.
  const VideoCodec::Noise noise{
      static_cast<std::uint64_t>(deck_.run.seed),
      item.noise_id(job_.prompts) + (static_cast<std::uint64_t>(i + 1) << 48)};
  if (loop > 0) {
    const std::int64_t side = codec_.pixels_a_latent();
    return encode_frames(last_frames, part_to_go_on_from(deck_, job_, codec_, item, loop - 1),
                         item.latent_height * side, item.latent_width * side, codec_, noise);
  }
  const GenerateDeck& g = deck_.get<GenerateDeck>();
  const Prompt& prompt = prompt_of(item);
  const MediaSource file{prompt.references[i], prompt.named_by};
  if (item.picture && i == 0)
    return encode_picture(file, {deck_.media, {}}, *model_.picture_start(), item.pixels, item.area,
                          codec_);
  const auto number = static_cast<std::int64_t>(i);
  const auto uses = [&](const MaskGroup& m) {
    return m.reference == number && m.loop >= 0 && m.loop < g.loop;
  };
  if (std::none_of(masks_.begin(), masks_.end(), uses)) return {};
  return encode_reference(file, {deck_.media, {}}, item.pixels.height, item.pixels.width, codec_,
                          noise, [&](std::int64_t latents) {
                            return frames_taken(masks_, g.loop, number, latents, item.latent_frames,
                                                g.align, item.name);
                          });
}

// Masks all but the real tokens: shorter texts are padded to the longest.
Tensor ClipMaker::pack_texts(const std::vector<TextRows>& texts, CaptionBatch& packed) const {
  const auto clips = std::ssize(texts);
  std::int64_t longest = 0;
  for (const TextRows& text : texts) longest = std::max(longest, text.tokens);
  const std::int64_t channels = model_.caption_channels();
  std::vector<float> values(clips * longest * channels);
  std::vector<std::int64_t> mask(clips * longest);
  for (std::int64_t b = 0; b < clips; ++b) {
    const TextRows& text = texts[b];
    std::copy(text.values.begin(), text.values.end(), values.begin() + b * longest * channels);
    std::fill_n(mask.begin() + b * longest, text.tokens, 1);
  }
  packed = pack_captions(mask, longest, clips, false);
  return Tensor::from_host(std::span<const float>(values), {clips, longest, channels});
}

void ClipMaker::add_captions(std::int64_t clips, SampleRequest& request) const {
  if (features_.null_captions()) {
    request.captions = pack_captions({}, model_.max_caption(), clips, true);
    return;
  }
  request.y = pack_texts(texts_, request.captions);
  if (!negatives_.empty()) request.negative_y = pack_texts(negatives_, request.negative);
}

Tensor ClipMaker::sample(const ClipBatch& batch, std::int64_t loop) {
  const double begin = now_seconds();
  const auto seed = static_cast<std::uint64_t>(deck_.run.seed);
  const auto clips = std::ssize(batch);
  const SamplerDeck& sampler = model_.sampler(deck_);
  const ClipItem& item = item_of(batch.front());
  const std::uint64_t id = item.noise_id(job_.prompts);
  SampleRequest request = make_request(deck_, item, clips);
  request.z = Tensor::empty(latent_shape(model_, item, clips), DType::f32);
  for (std::int64_t b = 0; b < clips; ++b) {
    Tensor noise = request.z.slice(b, b + 1);
    ops::fill_normal(seed, static_cast<int>(Purpose::sampler), static_cast<std::uint64_t>(loop),
                     item_of(batch[b]).noise_id(job_.prompts), noise);
  }
  std::vector<std::int64_t> lengths;
  for (const LatentReference& r : references_) lengths.push_back(r.frames);
  const auto placements = place_references(masks_, loop, item.latent_frames, lengths,
                                           deck_.get<GenerateDeck>().align, item.name);
  for (const Placement& p : placements)
    copy_frames(references_[p.reference], p, request.z, item.name);
  if (item.picture && placements.empty())
    request.condition = Tensor::from_host(std::span<const float>(references_.front().values),
                                          {1, model_.condition_channels(), item.latent_frames,
                                           item.latent_height, item.latent_width});
  // Without references the mask would be all ones: no effect, only time.
  if (!placements.empty()) request.edit = edit_ratios(placements, item.latent_frames);
  request.fresh_noise = [&](int step, Tensor& noise) {
    ops::fill_normal(seed, static_cast<int>(Purpose::noise),
                     static_cast<std::uint64_t>(loop * sampler.count() + step), id, noise);
  };
  add_captions(clips, request);
  if (branches_ != nullptr) request.branch = branches_->rank(), request.branches = branches_;
  request.expert = expert_;
  double reported = begin;
  request.progress = [&](int step, int steps) {
    if (step < steps && now_seconds() - reported < 10) return;
    if (step == steps && reported == begin) return;  // too short to need a line
    reported = now_seconds();
    log::info("sample    {}{}: loop {}, step {}/{}, {:.0f} s", item.name,
              clips > 1 ? fmt::format(" and {} more", clips - 1) : "", loop, step, steps,
              reported - begin);
  };
  // All ranks of a group skip what its first one would.
  if (ranks_ > 1)
    request.agree = [&](double change) {
      MPI_Bcast(&change, 1, MPI_DOUBLE, 0, group_);
      return change;
    };
  std::int64_t skipped = 0;
  request.skipped = &skipped;
  const Tensor z = flow_sample(model_, sampler, deck_.get<DiffusionDeck>(), request);
  z.to_host();  // waits for the GPU, for the time below
  if (first()) {
    times_.steps += sampler.count();
    times_.skipped += skipped;
    if (sampler.caches())
      log::info("sample    {}{}: loop {}, {} of {} steps skipped ({})", item.name,
                clips > 1 ? fmt::format(" and {} more", clips - 1) : "", loop, skipped,
                sampler.count(), sampler.cache);
  }
  times_.sample += now_seconds() - begin;
  return z;
}

// Turns a loop's latents into frames, and ends the clip with the last loop.
void ClipMaker::finish_loop(const ClipItem& item, std::int64_t loop, const Tensor& z,
                            InHand& clip) {
  const double start = now_seconds();
  const Tensor on_host = z.to_host();
  for (const float v : on_host.span<float>())
    WEFT_CHECK(std::isfinite(v), Exit::non_finite,
               "check the weights, and try model.dtype = \"f32\"",
               "the latent of loop {} is not finite", loop);
  if (loop == 0) begin(item, clip);
  decode(item, loop, z, clip);
  clip.seconds += now_seconds() - start;
  if (loop + 1 < deck_.get<GenerateDeck>().loop) return;
  if (clip.tensors) clip.tensors->finish();
  clip.writer.end(clip.seconds);
  clip.begun = false;
}

void ClipMaker::begin(const ClipItem& item, InHand& clip) {
  const GenerateDeck& g = deck_.get<GenerateDeck>();
  ClipToWrite whole;
  whole.line = {{"name", item.name},
                {"key", item.key},
                {"prompt", prompt_of(item).text},
                {"seed", deck_.run.seed},
                {"sample", item.sample}};
  whole.frames = job_.total_frames(item, g);
  whole.height = item.latent_height * codec_.pixels_a_latent();
  whole.width = item.latent_width * codec_.pixels_a_latent();
  for (const LatentReference& r : references_)
    if (!r.picture.empty())
      whole.pictures.push_back({item.pixels.height, item.pixels.width, r.picture});
  clip.begun = true;
  if (g.tensors)
    clip.tensors.emplace(clip.writer.directory() / (item.name + ".safetensors"), g.loop,
                         latent_shape(model_, item, 1), whole.frames, whole.height, whole.width);
  clip.writer.begin(std::move(whole),
                    g.save_fps > 0 ? g.save_fps : g.fps / static_cast<double>(g.frame_interval));
}

void ClipMaker::decode(const ClipItem& item, std::int64_t loop, const Tensor& z, InHand& clip) {
  const double begin = now_seconds(), waited = clip.writer.waited_seconds();
  // A loop begins with the condition frames, which the loop before has already shown.
  const std::int64_t dropped = loop > 0 ? job_.loops.condition_frames : 0;
  // Frames that the next loop goes on from.
  const VideoCodec::Part kept = part_to_go_on_from(deck_, job_, codec_, item, loop);
  if (clip.tensors) clip.tensors->add_latent(loop, z);
  codec_.decode(z, item.pixels.frames, [&](std::int64_t number, const Tensor& frames) {
    const std::int64_t count = frames.dim(0), size = frames.numel() / count;
    const std::int64_t from = std::clamp<std::int64_t>(kept.first_frame - number, 0, count);
    const std::int64_t to =
        std::clamp<std::int64_t>(kept.first_frame + kept.frames - number, from, count);
    if (to > from) {
      clip.last_frames.reserve(kept.frames * size);
      const Tensor on_host = frames.slice(from, to).to_host();
      const auto values = on_host.span<float>();
      clip.last_frames.insert(clip.last_frames.end(), values.begin(), values.end());
    }
    const std::int64_t skip = std::clamp<std::int64_t>(dropped - number, 0, count);
    if (skip == count) return;
    const Tensor shown = frames.slice(skip, count);
    if (clip.tensors) clip.tensors->add_frames(shown);
    clip.writer.add(count - skip, [&](std::span<std::uint8_t> pixels) {
      const std::int64_t bad = pixels_of(shown, pixels);
      WEFT_CHECK(bad < 0, Exit::non_finite,
                 fmt::format("check the {}'s weights, and try {} = \"f32\"", codec_.name(),
                             codec_.dtype_key()),
                 "frame {} of loop {} is not finite", number + skip + bad, loop);
    });
  });
  times_.decode += now_seconds() - begin - (clip.writer.waited_seconds() - waited);
}

// ---- Memory

namespace {

// A 32nd stays free: shorter texts leave other holes between blocks than the planned ones.
std::size_t usable_bytes(std::size_t capacity) {
  return std::max<std::size_t>(1, capacity - capacity / 32);
}

bool steps_fit(const Deck& deck, const ClipParts& parts, const ClipItem& item, std::int64_t clips,
               std::size_t usable) {
  const MemoryNeed need = plan_sampling(deck, parts, item, clips, usable);
  return need.fits && need.bytes <= usable;
}

std::string name_of(const PixelSize& p) {
  return fmt::format("{} of {}x{}", counted(p.frames, "frame"), p.width, p.height);
}

}  // namespace

bool experts_in_turn(const Deck& deck, const GenerateJob& job, const ClipParts& parts,
                     std::size_t bytes) {
  const std::string& experts = deck.get<GenerateDeck>().experts;
  Denoiser& model = *parts.denoiser;
  WEFT_CHECK(experts != "in_turn" || !model.weight_sets().empty(), Exit::usage,
             "set sampler.boundary, or leave it out",
             "generate.experts is \"in_turn\", and {} is one model", model.name());
  if (model.weight_sets().empty() || experts != "auto") return experts == "in_turn";
  std::size_t steps = bytes_of_gib(deck.memory.arena_gib);
  {
    const auto planned = Arena::planning();
    const ArenaScope scope(*planned);
    model.params().allocate_for_inference(model.bf16());
    std::set<PixelSize> seen;
    for (const ClipItem& item : job.items) {
      if (!seen.insert(item.pixels).second) continue;
      model.check_sequence(item.latent_height, item.latent_width, deck.parallel.sp);
      steps = std::max(steps, plan_sampling(deck, parts, item, 1).bytes);
    }
  }
  VideoCodec& codec = *parts.codec;
  return model.params().inference_bytes(model.bf16()) +
             codec.params().inference_bytes(codec.bf16()) + steps >
         bytes;
}

MemoryNeed plan_sampling(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                         std::int64_t clips, std::size_t capacity) {
  Denoiser& model = *parts.denoiser;
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  SampleRequest request = make_request(deck, item, clips);
  request.z = Tensor::empty(latent_shape(model, item, clips), DType::f32);
  const std::int64_t rows = model.max_caption();
  if (parts.encodes_texts())
    request.y = Tensor::empty({clips, rows, model.caption_channels()}, DType::f32);
  request.captions = pack_captions({}, rows, clips, !parts.encodes_texts());
  if (item.negative >= 0) {
    request.negative_y = Tensor::empty({clips, rows, model.caption_channels()}, DType::f32);
    request.negative = pack_captions({}, rows, clips, false);
  }
  if (model.condition_channels() > 0)
    request.condition = Tensor::empty({clips, model.condition_channels(), item.latent_frames,
                                       item.latent_height, item.latent_width},
                                      DType::f32);
  if (model.takes_given_frames()) request.edit.assign(clips * item.latent_frames, 1.0f);
  if (deck.get<GenerateDeck>().cfg_ranks > 1) request.branch = 0;
  SamplerDeck sampler = model.sampler(deck);
  // All steps need the same memory.
  sampler.steps = 1;
  sampler.timesteps.clear();
  flow_sample(model, sampler, deck.get<DiffusionDeck>(), request);
  return arena->need();
}

std::int64_t fit_batch(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                       std::int64_t most, std::size_t capacity) {
  std::int64_t low = 1;
  while (low < most) {
    const std::int64_t middle = low + (most - low + 1) / 2;
    if (steps_fit(deck, parts, item, middle, usable_bytes(capacity)))
      low = middle;
    else
      most = middle - 1;
  }
  return low;
}

std::size_t bytes_of_waiting(const Denoiser& model, const ClipItem& item, std::int64_t clips) {
  return static_cast<std::size_t>((clips - 1) * latent_shape(model, item, 1).numel()) *
         sizeof(float);
}

void fit_batches(const Deck& deck, const GenerateJob& job, const std::vector<std::int64_t>& order,
                 const ClipParts& parts, std::size_t capacity, BatchLimits& limits,
                 MPI_Comm world) {
  std::vector<std::string> lowered;
  std::set<PixelSize> seen;
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[i];
    std::int64_t& limit = limits.at(item.pixels);
    if (limit == 1 || !seen.insert(item.pixels).second) continue;
    parts.denoiser->check_sequence(item.latent_height, item.latent_width, deck.parallel.sp);
    std::int64_t fitting = fit_batch(deck, parts, item, limit, capacity);
    // Batches are handed out by number, so they must be the same on all ranks.
    MPI_Allreduce(MPI_IN_PLACE, &fitting, 1, MPI_INT64_T, MPI_MIN, world);
    if (fitting < limit)
      lowered.push_back(
          fmt::format("{} instead of {} clips of {}", fitting, limit, name_of(item.pixels)));
    limit = fitting;
  }
  if (!lowered.empty() && log::rank() == 0)
    log::warn("batches reduced to fit the memory: {}", fmt::join(lowered, ", "));
}

std::size_t fit_memory(const Deck& deck, const GenerateJob& job,
                       const std::vector<std::int64_t>& order, const BatchLimits& limits,
                       const ClipParts& parts, std::size_t capacity, bool decodes) {
  VideoCodec& codec = *parts.codec;
  std::set<PixelSize> seen;
  std::size_t planned = 0;
  constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
  const std::size_t usable = usable_bytes(capacity);
  std::int64_t most = 0, fitting = any;
  std::map<PixelSize, std::size_t> waiting_of;
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[i];
    const PixelSize& p = item.pixels;
    if (!seen.insert(p).second) continue;
    parts.denoiser->check_sequence(item.latent_height, item.latent_width, deck.parallel.sp);
    const std::size_t sampling = plan_sampling(deck, parts, item, 1).bytes;
    WEFT_CHECK(steps_fit(deck, parts, item, 1, usable), Exit::usage,
               "share its tokens over ranks (parallel.sp), ask for a smaller clip, or give the "
               "rank more memory (memory.arena_gib)",
               "a clip of {} needs {:.2f} GiB for its steps, this rank has {:.2f}", name_of(p),
               gib(sampling), gib(capacity));
    const std::int64_t clips = limits.at(p);
    planned =
        std::max(planned, clips == 1 ? sampling : plan_sampling(deck, parts, item, clips).bytes);
    if (!decodes) continue;
    most = std::max(most, codec.frames_asked(p.frames));
    const std::size_t waiting = bytes_of_waiting(*parts.denoiser, item, clips);
    waiting_of[p] = waiting;
    const std::int64_t frames =
        codec.fit_micro_batch(p.frames, p.height, p.width, capacity - waiting);
    if (frames < codec.frames_asked(p.frames)) fitting = std::min(fitting, frames);
  }
  if (seen.empty() || !decodes) return planned;
  if (fitting < most)
    log::warn("{} micro-batch reduced to {} frames (asked: {}) to fit {:.3f} GiB", codec.name(),
              fitting, most, gib(capacity));
  fitting = std::min(fitting, most);
  codec.set_micro_batch(fitting);
  for (const PixelSize& p : seen)
    planned = std::max(
        {planned, codec.plan_decode(p.frames, p.height, p.width, fitting).bytes + waiting_of[p],
         codec.plan_encode(p.frames, p.height, p.width, fitting).bytes});
  return planned;
}

FramePlan plan_frames(const Deck& deck, const GenerateJob& job,
                      const std::vector<std::int64_t>& order, const VideoCodec& codec) {
  FramePlan plan;
  std::size_t beside = 0;
  const std::int64_t side = codec.pixels_a_latent();
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[i];
    const PixelSize& p = item.pixels;
    const auto frame =
        static_cast<std::size_t>(3 * side * item.latent_height * side * item.latent_width);
    plan.piece =
        std::max(plan.piece, static_cast<std::size_t>(codec.frames_at_once(p.frames)) * frame);
    if (!job.prompts[item.prompt].references.empty())
      beside = std::max(
          beside, reference_bytes(codec.frames_at_once(std::numeric_limits<std::int32_t>::max()),
                                  p.height, p.width));
    for (std::int64_t loop = 0; loop + 1 < deck.get<GenerateDeck>().loop; ++loop) try {
        const VideoCodec::Part part = part_to_go_on_from(deck, job, codec, item, loop);
        beside = std::max(beside, static_cast<std::size_t>(part.frames) * frame * sizeof(float));
      } catch (const Error& e) {
        // A mask that does not fit: the clip itself will fail with this error.
        if (e.code() != Exit::data) throw;
      }
  }
  plan.bytes = ClipWriter::pieces * plan.piece + beside;
  return plan;
}

}  // namespace weft
