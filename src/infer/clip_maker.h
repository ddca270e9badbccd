// Makes one clip after another: references, noise, sampling, decoding, loop after loop (specs/inference.md 3 to 5).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "diffusion/rectified_flow.h"
#include "infer/clip_writer.h"
#include "infer/generate_job.h"
#include "infer/prompt_features.h"
#include "infer/references.h"

namespace weft {

// Seconds by stage, of one rank.
struct ClipTimes {
  double encode = 0, sample = 0, decode = 0;
};

// A clip's frames: u8 [frames, height, width, 3].
struct ClipPixels {
  std::vector<std::uint8_t> rgb;
  std::int64_t frames = 0, height = 0, width = 0;
  ClipTensors tensors;  // with generate.tensors
};

class ClipMaker {
 public:
  // `group`: the ranks that share a clip's tokens (parallel.sp), the model's sequence group, or MPI_COMM_NULL for a rank
  // alone. The group's first rank has the VAE's work.
  ClipMaker(const Deck& deck, const GenerateJob& job, Stdit3& model, VideoVae& vae,
            const PromptFeatures& features, MPI_Comm group);

  // Collective over the group; in the current arena. The pixels, on the group's first rank; none elsewhere. The same at
  // any rank count. Exit::data for references that cannot be read, Exit::non_finite for a clip that is not finite: on the
  // first rank alone, the others return.
  ClipPixels make(const ClipItem& item);

  const ClipTimes& times() const { return times_; }

 private:
  // Text and references of a loop, which the first rank reads alone, on every rank of the group: what fails at one of them
  // alone would leave the others waiting. False where the first rank has failed.
  bool prepare(const ClipItem& item, std::int64_t loop, const std::vector<float>& last_frames);
  void share_text();
  void share_reference(LatentReference& reference);
  Tensor sample(const ClipItem& item, std::int64_t loop);
  void decode(const ClipItem& item, std::int64_t loop, const Tensor& z, ClipPixels& clip,
              std::vector<float>& last_frames);
  bool first() const { return rank_ == 0; }

  const Deck& deck_;
  const GenerateJob& job_;
  Stdit3& model_;
  VideoVae& vae_;
  const PromptFeatures& features_;
  MPI_Comm group_;
  int rank_ = 0, ranks_ = 1;
  std::vector<LatentReference> references_;  // of the clip in hand
  std::vector<MaskGroup> masks_;
  TextRows text_;  // of the loop in hand
  ClipTimes times_;
};

// What the model is asked for, but for the starting noise and the prompt.
SampleRequest make_request(const Deck& deck, const ClipItem& item);
// [1,C,T,h,w]
Shape latent_shape(const Deck& deck, const ClipItem& item);

}  // namespace weft
