// Asks cuDNN through kernels/conv/convolution_cudnn.cu for the convolutions of VAE, VGG16 and PatchGAN, and prints as JSON which
// engine each gets. Run by plans.sh.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "conv/convolution.cuh"
#include "core/error.h"
#include "tensor/arena.h"
#include "tensor/device.h"

namespace weft {
cudaStream_t cuda_stream(Stream) { return nullptr; }
}  // namespace weft

namespace {

using namespace weft;
using kernels::Convolution;
using kernels::Pass;
using Sizes = std::array<std::int64_t, 3>;

struct Layer {
  const char* name;
  std::int64_t samples, in, out;
  Sizes size, kernel, before, after, stride;
  bool residual, phases;  // has a residual; is the phases' convolution, without a bias
};

constexpr Sizes none{0, 0, 0}, one{1, 1, 1}, rim{0, 1, 1}, two{1, 2, 2}, square{1, 3, 3},
    cube{3, 3, 3}, causal{2, 1, 1};
const Layer layers[] = {
    {"2D 128 at 480p", 4, 128, 128, {1, 480, 856}, square, rim, rim, one, true, false},
    {"2D 512 at 60x107", 4, 512, 512, {1, 60, 107}, square, rim, rim, one, true, false},
    {"2D 256 to 128", 4, 256, 128, {1, 480, 856}, square, rim, rim, one, false, false},
    {"pixels to 128", 4, 3, 128, {1, 480, 856}, square, rim, rim, one, false, false},
    {"128 to pixels", 4, 128, 3, {1, 480, 856}, square, rim, rim, one, false, false},
    {"512 to moments", 4, 512, 8, {1, 60, 107}, square, rim, rim, one, false, false},
    {"latents to 512", 4, 4, 512, {1, 60, 107}, square, rim, rim, one, false, false},
    {"down 128", 4, 128, 128, {1, 480, 856}, square, none, rim, two, false, false},
    {"down 512", 4, 512, 512, {1, 120, 214}, square, none, rim, two, false, false},
    {"up 512", 4, 512, 2048, {1, 60, 107}, two, rim, rim, one, false, true},
    {"up 256", 1, 256, 1024, {1, 240, 428}, two, rim, rim, one, false, true},
    {"up, a band", 1, 256, 1024, {1, 100, 640}, two, {0, 0, 1}, {0, 0, 1}, one, false, true},
    {"up, the first band", 1, 256, 1024, {1, 100, 640}, two, rim, {0, 0, 1}, one, false, true},
    {"causal 128", 1, 128, 128, {17, 60, 107}, cube, causal, rim, one, true, false},
    {"causal 512", 1, 512, 512, {5, 60, 107}, cube, causal, rim, one, true, false},
    {"causal 4 to 128", 1, 4, 128, {20, 60, 107}, cube, causal, rim, one, false, false},
    {"causal 512 to 8", 1, 512, 8, {5, 60, 107}, cube, causal, rim, one, false, false},
    {"causal 128 to 4", 1, 128, 4, {20, 60, 107}, cube, causal, rim, one, false, false},
    {"causal, half the frames",
     1,
     128,
     128,
     {20, 60, 107},
     cube,
     one,
     rim,
     {2, 1, 1},
     false,
     false},
    {"causal, 4 clips", 4, 256, 256, {9, 32, 32}, cube, causal, rim, one, true, false},
    {"PatchGAN's first", 4, 3, 64, {1, 256, 256}, {1, 4, 4}, rim, rim, two, false, false},
    {"PatchGAN's last", 4, 512, 1, {1, 31, 31}, {1, 4, 4}, rim, rim, one, false, false},
    {"VGG16's first", 4, 3, 64, {1, 256, 256}, square, rim, rim, one, false, false}};

Convolution convolution(const Layer& l, Pass pass, DType type) {
  Convolution c;
  c.pass = pass;
  c.type = type;
  c.spatial = l.size[0] > 1 ? 3 : 2;
  c.samples = l.samples;
  c.in_channels = l.in;
  c.out_channels = l.out;
  c.in = l.size;
  c.kernel = l.kernel;
  c.before = l.before;
  c.after = l.after;
  c.stride = l.stride;
  for (std::size_t d = 0; d < 3; ++d)
    c.out[d] = (c.in[d] + c.before[d] + c.after[d] - c.kernel[d]) / c.stride[d] + 1;
  c.bias = pass == Pass::forward && !l.phases;
  c.residual = c.bias && l.residual;
  return c;
}

std::int64_t& number(const char* name) {
  static void* const library = dlopen("libcudnn.so.9", RTLD_NOW);
  return *static_cast<std::int64_t*>(dlsym(library, name));
}

}  // namespace

int main() {
  constexpr const char* passes[] = {"forward", "backward input", "backward weight"};
  int without = 0;
  const auto arena = Arena::planning(DeviceKind::cuda);  // of the workspace, which nothing touches
  const ArenaScope scope(*arena);
  const char* separator = "";
  fmt::print("[");
  for (const Layer& l : layers)
    for (const Pass pass : {Pass::forward, Pass::backward_input, Pass::backward_weight})
      for (const DType type : {DType::bf16, DType::f32}) {
        void* const p = reinterpret_cast<void*>(0x7f0000000000);  // aligned, and never touched
        const Convolution c = convolution(l, pass, type);
        number("weft_looked_at") = 0;
        const bool found = kernels::convolve(c, {p, p, p, p, p});
        without += found ? 0 : 1;
        fmt::print(
            "{}\n  {{\"layer\": \"{}\", \"pass\": \"{}\", \"dtype\": \"{}\", \"found\": {}, "
            "\"engine\": {}, \"looked_at\": {}, "
            "\"workspace\": {}, \"convolution\": \"{}\"}}",
            separator, l.name, passes[static_cast<int>(pass)], name_of(type), found,
            number("weft_engine"), number("weft_looked_at"), number("weft_workspace"), describe(c));
        separator = ",";
      }
  fmt::print("\n]\n");
  return without > 0 ? 1 : 0;
}
