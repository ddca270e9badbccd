// `weft encode DECK`: a clip store of pixels becomes one of latents, with the captions'
// features.
#pragma once

#include <mpi.h>

#include "config/command.h"
#include "data/clip_source.h"
#include "models/interfaces.h"

namespace weft {

// The table [encode] of the deck.
struct EncodeDeck {
  std::string output = "latents.h5";
  std::string latents = "moments";
  std::string dtype = "f16";
  bool text = true;
};
DeckTable encode_table();

// The bucket as stored, by encode.latents and encode.dtype. `text_channels` 0: without the features
// of captions. `condition`: channels behind the latents (with_condition).
Bucket encoded_bucket(const Bucket& pixels, const EncodeDeck& deck, const VideoCodec& codec,
                      std::int64_t text_channels, std::int64_t condition);
// The model that is to be trained, if it reads something beside the latents that is made of the
// footage, too: its first frame as a picture, which the codec encodes again. Else null.
std::unique_ptr<Denoiser> with_condition(const Deck& deck);

// Collective. Returns the exit code: 0, 3 if clips failed (the others are kept in OUTPUT.parts), 75
// if asked to stop. The same command makes what is missing, and the store when all clips are there.
int encode(const Deck& deck, MPI_Comm world);
Command encode_command();

}  // namespace weft
