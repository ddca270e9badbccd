// `weft ingest` of labelled images: ingest.images is set.
#pragma once

#include <mpi.h>

#include "config/deck.h"

namespace weft {

// Decodes the images of ingest.images with their labels and writes them to ingest.output, a store
// of labelled images (data/images/image_store.h). Collective over `comm`.
//
// Images are decoded in pieces of 32, piece k on rank k % n, into a folder OUTPUT.parts which every
// rank sees; rank 0 joins them in their order. So the store does not depend on the number of ranks,
// byte by byte. A piece that is whole is kept if the job is interrupted, and taken again, on any
// number of ranks, unless one of its files or the settings changed.
//
// An image that cannot be read, whose labels have another size, or a class that ingest.num_classes
// does not know, is left out, named in a WARN line and counted.
//
// Returns and throws as ingest().
int ingest_images(const Deck& deck, MPI_Comm comm);

}  // namespace weft
