// Interfaces of a model that jobs and plans use. A model's line of the registry
// (models/registry.h) makes its parts by role: a Denoiser, a VideoCodec, a TextEncoder, and for
// training a TrainingTask (train/task.h).
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "checkpoint/weights.h"
#include "config/deck.h"
#include "nn/parameters.h"
#include "parallel/communicator.h"
#include "tensor/tensor.h"

namespace weft {

// What every network says of itself, whatever its role.
class ModelPart {
 public:
  virtual ~ModelPart() = default;

  virtual std::string name() const = 0;  // for messages
  // Allocating and filling the table is the caller's. Empty: the network needs no weights.
  virtual ParameterTable& params() = 0;
  virtual WeightNames weight_names() const { return {}; }
  virtual bool bf16() const { return false; }  // weights and activations
  // Tables of the deck that decide its results besides the weights (config/deck_table.h, identity).
  virtual std::set<std::string> tables() const = 0;
};

// Captions of a batch, only the rows that count, packed sample after sample.
struct Captions {
  Tensor y;  // f32 [B, Lmax, caption_channels], or undefined when every row is the null caption's.
             // In sampling there may be another number of texts than samples.
  Tensor index;    // i32 [sum L]: row b*Lmax + l of y, or -1-l for row l of the null caption
  Tensor offsets;  // i32 [B+1]
  std::vector<std::int64_t> lengths;  // [B], the same on the host
};

struct DenoiserInput {
  Tensor x;                      // f32 [B, C, T, h, w], the noisy latent
  Tensor timestep;               // f32 [B], in [0, 1000]: 0 is data, 1000 pure noise
  Tensor fps;                    // f32 [B]
  double height = 0, width = 0;  // of the footage in pixels
  Captions captions;
  Tensor x_mask;            // u8 [B, T], 1 = frame is being generated; undefined: all are
  Tensor condition;         // f32 [B, condition_channels(), T, h, w] of a model that has some
  bool high_noise = false;  // the step is one for the expert of high noise (SamplerDeck::boundary)
  // For a step cache, of a model with a cache_signal(): `blocks`, if not null, gets what all blocks
  // together add to the tokens, in a form of the model's own; with `reuse_blocks` it is taken as
  // an earlier step left it, and the blocks are not run.
  Tensor* blocks = nullptr;
  bool reuse_blocks = false;
};

struct SamplerDeck;  // models/flow_sampler.h
struct RgbView;      // media/resize.h
class VideoCodec;

// The clip that a picture asks for, in pixels, and how the picture is brought to its size: scaled,
// then cut.
struct PictureFit {
  std::int64_t width = 0, height = 0;
  std::int64_t scaled_width = 0, scaled_height = 0, left = 0, top = 0;
};
// How a model takes the picture that a clip begins with.
class PictureStart {
 public:
  virtual ~PictureStart() = default;
  // Whether it makes no clip without one.
  virtual bool required() const = 0;
  // For a clip of about `area` pixels, of a codec with `side` pixels a latent.
  virtual PictureFit fit(std::int64_t width, std::int64_t height, std::int64_t area,
                         std::int64_t side) const = 0;
  // The picture at that size, f32 [1,height,width,3] in -1..1 on this rank's device.
  virtual Tensor pixels(const RgbView& picture, const PictureFit& fit) const = 0;
  // DenoiserInput::condition of one clip of `frames` that begins with it, [1,c,T,h,w]; undefined:
  // its latent is the clip's first frame, which is given.
  virtual Tensor condition(VideoCodec& codec, const Tensor& pixels, std::int64_t frames) const {
    return {};
  }
};

// What [generate] takes where the deck leaves it to the model.
struct ClipDefaults {
  double fps = 24;
  double aes = 6.5;  // aesthetic score behind each prompt; 0: its captions carry no scores
  std::string negative_prompt;  // empty: the null caption, or an empty text where there is none
};

// Weights that are files of their own, of a model that has several: for low noise, and for high.
struct WeightSet {
  WeightNames names;                 // `prefix`: of its parameters
  std::vector<std::string> folders;  // what releases call its folder, beside the other's
};

// Predicts in which direction a noisy latent becomes data. Samplers (models/flow_sampler.h) know
// no other side of a model.
class Denoiser : public ModelPart {
 public:
  virtual std::int64_t channels() const = 0;  // C of the latent; 3: it works on pixels
  // Of a model that reads captions. Tokens at most; also the rows of the null caption.
  virtual std::int64_t caption_channels() const { return 1; }
  virtual std::int64_t max_caption() const { return 1; }
  // The keys of the deck that say so, for hints.
  virtual std::string caption_keys() const { return ""; }
  // Of two experts: low noise, high noise. Empty: all weights are one set.
  virtual std::vector<WeightSet> weight_sets() const { return {}; }
  // Whether it has learned a caption for no text at all. One that has not takes its captions from
  // a text encoder, and classifier-free guidance takes the negative prompt's.
  virtual bool has_null_caption() const { return true; }
  // Whether DenoiserInput::x_mask is heeded: frames that are given, and frames to edit.
  virtual bool takes_given_frames() const { return true; }
  // Channels of what it reads beside the noisy latent.
  virtual std::int64_t condition_channels() const { return 0; }
  // Null: it knows no such picture; references go where a mask strategy says.
  virtual const PictureStart* picture_start() const { return nullptr; }
  virtual ClipDefaults clip_defaults() const { return {}; }
  // The deck's table [sampler]; a model with defaults of its own has a table of its own.
  virtual const SamplerDeck& sampler(const Deck& deck) const;
  // Rows and columns of its latents must be multiples of this.
  virtual std::int64_t side_multiple() const { return 1; }

  // f32 [B, C or more, T, h, w] in the current arena: the first C channels are the velocity
  // x0 - eps. A model that predicts something else, or counts time otherwise, converts here.
  virtual Tensor velocity(const DenoiserInput& in) = 0;

  // For TeaCache (models/step_cache.h): the first block's modulated input, whose change from step
  // to step tells how much the velocity changes. Whole on every rank, in the current arena;
  // undefined: the model has none.
  virtual Tensor cache_signal(const DenoiserInput& in) { return {}; }
  // The polynomial, highest power first, from that relative change to the velocity's.
  virtual std::vector<double> cache_polynomial() const { return {}; }

  // Operations of one velocity of a clip of latent frames of h x w, with a caption of full length.
  virtual double flops(std::int64_t frames, std::int64_t h, std::int64_t w) const = 0;

  // From now on the ranks of `group` make each velocity together, on the same input (parallel.sp);
  // null: alone. `group` outlives its use. A dry run asks for its rank and size alone.
  virtual void set_sequence_group(Communicator* group) {}
  // Exit::usage unless a latent of h x w can be shared by `ranks` ranks. By default one rank takes
  // those of side_multiple(), and no latent can be shared.
  virtual void check_sequence(std::int64_t h, std::int64_t w, std::int64_t ranks) const;
};

// Frames of pixels to latents, and back.
class VideoCodec : public ModelPart {
 public:
  // `at_once`: the most frames that the deck asks to code at once; 0: as many as there are.
  explicit VideoCodec(std::int64_t at_once) : asked_(at_once), at_once_(at_once) {}

  // The key of the deck that names its weights, and what it says.
  struct WeightsKey {
    std::string key, value;
  };
  virtual WeightsKey weights() const { return {}; }
  virtual std::string dtype_key() const { return "model.dtype"; }  // the key for bf16(), for hints
  // Warns where the weights' files contradict the deck.
  virtual void check_weights(const ModelSource& source) const {}

  virtual std::int64_t channels() const = 0;  // C of its latents
  virtual std::int64_t latent_frames(std::int64_t frames) const = 0;
  // How many frames the latents of a clip of `frames` stand for: decode() makes no others, and
  // encode() reads none behind them.
  virtual std::int64_t coded_frames(std::int64_t frames) const { return frames; }
  virtual std::int64_t pixels_a_latent() const = 0;  // pixels of one side of a latent's
  // Pixel frames that are coded independently of the others. Exit::usage from a codec that is set
  // to code clips whole, or whose chunks go on where those before them ended.
  virtual std::int64_t chunk_pixels() const = 0;
  // How many frames of a clip of `frames` could be coded at once.
  virtual std::int64_t chunk_frames(std::int64_t frames) const { return frames; }

  // A latent as the denoiser sees it, times scale, plus shift, is what the posterior gives.
  struct Normalisation {
    std::vector<float> scale, shift;  // [C]
  };
  // The values in use; 1 and 0 where they have not been measured.
  virtual Normalisation normalisation() const = 0;
  // Why they have not ("vae.scale and vae.shift are empty"), so that latents of a denoiser cannot
  // be decoded; "": they have.
  virtual std::string lacks_scale() const { return ""; }
  // `n` as keys of the deck, to show; and written into a deck, where a codec made from it finds it.
  virtual std::string describe(const Normalisation& n) const;
  virtual void set_normalisation(Deck& deck, const Normalisation& n) const {}

  // A part of a clip of `clip_frames`: pixel frames [first_frame, first_frame + frames), which are
  // the latent frames [first_latent, first_latent + latents). A part needs no other frame, so it is
  // coded as it is within the clip: whole chunks, where chunks know nothing of each other, else the
  // clip from its beginning on.
  struct Part {
    std::int64_t clip_frames = 0, first_frame = 0, frames = 0, first_latent = 0, latents = 0;
  };
  Part whole(std::int64_t frames) const {
    return {frames, 0, coded_frames(frames), 0, latent_frames(frames)};
  }
  // The smallest part that has latent frames [first, last) of a clip, 0 <= first < last <=
  // latent_frames(frames).
  virtual Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const = 0;

  // Where the noise of a posterior comes from; the same (seed, sample) gives the same latents at
  // any rank count and number of frames at once. Null in its place takes the means.
  struct Noise {
    std::uint64_t seed = 0, sample = 0;
  };
  // Frames [first, first + count) of a clip, f32 [count,H,W,3] in [-1,1] on this rank's device, in
  // the current arena.
  using FrameSource = std::function<Tensor(std::int64_t first, std::int64_t count)>;
  // A part to the latent that the denoiser sees, f32 [1,C,part.latents,h,w] in the current arena.
  // The source is asked for the part's frames alone, in order, by their numbers in the clip.
  // H and W need not be multiples of pixels_a_latent(): what is left over is cut off. Exit::data
  // for frames that are too small.
  virtual Tensor encode(const Part& part, std::int64_t height, std::int64_t width,
                        const FrameSource& source, const Noise* noise) = 0;
  // The posterior's moments instead, not normalised: f32 [1,2C,part.latents,h,w], mean and log
  // variance. Exit::usage from a codec without a posterior, as it is by default.
  virtual Tensor encode_moments(const Part& part, std::int64_t height, std::int64_t width,
                                const FrameSource& source, const Noise* noise);

  // Decoded frames f32 [count,H,W,3], in order, not clamped; `first` is the number of the first.
  // While planning they hold no values.
  using FrameSink = std::function<void(std::int64_t first, const Tensor& frames)>;
  // latent f32 [1,C,latent_frames(frames),h,w] as the denoiser makes it -> `frames` pixel frames,
  // of which all are coded_frames().
  virtual void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) = 0;
  // Operations of decoding a frame, about.
  virtual double decoding_flops(double height, double width) const = 0;

  // Frames of a clip of `frames` that are coded at once: as the deck asks, and as set now.
  std::int64_t frames_asked(std::int64_t frames) const { return at_once(frames, asked_); }
  std::int64_t frames_at_once(std::int64_t frames) const { return at_once(frames, at_once_); }
  void set_micro_batch(std::int64_t frames) { at_once_ = frames; }
  // Dry runs of encode() and decode(): what a clip of that size with `micro_batch` frames at once
  // takes of an arena of `capacity` bytes (0: endless).
  MemoryNeed plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                         std::int64_t micro_batch, std::size_t capacity = 0);
  MemoryNeed plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                         std::int64_t micro_batch, std::size_t capacity = 0);
  // The most frames at once, up to frames_asked(), with which encoding and (with `decode_too`)
  // decoding a clip of that size fit into `capacity` bytes, a 32nd of it left free; 0: not even
  // one.
  std::int64_t largest_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::size_t capacity, bool decode_too = true);
  // The same, but Exit::usage with what one frame needs where not even that fits.
  std::int64_t fit_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                               std::size_t capacity, bool decode_too = true);

 private:
  std::int64_t at_once(std::int64_t frames, std::int64_t most) const {
    const std::int64_t chunk = chunk_frames(frames);
    return most > 0 ? std::min(chunk, most) : chunk;
  }
  MemoryNeed dry_run(std::int64_t micro_batch, std::size_t capacity,
                     const std::function<void()>& work);

  std::int64_t asked_, at_once_;
};

struct EncodedTexts {
  std::vector<std::int64_t> tokens;        // of each text, its end mark included
  std::vector<std::size_t> bytes_planned;  // [rank]
  std::vector<std::size_t>
      bytes_taken;  // [rank]: weights and the arena's peak; on the CPU also messages
  std::vector<std::size_t> limits;    // [rank]: what it was allowed
  std::size_t weight_bytes_read = 0;  // from the files, by all ranks together
  double seconds = 0;
  bool stopped = false;  // on request: files may be missing
};

// A file of features, of the texts behind those of the file before and before `end`.
struct TextFile {
  std::filesystem::path path;
  std::size_t end = 0;
  std::map<std::string, std::string> metadata;
};

// How large a network is.
struct ModelSize {
  std::int64_t tensors = 0, parameters = 0;
};
ModelSize size_of(const ParameterTable& table);

// Texts to features. A denoiser has its own null caption for texts that are not encoded.
class TextEncoder {
 public:
  virtual ~TextEncoder() = default;

  virtual std::string name() const = 0;  // for messages
  // What the deck lacks to encode texts, such as "t5.weights is empty"; "": nothing.
  virtual std::string lacks() const { return ""; }
  virtual std::int64_t channels() const = 0;     // of a token's features
  virtual std::int64_t max_tokens() const = 0;   // of a text, its end mark included
  virtual ModelSize size() const { return {}; }  // zero: it has no network
  // A line of all that decides the features besides the texts: weights, tokenizer, settings.
  virtual std::string describe() const = 0;
  // Exit::data, naming the deck's key, where there are no such weights. On rank 0.
  virtual void check_weights() const {}

  // Collective, by all ranks of `world`; `texts` and `files` count on rank 0 alone. Rank 0 writes
  // the files: each is safetensors with one tensor a text, named by its place in the file ("0",
  // "1", ...), F32 [tokens, channels]. Frees all its memory before it returns. `stop`, if given, is
  // asked between micro-batches: those in flight are finished, but their file is not written.
  // Exit::usage where memory is too small, Exit::data for weights or texts that do not fit.
  virtual EncodedTexts encode(const std::vector<std::string>& texts,
                              const std::vector<TextFile>& files, const std::function<bool()>& stop,
                              MPI_Comm world) = 0;
};

}  // namespace weft
