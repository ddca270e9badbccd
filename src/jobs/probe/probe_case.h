// Inputs and outputs of `weft probe`, the inputs also of `weft bench step`: safetensors files,
// checked against the model (docs/probe.md).
#pragma once

#include "checkpoint/safetensors.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"

namespace weft {

// Tensors of the inputs file, checked against the shapes that the model will assume.
inline constexpr const char* probe_hint = "see docs/probe.md for the inputs of each probe";

class ProbeInputs {
 public:
  explicit ProbeInputs(const std::string& path) : file_(SafetensorsFile::open(path)) {}

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  const std::vector<std::int64_t>& shape(const std::string& name) const {
    return file_.at(name).shape;
  }
  // Exit::data if it has not `rank` dimensions.
  Shape shape(const std::string& name, std::size_t rank) const;
  // On this rank's device. Exit::data if the tensor has another shape.
  Tensor f32(const std::string& name, const Shape& wanted) const;
  // A [count] tensor of f32, on the host.
  std::vector<float> numbers(const std::string& name, std::int64_t count) const;
  std::vector<std::int64_t> i64(const std::string& name) const {
    return file_.read_i64(file_.at(name));
  }
  // The bytes of a U8 tensor.
  std::vector<std::uint8_t> u8(const std::string& name) const;

 private:
  SafetensorsFile file_;
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

// x, y, captions, fps, size and frame mask of one batch; in.timestep is the caller's.
struct ProbeCase {
  Stdit3Input in;
  Tensor x, y;
  CaptionBatch captions;
};

ProbeCase read_case(const ProbeInputs& inputs, const Stdit3Config& model);

}  // namespace weft
