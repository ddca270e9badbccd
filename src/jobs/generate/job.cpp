#include "jobs/generate/job.h"

#include <algorithm>
#include <cctype>
#include <climits>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <vector>

#include "config/deck_table.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "data/clip_store.h"
#include "data/synthetic.h"
#include "jobs/generate/options.h"
#include "jobs/generate/references.h"
#include "media/video_reader.h"
#include "models/flow_sampler.h"
#include "models/pixels.h"
#include "models/registry.h"
#include "models/solver.h"
#include "models/step_cache.h"

namespace weft {

// ---- Parts

Deck with_model_defaults(const Deck& deck) {
  const ClipDefaults defaults = make_denoiser(deck)->clip_defaults();
  Deck filled = deck;
  auto& g = filled.get<GenerateDeck>();
  if (g.fps == 0) g.fps = defaults.fps;
  if (g.aes < 0) g.aes = defaults.aes;
  return filled;
}

Deck complete_deck(const Deck& written, MPI_Comm world) {
  const Deck deck = with_model_defaults(written);
  if (deck.data.path.empty() || is_synthetic(deck.data.path)) return deck;
  const std::unique_ptr<VideoCodec> codec = make_codec(deck);
  if (codec->lacks_scale().empty() || make_denoiser(deck)->channels() != codec->channels())
    return deck;
  const auto channels = static_cast<std::size_t>(codec->channels());
  std::vector<float> found(2 * channels + 1);  // whether, scale, shift
  if (log::rank() == 0) {
    const auto source = open_clip_source(deck.data, deck.media);
    const Bucket& first = source->buckets().front();
    if (first.scale.size() == channels && first.shift.size() == channels) {
      found[0] = 1;
      std::ranges::copy(first.scale, found.begin() + 1);
      std::ranges::copy(first.shift, found.begin() + 1 + std::ssize(first.scale));
    }
  }
  MPI_Bcast(found.data(), static_cast<int>(found.size()), MPI_FLOAT, 0, world);
  if (found[0] == 0) return deck;
  if (log::rank() == 0) log::info("codec     scale and shift of {}", deck.data.path);
  const auto shift = found.begin() + 1 + codec->channels();
  Deck filled = deck;
  codec->set_normalisation(filled, {{found.begin() + 1, shift}, {shift, found.end()}});
  return filled;
}

ClipParts::ClipParts(const Deck& deck)
    : denoiser(make_denoiser(deck)), codec(make_codec(deck)), texts(make_text_encoder(deck)) {
  tables = denoiser->tables();
  tables.merge(codec->tables());
  // Three channels are pixels, unless they are the codec's.
  on_pixels = denoiser->channels() == PixelCodec::pixel_channels &&
              codec->channels() != PixelCodec::pixel_channels;
  if (on_pixels) {
    codec = std::make_unique<PixelCodec>();
    return;
  }
  WEFT_CHECK(denoiser->channels() == codec->channels(), Exit::usage,
             "model.in_channels = 3 is a model that works on pixels",
             "the model's latents have {} channels, the {}'s have {}", denoiser->channels(),
             codec->name(), codec->channels());
  WEFT_CHECK(codec->lacks_scale().empty(), Exit::usage,
             "name the store that `weft encode` wrote as data.path, or set both keys as `weft "
             "inspect STORE` tells them",
             "{}: latents of the model cannot be decoded", codec->lacks_scale());
}

void check_codec_of_latents(const Deck& deck, const VideoCodec& codec, const ModelSource& weights) {
  const std::string now = checkpoint_in(weights.identity());
  for (const std::string& store : deck.data.all_paths()) {
    const std::string then = checkpoint_in(stored_made_by(store));
    WEFT_CHECK(then.empty() || now.empty() || then == now, Exit::data,
               "name the checkpoint that it was encoded with (RUN/step_N), or encode again and "
               "train in a new run.dir",
               "data.path = {} was encoded with another checkpoint than {} = {}", store,
               codec.weights().key, codec.weights().value);
  }
}

void check_text_encoder(const std::string& trained, const std::string& where,
                        const TextEncoder& encoder) {
  WEFT_CHECK(trained.empty() || trained == encoder_in(encoder.describe()), Exit::data,
             "name the tokenizer and the weights that those captions were encoded with "
             "(t5.tokenizer, t5.weights)",
             "the captions of {} were encoded by another text encoder than that of the prompts",
             where);
}

void ClipParts::check_texts() const {
  if (!encodes_texts()) return;
  WEFT_CHECK(texts->channels() == denoiser->caption_channels() &&
                 texts->max_tokens() <= denoiser->max_caption(),
             Exit::usage,
             fmt::format("set {} to the encoder's channels, and to no less than its longest text",
                         denoiser->caption_keys()),
             "{}'s features are [{}, {}], the model takes [{}, {}]", texts->name(),
             texts->max_tokens(), texts->channels(), denoiser->max_caption(),
             denoiser->caption_channels());
}

// ---- Clips

namespace {

std::string or_else(const std::string& own, const std::string& of_deck) {
  return own.empty() ? of_deck : own;
}

// What decides pixels besides the item's own prompt, size and references: rows of [generate] and of
// the parts' tables, weights, and how texts are encoded.
nlohmann::json common_key(const Deck& deck, const ClipParts& parts, const std::string& weights) {
  nlohmann::json key = {{"weights", weights},
                        {"seed", deck.run.seed},
                        {"orientation", deck.media.orientation},
                        {"text_encoder", parts.encodes_texts() ? parts.texts->describe() : ""}};
  std::set<std::string> tables = parts.tables;
  tables.insert("generate");
  for (const DeckLine& line : identity(deck, tables))
    key["deck"].push_back(line.table + "." + line.text);
  return key;
}

PixelSize size_of_prompt(const GenerateDeck& g, const Prompt& p, const std::string& where) {
  try {
    return clip_size(g, or_else(p.num_frames, g.num_frames), or_else(p.resolution, g.resolution),
                     or_else(p.aspect_ratio, g.aspect_ratio));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", where, e.what()), e.hint(), __FILE__, __LINE__);
  }
}

// Checks that each group's reference exists by the time its loop uses it: each loop adds one, from
// which the next loop continues.
void check_masks(const ClipItem& item, const Prompt& p, const GenerateDeck& g,
                 const LoopLengths& loops, const std::string& where) {
  for (const MaskGroup& group : item.masks) {
    if (group.loop < 0 || group.loop >= g.loop) continue;
    const std::int64_t there = static_cast<std::int64_t>(p.references.size()) +
                               (loops.condition_latents > 0 ? group.loop : 0);
    WEFT_CHECK(group.reference >= 0 && group.reference < there, Exit::data,
               "references are counted from 0, in the order of their list",
               "{}: the mask strategy asks for reference {}, there are {}", where, group.reference,
               there);
  }
}

// Exit::usage where the model cannot make such a clip: of that many frames or that size, with
// frames that are given, or by the deck's solver.
void check_model(const Deck& deck, const Prompt& p, const ClipItem& item, const ClipParts& parts,
                 const LoopLengths& loops, const std::string& where) {
  const GenerateDeck& g = deck.get<GenerateDeck>();
  const Denoiser& model = *parts.denoiser;
  const auto [frames, height, width] = item.pixels;
  const std::int64_t side = model.side_multiple();
  const auto cut = [&](std::int64_t latent) {
    return std::max(latent / side, std::int64_t{1}) * side * parts.codec->pixels_a_latent();
  };
  WEFT_CHECK(item.latent_height % side == 0 && item.latent_width % side == 0, Exit::usage,
             fmt::format("sides must be multiples of {}, such as generate.image_size = [{}, {}]",
                         side * parts.codec->pixels_a_latent(), cut(item.latent_height),
                         cut(item.latent_width)),
             "{}: {} makes no clip of {}x{} (width x height)", where, model.name(), width, height);
  const PictureStart* start = model.picture_start();
  WEFT_CHECK(
      start == nullptr || !start->required() || item.picture, Exit::usage,
      "name one: generate.references, or the prompt's reference_path, without a mask strategy",
      "{}: {} makes no clip without a picture to begin with", where, model.name());
  WEFT_CHECK(!item.picture || g.loop == 1, Exit::usage, "leave generate.loop out",
             "{}: {} begins with one picture, and goes on from none", where, model.name());
  WEFT_CHECK(model.takes_given_frames() || item.picture ||
                 (p.references.empty() && item.masks.empty() && g.loop == 1),
             Exit::usage, "leave out references, mask strategies and generate.loop",
             "{}: {} cannot begin with given frames or edit them", where, model.name());
  for (const MaskGroup& m : item.masks) check_edit(model.sampler(deck), m.edit, where);
  if (g.loop > 1 && loops.condition_latents > 0)
    check_edit(model.sampler(deck), g.condition_frame_edit, "generate.condition_frame_edit");
  sampler_times(model.sampler(deck), deck.get<DiffusionDeck>(),
                {static_cast<double>(height), static_cast<double>(width), frames});
}

// Warns of settings without effect, a line each.
void warn_of_unused(const GenerateDeck& g, const std::vector<Prompt>& prompts,
                    const Denoiser& model) {
  if (log::rank() != 0) return;
  if (!g.prompts.empty() && (!g.prompt_file.empty() || !g.prompt_generator.empty()))
    log::warn("generate.prompts is not used, generate.{} is set",
              g.prompt_file.empty() ? "prompt_generator" : "prompt_file");
  const auto first = [&](auto&& unused) {
    const auto p = std::find_if(prompts.begin(), prompts.end(), unused);
    return p == prompts.end() ? std::string() : place_of(g, *p);
  };
  const std::size_t used = model.picture_start() != nullptr ? 1 : 0;
  const std::string references =
      first([&](const Prompt& p) { return p.references.size() > used && p.mask_strategy.empty(); });
  if (!references.empty())
    log::warn("{}: references without a mask_strategy are not used; \"0\" begins with the first",
              references);
  const std::string sizes = first([&](const Prompt& p) {
    return !g.image_size.empty() && (!p.resolution.empty() || !p.aspect_ratio.empty());
  });
  if (!sizes.empty())
    log::warn("{}: resolution and aspect_ratio are not used, generate.image_size is set", sizes);
  const GenerateDeck unset;
  if (!g.image_size.empty() &&
      (g.resolution != unset.resolution || g.aspect_ratio != unset.aspect_ratio))
    log::warn("generate.resolution and aspect_ratio are not used, generate.image_size is set");
}

// The files' sizes, and warns of those that differ from what was asked for.
void describe_sizes(const GenerateJob& job, const Deck& deck, const VideoCodec& codec) {
  if (log::rank() != 0) return;
  const GenerateDeck& g = deck.get<GenerateDeck>();
  const std::int64_t side = codec.pixels_a_latent();
  std::map<PixelSize, std::int64_t> clips;
  std::set<PixelSize> asked;
  for (const ClipItem& item : job.items) {
    const PixelSize made{job.total_frames(item, g), side * item.latent_height,
                         side * item.latent_width};
    const auto [height, width] = std::pair{item.pixels.height, item.pixels.width};
    ++clips[made];
    if (!asked.insert(item.pixels).second) continue;
    if (made.height != height || made.width != width)
      log::warn("{}x{} (width x height) is not a multiple of {}: output will be {}x{}", width,
                height, side, made.width, made.height);
    if (made.frames > 1 && (made.height % 2 != 0 || made.width % 2 != 0))
      log::warn("an MP4 has even sides: files of {}x{} (width x height) will be {}x{}", made.width,
                made.height, made.width + made.width % 2, made.height + made.height % 2);
  }
  for (const auto& [size, count] : clips) {
    const bool portrait = size.height > size.width;
    log::info("size      {} of {}, {} wide x {} high{}{}", counted(count, "clip"),
              counted(size.frames, "frame"), size.width, size.height,
              portrait                   ? ", portrait"
              : size.height < size.width ? ", landscape"
                                         : "",
              portrait && g.image_size.empty()
                  ? " (aspect ratios are height:width; 9:16 is landscape)"
                  : "");
  }
}

std::string item_key(const nlohmann::json& common, const ClipItem& item, const Prompt& p,
                     const std::vector<std::string>& texts) {
  nlohmann::json j = common;
  for (const Prompt::Segment& s : p.segments) j["texts"].push_back({s.from_loop, s.text});
  if (item.negative >= 0) j["negative"] = texts[item.negative];
  j["index"] = {p.index, item.sample};
  j["size"] = {item.pixels.frames, item.pixels.height, item.pixels.width};
  j["mask"] = p.mask_strategy;
  for (const std::string& file : p.references) j["references"].push_back(file_identity(file));
  return to_hex(hash128(std::string_view(dump_json(j))));
}

// The name of a clip's files, unlike those in `names`, to which it is added.
std::string item_name(const GenerateDeck& g, const Prompt& p, std::int64_t sample,
                      std::set<std::string>& names) {
  std::string wanted =
      g.prompt_as_path
          ? file_name_of(g.sample_name + p.text)
          : fmt::format("{}_{:04d}", g.sample_name.empty() ? "sample" : g.sample_name, p.index);
  // All prompts of a generator have the same text.
  if (g.prompt_as_path && !g.prompt_generator.empty()) wanted += fmt::format("_{:04d}", p.index);
  if (g.num_samples != 1) wanted += fmt::format("-{}", sample);
  // Equal prompts, or prompts cut to the same name, get their index appended.
  std::string name = wanted;
  for (int again = 0; !names.insert(name).second; ++again)
    name = wanted + fmt::format("_{:04d}", p.index) +
           (again > 0 ? fmt::format("_{}", again) : std::string());
  // 31: the longest additions, "." before and "_watermark.safetensors.partial" behind the name.
  const bool too_long = name.size() + 31 > NAME_MAX;
  WEFT_CHECK(name.find('/') == name.npos && !too_long, Exit::usage,
             "choose another generate.sample_name", "\"{}\" cannot be the name of a file: {}", name,
             too_long ? "it is too long" : "it holds a slash");
  return name;
}

// What all samples of a prompt have in common: sizes, masks, cost.
ClipItem item_of_prompt(const Deck& deck, const Prompt& p, const ClipParts& parts,
                        const LoopLengths& loops) {
  const GenerateDeck& g = deck.get<GenerateDeck>();
  const VideoCodec& codec = *parts.codec;
  const std::string where = place_of(g, p);
  ClipItem item;
  item.pixels = size_of_prompt(g, p, where);
  const PictureStart* start = parts.denoiser->picture_start();
  item.picture = start != nullptr && !p.references.empty() && p.mask_strategy.empty();
  item.area = item.pixels.height * item.pixels.width;
  if (item.picture) {
    check_references({p.references.front()}, p.named_by, where);
    const VideoReader picture({p.references.front(), p.named_by}, {.access = {deck.media, {}}});
    const PictureFit fit =
        start->fit(picture.width(), picture.height(), item.area, codec.pixels_a_latent());
    item.pixels.height = fit.height, item.pixels.width = fit.width;
  }
  const auto [frames, height, width] = item.pixels;
  std::int64_t more = frames;
  while (codec.coded_frames(more) != more) ++more;
  WEFT_CHECK(more == frames, Exit::usage,
             fmt::format("ask for {} frames or for {}", codec.coded_frames(frames), more),
             "{}: the {} makes no clip of {} frames", where, codec.name(), frames);
  item.latent_frames = codec.latent_frames(frames);
  item.latent_height = height / codec.pixels_a_latent();
  item.latent_width = width / codec.pixels_a_latent();
  WEFT_CHECK(item.latent_height >= 1 && item.latent_width >= 1, Exit::usage,
             fmt::format("ask for {} pixels or more each way", codec.pixels_a_latent()),
             "{}: a clip of {}x{} pixels", where, width, height);
  WEFT_CHECK(g.loop == 1 || frames > loops.condition_frames, Exit::usage,
             "ask for more frames, or a smaller generate.condition_frame_length",
             "{}: each loop drops {} frames of its {}", where, loops.condition_frames, frames);
  item.masks = parse_mask_strategy(p.mask_strategy, where);
  check_references(p.references, p.named_by, where);
  if (item.picture && parts.denoiser->condition_channels() == 0)
    item.masks = parse_mask_strategy("0", where);
  check_masks(item, p, g, loops, where);
  check_model(deck, p, item, parts, loops, where);
  const SamplerDeck& sampler = parts.denoiser->sampler(deck);
  const double sampling =
      static_cast<double>((sampler.guided() ? 2 : 1) * sampler.count()) *
      parts.denoiser->flops(item.latent_frames, item.latent_height, item.latent_width);
  const double decoding =
      static_cast<double>(frames) *
      codec.decoding_flops(static_cast<double>(height), static_cast<double>(width));
  item.cost = static_cast<double>(g.loop) * (sampling + decoding);
  return item;
}

// What guidance leads a prompt's clips away from; empty: the null caption, where there is one.
std::string negative_prompt(const GenerateDeck& g, const Prompt& p, const Denoiser& model) {
  const std::string& asked = p.negative.value_or(g.negative_prompt);
  return asked.empty() ? model.clip_defaults().negative_prompt : asked;
}

LoopLengths loop_lengths(const GenerateDeck& g, const VideoCodec& codec) {
  LoopLengths l;
  if (g.loop == 1) return l;
  const std::int64_t chunk = codec.chunk_pixels();
  const std::int64_t latents = codec.latent_frames(chunk);
  WEFT_CHECK(g.condition_frame_length % latents == 0, Exit::usage,
             fmt::format("choose a multiple of {}, the latent frames of {} frames", latents, chunk),
             "generate.condition_frame_length = {}", g.condition_frame_length);
  l.condition_latents = g.condition_frame_length;
  l.condition_frames = g.condition_frame_length / latents * chunk;
  return l;
}

}  // namespace

std::uint64_t ClipItem::noise_id(const std::vector<Prompt>& prompts) const {
  const auto index = static_cast<std::uint64_t>(prompts[prompt].index);
  return index | (static_cast<std::uint64_t>(sample) << 32);
}

std::int64_t GenerateJob::total_frames(const ClipItem& item, const GenerateDeck& deck) const {
  return item.pixels.frames + (deck.loop - 1) * (item.pixels.frames - loops.condition_frames);
}

std::vector<std::int64_t> GenerateJob::longest_first() const {
  std::vector<std::int64_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return items[a].cost > items[b].cost; });
  return order;
}

GenerateJob plan_generate_job(const Deck& deck, std::vector<Prompt> prompts, const ClipParts& parts,
                              const std::string& weights) {
  const VideoCodec& codec = *parts.codec;
  const GenerateDeck& g = deck.get<GenerateDeck>();
  GenerateJob job;
  job.prompts = std::move(prompts);
  if (parts.denoiser->takes_given_frames()) job.loops = loop_lengths(g, codec);
  warn_of_unused(g, job.prompts, *parts.denoiser);
  check_cache(parts.denoiser->sampler(deck), *parts.denoiser);
  if (g.cfg_ranks > 1) check_branches(parts.denoiser->sampler(deck));
  WEFT_CHECK(parts.encodes_texts() || parts.denoiser->has_null_caption(), Exit::usage,
             "name the text encoder's weights: without them there is no caption at all",
             "{}, and {} has no null caption",
             parts.texts ? parts.texts->lacks() : "there is no text encoder",
             parts.denoiser->name());
  const nlohmann::json common = common_key(deck, parts, weights);
  std::map<std::string, std::int64_t> text_places;
  std::set<std::string> names;
  for (std::size_t i = 0; i < job.prompts.size(); ++i) {
    const Prompt& p = job.prompts[i];
    ClipItem item = item_of_prompt(deck, p, parts, job.loops);
    item.prompt = static_cast<std::int64_t>(i);
    const auto place_of_text = [&](const std::string& text) {
      const auto [place, is_new] =
          text_places.emplace(text, static_cast<std::int64_t>(job.texts.size()));
      if (is_new) job.texts.push_back(place->first);
      return place->second;
    };
    for (std::int64_t loop = 0; loop < g.loop; ++loop)
      item.texts.push_back(place_of_text(p.text_of_loop(loop)));
    const std::string negative = negative_prompt(g, p, *parts.denoiser);
    if (parts.encodes_texts() && !(negative.empty() && parts.denoiser->has_null_caption()))
      item.negative = place_of_text(negative);
    for (item.sample = 0; item.sample < g.num_samples; ++item.sample) {
      item.name = item_name(g, p, item.sample, names);
      item.key = item_key(common, item, p, job.texts);
      job.items.push_back(item);
    }
  }
  describe_sizes(job, deck, codec);
  return job;
}

// ---- Batches

namespace {

const ClipItem& item_of(const GenerateJob& job, std::int64_t number) { return job.items[number]; }

// Clips of a batch start from noise only and have one loop.
bool may_share(const Deck& deck, const GenerateJob& job, const ClipItem& item) {
  return deck.get<GenerateDeck>().loop == 1 && item.masks.empty() &&
         job.prompts[item.prompt].references.empty();
}

}  // namespace

BatchLimits limit_batches(const Deck& deck, const GenerateJob& job,
                          const std::vector<std::int64_t>& order, int groups) {
  std::map<PixelSize, std::int64_t> clips;
  for (const std::int64_t number : order)
    clips[item_of(job, number).pixels] += may_share(deck, job, item_of(job, number)) ? 1 : 0;
  BatchLimits limits;
  for (const auto& [size, count] : clips)
    limits[size] = std::clamp<std::int64_t>((count + groups - 1) / groups, 1,
                                            deck.get<GenerateDeck>().batch_size);
  return limits;
}

std::vector<ClipBatch> make_batches(const Deck& deck, const GenerateJob& job,
                                    const std::vector<std::int64_t>& order,
                                    const BatchLimits& limits) {
  std::vector<ClipBatch> batches;
  // The batch that clips of a size, with a negative prompt or without, go into.
  std::map<std::pair<PixelSize, bool>, std::size_t> open;
  for (const std::int64_t number : order) {
    const ClipItem& item = item_of(job, number);
    const bool shares = may_share(deck, job, item);
    const std::pair kind(item.pixels, item.negative >= 0);
    const auto found = open.find(kind);
    if (shares && found != open.end() &&
        std::ssize(batches[found->second]) < limits.at(item.pixels)) {
      batches[found->second].push_back(number);
      continue;
    }
    if (shares) open[kind] = batches.size();
    batches.push_back({number});
  }
  const auto cost = [&](const ClipBatch& batch) {
    return item_of(job, batch.front()).cost * static_cast<double>(batch.size());
  };
  std::stable_sort(batches.begin(), batches.end(),
                   [&](const ClipBatch& a, const ClipBatch& b) { return cost(a) > cost(b); });
  return batches;
}

}  // namespace weft
