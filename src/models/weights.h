// Parameters from and to safetensors under their released names.
#pragma once

#include <filesystem>

#include "nn/parameters.h"

namespace weft {

// Every parameter of the table must be in the file with its shape, and the file must hold nothing else;
// otherwise Exit::data names the tensor, both shapes and the nearest name.
void load_weights(const std::filesystem::path& path, ParameterTable& table);

// Writes all parameters as F32. `values`, if given, replaces the trainable values (flat, such as the EMA).
void save_weights(const std::filesystem::path& path, const ParameterTable& table,
                  const Tensor& values = Tensor());

}  // namespace weft
