#include "plan/gpus.h"

#include <algorithm>
#include <vector>

#include "core/error.h"

namespace weft {
namespace {

// Data sheets: NVIDIA H100 SXM (80 GB), H200 SXM (141 GB), A100 SXM (80 GB). Memory as CUDA reports
// it: 79.2 GiB on the H100 that was measured, 139 GiB on an H200; of the A100 as of the H100.
const std::vector<Gpu>& gpus() {
  static const std::vector<Gpu> all = {
      {"h100", "H100 SXM", 85, 989e12, 67e12, 3.35e12, 450e9, 64e9, true},
      {"h200", "H200 SXM", 149, 989e12, 67e12, 4.8e12, 450e9, 64e9, false},
      {"a100", "A100 SXM", 85, 312e12, 19.5e12, 2.039e12, 300e9, 32e9, false}};
  return all;
}

// What one H100 reached (validation/results/h100.md, 2026-11-26). In bf16 from the profile of a
// training step of STDiT3-XL/2, 51 frames of 480p: 149.1 TFLOP of products in 255.7 ms; spatial and
// cross attention 6.74 TFLOP forward in 28.4 ms and 16.85 TFLOP backward in 82.3 ms (temporal
// attention is bound by memory). Attention over all tokens of a clip with heads of 128: Wan2.1's
// kernels alone, at 32,760 tokens. Convolutions are fitted to encoding and decoding 51 frames of
// 512x512. In f32 from kernels alone; no convolution was timed in f32, and its rate is that of
// products.
constexpr double products_bf16 = 583e12, attention_forward_bf16 = 237e12,
                 attention_backward_bf16 = 205e12, convolutions_bf16 = 490e12;
constexpr double wide_heads_forward_bf16 = 606e12, wide_heads_backward_bf16 = 455e12;
constexpr double products_f32 = 50.7e12, attention_forward_f32 = 20e12,
                 attention_backward_f32 = 12.5e12;
constexpr double bandwidth = 2.8e12, gaps = 0.012;
constexpr double link_bandwidth = 370e9;  // of others: docs/plan.md, Machine constants
constexpr double host_copy_bandwidth = 55.2e9;

}  // namespace

const Gpu& find_gpu(const std::string& name) {
  std::vector<std::string> names;
  for (const Gpu& g : gpus()) {
    if (g.name == name) return g;
    names.push_back(g.name);
  }
  const std::string near = nearest_name(name, names);
  throw Error(Exit::usage, fmt::format("--gpu {}: unknown GPU", name),
              fmt::format("{}known are {}; --rates FILE describes any other",
                          near.empty() ? "" : fmt::format("did you mean {}? ", near),
                          fmt::join(names, ", ")),
              __FILE__, __LINE__);
}

Rates rates_of(const Gpu& gpu, bool f32) {
  const Gpu& h100 = find_gpu("h100");
  const double compute = f32 ? gpu.peak_f32 / h100.peak_f32 : gpu.peak_bf16 / h100.peak_bf16;
  const std::string format = f32 ? "f32" : "bf16";
  Rates r;
  r.products = compute * (f32 ? products_f32 : products_bf16);
  r.attention_forward = compute * (f32 ? attention_forward_f32 : attention_forward_bf16);
  r.attention_backward = compute * (f32 ? attention_backward_f32 : attention_backward_bf16);
  if (!f32) {
    r.wide_heads_forward = compute * wide_heads_forward_bf16;
    r.wide_heads_backward = compute * wide_heads_backward_bf16;
  }
  r.convolutions = compute * (f32 ? products_f32 : convolutions_bf16);
  r.bandwidth = gpu.bandwidth / h100.bandwidth * bandwidth;
  r.gaps = gaps;
  r.origin = gpu.measured ? fmt::format("{} in {}, measured on one of them", gpu.title, format)
                          : fmt::format(
                                "{} in {}: scaled, not measured (from an {} by published peak and "
                                "bandwidth)",
                                gpu.title, format, h100.title);
  return r;
}

void set_gpu(Machine& machine, const Gpu& gpu) {
  const Gpu& h100 = find_gpu("h100");
  machine.link_bandwidth = gpu.nvlink / h100.nvlink * link_bandwidth;
  machine.host_copy_bandwidth = gpu.pcie / h100.pcie * host_copy_bandwidth;
  machine.memory_bandwidth = gpu.bandwidth / h100.bandwidth * bandwidth;
}

}  // namespace weft
