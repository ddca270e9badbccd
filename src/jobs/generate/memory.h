// How much of a rank's arena the clips of a job take, and how the codec is made to fit.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <vector>

#include "core/host.h"
#include "jobs/generate/clip_batches.h"
#include "jobs/generate/job.h"
#include "jobs/generate/parts.h"
#include "tensor/tensor.h"

namespace weft {

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
// lengths (jobs/generate/frame_memory.h): the pieces on their way into files, and beside them
// either what a loop goes on from or a piece of a reference. For the codec's micro-batch as it is
// set. FFmpeg's own frames, some dozens, are not counted.
struct FramePlan {
  std::size_t piece = 0;  // bytes of the largest one (ClipWriter)
  std::size_t bytes = 0;  // of all
};
FramePlan plan_frames(const Deck& deck, const GenerateJob& job,
                      const std::vector<std::int64_t>& order, const VideoCodec& codec);

}  // namespace weft
