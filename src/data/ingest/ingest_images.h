// `weft ingest` of labelled images (ingest.images is set): pairs of files from a list or from two
// folders in, a store of them out.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "config/deck.h"
#include "data/images/labelled_images.h"
#include "data/ingest/ingest.h"

namespace weft {

// Names of classes: one a line; or of a .csv file the column Name, of which what stands before a
// ";" counts. Throws Exit::data.
std::vector<std::string> read_class_names(const std::string& path, const MediaDeck& limits);

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
