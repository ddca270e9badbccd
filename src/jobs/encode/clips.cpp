#include "jobs/encode/clips.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>

#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/encode/encode.h"
#include "models/pixels.h"

namespace weft {

Bucket encoded_bucket(const Bucket& pixels, const EncodeDeck& deck, const VideoCodec& codec,
                      std::int64_t text_channels) {
  const std::int64_t side = codec.pixels_a_latent();
  check_holds_clips(pixels);
  WEFT_CHECK(pixels.dtype == DType::u8, Exit::usage, "data.path must hold pixels",
             "bucket {} holds latents already", pixels.name);
  WEFT_CHECK(pixels.height >= side && pixels.width >= side, Exit::data,
             fmt::format("the {0} takes frames of at least {1}x{1}", codec.name(), side),
             "bucket {} has frames of {}x{}", pixels.name, pixels.height, pixels.width);
  Bucket b = pixels;
  b.frames = codec.latent_frames(pixels.frames);
  b.height = pixels.height / side;
  b.width = pixels.width / side;
  b.moments = deck.latents == "moments";
  b.channels = codec.channels() * (b.moments ? 2 : 1);
  b.dtype = deck.dtype == "f16" ? DType::f16 : DType::f32;
  const VideoCodec::Normalisation n = codec.normalisation();
  b.scale = n.scale;
  b.shift = n.shift;
  b.text_channels = text_channels;
  b.text_dtype = b.dtype;
  return b;
}

std::size_t fit_encoding(VideoCodec& codec, const std::vector<Bucket>& buckets,
                         std::size_t capacity) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> sizes;
  for (const Bucket& b : buckets) sizes.emplace(b.frames, b.height, b.width);
  std::int64_t fitting = std::numeric_limits<std::int64_t>::max(), most = 0;
  for (const auto& [frames, height, width] : sizes) {
    const std::int64_t at_once = codec.fit_micro_batch(frames, height, width, capacity, false);
    // A clip shorter than a micro-batch, such as a picture, takes fewer frames for want of more,
    // not of memory.
    if (at_once < codec.frames_asked(frames)) fitting = std::min(fitting, at_once);
    most = std::max(most, codec.frames_asked(frames));
  }
  if (fitting < most)
    log::warn("{} micro-batch reduced to {} (asked: {}) to fit {:.2f} GiB", codec.name(),
              counted(fitting, "frame"), most, gib(capacity));
  const std::int64_t at_once = std::min(fitting, most);
  codec.set_micro_batch(at_once);
  std::size_t bytes = 0;
  for (const auto& [frames, height, width] : sizes)
    bytes = std::max(bytes, codec.plan_encode(frames, height, width, at_once).bytes);
  return bytes;
}

std::vector<std::byte> stored_values(std::span<const float> values, DType dtype,
                                     const std::string& what) {
  for (const float v : values)
    WEFT_CHECK(std::isfinite(v), Exit::non_finite,
               "look at the encoder's weights and at what it is given",
               "{} does not encode to finite numbers", what);
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  if (dtype == DType::f32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const f16 h(values[i]);
    // All exponent bits set: the value has become infinite.
    WEFT_CHECK((h.bits & 0x7c00u) != 0x7c00u, Exit::data, "set encode.dtype = \"f32\"",
               "{} encodes to {}, which f16 cannot hold", what, values[i]);
    std::memcpy(bytes.data() + 2 * i, &h, 2);
  }
  return bytes;
}

std::vector<ListItem> encode_items(const std::vector<Bucket>& buckets, const std::string& job) {
  const std::string key = to_hex(hash128(job));
  std::vector<ListItem> items;
  for (const Bucket& b : buckets)
    for (std::int64_t i = 0; i < b.clips; ++i)
      items.push_back({fmt::format("{}/{}", b.name, i), key, static_cast<double>(b.clip_bytes())});
  return items;
}

EncodeJob::EncodeJob(const Deck& deck, const ClipSource& source, VideoCodec& codec,
                     const ListEngine& engine)
    : deck_(deck),
      source_(source),
      codec_(codec),
      engine_(engine),
      writer_(engine.settings().directory, engine.groups().rank) {}

EncodeJob::Place EncodeJob::place_of(std::int64_t sample) const {
  int bucket = 0;
  for (const Bucket& b : source_.buckets()) {
    if (sample < b.clips) return {bucket, sample};
    sample -= b.clips;
    ++bucket;
  }
  WEFT_ASSERT(false);
  return {};
}

void EncodeJob::prepare(const ItemBatch& samples) {
  const Place p = place_of(samples.front());
  reading_[samples.front()] = std::async(std::launch::async, [this, p] {
    std::vector<std::byte> clip(source_.buckets()[static_cast<std::size_t>(p.bucket)].clip_bytes());
    source_.read(p.bucket, p.index, clip);
    return clip;
  });
}

// A GPU gets a few frames at a time: the pixels of a long clip would take more memory than all of
// its latents' needs.
std::vector<std::byte> EncodeJob::encode(const std::vector<std::byte>& clip, const Bucket& b,
                                         std::int64_t sample, const std::string& what) {
  const VideoCodec::Noise noise{static_cast<std::uint64_t>(deck_.run.seed),
                                static_cast<std::uint64_t>(sample)};
  const Shape size{static_cast<std::int64_t>(clip.size())};
  const Tensor host = Tensor::borrow(const_cast<std::byte*>(clip.data()), size, DType::u8);
  const std::int64_t frame = b.height * b.width * 3;
  const VideoCodec::FrameSource frames = [&](std::int64_t first, std::int64_t n) {
    return pixel_frames(host.slice(first * frame, (first + n) * frame).to_device(), 0, n, b.height,
                        b.width);
  };
  const VideoCodec::Part all = codec_.whole(b.frames);
  const Tensor stored = deck_.get<EncodeDeck>().latents == "moments"
                            ? codec_.encode_moments(all, b.height, b.width, frames, &noise)
                            : codec_.encode(all, b.height, b.width, frames, &noise);
  const Tensor values = stored.to_host();
  return stored_values(values.span<float>(),
                       deck_.get<EncodeDeck>().dtype == "f16" ? DType::f16 : DType::f32, what);
}

void EncodeJob::make(const ItemBatch& samples, ItemResults& results) {
  const std::int64_t sample = samples.front();
  const ListItem& item = engine_.items()[static_cast<std::size_t>(sample)];
  const Place p = place_of(sample);
  const Bucket& b = source_.buckets()[static_cast<std::size_t>(p.bucket)];
  const double begin = now_seconds();
  const std::vector<std::byte> clip = reading_.extract(sample).mapped().get();
  waited_ += now_seconds() - begin;
  nlohmann::ordered_json line = {
      {"name", item.name}, {"key", item.key}, {"rank", engine_.groups().rank}};
  writer_.append(encode(clip, b, sample, fmt::format("clip {} of bucket {}", p.index, b.name)),
                 line);
  results.finished(line);
  frames_ += b.frames;
}

nlohmann::ordered_json EncodeJob::share() const {
  return {{"frames", frames_}, {"waited", waited_}};
}

}  // namespace weft
