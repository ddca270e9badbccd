// How SadTalker's networks find their weights: one safetensors file holds them all, each under a
// prefix of its own ("kp_extractor.", "generator.", "audio2exp.", "audio2pose.", "face_3drecon.");
// the mapping network is a file of its own ("mapping.").
//
//   FoldedNet net(table, "face_3drecon.");
//   source.load(table, sadtalker_weight_names({"face_3drecon."}), bf16);
#pragma once

#include <string>
#include <vector>

#include "checkpoint/weights.h"

namespace weft {

// For a table whose names begin with one of `prefixes`: every parameter must be in the file. Of
// what the file has under these prefixes nothing else may be there but counts of batches
// (num_batches_tracked); other names belong to other networks and are passed over. Under a prefix
// of `unused`, such as "audio2pose.netD_motion.", anything may be there too.
WeightNames sadtalker_weight_names(std::vector<std::string> prefixes,
                                   std::vector<std::string> unused = {});

// For the mapping network: files may also have its names without "mapping.".
WeightNames mapping_weight_names();

}  // namespace weft
