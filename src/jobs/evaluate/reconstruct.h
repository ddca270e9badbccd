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

// Collective. Returns the exit code: 0, also where inputs that cannot be read were skipped; 3 if
// results could not be written or no input can be read; 75 if asked to stop. The same command makes
// what is missing.
int reconstruct(const Deck& deck, MPI_Comm world);
Command reconstruct_command();

}  // namespace weft
