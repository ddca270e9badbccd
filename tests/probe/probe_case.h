// Inputs and outputs of weft_probe: safetensors files (tests/probe/README.md).
#pragma once

#include "bench/step_inputs.h"

namespace weft {

inline constexpr const char* probe_hint = "tests/probe/README.md lists the inputs of each WHAT";

class ProbeInputs : public TensorFile {
 public:
  explicit ProbeInputs(const std::string& path) : TensorFile(path, probe_hint) {}
};

// Results by name, written at the end: bf16 as F32, others as they are.
class ProbeOutputs {
 public:
  void add(const std::string& name, const Tensor& t);
  template <class Values>
  void add(const std::string& name, const Values& values, const Shape& shape) {
    using T = std::remove_cvref_t<decltype(values[0])>;
    add(name, Tensor::from_host(std::span<const T>(values), shape));
  }
  // grad.NAME of every trainable parameter.
  void add_gradients(const ParameterTable& table);
  void write(const std::string& path) const;

 private:
  std::vector<std::pair<std::string, Tensor>> tensors_;
};

}  // namespace weft
