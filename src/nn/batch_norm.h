// Batch norm whose statistics ranks share (docs/models/segmentation.md, Batch norm): one exchange
// of sums forward and one backward, for one layer or for several that do not depend on each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/nn.h"
#include "ops/norm.h"
#include "parallel/communicator.h"

namespace weft::nn {

struct BatchNorm {                               // parameters and running statistics of one layer
  Parameter *weight = nullptr, *bias = nullptr;  // [C]
  Parameter *running_mean = nullptr, *running_var = nullptr;  // [C], not trained
  // [C], [C] and [1], not trained: of the synchronised form, null in layers that never take it.
  Parameter *tmp_running_mean = nullptr, *tmp_running_var = nullptr, *running_iter = nullptr;
  float momentum = 0.001f;
};

using ops::Activation;

// How the layers of a model take their statistics: running ones; those of this rank's positions
// (ordinary batch norm); or those of all ranks' positions (the synchronised form,
// ops/norm.h).
struct BatchNormGroup {
  bool use_running = false;       // evaluation, and training with fixed statistics
  Communicator* ranks = nullptr;  // null: a rank alone, or a group used only for planning
  int size = 1;                   // ranks that share statistics; above 1: synchronised
  double blocked_seconds = 0;     // the host's waiting time in exchanges so far
  float eps = 1e-5f;
  float momentum = -1;  // of the running statistics, in place of the layers' own; below 0: theirs
};

// act(batch_norm(x) + residual), x [..., C]. Every rank of the group makes the same calls in the
// same order, backward and in recomputed parts too. Running statistics change in a forward that
// counts uses (Tape::counts_uses), once a micro-batch. Exit::data where an ordinary batch norm has
// one position only. On a tape that infers the result takes x's memory: nothing else may read x.
Var batch_norm(Context c, const Var& x, const BatchNorm& w, BatchNormGroup& group, Activation act,
               const Var& residual = nullptr);

struct BatchNormCall {
  Var x;
  const BatchNorm* w = nullptr;
  Activation act = Activation::none;
  Var residual = nullptr;  // added in front of the activation
};
// Several independent ones with one exchange forward and one backward.
std::vector<Var> batch_norms(Context c, const std::vector<BatchNormCall>& calls,
                             BatchNormGroup& group);
// act(batch_norm(a.x) + batch_norm(b.x)), likewise; the calls' own activations are none.
Var batch_norm_add(Context c, const BatchNormCall& a, const BatchNormCall& b, BatchNormGroup& group,
                   Activation act);

}  // namespace weft::nn

namespace weft {

// NAME.weight of ones, NAME.bias of `beta`, and, not trained, NAME.running_mean (0),
// NAME.running_var (1), all [C]; and, unless it is never `shared` by ranks,
// NAME._tmp_running_mean (0), NAME._tmp_running_var (1), both [C], and NAME._running_iter [1] (1).
nn::BatchNorm add_batch_norm(ParameterTable& table, const std::string& name, std::int64_t channels,
                             float beta = 0, float momentum = 0.001f, bool shared = true);

}  // namespace weft
