// Parameters of convolutional models, with the start that PyTorch gives them.
#pragma once

#include <string>

#include "nn/conv.h"

namespace weft {

// NAME.weight [out, in, kernel...] and, with `bias`, NAME.bias [out], both uniform within 1 / sqrt(fan in). `kernel` is
// {k, k} or {k, k, k}.
nn::ConvWeights add_conv(ParameterTable& table, const std::string& name, std::int64_t out,
                         std::int64_t in, std::initializer_list<std::int64_t> kernel, bool bias,
                         bool trainable = true);
// NAME.weight [out, in] and NAME.bias [out], likewise.
nn::Linear add_dense(ParameterTable& table, const std::string& name, std::int64_t out,
                     std::int64_t in, bool trainable = true);
// NAME.weight [C] of ones and NAME.bias [C] of zeros.
nn::NormWeights add_norm(ParameterTable& table, const std::string& name, std::int64_t channels,
                         bool trainable = true);

}  // namespace weft
