// What makes a clip: the parts that the registry gives for model.name.
#pragma once

#include <mpi.h>

#include <memory>

#include "config/deck.h"
#include "jobs/generate/pixel_codec.h"
#include "models/interfaces.h"

namespace weft {

// Collective. The deck, with the codec's scale and shift as the latents of data.path have them
// where it leaves them empty.
Deck with_scale_of_latents(const Deck& deck, MPI_Comm world);

// The model's parts, still without weights. They stay where they are.
struct ClipParts {
  // Exit::usage where the denoiser's latents are neither pixels nor the codec's, or the codec has
  // no scale.
  explicit ClipParts(const Deck& deck);

  std::unique_ptr<Denoiser> denoiser;
  std::unique_ptr<VideoCodec> codec;
  std::unique_ptr<TextEncoder> texts;  // null: every text is the null caption
  // All that decides a clip besides its weights.
  ResultTables result_tables;

  bool on_pixels = false;  // the denoiser's latents are the frames themselves
  // Exit::usage where the denoiser cannot take the encoder's features.
  void check_texts() const;
  // Whether texts are encoded.
  bool encodes_texts() const { return texts != nullptr && texts->lacks().empty(); }
};

}  // namespace weft
