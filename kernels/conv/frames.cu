// Sums of the modulation's gradient over frames (frames.cuh): the second half of the backward passes of ops/norm.h.
// Reads 4 C bytes a run and part, most of it still in the second-level cache: about 1 % of what the first halves move.
#include "conv/frames.cuh"

namespace weft::kernels {
namespace {

constexpr int adding_warps = 16;
constexpr int in_flight = 8;  // loads of a thread

// dm[row, vector] += the partials [frame, run, parts, C] of the frames that use the row. A block: 32 columns of one part
// and row; its warps take every 16th partial, and their sums are added in the order of warps. The frames are
// listed first, so that the loop over partials has no branch and keeps several loads under way.
__global__ void __launch_bounds__(adding_warps * 32)
    add_partials_kernel(const float* __restrict__ partial, const std::int32_t* __restrict__ rows,
                        FrameGrid g, int parts, int vector0, int vector1, int first_row,
                        float* __restrict__ dm) {
  float* sums = shared_memory<float>();                            // [adding_warps, 32]
  int* listed = reinterpret_cast<int*>(sums + adding_warps * 32);  // how many
  int* list = listed + 1;                                          // [frames]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane, part = blockIdx.y;
  const int group = blockIdx.z;
  if (group < first_row) return;  // passed frames wrote no partials
  if (warp == 0) {
    int count = 0;
    for (int base = 0; base < g.frames; base += 32) {
      const int frame = base + lane;
      const bool uses = frame < g.frames && rows[frame] == group;
      const unsigned users = __ballot_sync(full_mask, uses);
      if (uses) list[count + __popc(users & ((1u << lane) - 1))] = frame;
      count += __popc(users);
    }
    if (lane == 0) *listed = count;
  }
  __syncthreads();
  float sum = 0.0f;
  if (column < g.channels) {
    const int partials = *listed * g.runs;
    // Eight loads at a time, the last ones masked: their latency is what this kernel costs.
    for (int first = warp; first < partials; first += in_flight * adding_warps) {
      float x[in_flight];
#pragma unroll
      for (int j = 0; j < in_flight; ++j) {
        const int q = first + j * adding_warps;
        x[j] = 0.0f;
        if (q < partials) {
          const std::int64_t at = static_cast<std::int64_t>(list[q / g.runs]) * g.runs + q % g.runs;
          x[j] = partial[(at * parts + part) * g.channels + column];
        }
      }
#pragma unroll
      for (int j = 0; j < in_flight; ++j) sum += x[j];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || column >= g.channels) return;
  for (int w = 1; w < adding_warps; ++w) sum += sums[w * 32 + lane];
  dm[(static_cast<std::int64_t>(group) * g.vectors + (part == 0 ? vector0 : vector1)) * g.channels +
     column] += sum;
}

}  // namespace

void add_partials(const Tensor& partial, const Tensor& rows, const FrameGrid& g, int parts,
                  int vector0, int vector1, int first_row, Tensor& dm) {
  const dim3 grid(blocks_for(g.channels, 32), static_cast<unsigned>(parts),
                  static_cast<unsigned>(dm.dim(0)));
  launch(add_partials_kernel, grid, dim3(adding_warps * 32),
         (adding_warps * 32 + 1 + static_cast<std::size_t>(g.frames)) * sizeof(float),
         data<float>(partial), data<std::int32_t>(rows), g, parts, vector0, vector1, first_row,
         data<float>(dm));
}

}  // namespace weft::kernels
