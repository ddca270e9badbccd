#include "jobs/generate/clip_maker.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"
#include "core/philox.h"
#include "jobs/generate/options.h"
#include "models/flow_sampler.h"
#include "models/pixels.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "parallel/mpi.h"
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

}  // namespace

SampleRequest make_request(const Deck& deck, const ClipItem& item, std::int64_t clips) {
  SampleRequest r;
  r.fps.assign(static_cast<std::size_t>(clips),
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
  const auto given = static_cast<std::int64_t>(
      job.prompts[static_cast<std::size_t>(item.prompt)].references.size());
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
  const auto given = static_cast<std::int64_t>(
      job.prompts[static_cast<std::size_t>(item.prompt)].references.size());
  const LatentRange taken = frames_taken(all_masks(deck, job, item), deck.get<GenerateDeck>().loop,
                                         given + loop, item.latent_frames, item.latent_frames,
                                         deck.get<GenerateDeck>().align, item.name);
  return codec.part_with(item.pixels.frames, taken.first, taken.last);
}

ClipMaker::ClipMaker(const Deck& deck, const GenerateJob& job, Denoiser& model, VideoCodec& codec,
                     const PromptFeatures& features, MPI_Comm group)
    : deck_(deck), job_(job), model_(model), codec_(codec), features_(features), group_(group) {
  if (group_ == MPI_COMM_NULL) return;
  MPI_Comm_rank(group_, &rank_);
  MPI_Comm_size(group_, &ranks_);
}

void ClipMaker::share_text(TextRows& text) {
  if (ranks_ == 1) return;
  MPI_Bcast(&text.tokens, 1, MPI_INT64_T, 0, group_);
  broadcast_sized(text.values, group_);
}

void ClipMaker::share_reference(LatentReference& reference) {
  if (ranks_ == 1) return;
  std::int64_t sizes[] = {reference.frames, reference.first, reference.latents};
  MPI_Bcast(sizes, 3, MPI_INT64_T, 0, group_);
  reference.frames = sizes[0];
  reference.first = sizes[1];
  reference.latents = sizes[2];
  broadcast_sized(reference.values, group_);
}

LatentReference ClipMaker::encode(const ClipItem& item, std::int64_t loop, std::size_t i,
                                  const FrameVector<float>& last_frames) {
  // A draw of its own for every reference of every clip.
  const VideoCodec::Noise noise{
      static_cast<std::uint64_t>(deck_.run.seed),
      item.noise_id(job_.prompts) + (static_cast<std::uint64_t>(i + 1) << 48)};
  if (loop > 0) {
    const std::int64_t side = codec_.pixels_a_latent();
    return encode_frames(last_frames, part_to_go_on_from(deck_, job_, codec_, item, loop - 1),
                         item.latent_height * side, item.latent_width * side, codec_, noise);
  }
  const auto number = static_cast<std::int64_t>(i);
  const auto uses = [&](const MaskGroup& g) {
    return g.reference == number && g.loop >= 0 && g.loop < deck_.get<GenerateDeck>().loop;
  };
  if (std::none_of(masks_.begin(), masks_.end(), uses)) return {};
  const Prompt& prompt = job_.prompts[static_cast<std::size_t>(item.prompt)];
  return encode_reference(
      {prompt.references[i], prompt.named_by}, {deck_.media, {}}, item.pixels.height,
      item.pixels.width, codec_, noise, [&](std::int64_t latents) {
        return frames_taken(masks_, deck_.get<GenerateDeck>().loop, number, latents,
                            item.latent_frames, deck_.get<GenerateDeck>().align, item.name);
      });
}

bool ClipMaker::prepare(const ClipBatch& batch, std::int64_t loop,
                        const FrameVector<float>& last_frames) {
  // The first clip stands for all: clips of a larger batch have no references.
  const ClipItem& item = item_of(batch.front());
  const Prompt& prompt = job_.prompts[static_cast<std::size_t>(item.prompt)];
  const std::size_t before = references_.size();
  const bool again = loop > 0 && job_.loops.condition_latents > 0;
  references_.resize(before + (loop == 0 ? prompt.references.size() : again ? 1 : 0));
  texts_.assign(batch.size(), TextRows());
  std::exception_ptr failure;
  if (first()) try {
      for (std::size_t b = 0; b < batch.size() && !features_.null_captions(); ++b)
        texts_[b] = features_.read(item_of(batch[b]).texts[static_cast<std::size_t>(loop)]);
      const double begin = now_seconds();
      for (std::size_t i = before; i < references_.size(); ++i)
        references_[i] = encode(item, loop, i, last_frames);
      times_.encode += now_seconds() - begin;
    } catch (...) {
      failure = std::current_exception();
    }
  int good = failure ? 0 : 1;
  if (ranks_ > 1) MPI_Bcast(&good, 1, MPI_INT, 0, group_);
  // Only after the broadcast, or the others of the group would wait for ever.
  if (failure) std::rethrow_exception(failure);
  if (good == 0) return false;
  for (TextRows& text : texts_) share_text(text);
  for (std::size_t i = before; i < references_.size(); ++i) share_reference(references_[i]);
  return true;
}

// Masks all but the real tokens: shorter texts are padded to the longest.
void ClipMaker::add_captions(std::int64_t clips, SampleRequest& request) const {
  if (features_.null_captions()) {
    request.captions = pack_captions({}, model_.max_caption(), clips, true);
    return;
  }
  std::int64_t longest = 0;
  for (const TextRows& text : texts_) longest = std::max(longest, text.tokens);
  const std::int64_t channels = model_.caption_channels();
  std::vector<float> values(static_cast<std::size_t>(clips * longest * channels));
  std::vector<std::int64_t> mask(static_cast<std::size_t>(clips * longest));
  for (std::int64_t b = 0; b < clips; ++b) {
    const TextRows& text = texts_[static_cast<std::size_t>(b)];
    std::copy(text.values.begin(), text.values.end(), values.begin() + b * longest * channels);
    std::fill_n(mask.begin() + b * longest, text.tokens, 1);
  }
  request.y = Tensor::from_host(std::span<const float>(values), {clips, longest, channels});
  request.captions = pack_captions(mask, longest, clips, false);
}

Tensor ClipMaker::sample(const ClipBatch& batch, std::int64_t loop) {
  const double begin = now_seconds();
  const auto seed = static_cast<std::uint64_t>(deck_.run.seed);
  const auto clips = std::ssize(batch);
  const ClipItem& item = item_of(batch.front());
  const std::uint64_t id = item.noise_id(job_.prompts);
  SampleRequest request = make_request(deck_, item, clips);
  request.z = Tensor::empty(latent_shape(model_, item, clips), DType::f32);
  for (std::int64_t b = 0; b < clips; ++b) {
    Tensor noise = request.z.slice(b, b + 1);
    ops::fill_normal(seed, static_cast<int>(Purpose::sampler), static_cast<std::uint64_t>(loop),
                     item_of(batch[static_cast<std::size_t>(b)]).noise_id(job_.prompts), noise);
  }
  std::vector<std::int64_t> lengths;
  for (const LatentReference& r : references_) lengths.push_back(r.frames);
  const auto placements = place_references(masks_, loop, item.latent_frames, lengths,
                                           deck_.get<GenerateDeck>().align, item.name);
  for (const Placement& p : placements)
    copy_frames(references_[static_cast<std::size_t>(p.reference)], p, request.z, item.name);
  // Without references the mask would be all ones: no effect, only time.
  if (!placements.empty()) request.edit = edit_ratios(placements, item.latent_frames);
  request.fresh_noise = [&](int step, Tensor& noise) {
    ops::fill_normal(seed, static_cast<int>(Purpose::noise),
                     static_cast<std::uint64_t>(loop * deck_.get<SamplerDeck>().steps + step), id,
                     noise);
  };
  add_captions(clips, request);
  double reported = begin;
  request.progress = [&](int step, int steps) {
    if (step < steps && now_seconds() - reported < 10) return;
    if (step == steps && reported == begin) return;  // too short to need a line
    reported = now_seconds();
    log::info("sample    {}{}: loop {}, step {}/{}, {:.0f} s", item.name,
              clips > 1 ? fmt::format(" and {} more", clips - 1) : "", loop, step, steps,
              reported - begin);
  };
  const Tensor z =
      flow_sample(model_, deck_.get<SamplerDeck>(), deck_.get<DiffusionDeck>(), request);
  z.to_host();  // waits for the GPU, for the time below
  times_.sample += now_seconds() - begin;
  return z;
}

void ClipMaker::decode(const ClipItem& item, std::int64_t loop, const Tensor& z, ClipWriter& writer,
                       InHand& clip) {
  const double begin = now_seconds();
  // A loop begins with the condition frames, which the loop before has already shown.
  const std::int64_t dropped = loop > 0 ? job_.loops.condition_frames : 0;
  const VideoCodec::Part kept = part_to_go_on_from(deck_, job_, codec_, item, loop);
  FrameVector<float>& last_frames = clip.last_frames;
  if (clip.tensors) clip.tensors->add_latent(loop, z);
  codec_.decode(z, item.pixels.frames, [&](std::int64_t number, const Tensor& frames) {
    const std::int64_t count = frames.dim(0), size = frames.numel() / count;
    const std::int64_t from = std::clamp<std::int64_t>(kept.first_frame - number, 0, count);
    const std::int64_t to =
        std::clamp<std::int64_t>(kept.first_frame + kept.frames - number, from, count);
    if (to > from) {
      last_frames.reserve(static_cast<std::size_t>(kept.frames * size));
      const Tensor on_host = frames.slice(from, to).to_host();
      const auto values = on_host.span<float>();
      last_frames.insert(last_frames.end(), values.begin(), values.end());
    }
    const std::int64_t skip = std::clamp<std::int64_t>(dropped - number, 0, count);
    if (skip == count) return;
    const Tensor shown = frames.slice(skip, count);
    if (clip.tensors) clip.tensors->add_frames(shown);
    writer.add(count - skip, [&](std::span<std::uint8_t> pixels) {
      const std::int64_t bad = pixels_of(shown, pixels);
      WEFT_CHECK(bad < 0, Exit::non_finite,
                 fmt::format("check the {}'s weights, and try {} = \"f32\"", codec_.name(),
                             codec_.dtype_key()),
                 "frame {} of loop {} is not finite", number + skip + bad, loop);
    });
  });
  times_.decode += now_seconds() - begin;
}

void ClipMaker::begin(const ClipItem& item, ClipWriter& writer,
                      std::optional<ClipTensors>& tensors) {
  const GenerateDeck& g = deck_.get<GenerateDeck>();
  FinishedClip clip;
  clip.name = item.name;
  clip.key = item.key;
  clip.prompt = job_.prompts[static_cast<std::size_t>(item.prompt)].text;
  clip.seed = deck_.run.seed;
  clip.frames = job_.total_frames(item, g);
  clip.height = item.latent_height * codec_.pixels_a_latent();
  clip.width = item.latent_width * codec_.pixels_a_latent();
  for (const LatentReference& r : references_)
    if (!r.picture.empty())
      clip.pictures.push_back({item.pixels.height, item.pixels.width, r.picture});
  if (g.tensors)
    tensors.emplace(writer.directory() / (item.name + ".safetensors"), g.loop,
                    latent_shape(model_, item, 1), clip.frames, clip.height, clip.width);
  writer.begin(std::move(clip),
               g.save_fps > 0 ? g.save_fps : g.fps / static_cast<double>(g.frame_interval));
}

void ClipMaker::finish_loop(const ClipItem& item, std::int64_t loop, const Tensor& z,
                            ClipWriter& writer, InHand& clip) {
  const double start = now_seconds();
  const Tensor on_host = z.to_host();
  for (const float v : on_host.span<float>())
    WEFT_CHECK(std::isfinite(v), Exit::non_finite,
               "check the weights, and try model.dtype = \"f32\"",
               "the latent of loop {} is not finite", loop);
  if (loop == 0) {
    clip.begun = true;
    begin(item, writer, clip.tensors);
  }
  decode(item, loop, z, writer, clip);
  clip.seconds += now_seconds() - start;
  if (loop + 1 < deck_.get<GenerateDeck>().loop) return;
  if (clip.tensors) clip.tensors->finish();
  writer.end(clip.seconds);
}

std::int64_t ClipMaker::make(const ClipBatch& batch, ClipWriter& writer, const Failed& failed) {
  crash::at("clip", item_of(batch.front()).name.c_str());
  fault::crash_if_ordered(batch.front());
  std::int64_t made = 0;
  std::optional<InHand> clip(std::in_place);
  references_.clear();
  masks_ = all_masks(deck_, job_, item_of(batch.front()));
  const std::int64_t loops = deck_.get<GenerateDeck>().loop;
  bool good = true;  // of the clip with more loops, which is alone
  try {
    for (std::int64_t loop = 0; loop < loops; ++loop) {
      if (!good) {  // the others of the group wait in prepare() for this broadcast
        int none = 0;
        if (ranks_ > 1) MPI_Bcast(&none, 1, MPI_INT, 0, group_);
        break;
      }
      const double start = now_seconds();
      if (!prepare(batch, loop, clip->last_frames)) return 0;
      clip->last_frames = FrameVector<float>();  // frees the memory before the loop is sampled
      const Tensor z = sample(batch, loop);
      const double share = (now_seconds() - start) / static_cast<double>(batch.size());
      for (std::int64_t b = 0; b < std::ssize(batch) && first(); ++b) {
        const std::int64_t number = batch[static_cast<std::size_t>(b)];
        if (loop == 0) clip.emplace();
        clip->seconds += share;
        try {
          finish_loop(item_of(number), loop, z.slice(b, b + 1), writer, *clip);
          if (loop + 1 == loops) ++made;
        } catch (const Error& e) {
          if (clip->begun) writer.drop();
          clip.emplace();
          good = false;
          failed(number, e);
        }
      }
    }
  } catch (...) {
    if (clip->begun) writer.drop();
    throw;
  }
  return made;
}

}  // namespace weft
