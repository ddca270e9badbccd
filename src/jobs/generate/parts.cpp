#include "jobs/generate/parts.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "data/synthetic.h"
#include "models/registry.h"

namespace weft {

Deck with_scale_of_latents(const Deck& deck, MPI_Comm world) {
  if (deck.data.path.empty() || is_synthetic(deck.data.path)) return deck;
  const std::unique_ptr<VideoCodec> codec = make_codec(deck);
  if (codec->lacks_scale().empty() || make_denoiser(deck)->channels() != codec->channels())
    return deck;
  const auto channels = static_cast<std::size_t>(codec->channels());
  std::vector<float> found(2 * channels + 1);  // whether, scale, shift
  if (log::rank() == 0) {
    const auto source = open_clip_source(deck.data, deck.media);
    const Bucket& first = source->buckets().front();
    if (first.scale.size() == channels && first.shift.size() == channels) {
      found[0] = 1;
      std::ranges::copy(first.scale, found.begin() + 1);
      std::ranges::copy(first.shift, found.begin() + 1 + std::ssize(first.scale));
    }
  }
  MPI_Bcast(found.data(), static_cast<int>(found.size()), MPI_FLOAT, 0, world);
  if (found[0] == 0) return deck;
  if (log::rank() == 0) log::info("codec     scale and shift of {}", deck.data.path);
  const auto shift = found.begin() + 1 + codec->channels();
  Deck filled = deck;
  codec->set_normalisation(filled, {{found.begin() + 1, shift}, {shift, found.end()}});
  return filled;
}

ClipParts::ClipParts(const Deck& deck)
    : denoiser(make_denoiser(deck)), codec(make_codec(deck)), texts(make_text_encoder(deck)) {
  result_tables = denoiser->result_tables();
  result_tables.merge(codec->result_tables());
  if (texts) result_tables.merge(texts->result_tables());
  // Three channels are pixels, unless they are the codec's.
  on_pixels = denoiser->channels() == PixelCodec::pixel_channels &&
              codec->channels() != PixelCodec::pixel_channels;
  if (on_pixels) {
    codec = std::make_unique<PixelCodec>();
    return;
  }
  WEFT_CHECK(denoiser->channels() == codec->channels(), Exit::usage,
             "model.in_channels = 3 is a model that works on pixels",
             "the model's latents have {} channels, the {}'s have {}", denoiser->channels(),
             codec->name(), codec->channels());
  WEFT_CHECK(codec->lacks_scale().empty(), Exit::usage,
             "name the store that `weft encode` wrote as data.path, or set both keys as `weft "
             "inspect STORE` tells them",
             "{}: latents of the model cannot be decoded", codec->lacks_scale());
}

void ClipParts::check_texts() const {
  if (!encodes_texts()) return;
  WEFT_CHECK(texts->channels() == denoiser->caption_channels() &&
                 texts->max_tokens() <= denoiser->max_caption(),
             Exit::usage,
             "set model.caption_channels to the encoder's channels, and model.model_max_length to "
             "no less than its longest text",
             "{}'s features are [{}, {}], the model takes [{}, {}]", texts->name(),
             texts->max_tokens(), texts->channels(), denoiser->max_caption(),
             denoiser->caption_channels());
}

}  // namespace weft
