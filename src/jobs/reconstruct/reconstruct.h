// `weft reconstruct DECK`: footage through the VAE and back, beside the original, with PSNR, SSIM and the statistics of
// the latents, which are where vae.scale and vae.shift come from.
#pragma once

#include <mpi.h>

#include "config/deck.h"

namespace weft {

int reconstruct(const Deck& deck, MPI_Comm world);

}  // namespace weft
