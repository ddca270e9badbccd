// Which labelled images an ingest reads: pairs of files, from a list or from two folders.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "data/images/image_sizes.h"
#include "data/ingest/ingest.h"

namespace weft {

struct ImagePair {
  std::string image, labels;  // paths
  std::string name;           // the image's path as the list or the folder has it
  std::string where;          // "train.odgt, line 3", or "" of a folder: for messages
  ImageSize size;             // as the list says; 0 where it says nothing
};

// ingest.images is a folder, then ingest.labels is one too: files in them and below are matched by
// their paths from there without an ending, sorted; a picture without labels has a path there that
// does not exist, labels without a picture are left out and counted. Or it is a list, JSON lines or
// CSV, with fpath_img, fpath_segm and perhaps width and height (.odgt): paths count from
// ingest.root, by default the list's folder. Throws Exit::data, naming the line, for a list that
// cannot be read.
std::vector<ImagePair> list_images(const IngestDeck& deck, const MediaDeck& limits);

// Names of classes: one a line; or of a .csv file the column Name, of which what stands before a
// ";" counts. Throws Exit::data.
std::vector<std::string> read_class_names(const std::string& path, const MediaDeck& limits);

}  // namespace weft
