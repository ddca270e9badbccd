// Makes one clip after another: references, noise, sampling, decoding, loop after loop (specs/inference.md 3 to 5).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "diffusion/rectified_flow.h"
#include "infer/clip_tensors.h"
#include "infer/clip_writer.h"
#include "infer/generate_job.h"
#include "infer/prompt_features.h"
#include "infer/references.h"

namespace weft {

// Seconds by stage, of one rank.
struct ClipTimes {
  double encode = 0, sample = 0, decode = 0;
};

class ClipMaker {
 public:
  // `group`: the ranks that share a clip's tokens (parallel.sp), the model's sequence group, or MPI_COMM_NULL for a rank
  // alone. The group's first rank has the VAE's work.
  ClipMaker(const Deck& deck, const GenerateJob& job, Stdit3& model, VideoVae& vae,
            const PromptFeatures& features, MPI_Comm group);

  // Collective over the group; in the current arena. On the group's first rank the frames go to `writer` as they are decoded,
  // and it is true when they are all there. The same pixels at any rank count. Exit::data for references that cannot be read,
  // Exit::non_finite for a clip that is not finite: on the first rank alone, the others return; the writer has dropped the
  // clip then.
  bool make(const ClipItem& item, ClipWriter& writer);

  const ClipTimes& times() const { return times_; }

 private:
  // Text and references of a loop, which the first rank reads alone, on every rank of the group: what fails at one of them
  // alone would leave the others waiting. False where the first rank has failed.
  bool prepare(const ClipItem& item, std::int64_t loop, const FrameVector<float>& last_frames);
  LatentReference encode(const ClipItem& item, std::int64_t loop, std::size_t i,
                         const FrameVector<float>& last_frames);
  void begin(const ClipItem& item, ClipWriter& writer, std::optional<ClipTensors>& tensors);
  void share_text();
  void share_reference(LatentReference& reference);
  Tensor sample(const ClipItem& item, std::int64_t loop);
  void decode(const ClipItem& item, std::int64_t loop, const Tensor& z, ClipWriter& writer,
              ClipTensors* tensors, FrameVector<float>& last_frames);
  bool first() const { return rank_ == 0; }

  const Deck& deck_;
  const GenerateJob& job_;
  Stdit3& model_;
  VideoVae& vae_;
  const PromptFeatures& features_;
  MPI_Comm group_;
  int rank_ = 0, ranks_ = 1;
  std::vector<LatentReference> references_;  // of the clip in hand
  std::vector<MaskGroup> masks_;             // with what loops add
  TextRows text_;                            // of the loop in hand
  ClipTimes times_;
};

// What the model is asked for, but for the starting noise and the prompt.
SampleRequest make_request(const Deck& deck, const ClipItem& item);
// [1,C,T,h,w]
Shape latent_shape(const Deck& deck, const ClipItem& item);
// The prompt's groups, and for each loop from 1 on what it goes on from.
std::vector<MaskGroup> all_masks(const Deck& deck, const GenerateJob& job, const ClipItem& item);
// The chunks of a loop's clip that are encoded again, because later loops take latent frames of them; empty: none.
VideoVae::Part part_to_go_on_from(const Deck& deck, const GenerateJob& job, const VideoVae& vae,
                                  const ClipItem& item, std::int64_t loop);

}  // namespace weft
