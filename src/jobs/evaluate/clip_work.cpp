// The clips of `weft evaluate`: frames in order against the references', frames picked for CLIP,
// lines of the manifest.
#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "jobs/engine/pictures.h"
#include "jobs/evaluate/clips.h"
#include "media/image_file.h"
#include "media/resize.h"
#include "media/similarity.h"
#include "media/video_reader.h"
#include "models/clip/clip.h"
#include "models/clip/clip_tokenizer.h"
#include "models/video_vae/vae_loss.h"
#include "tensor/device.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t longest_reason = 400;
// Equal frames would be infinitely close.
constexpr double most_psnr = 100;
// The frames that Open-Sora's tools look at, as shares of a video's length.
constexpr std::array<double, 3> aesthetic_points = {0.1, 0.5, 0.9};
constexpr double match_point = 0.5;

struct ClipUnit : PictureUnit {
  Json line;
  std::string fault;  // the first, of the reference or of a frame
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> frames, references;  // those that LPIPS compares, one after the other
  std::map<std::int64_t, std::vector<std::uint8_t>> shown;  // to CLIP, by number of the frame
  std::int64_t match_frame = 0;
  std::vector<std::int64_t> aesthetic_frames;
  double seconds = 0;
};

std::vector<std::uint8_t> packed(const VideoFrame& f) {
  std::vector<std::uint8_t> rgb;
  rgb.reserve(static_cast<std::size_t>(f.height * f.width * 3));
  for (std::int64_t y = 0; y < f.height; ++y)
    rgb.insert(rgb.end(), f.rgb + y * f.stride, f.rgb + y * f.stride + 3 * f.width);
  return rgb;
}

// The networks that a job needs.
struct Networks {
  std::optional<ClipShape> shape;
  std::unique_ptr<ClipImageEncoder> image;
  std::unique_ptr<ClipTextEncoder> text;
  std::unique_ptr<ClipTokenizer> tokenizer;
  std::unique_ptr<AestheticPredictor> aesthetic;
  std::unique_ptr<Lpips> lpips;

  Networks(const Deck& deck, const ClipMeasures& m) {
    const ClipDeck& clip = deck.get<ClipDeck>();
    if (m.clip()) {
      WeightFiles files = WeightFiles::open(clip.weights);
      shape = clip_shape(files);
      if (m.match) {
        text = std::make_unique<ClipTextEncoder>(files, *shape);
        tokenizer = std::make_unique<ClipTokenizer>(
            open_clip_tokenizer(clip.merges, clip.weights, shape->vocabulary));
      }
      image = std::make_unique<ClipImageEncoder>(files, *shape);
      log::info("weights   CLIP {}: pictures of {}x{}", describe(files), shape->side(),
                shape->side());
    }
    if (m.aes) aesthetic = std::make_unique<AestheticPredictor>(clip.aesthetic, shape->channels);
    if (m.lpips) {
      lpips = std::make_unique<Lpips>(false);
      lpips->load(deck.get<EvaluateClipsDeck>().lpips_weights);
    }
  }
};

class ClipWork : public PictureWork {
 public:
  ClipWork(const Deck& deck, const ClipRows& rows, const ClipMeasures& measures, Networks& networks,
           ListEngine& engine)
      : PictureWork(engine), deck_(deck), rows_(rows), measures_(measures), networks_(networks) {}
  std::unique_ptr<PictureUnit> next(std::int64_t, std::int64_t number) override {
    return number == 0 ? std::make_unique<ClipUnit>() : nullptr;
  }
  FeedWork::Prepared read(PictureUnit& picture) override;
  void predict(std::span<PictureUnit* const> pictures) override;
  void finish(PictureUnit& picture) override;
  void failed(PictureUnit& picture, const Error& e) override;

 private:
  MediaAccess access() const {
    return {deck_.media, [this] { return engine_.stop_requested(); }};
  }
  void read_in_order(ClipUnit& u, const EvaluatedClip& clip) const;
  void pick_frames(ClipUnit& u, const EvaluatedClip& clip) const;
  void check_lpips_memory(std::int64_t height, std::int64_t width);
  double lpips(const ClipUnit& u);

  const Deck& deck_;
  const ClipRows& rows_;
  const ClipMeasures& measures_;
  Networks& networks_;
  std::vector<std::pair<std::int64_t, std::int64_t>> known_;  // sizes that fit LPIPS's memory
};

// Means over the frames that clip and reference both have. A reference of another size is scaled
// and cropped to the clip's as footage is for training.
class Comparison {
 public:
  Comparison(const ClipMeasures& measures, const std::string& path, const MediaAccess& access)
      : measures_(measures), reader_({path, MediaTrust::untrusted}, {.access = access}) {}
  // With the clip's next frame. False once the reference has ended.
  bool add(ClipUnit& u, const std::vector<std::uint8_t>& frame) {
    const VideoFrame* f = reader_.next();
    if (f == nullptr) return false;
    std::vector<std::uint8_t> rgb;
    if (f->height == u.height && f->width == u.width) {
      rgb = packed(*f);
    } else {
      rgb.resize(frame.size());
      resize_(*f, u.height, u.width, rgb.data());
    }
    if (measures_.psnr)
      psnrs_ += std::min(most_psnr, psnr(frame.data(), rgb.data(), u.height, u.width));
    if (measures_.ssim) ssims_ += ssim(frame.data(), rgb.data(), u.height, u.width);
    if (measures_.lpips) {
      WEFT_CHECK(u.height >= 16 && u.width >= 16, Exit::data, "leave lpips out for such clips",
                 "LPIPS takes frames of at least 16x16, not {}x{}", u.height, u.width);
      u.frames.insert(u.frames.end(), frame.begin(), frame.end());
      u.references.insert(u.references.end(), rgb.begin(), rgb.end());
    }
    changes_.add(std::move(rgb));
    return true;
  }
  bool ended() { return reader_.next() == nullptr; }
  void put(Json& line) const {
    const auto n = static_cast<double>(changes_.frames());
    if (changes_.frames() == 0) return;
    if (measures_.psnr) line["psnr"] = psnrs_ / n;
    if (measures_.ssim) line["ssim"] = ssims_ / n;
    if (measures_.flicker && changes_.has_flicker()) line["reference_flicker"] = changes_.flicker();
    if (measures_.motion && changes_.has_motion()) line["reference_motion"] = changes_.motion();
  }

 private:
  const ClipMeasures& measures_;
  VideoReader reader_;
  CoverResize resize_;
  FrameChanges changes_;
  double psnrs_ = 0, ssims_ = 0;
};

void ClipWork::read_in_order(ClipUnit& u, const EvaluatedClip& clip) const {
  VideoReader reader(clip.media, {.access = access()});
  std::optional<Comparison> comparison;
  // A reference that cannot be used is a fault; the clip's own measures go on.
  const auto with_reference = [&](auto&& work) {
    try {
      work();
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;
      u.fault = printable(fmt::format("reference: {}", e.what()), longest_reason);
      comparison.reset();
      u.frames = u.references = {};
    }
  };
  // The folder of references need not have one for each clip; what a table names must be there.
  std::error_code none;
  const bool lacks = !deck_.get<EvaluateClipsDeck>().references.empty() &&
                     !std::filesystem::exists(clip.reference, none);
  if (!clip.reference.empty() && !lacks)
    with_reference([&] { comparison.emplace(measures_, clip.reference, access()); });
  FrameChanges changes;
  bool shorter = false;
  while (const VideoFrame* f = reader.next()) {
    if (changes.frames() == 0) u.height = f->height, u.width = f->width;
    WEFT_CHECK(f->height == u.height && f->width == u.width, Exit::data,
               "cut it where the size of its frames changes", "{}: frame {} has another size",
               clip.path, f->index);
    std::vector<std::uint8_t> frame = packed(*f);
    if (comparison && !shorter) with_reference([&] { shorter = !comparison->add(u, frame); });
    changes.add(std::move(frame));
  }
  WEFT_CHECK(changes.frames() > 0, Exit::data, "check whether ffplay plays it", "{} has no frames",
             clip.path);
  u.line["frames"] = changes.frames();
  if (measures_.flicker && changes.has_flicker()) u.line["flicker"] = changes.flicker();
  if (measures_.motion && changes.has_motion()) u.line["motion"] = changes.motion();
  if (!comparison) return;
  with_reference([&] {
    u.line["lengths_differ"] = shorter || !comparison->ended();
    comparison->put(u.line);
  });
}

// Frames as OpenCV gives them, of the length that the container states.
void ClipWork::pick_frames(ClipUnit& u, const EvaluatedClip& clip) const {
  const bool matched = measures_.match && !clip.text.empty();
  if (!matched && !measures_.aes) return;
  const std::int64_t side = networks_.shape->side();
  if (kind_of_name(clip.path) != MediumKind::video) {
    const ImageFile file = read_image_file(clip.media, deck_.media);
    u.shown[0] = clip_pixels({file.values.data(), file.height, file.width, 3 * file.width}, side);
    u.aesthetic_frames = {0};
    return;
  }
  const std::int64_t length = VideoReader(clip.media, {.access = access()}).counted();
  const auto at = [&](double point) {
    return static_cast<std::int64_t>(point * static_cast<double>(length));
  };
  u.match_frame = at(match_point);
  if (measures_.aes)
    for (const double point : aesthetic_points) u.aesthetic_frames.push_back(at(point));
  std::vector<std::int64_t> wanted = u.aesthetic_frames;
  if (matched) wanted.push_back(u.match_frame);
  for (const std::int64_t index : wanted) {
    if (u.shown.contains(index)) continue;
    const PickedFrame f = frame_at(clip.media, index, access());
    if (!f.fault.empty() && u.fault.empty()) u.fault = printable(f.fault, longest_reason);
    u.shown[index] = clip_pixels({f.rgb.data(), f.height, f.width, 3 * f.width}, side);
  }
}

FeedWork::Prepared ClipWork::read(PictureUnit& picture) {
  auto& u = static_cast<ClipUnit&>(picture);
  const EvaluatedClip& clip = rows_.clips[u.item];
  const double begin = now_seconds();
  u.line = engine_.line_of(u.item);
  WEFT_CHECK(!clip.path.empty(), Exit::data, "fill it in, or leave the row out",
             "the path is empty");
  if (measures_.in_order()) read_in_order(u, clip);
  const double compared = now_seconds();
  if (measures_.clip()) pick_frames(u, clip);
  const double end = now_seconds();
  u.seconds = end - begin;
  std::size_t bytes = u.frames.size() + u.references.size();
  for (const auto& [index, pixels] : u.shown) bytes += pixels.size();
  return {compared - begin, end - compared, true, bytes};
}

void ClipWork::check_lpips_memory(std::int64_t height, std::int64_t width) {
  const std::pair size{height, width};
  if (std::ranges::find(known_, size) != known_.end()) return;
  const std::size_t capacity = Arena::current().capacity();
  const auto planned = Arena::planning(this_device().kind, capacity);
  {
    const ArenaScope scope(*planned);
    const Tensor x = Tensor::empty({1, 1, height, width, 3}, DType::f32);
    Tensor loss = Tensor::empty({1}, DType::f32);
    networks_.lpips->add(x, make_var(Tensor::empty(x.shape(), DType::f32)), 1, loss);
  }
  WEFT_CHECK(planned->need().fits, Exit::data,
             "leave lpips out of evaluate.measures, or give the rank more memory "
             "(memory.arena_gib)",
             "LPIPS of a frame of {}x{} needs {:.2f} GiB, this rank has {:.2f}", height, width,
             gib(planned->need().bytes), gib(capacity));
  known_.push_back(size);
}

// The mean over the frames.
double ClipWork::lpips(const ClipUnit& u) {
  check_lpips_memory(u.height, u.width);
  const auto frame = static_cast<std::size_t>(u.height * u.width * 3);
  const auto tensor = [&](const std::vector<std::uint8_t>& from, std::size_t at) {
    std::vector<float> values(frame);
    for (std::size_t i = 0; i < frame; ++i)
      values[i] = static_cast<float>(from[at + i]) * (1.0f / 127.5f) - 1.0f;
    return Tensor::from_host(std::span<const float>(values), {1, 1, u.height, u.width, 3});
  };
  double sum = 0;
  for (std::size_t at = 0; at < u.frames.size(); at += frame) {
    const float zero = 0;
    Tensor loss = Tensor::from_host(std::span(&zero, 1), {1});
    networks_.lpips->add(tensor(u.references, at), make_var(tensor(u.frames, at)), 1, loss);
    sum += static_cast<double>(loss.to_host().span<float>()[0]);
  }
  return sum * static_cast<double>(frame) / static_cast<double>(u.frames.size());
}

void ClipWork::predict(std::span<PictureUnit* const> pictures) {
  auto& u = static_cast<ClipUnit&>(*pictures.front());
  const EvaluatedClip& clip = rows_.clips[u.item];
  const double begin = now_seconds();
  if (!u.frames.empty()) {
    u.line["lpips"] = lpips(u);
    u.frames = u.references = {};
  }
  if (!u.shown.empty()) {
    const std::int64_t channels = networks_.shape->channels;
    std::vector<std::uint8_t> pixels;
    for (const auto& [index, frame] : u.shown)
      pixels.insert(pixels.end(), frame.begin(), frame.end());
    const std::vector<float> features = networks_.image->encode(pixels);
    const auto of_frame = [&](std::int64_t index) {
      const auto place = std::distance(u.shown.begin(), u.shown.find(index));
      return std::span(features).subspan(static_cast<std::size_t>(place * channels),
                                         static_cast<std::size_t>(channels));
    };
    if (measures_.match && !clip.text.empty()) {
      const std::int64_t most = networks_.shape->positions;
      if (const std::size_t tokens = networks_.tokenizer->encode(clip.text, 1 << 20).size();
          std::cmp_greater(tokens, most))
        log::warn("the caption of {} has {} tokens, of which CLIP reads {}", clip.media.path,
                  tokens, most);
      const Tensor caption =
          networks_.text
              ->forward({networks_.tokenizer->encode(clip.text, networks_.shape->positions)})
              .to_host();
      u.line["match"] = clip_score(of_frame(u.match_frame), caption.span<float>());
    }
    if (measures_.aes) {
      double sum = 0;
      for (const std::int64_t index : u.aesthetic_frames) {
        const std::vector<float> unit = unit_length(of_frame(index));
        const Tensor one = Tensor::from_host(std::span<const float>(unit), {1, channels});
        sum += static_cast<double>(networks_.aesthetic->score(one).at(0));
      }
      u.line["aes"] = sum / static_cast<double>(u.aesthetic_frames.size());
    }
    u.shown.clear();
  }
  u.seconds += now_seconds() - begin;
}

void ClipWork::finish(PictureUnit& picture) {
  auto& u = static_cast<ClipUnit&>(picture);
  u.line["seconds"] = u.seconds;
  if (u.fault.empty())
    engine_.finished(u.line);
  else
    engine_.failed(
        u.item, Error(Exit::data, u.fault, "check the path, then whether ffplay plays it"), u.line);
}

// With what was measured before, and for the table's column of faults.
void ClipWork::failed(PictureUnit& picture, const Error& e) {
  if (!e.of_item()) throw e;
  auto& u = static_cast<ClipUnit&>(picture);
  engine_.failed(u.item, Error(e.code(), printable(e.what(), longest_reason), e.hint()),
                 u.line.is_null() ? engine_.line_of(u.item) : u.line);
}

}  // namespace

Json evaluate_missing_clips(const Deck& deck, const ListStart& start, const ClipRows& rows,
                            const ClipMeasures& measures, ListEngine& engine) {
  Networks networks(deck, measures);
  const std::size_t capacity = arena_capacity(deck.memory, start.device);
  std::size_t needed = 0;
  if (networks.image) needed = networks.image->plan(std::ssize(aesthetic_points)).bytes;
  if (networks.text) needed = std::max(needed, networks.text->plan().bytes);
  WEFT_CHECK(needed <= capacity, Exit::usage,
             "give the rank more memory (memory.arena_gib, fewer ranks a host)",
             "CLIP needs {}, this rank has {}", size_text(static_cast<double>(needed)),
             size_text(static_cast<double>(capacity)));
  ClipWork work(deck, rows, measures, networks, engine);
  return make_pictures(work, engine, deck, start, engine.ahead_of_others());
}

}  // namespace weft
