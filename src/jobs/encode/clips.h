// Clips of pixels to moments or latents, as a list job: each rank writes a part.
#pragma once

#include <future>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "jobs/encode/encode.h"
#include "jobs/encode/parts.h"
#include "jobs/engine/list_job.h"
#include "models/interfaces.h"

namespace weft {

// The bucket as stored, by encode.latents and encode.dtype. `text_channels` 0: without the features
// of captions.
Bucket encoded_bucket(const Bucket& pixels, const EncodeDeck& deck, const VideoCodec& codec,
                      std::int64_t text_channels);

// Arena bytes that the largest clip takes, with micro-batches that fit `capacity`: set in `codec`.
// Exit::usage where nothing fits.
std::size_t fit_encoding(VideoCodec& codec, const std::vector<Bucket>& buckets,
                         std::size_t capacity);

// Values as the store has them, f16 or f32. Exit::non_finite where one is not finite, Exit::data
// where f16 cannot hold it:
// "`what` encodes to ...".
std::vector<std::byte> stored_values(std::span<const float> values, DType dtype,
                                     const std::string& what);

// All clips, each by its running number over all buckets (its sample id). `job`: all that decides
// the latents.
std::vector<ListItem> encode_items(const std::vector<Bucket>& buckets, const std::string& job);

// Encodes clips, in the current arena. Noise is a function of (run.seed, sample id): the same
// latents at any rank count. The next clip is read while one is encoded.
class EncodeJob : public ListJob {
 public:
  EncodeJob(const Deck& deck, const ClipSource& source, VideoCodec& codec,
            const ListEngine& engine);
  void prepare(const ItemBatch& samples) override;
  void make(const ItemBatch& samples, ItemResults& results) override;
  void flush(ItemResults&) override { writer_.close(); }
  // For the report: frames, and seconds spent waiting for clips.
  nlohmann::ordered_json share() const;

 private:
  struct Place {
    int bucket = 0;
    std::int64_t index = 0;  // in the bucket
  };
  Place place_of(std::int64_t sample) const;
  std::vector<std::byte> encode(const std::vector<std::byte>& clip, const Bucket& bucket,
                                std::int64_t sample, const std::string& what);

  const Deck& deck_;
  const ClipSource& source_;
  VideoCodec& codec_;
  const ListEngine& engine_;
  PartWriter writer_;
  std::map<std::int64_t, std::future<std::vector<std::byte>>> reading_;  // by sample id
  std::int64_t frames_ = 0;
  double waited_ = 0;
};

}  // namespace weft
