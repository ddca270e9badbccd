#include <fcntl.h>
#include <omp.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/philox.h"
#include "data/stage.h"
#include "doctor/doctor.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft {

namespace {

constexpr int repeats = 3;  // the best counts: what the machine can do, not what disturbed it

template <class F>
double best_seconds(F&& run) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repeats; ++i) best = std::min(best, run());
  return best;
}

// Seconds of `work`: of the host's, or of the device's by events of `stream`.
template <class F>
double seconds_of(Stream stream, F&& work) {
  if (!on_cuda()) {
    const double start = now_seconds();
    work();
    return now_seconds() - start;
  }
  DeviceRuntime& gpu = device_runtime();
  const DeviceEvent begin = gpu.record(stream);
  work();
  const DeviceEvent end = gpu.record(stream);
  gpu.synchronize(end);
  return gpu.seconds(begin, end);
}

// The known answer. Rows of x and w are a periodic sequence of whole numbers from -3 to 3, each row
// shifted, over a whole number of periods, and the bias repeats too: y[m,n] depends on (m mod
// period, n mod period) alone, so a table gives all of it. Every sum stays far below 2^24 and is
// exact in f32 in whatever order it is made.
constexpr int period = 61, periods = 32;
constexpr std::int64_t inner = period * periods;  // a multiple of 32, so that no path has to pad
constexpr int row_shift_x = 3, row_shift_w = 5;

int sequence(int which, std::int64_t i) {
  const auto k = static_cast<int>(i % period);
  return (which == 0 ? k * k * 7 + k * 3 + 1 : k * k * 11 + k * 17 + 5) % period % 7 - 3;
}

template <class T>
T value_of(int v) {
  return T(static_cast<float>(v));
}

template <class T>
std::vector<T> operand(int which, std::int64_t rows) {
  std::vector<T> out(rows * inner);
  const int shift = which == 0 ? row_shift_x : row_shift_w;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t k = 0; k < inner; ++k)
      out[r * inner + k] = value_of<T>(sequence(which, r * shift + k));
  return out;
}

template <class T>
std::vector<T> known_table() {
  std::vector<T> out;
  for (int m = 0; m < period; ++m)
    for (int n = 0; n < period; ++n) {
      int sum = 0;
      for (int k = 0; k < period; ++k)
        sum += sequence(0, m * row_shift_x + k) * sequence(1, n * row_shift_w + k);
      out.push_back(value_of<T>(sum * periods + n));
    }
  return out;
}

template <class T>
void known_product(const std::string& name, RankFacts& facts) {
  const std::int64_t rows = on_cuda() ? 4096 : 1024;
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const ArenaScope scope(*arena);
  const std::vector<T> xs = operand<T>(0, rows), ws = operand<T>(1, rows);
  const Tensor x = Tensor::from_host<T>(xs, {rows, inner});
  const Tensor w = Tensor::from_host<T>(ws, {rows, inner});
  std::vector<float> biases;
  for (std::int64_t n = 0; n < rows; ++n) biases.push_back(static_cast<float>(n % period));
  const Tensor bias = Tensor::from_host<float>(biases, {rows});
  Tensor y = Tensor::empty({rows, rows}, dtype_of<T>::value);
  // NaN first: an element left unwritten must not pass for the result of an earlier run.
  const std::vector<T> nan(rows * rows, T(std::numeric_limits<float>::quiet_NaN()));
  const std::vector<T> known = known_table<T>();
  std::int64_t& wrong = facts.wrong["product " + name];
  const double seconds = best_seconds([&] {
    y.set(std::span<const T>(nan));
    const double s =
        seconds_of(Stream::compute, [&] { ops::linear_forward(x, w, bias, Tensor(), y); });
    const Tensor got = y.to_host();
    const T* at = got.template data<T>();
    for (std::int64_t m = 0; m < rows; ++m)
      for (std::int64_t n = 0; n < rows; ++n, ++at) {
        const T want = known[m % period * period + n % period];
        if (static_cast<float>(*at) != static_cast<float>(want)) ++wrong;
      }
    return s;
  });
  facts.measured["product " + name + " TFLOP/s"] =
      2e-12 * static_cast<double>(rows) * static_cast<double>(rows) * inner / seconds;
}

}  // namespace

void measure_memory(RankFacts& facts) {
  // Larger than the caches, small beside what a rank has.
  const double budget = 0.1 * facts.available_gib / facts.host_ranks * (1ull << 30);
  const auto words = static_cast<std::size_t>(std::clamp(budget, 8e6, 256e6)) / 8 / 2;
  std::vector<double> from(words), to(words);
  // First touched by the threads that will copy it, so that each copies its own NUMA node's memory.
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < words; ++i) from[i] = static_cast<double>(i);
  const double seconds = best_seconds([&] {
    const double start = now_seconds();
#pragma omp parallel
    {
      const auto threads = static_cast<std::size_t>(omp_get_num_threads());
      const auto me = static_cast<std::size_t>(omp_get_thread_num());
      const std::size_t begin = words * me / threads, end = words * (me + 1) / threads;
      std::memcpy(to.data() + begin, from.data() + begin, (end - begin) * sizeof(double));
    }
    return now_seconds() - start;
  });
  facts.measured["memory copy GB/s"] = 2e-9 * static_cast<double>(words * sizeof(double)) / seconds;
  facts.wrong["host memory"] = 0;
  for (std::size_t i = 0; i < words; ++i)
    if (to[i] != static_cast<double>(i)) ++facts.wrong["host memory"];
}

void measure_products(RankFacts& facts) {
  known_product<float>("f32", facts);
  // Without AVX-512 (on Arm, too) the CPU widens bf16: no rate to judge.
  if (on_cuda() || ops::cpu_is_v4()) known_product<bf16>("bf16", facts);
}

void measure_device_copies(RankFacts& facts) {
  if (!on_cuda()) return;
  DeviceRuntime& gpu = device_runtime();
  const std::size_t bytes = std::min<std::size_t>(256u << 20, gpu.free_bytes() / 16 / 4096 * 4096);
  WEFT_CHECK(bytes >= (1u << 20), Exit::memory, "see who else holds memory of this GPU",
             "GPU has no memory left: {} bytes are free", gpu.free_bytes());
  struct Memory {  // freed on every path out
    DeviceRuntime& gpu;
    void *host_from, *host_to, *a, *b;
    ~Memory() {
      gpu.free_pinned(host_from);
      gpu.free_pinned(host_to);
      gpu.free(a);
      gpu.free(b);
    }
  } m{gpu, gpu.allocate_pinned(bytes), gpu.allocate_pinned(bytes), gpu.allocate(bytes, false),
      gpu.allocate(bytes, false)};
  auto* from = static_cast<std::uint32_t*>(m.host_from);
  // An odd factor makes every word different, so a copy to the wrong place shows too.
  for (std::size_t i = 0; i < bytes / 4; ++i) from[i] = static_cast<std::uint32_t>(i) * 2654435761u;
  std::memset(m.host_to, 0, bytes);
  const auto rate = [&](void* to, const void* what, double passes) {
    return passes * 1e-9 * static_cast<double>(bytes) / best_seconds([&] {
             return seconds_of(Stream::copy, [&] { gpu.copy(to, what, bytes, Stream::copy); });
           });
  };
  facts.measured["host to device GB/s"] = rate(m.a, m.host_from, 1);
  facts.measured["device copy GB/s"] = rate(m.b, m.a, 2);
  facts.measured["device to host GB/s"] = rate(m.host_to, m.b, 1);
  std::int64_t& wrong = facts.wrong["device memory"];
  const auto* to = static_cast<const std::uint32_t*>(m.host_to);
  for (std::size_t i = 0; i < bytes / 4; ++i)
    if (to[i] != from[i]) ++wrong;
}

void measure_all_reduce(Communicator& comm, RankFacts& facts) {
  facts.communicator = comm.describe();
  // Whole numbers of at most 15: the sums are exact in f32 in any order. They repeat every 31
  // elements, so a table of 31 knows them all.
  const auto term = [](std::int64_t element, int rank) {
    return static_cast<float>((element % 31 * 7 + rank * 13) % 31 - 15);
  };
  std::array<float, 31> known{};
  for (std::int64_t e = 0; e < 31; ++e)
    for (int r = 0; r < comm.size(); ++r) known[e] += term(e, r);
  std::int64_t& wrong = facts.wrong["all-reduce"];
  const auto measure = [&](std::int64_t n) {
    std::vector<float> terms(n);
    for (std::int64_t i = 0; i < n; ++i) terms[i] = term(i, comm.rank());
    Tensor t = Tensor::persistent({n}, DType::f32);
    const double seconds = best_seconds([&] {
      t.set(std::span<const float>(terms));
      const double s = seconds_of(Stream::compute, [&] { comm.wait(comm.all_reduce_sum(t)); });
      const Tensor got = t.to_host();
      for (std::int64_t i = 0; i < n; ++i)
        if (got.data<float>()[i] != known[i % 31]) ++wrong;
      return s;
    });
    comm.check();
    return seconds;
  };
  facts.measured["all-reduce 8 B us"] = 1e6 * measure(2);
  constexpr std::int64_t large = 16 << 20;
  facts.measured["all-reduce 64 MiB GB/s"] = 4e-9 * static_cast<double>(large) / measure(large);
}

namespace {

constexpr std::size_t most_bytes = 256u << 20;  // of a clip store
constexpr std::size_t temporary_bytes = 64u << 20;
constexpr std::size_t piece = 4u << 20;

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

std::string file_system_of(int fd) {
  struct statfs s {};
  return fstatfs(fd, &s) == 0 ? file_system_of_type(static_cast<std::uint32_t>(s.f_type)).name
                              : "?";
}

double timed_read(int fd, std::size_t begin, std::size_t bytes, const std::string& name) {
  std::vector<std::byte> buffer(piece);
  // Otherwise the page cache would answer. It drops clean pages only and changes nothing for
  // others.
  posix_fadvise(fd, static_cast<off_t>(begin), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  const double start = now_seconds();
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n =
        pread(fd, buffer.data(), std::min(piece, bytes - done), static_cast<off_t>(begin + done));
    WEFT_CHECK(n > 0, Exit::data, "look at the file system and its log", "reading {} failed: {}",
               name, n == 0 ? "it ends early" : std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
  return now_seconds() - start;
}

}  // namespace

void measure_files(const std::string& path, RankFacts& facts) {
  struct stat s {};
  const bool store = !path.empty() && is_store_path(path);
  if (store) {
    const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    WEFT_CHECK(file.fd() >= 0 && fstat(file.fd(), &s) == 0 && S_ISREG(s.st_mode), Exit::data,
               "see that data.path is a clip store that every node can read",
               "cannot read data.path {}: {}", path,
               errno != 0 ? std::strerror(errno) : "it is not a file");
    const auto size = static_cast<std::size_t>(s.st_size);
    const std::size_t bytes = std::min(most_bytes, size);
    // Each rank has a part of its own, as far as the file reaches.
    const std::size_t parts = std::max<std::size_t>(1, size / std::max<std::size_t>(1, bytes));
    const std::size_t begin = static_cast<std::size_t>(facts.rank) % parts * bytes;
    facts.file = path;
    facts.file_system = file_system_of(file.fd());
    if (bytes == 0) return;
    facts.measured["file read GB/s"] =
        1e-9 * static_cast<double>(bytes) / timed_read(file.fd(), begin, bytes, path);
    return;
  }
  const std::string name = fmt::format(".weft-doctor-{}-{}", facts.host, facts.pid);
  const File file(open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  WEFT_CHECK(file.fd() >= 0, Exit::data, "start weft in a directory that it may write to",
             "cannot make a file in the working directory: {}", std::strerror(errno));
  unlink(name.c_str());  // the file goes with its last handle, even after a crash
  facts.file = "a temporary file in the working directory";
  facts.file_system = file_system_of(file.fd());
  const std::vector<std::byte> bytes(piece, std::byte{42});
  const double start = now_seconds();
  for (std::size_t done = 0; done < temporary_bytes; done += piece)
    WEFT_CHECK(pwrite(file.fd(), bytes.data(), piece, static_cast<off_t>(done)) ==
                   static_cast<ssize_t>(piece),
               Exit::data, "free space, or see your quota", "writing {} MiB here failed: {}",
               temporary_bytes >> 20, std::strerror(errno));
  // Part of the timing: a write counts once it is on storage. It also leaves the pages clean, which
  // the read below needs to drop them.
  WEFT_CHECK(fsync(file.fd()) == 0, Exit::data, "free space, or see your quota",
             "writing {} MiB here failed: {}", temporary_bytes >> 20, std::strerror(errno));
  facts.measured["file write GB/s"] =
      1e-9 * static_cast<double>(temporary_bytes) / (now_seconds() - start);
  facts.measured["file read GB/s"] =
      1e-9 * static_cast<double>(temporary_bytes) / timed_read(file.fd(), 0, temporary_bytes, name);
}

// Whether the operations that networks are made of compute rightly on this rank's device: a few of
// each kind, on small inputs. tests/kernels/ has every operation, at every size.
namespace {

// Standard normals, the same to the bit on every device.
std::vector<float> normals(const Shape& shape, std::uint64_t seed) {
  const Philox random(seed, Purpose::noise, 0, 0);
  std::vector<float> values;
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    values.push_back(random.normal(static_cast<std::uint32_t>(i)));
  return values;
}
// The same in the current arena, on its device.
Tensor draw(const Shape& shape, DType dtype, std::uint64_t seed) {
  const std::vector<float> values = normals(shape, seed);
  if (dtype == DType::f32) return Tensor::from_host(std::span<const float>(values), shape);
  const std::vector<bf16> rounded(values.begin(), values.end());
  return Tensor::from_host(std::span<const bf16>(rounded), shape);
}

constexpr std::int64_t rows = 77, columns = 104, depth = 200;  // of the product

Tensor product(DType dtype) {
  const Tensor x = draw({rows, depth}, dtype, 1), w = draw({columns, depth}, dtype, 2);
  Tensor y = Tensor::empty({rows, columns}, dtype);
  ops::linear_forward(x, w, Tensor(), Tensor(), y);
  return y;
}

Tensor attention(DType dtype) {
  const std::int64_t T = 2, S = 77, H = 2, D = 72;
  const Tensor qkv = draw({1, T, S, 3, H, D}, dtype, 1);
  Tensor y = Tensor::empty({1, T, S, H * D}, dtype), lse = Tensor::empty({T, H, S}, DType::f32);
  Tensor none;
  ops::self_attention_forward(qkv, none, none, none, ops::Axis::space, y, lse, none);
  return y;
}

Tensor layer_norm(DType dtype) {
  const std::int64_t frames = 2, S = 33, C = 144;
  const Tensor x = draw({frames, S, C}, dtype, 1), m = draw({1, 2, C}, DType::f32, 2);
  const std::vector<std::int32_t> zeros(frames, 0);
  const Tensor use = Tensor::from_host(std::span<const std::int32_t>(zeros), {frames});
  Tensor y = Tensor::empty(x.shape(), dtype), stats = Tensor::empty({frames * S, 2}, DType::f32);
  ops::layer_norm_modulate_forward(x, m, use, 0, 1, 0, y, stats);
  return y;
}

Tensor convolution(DType dtype) {
  const ops::Conv conv = ops::Conv::same(3);
  const Tensor x = draw({1, 1, 18, 22, 32}, dtype, 1), w = draw({48, 32, 3, 3}, dtype, 2);
  Tensor y = Tensor::empty(conv.output(x.shape(), 48), dtype);
  ops::conv_forward(x, w, Tensor(), Tensor(), conv, y);
  return y;
}

Tensor reduction(DType dtype) {
  Tensor sum = Tensor::empty({1}, DType::f64);
  ops::sum_of_squares(draw({10007}, dtype, 1), sum, false);
  return sum;
}

Tensor optimizer_step(DType dtype) {
  const ops::AdamW a{1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.1f, 0.001f, 0.19f, 0.002f, 1.0f, 0};
  const Shape n{5003};
  const double four = 4;
  const Tensor squares = Tensor::from_host(std::span<const double>(&four, 1), {1});
  // A second moment is positive: squares of what was drawn.
  std::vector<float> moment = normals(n, 4);
  for (float& v : moment) v = v * v;
  Tensor p = draw(n, dtype, 1), m = draw(n, dtype, 3), none,
         v = Tensor::from_host(std::span<const float>(moment), n);
  ops::adamw_step(a, squares, draw(n, dtype, 2), p, m, v, none, none);
  return p;
}

// `tolerance`: the largest difference that another order of sums and another rounding explain, as a
// share of the largest value.
struct Operation {
  const char* name;
  Tensor (*run)(DType);
  DType dtype;
  double tolerance;
};
constexpr Operation operations[] = {
    {"matrix product f32", product, DType::f32, 8e-6},
    {"matrix product bf16", product, DType::bf16, 1.0 / 64},
    {"attention f32", attention, DType::f32, 5e-6},
    {"attention bf16", attention, DType::bf16, 4.0 / 256},
    {"layer norm", layer_norm, DType::bf16, 1.0 / 128},
    {"3x3 convolution", convolution, DType::f32, 2e-5},
    {"sum of squares", reduction, DType::f32, 1e-12},
    {"optimizer step", optimizer_step, DType::f32, 1e-5},
};

std::vector<double> values_of(const Tensor& on_device) {
  const Tensor t = on_device.to_host();
  std::vector<double> values;
  for (std::int64_t i = 0; i < t.numel(); ++i)
    values.push_back(t.dtype() == DType::f64   ? t.data<double>()[i]
                     : t.dtype() == DType::f32 ? static_cast<double>(t.data<float>()[i])
                                               : static_cast<double>(float(t.data<bf16>()[i])));
  return values;
}

// The product by its definition.
std::vector<double> plain_product(DType dtype) {
  const auto x = values_of(draw({rows, depth}, dtype, 1)),
             w = values_of(draw({columns, depth}, dtype, 2));
  std::vector<double> y;
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < columns; ++c) {
      y.push_back(0);
      for (std::size_t k = 0; k < depth; ++k) y.back() += x[r * depth + k] * w[c * depth + k];
    }
  return y;
}

}  // namespace

void check_operations(RankFacts& facts) {
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const auto host_arena = Arena::reserve(std::size_t{1} << 30, DeviceKind::cpu);
  for (const Operation& o : operations) {
    if (!on_cuda() && o.run != product) continue;
    std::vector<double> wanted, got;
    {
      const ArenaScope on_host(*host_arena);
      wanted = on_cuda() ? values_of(o.run(o.dtype)) : plain_product(o.dtype);
    }
    const ArenaScope scope(*arena);
    try {
      got = values_of(o.run(o.dtype));
    } catch (const Error& e) {
      // A GPU without cuDNN makes no convolutions. That is no fault of jobs that need none.
      if (o.run != convolution || e.code() != Exit::usage) throw;
      continue;
    }
    double largest = 0;
    for (const double v : wanted) largest = std::max(largest, std::abs(v));
    // Negated, so that NaN counts as wrong.
    facts.operations[o.name] = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
      if (!(std::abs(got[i] - wanted[i]) <= o.tolerance * largest)) ++facts.operations[o.name];
  }
}

}  // namespace weft
