// Measured choices and their table: lines "identity TAB key TAB way TAB microseconds". `identity`
// names GPU and library: another GPU's entries are kept, and not used. One rank measures; the
// others are given its table (train/trainer.h), so that all choose alike.
#include "matmul/ways.cuh"

#include <cublasLt.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/log.h"
#include "launch.cuh"
#include "tensor/device_cuda.h"

namespace weft::kernels {
namespace {

struct Entry {
  std::string way;
  double microseconds = 0;  // 0: it was not measured
};
// Used by the thread that enqueues the operations.
struct ChoiceTable {
  Ways ways;
  std::string of_others;  // lines of other GPUs
  std::map<std::string, Entry> entries;
  std::set<std::string> wrong;  // ways that differed
  int generation = 0;
};
ChoiceTable& choice_table() {
  static ChoiceTable s;
  return s;
}

// partial [blocks, 4]: sums of a^2 and of (a - b)^2, largest |a| and |a - b|.
template <class T>
__global__ void __launch_bounds__(threads)
    difference_kernel(const T* a, const T* b, std::int64_t n, float* partial) {
  float squares = 0, off = 0, largest = 0, worst = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < n;
       i += static_cast<std::int64_t>(gridDim.x) * threads) {
    const float x = to_float(a[i]), y = to_float(b[i]);
    const bool alike = x == y || (x != x && y != y);
    const float d = alike ? 0.0f : fabsf(x - y), size = fabsf(x) <= FLT_MAX ? fabsf(x) : 0.0f;
    squares += size * size;
    off += d * d;
    largest = fmaxf(largest, size);
    worst = fmaxf(worst, d);
  }
  float* const scratch = shared_memory<float>();
  squares = block_sum(squares, scratch);
  off = block_sum(off, scratch);
  largest = warp_max(largest);
  worst = warp_max(worst);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = largest;
    scratch[warps + threadIdx.x / 32] = worst;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < warps; ++w) {
    largest = fmaxf(largest, scratch[w]);
    worst = fmaxf(worst, scratch[warps + w]);
  }
  float* const to = partial + 4 * blockIdx.x;
  to[0] = squares;
  to[1] = off;
  to[2] = largest;
  to[3] = worst;
}

// How far b is from a, both contiguous: the root mean square of the difference as a share of a's,
// or a quarter of the largest as a share of a's largest. NaN and infinities differ from all but
// their like. -1 where both are zero, which shows nothing.
double difference(const Tensor& a, const Tensor& b) {
  constexpr unsigned blocks = 512;
  const Tensor partial = Tensor::persistent({blocks, 4}, DType::f32);
  by_type(a, [&]<class T>() {
    launch(difference_kernel<T>, dim3(blocks), dim3(threads), 2 * warps * sizeof(float), data<T>(a),
           data<T>(b), a.numel(), data<float>(partial));
  });
  const Tensor host = partial.to_host();
  double squares = 0, off = 0, largest = 0, worst = 0;
  for (unsigned i = 0; i < blocks; ++i) {
    const float* const p = host.data<float>() + 4 * i;
    squares += p[0], off += p[1];
    largest = std::max<double>(largest, p[2]), worst = std::max<double>(worst, p[3]);
  }
  if (off == 0) return largest > 0 ? 0 : -1;
  // A sum with NaN in it is NaN, which a maximum may hide.
  return std::isfinite(off) ? std::max(std::sqrt(off / squares), worst / (4 * largest)) : off;
}

// Memory like the outputs, outside the arena: once a shape, before the steady state.
class Spare {
 public:
  explicit Spare(const Outputs& outputs) {
    for (const Tensor& t : outputs) {
      memory_.push_back(t.defined() ? device_runtime().allocate(t.bytes()) : nullptr);
      like_.push_back(t.defined() ? Tensor::borrow(memory_.back(), t.shape(), t.dtype(), t.device())
                                  : Tensor());
    }
  }
  ~Spare() {
    for (void* p : memory_)
      if (p != nullptr) device_runtime().free(p);
  }
  Spare(const Spare&) = delete;
  Spare& operator=(const Spare&) = delete;

  const Outputs& like() const { return like_; }
  // For ways that add to what is there.
  void zero() const {
    for (const Tensor& t : like_)
      if (t.defined()) device_runtime().zero(t.raw(), t.bytes(), Stream::compute);
  }

 private:
  std::vector<void*> memory_;
  Outputs like_;
};

// Whether two sets of outputs fit beside the arena; else a warning.
bool fits(const Outputs& outputs) {
  std::size_t bytes = std::size_t{64} << 20;
  for (const Tensor& t : outputs) bytes += t.defined() ? 2 * t.bytes() : 0;
  const std::size_t left = device_runtime().free_bytes();
  if (left >= bytes) return true;
  log::write_warn("ways of an operation are not measured: that takes " +
                  std::to_string(bytes >> 20) + " MiB of device memory, " +
                  std::to_string(left >> 20) + " are left");
  return false;
}

// The least time of one run in microseconds, of a way that has run before.
double measure(const RunWay& run, int way, const Outputs& to) {
  constexpr int groups = 3, runs = 4;
  DeviceRuntime& gpu = device_runtime();
  double least = std::numeric_limits<double>::infinity();
  for (int group = -1; group < groups; ++group) {  // the first only fills the caches
    const DeviceEvent start = gpu.record(Stream::compute);
    for (int i = 0; i < runs; ++i) run(way, to);
    const DeviceEvent end = gpu.record(Stream::compute);
    gpu.synchronize(end);
    if (group >= 0) least = std::min(least, gpu.seconds(start, end) * 1e6 / runs);
  }
  return least;
}

// Nothing where a comparison showed nothing: the work is to be looked at again.
std::optional<Entry> fastest(const std::string& key, const std::vector<std::string>& ways,
                             const Outputs& outputs, double tolerance, const RunWay& run) {
  Entry best{ways.front()};
  if (!fits(outputs)) return best;
  const Spare plain(outputs), other(outputs);
  std::optional<std::size_t> first;  // of the ways that can be taken
  for (std::size_t w = 0; w < ways.size(); ++w) {
    const Spare& to = first ? other : plain;
    to.zero();
    if (!run(static_cast<int>(w), to.like())) continue;
    if (!first) first = w;
    double off = w == *first ? 0 : -1;
    for (std::size_t i = 0; w != *first && i < outputs.size(); ++i)
      if (outputs[i].defined())
        if (const double d = difference(plain.like()[i], other.like()[i]); !(d <= off)) off = d;
    if (off < 0) return std::nullopt;
    if (!(off <= tolerance)) {
      char shares[64];
      std::snprintf(shares, sizeof shares, "%.1e of their size, allowed %.0e", off, tolerance);
      log::write_warn("way " + ways[w] + " of " + key + " is not taken: its results differ from " +
                      ways[*first] + "'s by " + shares +
                      ". Please report it, with the output of weft doctor");
      choice_table().wrong.insert(ways[w]);
      continue;
    }
    const double time = measure(run, static_cast<int>(w), other.like());
    // The first ones are the most trusted: a later one must be clearly faster to win over noise.
    if (w == *first || time < 0.98 * best.microseconds) best = {ways[w], time};
  }
  device_runtime().synchronize();  // before the memory goes
  return best;
}

}  // namespace

bool compute_is_capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(cuda_stream(Stream::compute), &status));
  return status != cudaStreamCaptureStatusNone;
}

int ways_generation() { return choice_table().generation; }

bool is_tried(std::string_view way) {
  return std::ranges::find(choice_table().ways.tried, way) != choice_table().ways.tried.end();
}

bool has_choice(std::int64_t multiplications) {
  const ChoiceTable& s = choice_table();
  return !s.ways.only.empty() ||
         ((s.ways.measure || !s.entries.empty()) && multiplications >= s.ways.least);
}

int choose(const std::string& key, const std::vector<std::string>& ways, const Outputs& outputs,
           double tolerance, const RunWay& run) {
  ChoiceTable& s = choice_table();
  const auto index_of = [&](const std::string& way) {
    const auto at = std::ranges::find(ways, way);
    return at == ways.end() ? -1 : static_cast<int>(at - ways.begin());
  };
  if (!s.ways.only.empty()) {
    const int way = index_of(s.ways.only);
    if (way >= 0) s.entries[key] = {s.ways.only};
    return std::max(0, way);
  }
  // An entry may name a way that is not offered now.
  if (const auto known = s.entries.find(key); known != s.entries.end())
    if (const int way = index_of(known->second.way); way >= 0) return way;
  if (!s.ways.measure || compute_is_capturing()) return 0;
  const auto best = fastest(key, ways, outputs, tolerance, run);  // may make choices of its own
  if (best) s.entries[key] = *best;
  return best ? index_of(best->way) : 0;
}

std::string ways_identity() {
  const cudaDeviceProp& p = cuda_properties();
  return std::string(p.name) + ", " + std::to_string(p.multiProcessorCount) + " SMs, cuBLASLt " +
         std::to_string(cublasLtGetVersion());
}

void run_best(const std::string& key, const std::vector<std::string>& ways, const Outputs& outputs,
              double tolerance, const RunWay& run, int fallback) {
  if (run(choose(key, ways, outputs, tolerance, run), outputs)) return;
  // A test of that way alone has not seen it.
  if (!choice_table().ways.only.empty()) choice_table().entries.erase(key);
  run(fallback, outputs);
}

void set_ways(Ways ways) {
  ChoiceTable& s = choice_table();
  s.entries.clear();
  s.of_others.clear();
  s.wrong.clear();
  const std::string mine = ways.table.empty() ? "" : ways_identity();
  std::istringstream table(ways.table);
  for (std::string line; std::getline(table, line);) {
    std::istringstream fields(line);
    std::string whose, key;
    Entry e;
    if (!std::getline(fields, whose, '\t') || !std::getline(fields, key, '\t') ||
        !std::getline(fields, e.way, '\t') || !(fields >> e.microseconds))
      continue;
    if (whose == mine)
      s.entries.emplace(key, e);
    else
      s.of_others += line + '\n';
  }
  s.ways = std::move(ways);
  ++s.generation;
}

std::string ways_table() {
  const ChoiceTable& s = choice_table();
  std::ostringstream table;
  table << s.of_others;
  for (const auto& [key, e] : s.entries)
    table << ways_identity() << '\t' << key << '\t' << e.way << '\t' << e.microseconds << '\n';
  return table.str();
}

std::string ways_taken() {
  const ChoiceTable& s = choice_table();
  std::string text;
  for (const std::string& name : s.ways.tried) {
    if (name == "kept") continue;  // no choice of an operation's
    const auto taken = std::ranges::count_if(
        s.entries, [&](const auto& entry) { return entry.second.way == name; });
    text += (text.empty() ? "" : ", ") + name + " in " +
            (taken > 0 ? std::to_string(taken) + (taken == 1 ? " choice" : " choices") : "none") +
            (s.wrong.contains(name) ? " (wrong)" : "");
  }
  for (const std::string& name : s.wrong)
    if (!is_tried(name)) text += (text.empty() ? "" : ", ") + name + " (wrong)";
  return text;
}

}  // namespace weft::kernels
