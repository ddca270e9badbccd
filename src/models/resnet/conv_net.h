// What convolutional networks with batch norm are made of: a convolution without bias and the norm
// behind it, how such layers are named, start and are optimised, and what they cost.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "nn/batch_norm.h"
#include "nn/conv.h"

namespace weft {

// Feature maps [N,1,h,w,channels] of an image [N,1,H,W,3].
struct Feature {
  std::int64_t channels = 0;
  int rate = 1;  // h = H / rate, rounded up; w likewise
  int grid = 0;  // instead, where not 0: h = w = grid, whatever the image
};

struct ConvNorm {
  nn::ConvWeights conv;
  nn::ConvWeights offsets;  // of a deformable convolution (nn/conv.h); none in others
  nn::BatchNorm norm;
  ops::Conv geometry;
  Feature out;
};

// The convolution without the norm.
Var convolve(nn::Context c, const Var& x, const ConvNorm& layer);
// act(norm(conv(x)) + residual).
Var conv_norm(nn::Context c, const Var& x, const ConvNorm& layer, nn::BatchNormGroup& group,
              nn::Activation act, const Var& residual = nullptr);
// Several that do not depend on each other: one exchange between ranks for all their norms.
struct ConvNormCall {
  Var x;
  const ConvNorm* layer;
  nn::Activation act = nn::Activation::relu;
};
std::vector<Var> conv_norms(nn::Context c, const std::vector<ConvNormCall>& calls,
                            nn::BatchNormGroup& group);

// How the weights of convolutions start; k x k kernels, `fan_in` = k k Cin / groups.
enum class ConvStart {
  fan_out,           // normal, deviation sqrt(2 / (k k Cout))
  fan_out_of_group,  // normal, deviation sqrt(2 / (k k Cout / groups))
  fan_in,            // normal, deviation sqrt(2 / fan_in)
  uniform,           // within 1 / sqrt(fan_in): PyTorch's default
  zero,
};

// Registers the layers of a network, in the order of the forward pass.
class ConvNet {
 public:
  ConvNet(ParameterTable& parameters, std::string prefix_of_names)
      : table(parameters), prefix(std::move(prefix_of_names)) {}

  ParameterTable& table;
  std::string prefix;  // of all names
  ConvStart start = ConvStart::fan_out;
  float beta = 0;                // of norms, at the start
  float momentum = 0.001f;       // of their running statistics
  bool rank_statistics = false;  // norms whose statistics ranks never share
  int matrix_group = 0;          // Parameter::group of convolutions' weights
  int vector_group = 0;          // of norms' and of biases, which take no weight decay
  bool auxiliary = false;        // what is registered now is a part that a forward may leave out

  // CONV.weight and the norm NORM.
  ConvNorm add(const std::string& conv, const std::string& norm, const Feature& in,
               std::int64_t out, const ops::Conv& geometry);
  // CONV.weight without a norm; with CONV.bias, which starts within 1 / sqrt(fan_in), where `bias`.
  ConvNorm add_plain(const std::string& conv, const Feature& in, std::int64_t out,
                     const ops::Conv& geometry, bool bias = false);
  // NAME.weight [in,out,2,2] and NAME.bias [out] of a transposed convolution that doubles the size
  // (nn::conv_transpose_2x2).
  nn::ConvWeights add_transposed(const std::string& name, const Feature& in, std::int64_t out);
  // CONV.conv_offset.weight and .bias, zeros, which make that 3x3 convolution deformable.
  void make_deformable(const std::string& conv, const Feature& in, ConvNorm& layer);
  nn::BatchNorm add_norm(const std::string& name, std::int64_t channels);
  // NAME.weight and NAME.bias of a 1x1 convolution; the bias starts within 1 / sqrt(in).
  nn::ConvWeights add_classifier(const std::string& name, const Feature& in, std::int64_t out);

  // Multiply-adds of a forward of one image; `with_auxiliary`: of all layers.
  double multiply_adds(std::int64_t height, std::int64_t width, bool with_auxiliary) const;

 private:
  Parameter& add_bias(const std::string& name, std::int64_t out, double fan_in);
  struct Work {
    std::int64_t weights;  // each is multiplied once a pixel of `out`
    Feature out;
    bool auxiliary;
  };
  nn::ConvWeights weights(const std::string& name, const Feature& in, const Feature& out,
                          const ops::Conv& geometry);
  std::vector<Work> work_;
};

}  // namespace weft
