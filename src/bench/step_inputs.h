// The file that `weft bench step --inputs` takes: one training batch of STDiT3 as safetensors.
//   x [B,C,T,H,W] the clean latent, y [B,1,L,caption_channels], mask [rows,L] whose rows divide B
//   (1: a token of the caption; absent: all are), x_mask [B,T] (0: a given frame; absent: none),
//   fps, height, width, timestep [B], noise of x's shape.
// Masks are I64, I32, U8 or BOOL, all others F32, F16 or BF16. The first height and width, in
// pixels, count for the whole batch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "train/task.h"

namespace weft {

inline constexpr const char* given_hint = "docs/gpu.md lists the tensors of --inputs";

// The tensors of a safetensors file by name, checked against the shapes that are wanted. What is
// missing or does not fit throws Exit::data with `hint`.
class TensorFile {
 public:
  TensorFile(const std::string& path, std::string hint)
      : file_(SafetensorsFile::open(path)), hint_(std::move(hint)) {}

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
  std::string hint_;
};

// x, y, captions, fps, size and frame mask of one batch; in.timestep is the caller's.
struct StepInputs {
  Stdit3Input in;
  Tensor x, y;
  CaptionBatch captions;
};

StepInputs read_step_inputs(const TensorFile& file, const Stdit3Config& model);

// The sizes of x in such a file, and the training of a deck's STDiT3 whose every micro-batch is the
// file's, whatever the clips are.
Shape given_shape(const std::string& path);
std::unique_ptr<TrainingTask> make_given_task(const Deck& deck, const std::string& path);

}  // namespace weft
