// `weft reconstruct DECK`: footage through the VAE and back, beside the original, with PSNR, SSIM
// and the statistics of the latents, from which vae.scale and vae.shift follow.
#pragma once

#include <mpi.h>

#include "config/command.h"

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

// How close a picture is to another one, in 256 levels.
// 10 log10(255^2 / mean squared error) over all values of two [height, width, 3] frames, in dB;
// infinite for equal ones.
double psnr(const std::uint8_t* a, const std::uint8_t* b, std::int64_t height, std::int64_t width);

// Structural similarity of two [height, width, 3] frames, the mean of the three channels (Wang et
// al., "Image quality assessment: from error visibility to structural similarity", 2004), as
// scikit-image's structural_similarity computes it by default: windows of 7x7, all of equal weight,
// unbiased variances, K1 = 0.01, K2 = 0.03, data range 255, the mean over the windows that lie
// within the frame. Both sides must be at least 7.
double ssim(const std::uint8_t* a, const std::uint8_t* b, std::int64_t height, std::int64_t width);

}  // namespace weft
