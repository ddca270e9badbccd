// Makes clips, one or a batch after another: references, noise, sampling, decoding, loop after loop
// (docs/generate.md, Prompts, Masks, Loops); and by dry runs of the same steps what they
// take of a rank's memory, to which batches and the codec are fitted.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/host.h"
#include "jobs/generate/clip_writer.h"
#include "jobs/generate/job.h"
#include "jobs/generate/references.h"
#include "jobs/generate/texts.h"
#include "models/flow_sampler.h"
#include "models/interfaces.h"
#include "tensor/tensor.h"

namespace weft {

// Seconds by stage, of one rank.
struct ClipTimes {
  double encode = 0, sample = 0, decode = 0;
  // On the first rank of a group: the sampler's steps, a batch's once, and those that a step cache
  // skipped.
  std::int64_t steps = 0, skipped = 0;
};

class ClipMaker {
 public:
  // `group`: the ranks that make a clip together, or MPI_COMM_NULL for a rank alone: those that
  // share its tokens (parallel.sp), the model's sequence group, and with generate.cfg_ranks = 2 as
  // many again for the other half of guidance; `branches` then has a rank of each. The group's
  // first rank has the codec's work. `expert`: SampleRequest's.
  ClipMaker(const Deck& deck, const GenerateJob& job, Denoiser& model, VideoCodec& codec,
            const PromptFeatures& features, MPI_Comm group, Communicator* branches = nullptr,
            std::function<void(bool high_noise)> expert = nullptr);

  // Collective over the group; in the current arena. On the group's first rank the frames go to
  // `writer` as they are decoded, clip after clip; returns how many are all there. The same pixels
  // at any rank count, and in any batch but for the order of sums. Throws what fails for the batch
  // as a whole, Exit::data for references that cannot be read on the first rank alone, where the
  // others return. A clip that fails by itself, as one that is not finite (Exit::non_finite), goes
  // to `failed` on the first rank, from within the handler; the writer has dropped it then.
  using Failed = std::function<void(std::int64_t item, const Error& e)>;
  std::int64_t make(const ClipBatch& batch, ClipWriter& writer, const Failed& failed);

  const ClipTimes& times() const { return times_; }

 private:
  // A clip between its loops. The writer drops one that goes before end().
  struct InHand {
    explicit InHand(ClipWriter& to) : writer(to) {}
    ~InHand() {
      if (begun) writer.drop();
    }
    InHand(const InHand&) = delete;
    InHand& operator=(const InHand&) = delete;

    ClipWriter& writer;
    bool begun = false;  // the writer has it
    std::optional<ClipTensors> tensors;
    // The frames of the loop before from which the next one goes on, as decoded.
    std::vector<float> last_frames;
    double seconds = 0;
  };

  const ClipItem& item_of(std::int64_t number) const { return job_.items[number]; }
  const Prompt& prompt_of(const ClipItem& item) const { return job_.prompts[item.prompt]; }
  bool first() const { return rank_ == 0; }
  bool on_first(const std::function<bool()>& work);

  // The steps of a loop, in their order.
  bool prepare(const ClipBatch& batch, std::int64_t loop, const std::optional<InHand>& clip);
  LatentReference encode(const ClipItem& item, std::int64_t loop, std::size_t i,
                         const std::vector<float>& last_frames);
  Tensor sample(const ClipBatch& batch, std::int64_t loop);
  void add_captions(std::int64_t clips, SampleRequest& request) const;
  Tensor pack_texts(const std::vector<TextRows>& texts, CaptionBatch& packed) const;
  void finish_loop(const ClipItem& item, std::int64_t loop, const Tensor& z, InHand& clip);
  void begin(const ClipItem& item, InHand& clip);
  void decode(const ClipItem& item, std::int64_t loop, const Tensor& z, InHand& clip);

  const Deck& deck_;
  const GenerateJob& job_;
  Denoiser& model_;
  VideoCodec& codec_;
  const PromptFeatures& features_;
  MPI_Comm group_;
  Communicator* branches_;
  std::function<void(bool)> expert_;
  int rank_ = 0, ranks_ = 1;
  std::vector<LatentReference> references_;  // of the clip in hand; a batch has none
  std::vector<MaskGroup> masks_;             // with what loops add
  std::vector<TextRows> texts_;              // [clips] of the loop in hand
  std::vector<TextRows> negatives_;          // likewise; none: guidance takes the null caption
  ClipTimes times_;
};

// The model's request for that many clips like `item`, without starting noise and prompts.
SampleRequest make_request(const Deck& deck, const ClipItem& item, std::int64_t clips);
// [clips,C,T,h,w]
Shape latent_shape(const Denoiser& model, const ClipItem& item, std::int64_t clips);
// The prompt's groups, and for each loop from 1 on a group for the frames that it continues.
std::vector<MaskGroup> all_masks(const Deck& deck, const GenerateJob& job, const ClipItem& item);
// The chunks of a loop's clip that are encoded again because later loops take latent frames from
// them; empty: none.
VideoCodec::Part part_to_go_on_from(const Deck& deck, const GenerateJob& job,
                                    const VideoCodec& codec, const ClipItem& item,
                                    std::int64_t loop);

// Whether one of two experts at a time is in memory (generate.experts), which has `bytes`: with
// "auto" where both, the codec and the steps of a clip, or memory.arena_gib, do not fit.
// Exit::usage for experts in turn of one model.
bool experts_in_turn(const Deck& deck, const GenerateJob& job, const ClipParts& parts,
                     std::size_t bytes);

// Dry run: the need of sampling that many clips like `item` together in an arena of `capacity`
// bytes (0: no limit).
MemoryNeed plan_sampling(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                         std::int64_t clips, std::size_t capacity = 0);
// How many clips like `item`, up to `most`, fit the memory; 1 even if not one fits.
std::int64_t fit_batch(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                       std::int64_t most, std::size_t capacity);
// Bytes of the latents of a batch's other clips, which wait while one is decoded.
std::size_t bytes_of_waiting(const Denoiser& model, const ClipItem& item, std::int64_t clips);

// Collective: lowers `limits` of the items `order` to what fits into an arena of `capacity` bytes
// on every rank, with a warning.
void fit_batches(const Deck& deck, const GenerateJob& job, const std::vector<std::int64_t>& order,
                 const ClipParts& parts, std::size_t capacity, BatchLimits& limits, MPI_Comm world);

// Fits the codec's micro-batch to an arena of `capacity` bytes, where this rank `decodes`: as many
// frames as the deck asks for or, with a warning, as there is memory for.
// Returns the bytes that the job's items `order`, in batches up to `limits`, are planned to take at
// most. Exit::usage where the steps of one need more, or a size has no tokens for every rank of
// parallel.sp.
std::size_t fit_memory(const Deck& deck, const GenerateJob& job,
                       const std::vector<std::int64_t>& order, const BatchLimits& limits,
                       const ClipParts& parts, std::size_t capacity, bool decodes);

// What a rank that decodes has of those items' frames in host memory at most, whatever their
// lengths: the pieces on their way into files, and beside them either what a loop goes on from or a
// piece of a reference. For the codec's micro-batch as it is set. FFmpeg's own frames, some dozens,
// are not counted.
struct FramePlan {
  std::size_t piece = 0;  // bytes of the largest one (ClipWriter)
  std::size_t bytes = 0;  // of all
};
FramePlan plan_frames(const Deck& deck, const GenerateJob& job,
                      const std::vector<std::int64_t>& order, const VideoCodec& codec);

}  // namespace weft
