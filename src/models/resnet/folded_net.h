// Convolutional networks that are only run: what their released files keep apart from a
// convolution's weights - batch norm's running statistics, a spectral norm - is multiplied into the
// weights once they are loaded.
//
//   FoldedNet net(table, "body.");
//   const FoldedConv* stem = net.add("conv1", "bn1", 3, 64, ops::Conv::strided(7, 2));
//   ...                                   // add() all layers, then load the table:
//   source.load(table, names, bf16);      // or allocate_for_inference() and load_weights()
//   net.fold();
//   Tensor y = convolve(*stem, x, 0);     // ReLU(BN(conv(x)))
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/parameters.h"
#include "ops/conv.h"

namespace weft {

// A convolution, its norm folded in. The table owns the weights' memory.
struct FoldedConv {
  ops::Conv geometry;
  std::int64_t in = 0, out = 0;
  // After FoldedNet::fold():
  Tensor weight;  // of the model's type
  Tensor bias;    // f32 [out]; undefined if there is neither bias nor norm
};

// A batch norm that no convolution precedes.
struct FoldedNorm {
  Tensor statistics;  // f32 [4,C] (ops/norm.h), after FoldedNet::fold()
  Parameter *gamma = nullptr, *beta = nullptr;
};

// y = leaky(conv(x) + residual), leaky(v) = v < 0 ? slope v : v: slope 0 is ReLU, 1 is nothing.
// x and y [N,T,H,W,C] of the weights' type; y is in the current arena.
Tensor convolve(const FoldedConv& conv, const Tensor& x, float slope = 1,
                const Tensor& residual = {});
// y = ReLU(norm(x)), or norm(x). `y` may be x.
void normalise(const FoldedNorm& norm, const Tensor& x, bool relu, Tensor& y);

// Counts the multiply-adds of convolve() during its lifetime, also of a dry run in a planning
// arena. One at a time.
class MultiplyAddCount {
 public:
  MultiplyAddCount();
  ~MultiplyAddCount();
  MultiplyAddCount(const MultiplyAddCount&) = delete;
  MultiplyAddCount& operator=(const MultiplyAddCount&) = delete;
  double total() const { return total_; }

 private:
  friend Tensor convolve(const FoldedConv&, const Tensor&, float, const Tensor&);
  double total_ = 0;
};

// Registers layers under their released names. A norm NAME is NAME.weight, .bias, .running_mean and
// .running_var, in eval mode with eps 1e-5; files also count its batches, which counts_batches()
// (below) lets load_weights() pass over.
class FoldedNet {
 public:
  FoldedNet(ParameterTable& parameters, std::string prefix_of_names)
      : prefix(std::move(prefix_of_names)), table_(parameters) {}
  FoldedNet(const FoldedNet&) = delete;
  FoldedNet& operator=(const FoldedNet&) = delete;

  std::string prefix;  // of the names of what is added next
  // Axes of a kernel in files for what is added next: CONV.weight is [out,in/groups] (linear, 0),
  // [.., kw] (1), [.., kh, kw] (2) or [.., kt, kh, kw] (3). A kernel of kt > 1 with two axes is
  // that of a volume whose kt frames are seen as channels: [out, in kt, kh, kw], channel c kt + t.
  int axes = 2;

  // CONV.weight, CONV.bias where `bias`, and the norm behind it; norm "": none. What is returned
  // stays valid as long as this.
  const FoldedConv* add(const std::string& conv, const std::string& norm, std::int64_t in,
                        std::int64_t out, const ops::Conv& geometry, bool bias = false);
  // Several convolutions of one input as one: `out` channels of the first, then of the next.
  // Their weights stay one behind the other in memory, so nothing is copied.
  const FoldedConv* add_joined(const std::vector<std::string>& convs, std::int64_t in,
                               std::int64_t out, const ops::Conv& geometry, bool bias = false);
  // A spectral norm: CONV.weight_orig W, .weight_u, .weight_v; the weights are W / (u . (W v)), W
  // seen as [out, rest].
  const FoldedConv* add_spectral(const std::string& conv, std::int64_t in, std::int64_t out,
                                 const ops::Conv& geometry, bool bias = false);
  const FoldedNorm* add_norm(const std::string& norm, std::int64_t channels);

  // Once, after the table is loaded or drawn. In a bf16 model weights are rounded before and after.
  // Exit::data if a variance is below 0 or a spectral norm is 0, or one is not finite.
  void fold();

 private:
  struct Norm {
    Parameter *gamma, *beta, *mean, *variance;
  };
  struct Layer {
    std::unique_ptr<FoldedConv> conv;
    std::vector<Parameter*> weights, biases;  // more than one: joined
    std::unique_ptr<Norm> norm;
    Parameter *u = nullptr, *v = nullptr;
  };
  struct Front {
    std::unique_ptr<FoldedNorm> norm;
    Norm of;
  };
  Parameter* weight(const std::string& name, const FoldedConv& conv, std::int64_t out);
  Parameter* vector(const std::string& name, std::int64_t n, Init init);
  Norm norm(const std::string& name, std::int64_t channels);
  Layer& layer(std::int64_t in, std::int64_t out, const ops::Conv& geometry);
  void fold(Layer& l) const;

  ParameterTable& table_;
  std::vector<Layer> layers_;
  std::vector<Front> fronts_;
};

// Whether `name` is a norm's count of batches, which nothing reads: for WeightNames::spare.
bool counts_batches(const std::string& name);

}  // namespace weft
