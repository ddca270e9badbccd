// The GPUs that `weft plan --gpu` knows. What an H100 reaches was measured (docs/plan.md, GPUs);
// the others are scaled from it by published peaks, and every report says so.
#pragma once

#include <string>

#include "plan/step_model.h"

namespace weft {

struct Gpu {
  std::string name, title;  // "h100", "H100 SXM"
  double memory_gb;         // that CUDA reports, in 1e9 bytes
  // Published: FLOP/s of dense products in bf16 and of arithmetic in f32, B/s
  // of memory, of NVLink in one direction, and of PCIe.
  double peak_bf16, peak_f32, bandwidth, nvlink, pcie;
  bool measured;  // by weft; otherwise scaled
};

// Exit::usage for a name that is none, with the nearest.
const Gpu& find_gpu(const std::string& name);

// The rates of training in bf16, or in f32.
Rates rates_of(const Gpu& gpu, bool f32);
// Sets what of the machine depends on the GPU: memory's speed, links in a node, copies to the host.
void set_gpu(Machine& machine, const Gpu& gpu);

}  // namespace weft
