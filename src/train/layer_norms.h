// The gradient's norm in each layer (train.layer_norms_every), which shows where a gradient grows
// or vanishes before the norm of all of it does. Each rank squares its own part of the summed
// gradient, and one all-reduce of a number a layer joins the parts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/parameters.h"
#include "parallel/communicator.h"
#include "tensor/tensor.h"
#include "train/metrics/step_report.h"

namespace weft {

// The layer that a parameter belongs to: its name up to the first number in it
// ("spatial_blocks.3.attn.qkv.weight": "spatial_blocks.3"), or without its last part
// ("x_embedder.proj.weight": "x_embedder.proj").
std::string layer_of(std::string_view parameter);

class LayerNorms {
 public:
  // Norms of the trainable parameters. `state` says which part of each bucket is this rank's.
  LayerNorms(const ParameterTable& table, const OptimizerState& state, Communicator& comm);

  // In the order of the forward.
  const std::vector<std::string>& layers() const { return layers_; }
  // Sums the squares of the gradient, once it has been summed over ranks and before the update.
  // Collective; returns the ticket of the sum over ranks, 0 where there is none.
  Communicator::Ticket send();
  // [layer] Sums of squares, as HostCopy brings them, once the ticket has been waited for.
  std::span<const double> fetch() { return host_.fetch(squares_); }

 private:
  // Neighbouring parameters of one layer: elements of this rank's part of a bucket.
  struct Stretch {
    int bucket = 0;
    std::int64_t begin = 0, end = 0;
    std::int64_t layer = 0;
  };

  const OptimizerState& state_;
  Communicator& comm_;
  std::vector<std::string> layers_;
  std::vector<Stretch> stretches_;
  Tensor squares_;  // f64 [layer]
  HostCopy host_;
};

}  // namespace weft
