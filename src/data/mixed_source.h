// Several stores of clips as one (data.path as a list, data.weights, data.prompt_prefixes), and
// buckets of which an epoch keeps a share (data.keep).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/clip_source.h"

namespace weft {

struct MixedStore {
  std::string name;  // its path
  std::unique_ptr<ClipSource> source;
  double weight = 0;   // its part of the samples; of all stores in one unit
  double times = 1;    // how often data.path names it
  std::string prefix;  // put before its clips' captions
};

// Buckets of one name become one, with the clips of the first store first; they are in the order in
// which they are met. A clip's permanent id is its id in its store, behind the clips of the stores
// before. An epoch has as many samples as the stores hold kept clips (`times` counted, without
// stores of weight 0), of each store its weight's share of them, in its buckets in proportion to
// kept clips. Without `weighted` the weights are those numbers of clips.
//
// Exit::usage for stores of labelled images, for a prefix where captions are features already, for
// entries of `keep` that name no bucket, and where nothing is left of a store that has a weight.
// Exit::data where buckets of one name, or the latents of two stores, are not alike.
std::unique_ptr<ClipSource> mix_stores(std::vector<MixedStore> stores, bool weighted,
                                       const DataDeck& data);

}  // namespace weft
