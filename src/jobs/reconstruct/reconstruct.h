// `weft reconstruct DECK`: footage through the VAE and back, beside the original, with PSNR, SSIM
// and the statistics of the latents, from which vae.scale and vae.shift follow.
#pragma once

#include <mpi.h>

#include "config/command.h"
#include "media/similarity.h"

namespace weft {

// The table [reconstruct] of the deck.
struct ReconstructDeck {
  std::vector<std::string> inputs;
  std::string output;
  std::int64_t frames = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
};
DeckTable reconstruct_table();

int reconstruct(const Deck& deck, MPI_Comm world);
Command reconstruct_command();

}  // namespace weft
