#include "jobs/encode/clips.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <set>
#include <tuple>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/encode/encode.h"
#include "jobs/work_queue.h"
#include "models/video_vae/pixels.h"

namespace weft {
namespace {

constexpr double progress_seconds = 10;

struct Item {
  std::int64_t sample = 0, index = 0;  // running number; number in its bucket
  int bucket = 0;
};

// What is missing, the longest first: who takes the last clip keeps the others waiting the least.
std::vector<Item> missing(const std::vector<Bucket>& buckets, const EncodeParts& parts) {
  std::vector<Item> items;
  std::int64_t sample = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b)
    for (std::int64_t i = 0; i < buckets[b].clips; ++i, ++sample)
      if (!parts.made(sample)) items.push_back({sample, i, static_cast<int>(b)});
  const auto pixels = [&](const Item& item) {
    return buckets[static_cast<std::size_t>(item.bucket)].clip_bytes();
  };
  std::stable_sort(items.begin(), items.end(),
                   [&](const Item& a, const Item& b) { return pixels(a) > pixels(b); });
  return items;
}

// The next item and, under way in a thread, its pixels.
struct Ahead {
  std::int64_t place = -1;
  std::future<std::vector<std::byte>> pixels;
};

}  // namespace

Bucket encoded_bucket(const Bucket& pixels, const EncodeDeck& deck, const VideoVae& vae,
                      std::int64_t text_channels) {
  const std::int64_t side = vae.pixels_a_latent();
  WEFT_CHECK(pixels.dtype == DType::u8, Exit::usage, "data.path must hold pixels",
             "bucket {} holds latents already", pixels.name);
  WEFT_CHECK(pixels.height >= side && pixels.width >= side, Exit::data,
             fmt::format("the VAE takes frames of at least {0}x{0}", side),
             "bucket {} has frames of {}x{}", pixels.name, pixels.height, pixels.width);
  Bucket b = pixels;
  b.frames = vae.latent_frames(pixels.frames);
  b.height = pixels.height / side;
  b.width = pixels.width / side;
  b.moments = deck.latents == "moments";
  b.channels = TemporalVae::latent_channels * (b.moments ? 2 : 1);
  b.dtype = deck.dtype == "f16" ? DType::f16 : DType::f32;
  // As the model has them: rounded in a bf16 VAE.
  const Tensor constants = vae.denormalised().to_host();
  const std::span<const float> values = constants.span<float>();
  const auto C = static_cast<std::size_t>(TemporalVae::latent_channels);
  b.scale.assign(values.begin(), values.begin() + C);
  b.shift.assign(values.begin() + C, values.begin() + 2 * C);
  b.text_channels = text_channels;
  b.text_dtype = b.dtype;
  return b;
}

std::size_t fit_encoding(VideoVae& vae, const std::vector<Bucket>& buckets, std::size_t capacity) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> sizes;
  for (const Bucket& b : buckets) sizes.emplace(b.frames, b.height, b.width);
  const std::int64_t wanted = vae.config().micro_batch_size;
  std::int64_t at_once = std::numeric_limits<std::int64_t>::max(), most = 0;
  for (const auto& [frames, height, width] : sizes) {
    at_once = std::min(at_once, vae.fit_micro_batch(frames, height, width, capacity, false));
    most = std::max(most, vae.chunk_frames(frames));
  }
  if (wanted > 0 && at_once < std::min(wanted, most))
    log::warn("{:.2f} GiB are there: the VAE takes {} frames at once instead of {}", gib(capacity),
              at_once, wanted);
  vae.set_micro_batch(at_once);
  std::size_t bytes = 0;
  for (const auto& [frames, height, width] : sizes)
    bytes = std::max(bytes, vae.plan_encode(frames, height, width, at_once).bytes);
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
    WEFT_CHECK((h.bits & 0x7c00u) != 0x7c00u, Exit::data, "set encode.dtype = \"f32\"",
               "{} encodes to {}, which f16 cannot hold", what, values[i]);
    std::memcpy(bytes.data() + 2 * i, &h, 2);
  }
  return bytes;
}

EncodeTimes encode_clips(const Deck& deck, const ClipSource& source, VideoVae& vae,
                         EncodeParts& parts, const std::function<bool()>& stop, MPI_Comm world) {
  const std::vector<Bucket>& buckets = source.buckets();
  const std::vector<Item> items = missing(buckets, parts);
  const auto count = static_cast<std::int64_t>(items.size());
  WorkQueue queue(world, count);
  const auto take = [&] {
    Ahead ahead;
    if (stop()) queue.close();  // for all ranks: a signal may reach one alone
    ahead.place = queue.next();
    if (ahead.place < 0) return ahead;
    const Item item = items[static_cast<std::size_t>(ahead.place)];
    ahead.pixels = std::async(std::launch::async, [&source, &buckets, item] {
      std::vector<std::byte> clip(buckets[static_cast<std::size_t>(item.bucket)].clip_bytes());
      source.read(item.bucket, item.index, clip);
      return clip;
    });
    return ahead;
  };

  EncodeTimes times;
  const double start = now_seconds();
  double told = start;
  for (Ahead now = take(); now.place >= 0;) {
    Ahead next = take();
    const double asked = now_seconds();
    const std::vector<std::byte> clip = now.pixels.get();
    const double began = now_seconds();
    const Item& item = items[static_cast<std::size_t>(now.place)];
    const Bucket& b = buckets[static_cast<std::size_t>(item.bucket)];
    {
      const VideoVae::Noise noise{static_cast<std::uint64_t>(deck.run.seed),
                                  static_cast<std::uint64_t>(item.sample)};
      const Shape size{static_cast<std::int64_t>(clip.size())};
      const Tensor host = Tensor::borrow(const_cast<std::byte*>(clip.data()), size, DType::u8);
      // A GPU gets a few frames at a time: a long clip of pixels would be larger than all of its latents' making.
      const std::int64_t frame = b.height * b.width * 3;
      const Tensor moments = vae.encode_moments(
          b.frames, b.height, b.width,
          [&](std::int64_t first, std::int64_t n) {
            return pixel_frames(host.slice(first * frame, (first + n) * frame).to_device(), 0, n,
                                b.height, b.width);
          },
          &noise);
      const Tensor stored =
          deck.get<EncodeDeck>().latents == "moments" ? moments : vae.draw_latent(moments, &noise);
      const DType dtype = deck.get<EncodeDeck>().dtype == "f16" ? DType::f16 : DType::f32;
      const Tensor values = stored.to_host();
      parts.append(item.sample,
                   stored_values(values.span<float>(), dtype,
                                 fmt::format("clip {} of bucket {}", item.index, b.name)));
    }
    const double end = now_seconds();
    times.waited += began - asked;
    times.busy += end - began;
    ++times.clips;
    times.frames += b.frames;
    if (log::rank() == 0 && end - told >= progress_seconds) {
      told = end;
      // Items are taken in order: what is before this one is done, or nearly.
      log::info("encode: {} of {} clips, {:.2f} clips/s", now.place + 1, count,
                static_cast<double>(now.place + 1) / (end - start));
    }
    now = std::move(next);
  }
  return times;
}

}  // namespace weft
