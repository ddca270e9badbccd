// Measured choices and their table: a text file of lines "identity TAB key TAB option TAB
// microseconds", to which ranks append and of which the first line of a key counts. So all ranks of
// a run, and the run after a restart, choose alike, whoever measured first. `identity` names GPU
// and library: another GPU's entries are kept, and not used.
#include "matmul/tuning.cuh"

#include <cublasLt.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/log.h"
#include "ops/matmul.h"
#include "tensor/device_cuda.h"

namespace weft::kernels {
namespace {

struct Table {
  std::string path;
  std::int64_t least = least_measured_product;
  std::map<std::string, int> entries;  // key -> option
  off_t read = 0;                      // bytes of the file that are in `entries`
  std::atomic<int> generation = 0;
  std::mutex mutex;
};

Table& table() {
  static Table t;
  static std::once_flag once;
  std::call_once(once, [] {
    if (const char* path = std::getenv("WEFT_MATMUL_CACHE")) t.path = path;
  });
  return t;
}

std::string identity() {
  const cudaDeviceProp& p = cuda_properties();
  return std::string(p.name) + ", " + std::to_string(p.multiProcessorCount) + " SMs, cuBLASLt " +
         std::to_string(cublasLtGetVersion());
}

// Enters the lines of this GPU that are new; the first line of a key counts. The file only grows:
// what was read is not read again, and a line that is not whole yet waits for the next time.
void read(Table& t) {
  struct stat file_now {};
  if (stat(t.path.c_str(), &file_now) != 0 || file_now.st_size <= t.read) return;
  std::ifstream file(t.path);
  file.seekg(t.read);
  const std::string mine = identity();
  for (std::string line; std::getline(file, line) && !file.eof();) {
    t.read += static_cast<off_t>(line.size()) + 1;
    const auto a = line.find('\t'), b = line.find('\t', a + 1), c = line.find('\t', b + 1);
    if (c == std::string::npos || line.compare(0, a, mine) != 0) continue;
    int option = 0;
    const auto [end, error] = std::from_chars(line.data() + b + 1, line.data() + c, option);
    if (error != std::errc{} || end != line.data() + c || option < 0) continue;
    t.entries.emplace(line.substr(a + 1, b - a - 1), option);
  }
}

// One write in append mode, so that lines of several ranks do not mix.
void append(const Table& t, const std::string& line) {
  const int file = open(t.path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  const bool written =
      file >= 0 && write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  const int reason = errno;
  if (file >= 0) close(file);
  if (!written)
    throw Error(Exit::usage,
                "cannot write the table of measured matrix products " + t.path + ": " +
                    std::strerror(reason),
                "choose a file that can be written, or unset WEFT_MATMUL_CACHE to take the "
                "library's first proposal everywhere",
                __FILE__, __LINE__);
}

// The least time of one run in microseconds; infinity where the option cannot run.
double measure(const std::function<bool(int)>& run, int option) {
  constexpr int groups = 3, runs = 4;
  DeviceRuntime& gpu = device_runtime();
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 2; ++i)  // the first runs load the kernel and fill the caches
    if (!run(option)) return least;
  for (int group = 0; group < groups; ++group) {
    const DeviceEvent start = gpu.record(Stream::compute);
    for (int i = 0; i < runs; ++i) run(option);
    const DeviceEvent end = gpu.record(Stream::compute);
    gpu.synchronize(end);
    least = std::min(least, gpu.seconds(start, end) * 1e6 / runs);
  }
  return least;
}

// The entry of `key`, or -1.
int entry(Table& t, const std::string& key) {
  auto found = t.entries.find(key);
  if (found == t.entries.end()) {
    read(t);
    found = t.entries.find(key);
  }
  return found == t.entries.end() ? -1 : found->second;
}

}  // namespace

bool compute_is_capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(cuda_stream(Stream::compute), &status));
  return status != cudaStreamCaptureStatusNone;
}

int table_generation() { return table().generation; }

bool is_measured(std::int64_t multiplications) {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  return !t.path.empty() && multiplications >= t.least;
}

bool must_measure(const std::string& key) {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  return !t.path.empty() && entry(t, key) < 0 && !compute_is_capturing();
}

int choose(const std::string& key, int options, const std::function<bool(int)>& run) {
  Table& t = table();
  if (options < 2) return 0;
  {
    const std::lock_guard lock(t.mutex);
    if (t.path.empty()) return 0;
    if (const int known = entry(t, key); known >= 0) return known < options ? known : 0;
  }
  if (compute_is_capturing()) return 0;
  // No lock is held while measuring, because `run` may make choices of its own.
  int best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int option = 0; option < options; ++option) {
    const double time = measure(run, option);
    // The proposals come best first: a later one must be clearly faster to win over the noise.
    if (time < (option == 0 ? 1.0 : 0.98) * least) {
      least = time;
      best = option;
    }
  }
  const std::lock_guard lock(t.mutex);
  append(t, identity() + '\t' + key + '\t' + std::to_string(best) + '\t' + std::to_string(least) +
                '\n');
  const int agreed = entry(t, key);
  return agreed >= 0 && agreed < options ? agreed : best;
}

Spoil::Spoil(std::size_t bytes) : p_(bytes == 0 ? nullptr : device_runtime().allocate(bytes)) {}
Spoil::~Spoil() {
  if (p_ != nullptr) device_runtime().free(p_);
}

bool Spoil::fits(std::size_t bytes) {
  const std::size_t left = device_runtime().free_bytes(), reserve = 64u << 20;
  if (left >= bytes + reserve) return true;
  log::write_warn("a matrix product is not measured: that takes " +
                  std::to_string((bytes + reserve) >> 20) + " MiB of device memory, " +
                  std::to_string(left >> 20) + " are left");
  return false;
}

void set_matmul_tuning(const std::string& path, std::int64_t least) {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  t.path = path;
  t.least = least;
  t.entries.clear();
  t.read = 0;
  ++t.generation;
}

}  // namespace weft::kernels
