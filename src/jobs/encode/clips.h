// Clips of pixels to moments or latents: ranks take clips from one queue, the longest first, and each writes a part.
#pragma once

#include <mpi.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "jobs/encode/encode.h"
#include "jobs/encode/parts.h"
#include "models/video_vae/video_vae.h"

namespace weft {

// The bucket as it is stored: encode.latents and encode.dtype. `text_channels` 0: without captions' features.
Bucket encoded_bucket(const Bucket& pixels, const EncodeDeck& deck, const VideoVae& vae,
                      std::int64_t text_channels);

// Arena bytes that the largest clip takes, with micro-batches that fit `capacity`: set in `vae`. Exit::usage where nothing fits.
std::size_t fit_encoding(VideoVae& vae, const std::vector<Bucket>& buckets, std::size_t capacity);

// Values as the store has them, f16 or f32. Exit::non_finite where one is not finite, Exit::data where f16 cannot hold it:
// "`what` encodes to ...".
std::vector<std::byte> stored_values(std::span<const float> values, DType dtype,
                                     const std::string& what);

struct EncodeTimes {
  std::int64_t clips = 0, frames = 0;
  double busy = 0, waited = 0;  // seconds: encoding, and waiting for clips to be read
};

// Collective. Encodes what `parts` does not have yet; in the current arena. Noise is a function of (run.seed, sample id), and the
// id a clip's running number over all buckets: the same latents at any rank count. Reading the next clip overlaps.
// `stop`, asked between clips, ends this rank's work early.
EncodeTimes encode_clips(const Deck& deck, const ClipSource& source, VideoVae& vae,
                         EncodeParts& parts, const std::function<bool()>& stop, MPI_Comm world);

}  // namespace weft
