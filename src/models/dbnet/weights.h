// What the training of a text detector starts from: a released file, or a backbone of ImageNet or
// oCLIP.
#pragma once

#include "models/dbnet/dbnet.h"

namespace weft {

// Reads `whole`, or else deck.weights_backbone, whichever is given; the rest of the table keeps its
// values. A file of the backbone has its names without "backbone." and may hold a classifier; it
// may lack the offsets of deformable convolutions, which then start at 0. Exit::usage if both are
// given, or if `whole` has deformable convolutions and the table none; Exit::data names what is
// missing, left over or of another shape.
std::string load_dbnet(const std::string& whole, const DbnetDeck& deck, ParameterTable& table);

}  // namespace weft
