// Weight files of text detectors: a released one, or a backbone of ImageNet or oCLIP.
#pragma once

#include "checkpoint/weights.h"
#include "models/dbnet/options.h"

namespace weft {

// How files may differ from the table (docs/models/dbnet.md, Weights): they may count batches
// (num_batches_tracked), and lack what only weft's batch norm keeps (_tmp_running_mean,
// _tmp_running_var, _running_iter). `prefix`: "backbone." for a file of that part, whose names are
// without it and which may hold a classifier.
WeightNames dbnet_weight_names(const std::string& prefix = "");
// Whether released files hold no such parameter: `weft export` leaves it out.
bool is_unreleased(const Parameter& p);

// What training starts from: `whole`, or else deck.weights_backbone, whichever is given; the rest
// of the table keeps its values. Exit::usage if both are given, or if `whole` has deformable
// convolutions and the table none; Exit::data names what is missing, left over or of another shape.
void load_dbnet(const std::string& whole, const DbnetDeck& deck, ParameterTable& table);

}  // namespace weft
