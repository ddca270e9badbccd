// Makes clips, one or a batch after another: references, noise, sampling, decoding, loop after loop
// (docs/generate_reference.md, Prompts, Masks, Loops).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/error.h"
#include "jobs/generate/clip_batches.h"
#include "jobs/generate/clip_tensors.h"
#include "jobs/generate/clip_writer.h"
#include "jobs/generate/job.h"
#include "jobs/generate/prompts/prompt_features.h"
#include "jobs/generate/prompts/references.h"
#include "models/flow_sampler.h"
#include "models/interfaces.h"

namespace weft {

// Seconds by stage, of one rank.
struct ClipTimes {
  double encode = 0, sample = 0, decode = 0;
};

class ClipMaker {
 public:
  // `group`: the ranks that share a clip's tokens (parallel.sp), the model's sequence group, or
  // MPI_COMM_NULL for a rank alone. The group's first rank has the codec's work.
  ClipMaker(const Deck& deck, const GenerateJob& job, Denoiser& model, VideoCodec& codec,
            const PromptFeatures& features, MPI_Comm group);

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
  // The state of a clip between its loops.
  struct InHand {
    std::optional<ClipTensors> tensors;
    FrameVector<float>
        last_frames;  // of the loop before, what the next one goes on from, as decoded
    double seconds = 0;
    bool begun = false;
  };

  const ClipItem& item_of(std::int64_t number) const {
    return job_.items[static_cast<std::size_t>(number)];
  }
  // Brings the texts and references of a loop to every rank of the group. Only the first rank reads
  // them: an error on another one would leave the rest waiting. False if the first rank has failed.
  bool prepare(const ClipBatch& batch, std::int64_t loop, const FrameVector<float>& last_frames);
  LatentReference encode(const ClipItem& item, std::int64_t loop, std::size_t i,
                         const FrameVector<float>& last_frames);
  void begin(const ClipItem& item, ClipWriter& writer, std::optional<ClipTensors>& tensors);
  void share_text(TextRows& text);
  void share_reference(LatentReference& reference);
  void add_captions(std::int64_t clips, SampleRequest& request) const;
  Tensor sample(const ClipBatch& batch, std::int64_t loop);
  void decode(const ClipItem& item, std::int64_t loop, const Tensor& z, ClipWriter& writer,
              InHand& clip);
  // Turns a loop's latents into frames, and ends the clip with the last loop.
  void finish_loop(const ClipItem& item, std::int64_t loop, const Tensor& z, ClipWriter& writer,
                   InHand& clip);
  bool first() const { return rank_ == 0; }

  const Deck& deck_;
  const GenerateJob& job_;
  Denoiser& model_;
  VideoCodec& codec_;
  const PromptFeatures& features_;
  MPI_Comm group_;
  int rank_ = 0, ranks_ = 1;
  std::vector<LatentReference> references_;  // of the clip in hand; a batch has none
  std::vector<MaskGroup> masks_;             // with what loops add
  std::vector<TextRows> texts_;              // [clips] of the loop in hand
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

}  // namespace weft
