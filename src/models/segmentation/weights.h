// Weight files of semantic segmentation: the released pair, one file of both, an encoder of
// ImageNet.
#pragma once

#include "checkpoint/weights.h"
#include "models/segmentation/options.h"

namespace weft {

// How files may differ from the table (docs/models/segmentation.md, Weights): they may lack what
// only training over several ranks reads of norms (_tmp_running_mean, _tmp_running_var,
// _running_iter), may count batches (num_batches_tracked), and may hold what the encoder's
// classifier of ImageNet needs. `prefix`: "encoder." or "decoder." for a file of that half, whose
// names are without it.
WeightNames segmentation_weight_names(const std::string& prefix = "");

// Reads `whole`, a file with encoder. and decoder. in front of names, or else encoder and decoder
// from files of their own, whichever are given (model.weights, model.weights_encoder,
// model.weights_decoder). What no file is given for keeps its values. Exit::usage if both are
// given; Exit::data names what is missing, left over or of another shape. Returns what was read,
// for the log; "" for nothing.
std::string load_segmentation(const std::string& whole, const SegmentationDeck& deck,
                              ParameterTable& table);

}  // namespace weft
