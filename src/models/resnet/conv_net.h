// What convolutional networks are made of: convolutions, the batch norms behind them, how their
// parameters are named and start, and what they cost. A network is described once, by the layers
// that it adds to a ConvNet in the order of its forward pass. It can then be trained, or folded:
// run only, with each norm multiplied into the weights in front of it.
//
//   ConvNet net(table, "body.");
//   const ConvLayer* stem = net.add("conv1", "bn1", 3, 64, ops::Conv::strided(7, 2));
//   ...                                          // add() all layers, then the values:
//   table.allocate(...); load_weights(...);      // to train:
//   Var y = conv_norm(c, x, *stem, group, nn::Activation::relu);
//   source.load(table, names, bf16); net.fold(); // or only to run; conv_norm() works too
//   Tensor y = convolve(*stem, x, 0);            // ReLU(BN(conv(x)))
#pragma once

#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nn/batch_norm.h"
#include "nn/conv.h"
#include "tensor/tensor.h"

namespace weft {

// Feature maps [N,1,h,w,channels] of an image [N,1,H,W,3].
struct Feature {
  constexpr Feature(std::int64_t c = 0, int r = 1, int g = 0) : channels(c), rate(r), grid(g) {}
  std::int64_t channels;
  int rate;  // h = H / rate, rounded up; w likewise
  int grid;  // instead, where not 0: h = w = grid, whatever the image
};

// A convolution and what belongs to it; null or undefined where it has none. The table owns the
// parameters' memory.
struct ConvLayer {
  ops::Conv geometry;
  Feature in, out;
  nn::ConvWeights conv;
  nn::ConvWeights offsets;               // of a deformable convolution (nn/conv.h)
  nn::BatchNorm norm;                    // behind it
  std::vector<nn::ConvWeights> more;     // convolutions of the same input, seen as one with `conv`
  Parameter *u = nullptr, *v = nullptr;  // of a spectral norm
  // After ConvNet::fold():
  Tensor weight;  // of the model's type
  Tensor bias;    // f32 [out.channels]
  bool folded() const { return weight.defined(); }
};

// A batch norm that does not stand behind one of these convolutions.
struct NormLayer {
  nn::BatchNorm norm;
  Tensor statistics;  // f32 [4,C] (ops/norm.h), after ConvNet::fold()
};

// Layers on a tape. conv_norm() and conv_norms() take folded layers too, and then neither exchange
// nor record; their activation is ReLU or none.

// The convolution without the norm.
Var convolve(nn::Context c, const Var& x, const ConvLayer& layer);
// act(norm(conv(x)) + residual).
Var conv_norm(nn::Context c, const Var& x, const ConvLayer& layer, nn::BatchNormGroup& group,
              nn::Activation act, const Var& residual = nullptr);
// Several that do not depend on each other: one exchange between ranks for all their norms.
struct ConvNormCall {
  Var x;
  const ConvLayer* layer;
  nn::Activation act = nn::Activation::relu;
  Var residual = nullptr;
};
std::vector<Var> conv_norms(nn::Context c, std::vector<ConvNormCall> calls,
                            nn::BatchNormGroup& group);
// relu(norm(conv(x)) + norm(conv(x))) of two layers, with one exchange for both.
Var conv_norm_add(nn::Context c, ConvNormCall a, ConvNormCall b, nn::BatchNormGroup& group);

// Folded layers on tensors.

// y = leaky(conv(x) + residual), leaky(v) = v < 0 ? slope v : v: slope 0 is ReLU, 1 is nothing.
// x and y [N,T,H,W,C] of the weights' type; y is in the current arena.
Tensor convolve(const ConvLayer& layer, const Tensor& x, float slope = 1,
                const Tensor& residual = {});
// y = ReLU(norm(x)), or norm(x). `y` may be x.
void normalise(const NormLayer& layer, const Tensor& x, bool relu, Tensor& y);

// Dry runs of what calls these: the memory that `run` takes of an arena of `capacity` bytes (0: no
// limit), and the operations of its convolve(), two a multiply-add.
template <class Run>
MemoryNeed memory_of(std::size_t capacity, const Run& run) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  run();
  return arena->need();
}
class OperationCount {  // one at a time
 public:
  OperationCount();
  ~OperationCount();
  OperationCount(const OperationCount&) = delete;
  OperationCount& operator=(const OperationCount&) = delete;
  double total() const { return total_; }

 private:
  friend Tensor convolve(const ConvLayer&, const Tensor&, float, const Tensor&);
  double total_ = 0;
};
template <class Run>
double operations_of(const Run& run) {
  const OperationCount count;
  memory_of(0, run);
  return count.total();
}

// The tensor that holds a loaded parameter: f32 if there is one, else bf16; its values on the host;
// and row o of it, seen as [rows, rest], times factors[o].
const Tensor& stored(const Parameter& p);
std::vector<float> values_of(const Parameter& p);
void scale_rows(Parameter& p, std::span<const double> factors);

// How the weights of convolutions start; k x k kernels, `fan_in` = k k Cin / groups.
enum class ConvStart {
  fan_out,           // normal, deviation sqrt(2 / (k k Cout))
  fan_out_of_group,  // normal, deviation sqrt(2 / (k k Cout / groups))
  fan_in,            // normal, deviation sqrt(2 / fan_in)
  uniform,           // within 1 / sqrt(fan_in): PyTorch's default
  zero,
};

// Registers layers under their released names. What is returned stays valid as long as this.
class ConvNet {
 public:
  ConvNet(ParameterTable& parameters, std::string prefix_of_names)
      : table(parameters), prefix(std::move(prefix_of_names)) {}
  ConvNet(const ConvNet&) = delete;
  ConvNet& operator=(const ConvNet&) = delete;

  // The settings of what is added next:
  ParameterTable& table;
  std::string prefix;  // of names
  ConvStart start = ConvStart::uniform;
  float beta = 0;                  // of norms, at the start
  float momentum = 0.001f;         // of their running statistics
  bool shared_statistics = false;  // ranks may share the norms' statistics
  int matrix_group = 0;            // Parameter::group of convolutions' weights
  int vector_group = 0;            // of norms' and of biases, which take no weight decay
  bool auxiliary = false;          // it is a part that a forward may leave out
  // Axes of a kernel in files: CONV.weight is [out,in/groups] (linear, 0), [.., kw] (1),
  // [.., kh, kw] (2) or [.., kt, kh, kw] (3). A kernel of kt > 1 with two axes is that of a volume
  // whose kt frames are seen as channels: [out, in kt, kh, kw], channel c kt + t.
  int axes = 2;

  // CONV.weight, CONV.bias where `bias`, and the norm behind it (nn/batch_norm.h, add_batch_norm);
  // norm "": none. A bias starts within 1 / sqrt(fan_in).
  const ConvLayer* add(const std::string& conv, const std::string& norm, const Feature& in,
                       std::int64_t out, const ops::Conv& geometry, bool bias = false);
  // The same with CONV.conv_offset.weight and .bias, zeros, which make a 3x3 convolution
  // deformable.
  const ConvLayer* add_deformable(const std::string& conv, const std::string& norm,
                                  const Feature& in, std::int64_t out, const ops::Conv& geometry);
  // Several convolutions of one input as one, to be folded: `out` channels of the first, then of
  // the next. Their weights stay one behind the other in memory, so nothing is copied.
  const ConvLayer* add_joined(const std::vector<std::string>& convs, const Feature& in,
                              std::int64_t out, const ops::Conv& geometry, bool bias = false);
  // A spectral norm, to be folded: CONV.weight_orig W, .weight_u, .weight_v; the weights are
  // W / (u . (W v)), W seen as [out, rest].
  const ConvLayer* add_spectral(const std::string& conv, const Feature& in, std::int64_t out,
                                const ops::Conv& geometry, bool bias = false);
  // NAME.weight [in,out,2,2] and NAME.bias [out] of a transposed convolution that doubles the size
  // (nn::conv_transpose_2x2).
  nn::ConvWeights add_transposed(const std::string& name, const Feature& in, std::int64_t out);
  const NormLayer* add_norm(const std::string& name, std::int64_t channels);

  // Once, after the table is loaded or drawn, for a network that is only run: norms in eval mode
  // with eps 1e-5. In a bf16 model weights are rounded before and after. Exit::data if a variance
  // is below 0 or a spectral norm is 0, or one is not finite.
  void fold();

  // Multiply-adds of a forward of one image; `with_auxiliary`: of all layers.
  double multiply_adds(std::int64_t height, std::int64_t width, bool with_auxiliary) const;

 private:
  struct Work {
    std::int64_t weights;  // each is multiplied once a pixel of `out`
    Feature out;
    bool auxiliary;
  };
  ConvLayer& layer(const Feature& in, std::int64_t out, const ops::Conv& geometry);
  Parameter* weight(const std::string& name, const ConvLayer& layer, std::int64_t out);
  Parameter* vector(const std::string& name, std::int64_t n, const Init& init);
  nn::ConvWeights conv(const std::string& name, const ConvLayer& layer, std::int64_t out,
                       bool bias);
  nn::BatchNorm norm(const std::string& name, std::int64_t channels);

  std::deque<ConvLayer> layers_;
  std::deque<NormLayer> norms_;
  std::vector<Work> work_;
};

}  // namespace weft
