#include "data/synthetic.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <vector>

#include "config/deck.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/philox.h"
#include "data/lists/table.h"

namespace weft {

std::string read_keys(std::string_view spec, std::string_view kind, const std::string& hint,
                      std::span<const NumberKey> numbers, std::span<const TextKey> texts) {
  const auto number = [&](std::string_view key, std::string_view text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    WEFT_CHECK(error == std::errc() && end == text.data() + text.size(), Exit::usage, hint,
               "{} = \"{}\" of {} is not a whole number", key, text, kind);
    return value;
  };
  for (std::size_t at = 0; at <= spec.size();) {
    const std::size_t end = std::min(spec.find(',', at), spec.size());
    const std::string_view item = trimmed(spec.substr(at, end - at));
    at = end + 1;
    if (item.empty()) continue;
    const auto equals = item.find('=');
    WEFT_CHECK(equals != std::string_view::npos, Exit::usage, hint,
               "\"{}\" in {}: is not key=value", item, kind);
    const std::string_view name = trimmed(item.substr(0, equals));
    const std::string_view value = trimmed(item.substr(equals + 1));
    const auto text = std::ranges::find(texts, name, &TextKey::name);
    if (text != texts.end()) {
      *text->target = value;
      continue;
    }
    const auto key = std::ranges::find(numbers, name, &NumberKey::name);
    if (key == numbers.end()) {
      std::vector<std::string> names;
      for (const NumberKey& k : numbers) names.emplace_back(k.name);
      for (const TextKey& k : texts) names.emplace_back(k.name);
      const std::string near = nearest_name(std::string(name), names);
      throw Error(Exit::usage, fmt::format("unknown key \"{}\" in {}:", name, kind),
                  near.empty() ? hint : fmt::format("did you mean \"{}\"?", near), __FILE__,
                  __LINE__);
    }
    const auto dots = key->range ? value.find("..") : std::string_view::npos;
    NumberRange& r = *key->target;
    r.low = number(name, value.substr(0, dots));
    r.high = dots == std::string_view::npos ? r.low : number(name, value.substr(dots + 2));
    WEFT_CHECK(r.low >= key->least && r.high <= key->most && r.low <= r.high, Exit::usage,
               fmt::format("choose {} to {}", key->least, key->most),
               "{} = {} of {} is out of range", name, value, kind);
  }
  std::string all;
  for (const NumberKey& k : numbers)
    all += fmt::format("{}={}..{}\n", k.name, k.target->low, k.target->high);
  return all;
}

namespace {

constexpr const char* hint =
    "write for example data.path=\"synthetic:clips=64,frames=5,height=32,width=32\"";

struct Part {
  std::int64_t clips = 0, frames = 0, height = 0, width = 0, channels = 0, latent = 0, fps = 0,
               seed = 0, tokens = 0, text_channels = 0;
  std::string name;
};

Part read_part(std::string_view text) {
  NumberRange clips{64, 64}, frames{5, 5}, height{32, 32}, width{32, 32}, channels, latent, fps,
      seed{42, 42}, tokens, text_channels;
  const std::string none = " ";  // no text that is given has blanks at its ends
  std::string name = none;
  const std::array numbers = {NumberKey{"clips", &clips, 1, 1'000'000'000, false},
                              NumberKey{"frames", &frames, 1, 4096, false},
                              NumberKey{"height", &height, 1, 8192, false},
                              NumberKey{"width", &width, 1, 8192, false},
                              NumberKey{"channels", &channels, 1, 64, false},
                              NumberKey{"latent", &latent, 0, 1, false},
                              NumberKey{"fps", &fps, 1, 1000, false},
                              NumberKey{"seed", &seed, 0, INT64_MAX, false},
                              NumberKey{"tokens", &tokens, 0, 4096, false},
                              NumberKey{"text_channels", &text_channels, 0, 65536, false}};
  const std::array texts = {TextKey{"name", &name}};
  read_keys(text, "synthetic", hint, numbers, texts);
  WEFT_CHECK(name == none ||
                 (!name.empty() && name.find_first_not_of("abcdefghijklmnopqrstuvwxyz"
                                                          "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                                          "0123456789-._") == std::string::npos),
             Exit::usage, "letters, digits, dots, dashes and underscores make a bucket's name",
             "name = \"{}\" of synthetic", name);
  Part part{clips.low,
            frames.low,
            height.low,
            width.low,
            channels.low,
            latent.low,
            fps.low,
            seed.low,
            tokens.low,
            text_channels.low,
            name == none ? "" : name};
  WEFT_CHECK((part.tokens > 0) == (part.text_channels > 0), Exit::usage,
             "text_channels is what the model takes, such as model.caption_channels",
             "synthetic clips with tokens = {} and text_channels = {}: captions have both",
             part.tokens, part.text_channels);
  if (part.channels == 0) part.channels = part.latent != 0 ? 4 : 3;
  WEFT_CHECK(part.latent != 0 || part.channels == 3, Exit::usage,
             "add latent=1 for clips of another number of channels",
             "synthetic pixel clips with channels = {}: pixels have 3", part.channels);
  return part;
}

// The random parameters of a sample. Positions and speeds are in units of the frame's shorter side.
struct Scene {
  Philox random;
  int channels;
  explicit Scene(std::uint64_t seed, std::uint64_t sample, std::int64_t channels_)
      : random(seed, Purpose::synthetic, 0, sample), channels(static_cast<int>(channels_)) {}

  // Colours: the gradient's corners are dull, the shapes bright or dark.
  float corner(int which, int c) const {
    return 0.25f + 0.35f * random.uniform(static_cast<std::uint32_t>(64 + 4 * c + which));
  }
  float colour(int shape, int c) const {
    const float u = random.uniform(static_cast<std::uint32_t>(512 + 2 * c + shape));
    return shape == 0 ? 0.7f + 0.3f * u : 0.2f * u + (c == 0 ? 0.6f : 0.0f);
  }
  float size(int shape) const {
    return 0.12f + 0.1f * random.uniform(static_cast<std::uint32_t>(shape));
  }
  // The shape's position at frame t along one axis of length `extent`, bouncing off the edges.
  float position(int shape, int axis, float extent, std::int64_t t) const {
    const std::uint32_t element = static_cast<std::uint32_t>(8 + 4 * shape + 2 * axis);
    // Elements 8..15 and 28..35 do not overlap those of sizes (0, 1), corners (64 on) and colours
    // (512 on).
    const float speed = 0.02f + 0.08f * random.uniform(element);
    const float direction = random.u32(element + 20) & 1u ? 1.0f : -1.0f;
    const float start = random.uniform(element + 1) * 2 * extent;
    // 4096 extents, a whole number of periods, keep the argument of fmod positive for every frame.
    const float at =
        std::fmod(start + direction * speed * static_cast<float>(t) + 4096 * extent, 2 * extent);
    return at < extent ? at : 2 * extent - at;
  }
};

// Draws one frame, f32 [H,W,C] in [0,1]. The shapes' edges are one pixel soft, so that slow drift
// is visible.
void draw(const Scene& scene, const Bucket& b, std::int64_t t, std::vector<float>& frame) {
  const int channels = scene.channels;
  const float side = static_cast<float>(std::min(b.height, b.width));
  const float fh = static_cast<float>(b.height), fw = static_cast<float>(b.width);
  std::vector<float> left(channels), slope(left.size());
  for (std::int64_t y = 0; y < b.height; ++y) {
    const float fy = (static_cast<float>(y) + 0.5f) / fh;
    float* row = frame.data() + y * b.width * channels;
    for (int c = 0; c < channels; ++c) {
      const auto i = static_cast<std::size_t>(c);
      left[i] = scene.corner(0, c) * (1 - fy) + scene.corner(1, c) * fy;
      slope[i] = (scene.corner(2, c) * (1 - fy) + scene.corner(3, c) * fy - left[i]) / fw;
    }
    for (std::int64_t x = 0; x < b.width; ++x)
      for (int c = 0; c < channels; ++c)
        row[x * channels + c] = left[c] + slope[c] * (static_cast<float>(x) + 0.5f);
  }
  for (int shape = 0; shape < 2; ++shape) {  // 0 is the disc, 1 the square
    const float radius = scene.size(shape) * side;
    const float cy = scene.position(shape, 0, fh / side, t) * side;
    const float cx = scene.position(shape, 1, fw / side, t) * side;
    std::vector<float> colour(channels);
    for (int c = 0; c < channels; ++c) colour[c] = scene.colour(shape, c);
    const auto from = [&](float centre) {
      return std::max<std::int64_t>(0, static_cast<std::int64_t>(centre - radius - 1));
    };
    const auto to = [&](float centre, std::int64_t limit) {
      return std::min<std::int64_t>(limit, static_cast<std::int64_t>(centre + radius + 2));
    };
    for (std::int64_t y = from(cy); y < to(cy, b.height); ++y) {
      for (std::int64_t x = from(cx); x < to(cx, b.width); ++x) {
        const float dy = static_cast<float>(y) + 0.5f - cy, dx = static_cast<float>(x) + 0.5f - cx;
        const float distance =
            shape == 0 ? std::sqrt(dy * dy + dx * dx) : std::max(std::abs(dy), std::abs(dx));
        const float cover = std::clamp(radius - distance + 0.5f, 0.0f, 1.0f);
        float* pixel = frame.data() + (y * b.width + x) * channels;
        for (int c = 0; c < channels; ++c) pixel[c] += cover * (colour[c] - pixel[c]);
      }
    }
  }
}

// The frames of footage that Open-Sora's VAE packs into T latent frames: 17 into 5, a remainder of
// r into ceil(r / 4).
std::int64_t pixel_frames_of(std::int64_t latent_frames) {
  const std::int64_t rest = latent_frames % 5;
  return latent_frames / 5 * 17 + (rest > 0 ? 4 * (rest - 1) + 1 : 0);
}

class SyntheticSource : public ClipSource {
 public:
  explicit SyntheticSource(const std::string& spec) {
    std::int64_t first = 0;
    for (std::size_t at = 0; at <= spec.size();) {
      const std::size_t end = std::min(spec.find(';', at), spec.size());
      const std::string_view text = trimmed(std::string_view(spec).substr(at, end - at));
      at = end + 1;
      if (text.empty() && spec.find(';') != std::string::npos) continue;  // after the last ";"
      Part part = read_part(text);
      Bucket b;
      b.frames = part.frames;
      b.height = part.height;
      b.width = part.width;
      b.channels = part.channels;
      b.clips = part.clips;
      b.dtype = part.latent != 0 ? DType::f32 : DType::u8;
      b.pixel_frames = part.latent != 0 ? pixel_frames_of(part.frames) : part.frames;
      b.pixel_height = part.latent != 0 ? 8 * part.height : part.height;
      b.pixel_width = part.latent != 0 ? 8 * part.width : part.width;
      b.longest_text = part.tokens;
      b.text_channels = part.text_channels;
      b.name = !part.name.empty()
                   ? part.name
                   : fmt::format("synthetic{}-{}-{}x{}", part.latent != 0 ? "-latent" : "",
                                 part.frames, part.height, part.width);
      buckets_.push_back(b);
      if (part.fps == 0) part.fps = b.pixel_frames == 1 ? 120 : 24;
      parts_.push_back(part);
      first_.push_back(first);
      first += part.clips;
    }
    WEFT_CHECK(!buckets_.empty(), Exit::usage, hint, "\"synthetic:{}\" describes no clips", spec);
  }

  const std::vector<Bucket>& buckets() const override { return buckets_; }

  ClipInfo info(int bucket, std::int64_t index) const override {
    const std::int64_t sample = check(bucket, index);
    static constexpr std::array sizes = {"small", "large"};
    const Part& part = parts_[bucket];
    const Scene s = scene(bucket, index);
    ClipInfo info;
    info.fps = static_cast<float>(part.fps);
    info.source = fmt::format("synthetic:seed={} sample {}", part.seed, sample);
    info.text = fmt::format("a {} bright disc and a {} square drifting over a soft gradient",
                            sizes[s.size(0) > 0.17f], sizes[s.size(1) > 0.17f]);
    return info;
  }

  std::string content_id() const override {
    std::string text;
    for (const Part& p : parts_) {
      text += fmt::format("{} {} {} {} {} {} {} {}\n", p.clips, p.frames, p.height, p.width,
                          p.channels, p.latent, p.fps, p.seed);
      if (p.tokens > 0) text += fmt::format("text {} {}\n", p.tokens, p.text_channels);
    }
    return to_hex(hash128(text));
  }

  std::int64_t text_tokens(int bucket, std::int64_t index) const override {
    return buckets_[bucket].longest_text;
  }
  // Noise, which trains as long as text does.
  std::vector<float> read_text(int bucket, std::int64_t index) const override {
    const Bucket& b = buckets_[bucket];
    // 0 to 3 are other streams of data in memory.
    const Philox random(static_cast<std::uint64_t>(parts_[bucket].seed), Purpose::synthetic, 4,
                        static_cast<std::uint64_t>(check(bucket, index)));
    std::vector<float> text(static_cast<std::size_t>(b.longest_text * b.text_channels));
    for (std::size_t i = 0; i < text.size(); ++i)
      text[i] = random.normal(static_cast<std::uint32_t>(i));
    return text;
  }

  void read(int bucket, std::int64_t index, std::span<std::byte> out) const override {
    check(bucket, index);
    const Bucket& b = buckets_[bucket];
    WEFT_ASSERT(out.size() == b.clip_bytes());
    const Scene s = scene(bucket, index);
    const std::int64_t pixels = b.height * b.width;
    std::vector<float> frame(pixels * b.channels);
    for (std::int64_t t = 0; t < b.frames; ++t) {
      draw(s, b, t, frame);
      if (b.dtype == DType::u8) {
        auto* to = reinterpret_cast<std::uint8_t*>(out.data()) + t * pixels * b.channels;
        for (std::size_t i = 0; i < frame.size(); ++i)
          to[i] = static_cast<std::uint8_t>(frame[i] * 255.0f + 0.5f);
      } else {
        for (std::int64_t c = 0; c < b.channels; ++c) {
          std::byte* to = out.data() + (c * b.frames + t) * pixels * 4;
          for (std::int64_t i = 0; i < pixels; ++i) {
            const float value = 2 * frame[i * b.channels + c] - 1;
            std::memcpy(to + i * 4, &value, 4);
          }
        }
      }
    }
  }

 private:
  // The sample's id: the running number over all buckets, so that no two clips are alike.
  std::int64_t check(int bucket, std::int64_t index) const {
    WEFT_ASSERT(bucket >= 0 && static_cast<std::size_t>(bucket) < buckets_.size());
    WEFT_ASSERT(index >= 0 && index < buckets_[bucket].clips);
    return first_[bucket] + index;
  }
  Scene scene(int bucket, std::int64_t index) const {
    const auto b = static_cast<std::size_t>(bucket);
    return Scene(static_cast<std::uint64_t>(parts_[b].seed),
                 static_cast<std::uint64_t>(check(bucket, index)), buckets_[b].channels);
  }

  std::vector<Bucket> buckets_;
  std::vector<Part> parts_;
  std::vector<std::int64_t> first_;
};

}  // namespace

std::unique_ptr<ClipSource> make_synthetic_source(const std::string& spec) {
  return std::make_unique<SyntheticSource>(spec);
}

}  // namespace weft
