// Every operation with a GPU side, on inputs of real and of awkward sizes: what `weft bench kernels` checks against the
// CPU side and then times. One kernel_cases_*.cpp a header of ops/.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace weft {

// `small`: some seconds for all cases together on the stand-in for CUDA, with sizes that divide nothing (tests, sanitizers).
// `real`: the shapes of STDiT3-XL/2 at 51 frames 480p (T 15, S 1590) and 16 frames 256x256 (T 4, S 256).
enum class CaseSize { small, real };

// What bounds the operation: the ceiling that its time is compared with.
enum class Bound { bandwidth, tensor_cores };

struct KernelCase {
  std::string op;     // "layer_norm_modulate_forward"
  std::string shape;  // "B2 T15 S1590 C1152"
  DType dtype = DType::f32;
  std::vector<Tensor> inputs;  // in host memory
  // Calls the operation on `in`, which are the inputs on one device (it may change them), and returns what it wrote.
  // Outputs come from the current arena.
  std::function<std::vector<Tensor>(std::vector<Tensor>& in)> run;
  double bytes =
      0;  // least traffic with the device's memory: every input read and every output written once
  double flops = 0;  // useful operations (no padding, no recomputation)
  Bound bound = Bound::bandwidth;
  // Largest |device - CPU| allowed, as a share of the largest |CPU| of the same output. For bf16 derived from 2^-8.
  double tolerance = 1e-5;
};

std::vector<KernelCase> norm_cases(CaseSize size);
std::vector<KernelCase> attention_cases(CaseSize size);
std::vector<KernelCase> temporal_cases(CaseSize size);
std::vector<KernelCase> matmul_cases(CaseSize size);
std::vector<KernelCase> pointwise_cases(CaseSize size);
std::vector<KernelCase> wire_cases(CaseSize size);
std::vector<KernelCase> embed_cases(CaseSize size);
std::vector<KernelCase> loss_cases(CaseSize size);
std::vector<KernelCase> optimizer_cases(CaseSize size);
std::vector<KernelCase> conv_cases(CaseSize size);
std::vector<KernelCase> vae_cases(CaseSize size);
std::vector<KernelCase> text_cases(CaseSize size);
std::vector<KernelCase> vae_loss_cases(CaseSize size);

// Host tensor of the type, normal with the given deviation, a function of `seed`.
Tensor random_tensor(const Shape& shape, DType dtype, std::uint64_t seed, float deviation = 1.0f,
                     float mean = 0.0f);

}  // namespace weft
