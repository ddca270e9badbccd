#include "bench/bench.h"

#include <time.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "parallel/communicator.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

// Small integers, so that sums are exact in f32 in whatever order they are made.
float term(std::int64_t element, int rank) {
  return static_cast<float>((element * 7 + rank * 13) % 31 - 15);
}

double all_reduce_seconds(Communicator& comm, const Tensor& t, CommDtype comm_dtype) {
  if (!on_cuda()) {
    const double start = now_seconds();
    comm.wait(comm.all_reduce_sum(t, comm_dtype));
    return now_seconds() - start;
  }
  DeviceRuntime& gpu = device_runtime();
  const DeviceEvent begin = gpu.record(Stream::compute);
  comm.wait(comm.all_reduce_sum(t, comm_dtype));
  const DeviceEvent end = gpu.record(Stream::compute);
  gpu.synchronize(end);
  return gpu.seconds(begin, end);
}

// Plain MPI_Allreduce for comparison.
double plain_seconds(const Tensor& t, MPI_Comm world) {
  const double start = now_seconds();
  MPI_Allreduce(MPI_IN_PLACE, t.raw(), static_cast<int>(t.numel()), MPI_FLOAT, MPI_SUM, world);
  return now_seconds() - start;
}

// The processor's time of all threads of this process.
double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Times of one way to sum, and the processor's time that it took.
struct Timing {
  std::vector<double> seconds;
  double processor = 0;

  template <class F>
  void run(F&& f) {
    const double before = processor_seconds();
    seconds.push_back(f());
    processor += processor_seconds() - before;
  }
  // Nanoseconds a byte of the tensor, on this rank.
  double processor_a_byte(double bytes) const {
    return processor * 1e9 / (static_cast<double>(seconds.size()) * bytes);
  }
};

}  // namespace

int bench_comm(const BenchCommRequest& request, MPI_Comm world) {
  const RankDevice device = choose_device(request.device, request.share, world);
  set_threads(0, device.core_sharers);
  const auto comm = make_communicator(world);
  const int ranks = comm->size();
  const auto largest = static_cast<std::int64_t>(request.largest_mib * (1 << 20) / 4);
  if (comm->rank() == 0)
    fmt::print(
        "{}\n{} ranks, {}\n{:>12} {:>10} {:>8} {:>8} {:>8} {:>10} {:>7} {:>10} {:>7} {:>7}\n",
        version_line(), ranks, comm->describe(), "bytes", "us", "GB/s", "bus GB/s", "cpu ns/B",
        "bf16 us", "cpu", "plain us", "cpu", "wrong");
  auto table = nlohmann::ordered_json::array();
  double wrong_everywhere = 0;
  for (std::int64_t n = 256; n <= largest; n *= 4) {
    std::vector<float> terms(n), sums(terms.size(), 0.0f);
    for (std::int64_t i = 0; i < n; ++i) {
      terms[i] = term(i, comm->rank());
      for (int r = 0; r < ranks; ++r) sums[i] += term(i, r);
    }
    Tensor t = Tensor::persistent({n}, DType::f32);
    t.set(std::span<const float>(terms));
    all_reduce_seconds(*comm, t, CommDtype::f32);
    const Tensor got = t.to_host();
    double wrong = 0;
    for (std::int64_t i = 0; i < n; ++i)
      if (got.data<float>()[i] != sums[i]) ++wrong;
    Tensor total = Tensor::persistent({1}, DType::f64);
    total.set(std::span<const double>(&wrong, 1));
    comm->wait(comm->all_reduce_sum(total));
    wrong = total.to_host().data<double>()[0];
    wrong_everywhere += wrong;

    const std::vector<float> zeros(terms.size(), 0.0f);  // many sums of sums would overflow
    t.set(std::span<const float>(zeros));
    // Interleaved, so that other load on these nodes affects all three alike.
    Timing ours, half, plain;
    const int rounds = n < (1 << 18) ? 25 : 7;
    for (int i = 0; i < rounds; ++i) {
      ours.run([&] { return all_reduce_seconds(*comm, t, CommDtype::f32); });
      half.run([&] { return all_reduce_seconds(*comm, t, CommDtype::bf16); });
      if (!on_cuda()) plain.run([&] { return plain_seconds(t, world); });
    }
    const double seconds = upper_median(ours.seconds), bytes = 4.0 * static_cast<double>(n);
    const double rate = bytes / seconds, bus = rate * 2 * (ranks - 1) / ranks;
    nlohmann::ordered_json row{{"bytes", 4 * n},
                               {"seconds", seconds},
                               {"bus_bytes_per_second", bus},
                               {"processor_ns_per_byte", ours.processor_a_byte(bytes)},
                               {"bf16_seconds", upper_median(half.seconds)},
                               {"bf16_processor_ns_per_byte", half.processor_a_byte(bytes)},
                               {"wrong", wrong}};
    std::string yardstick = fmt::format("{:>10} {:>7}", "-", "-");
    if (!on_cuda()) {
      row["plain_mpi_seconds"] = upper_median(plain.seconds);
      row["plain_mpi_processor_ns_per_byte"] = plain.processor_a_byte(bytes);
      yardstick = fmt::format("{:>10.1f} {:>7.2f}", upper_median(plain.seconds) * 1e6,
                              plain.processor_a_byte(bytes));
    }
    if (comm->rank() == 0)
      fmt::print("{:>12} {:>10.1f} {:>8.2f} {:>8.2f} {:>8.2f} {:>10.1f} {:>7.2f} {} {:>7.0f}\n",
                 4 * n, seconds * 1e6, rate * 1e-9, bus * 1e-9, ours.processor_a_byte(bytes),
                 upper_median(half.seconds) * 1e6, half.processor_a_byte(bytes), yardstick, wrong);
    table.push_back(std::move(row));
  }
  if (comm->rank() == 0 && !request.json.empty()) {
    const nlohmann::ordered_json j{{"build", version_line()},
                                   {"ranks", ranks},
                                   {"communicator", comm->describe()},
                                   {"sizes", table}};
    std::ofstream out(request.json);
    out << dump_json(j, 2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  WEFT_CHECK(wrong_everywhere == 0, Exit::hardware, "run weft doctor on these nodes",
             "{:.0f} elements were reduced to wrong sums", wrong_everywhere);
  return 0;
}

Command bench_comm_command() {
  const auto r = std::make_shared<BenchCommRequest>();
  Command c{"comm", "all-reduce over all ranks, checked and timed",
            [r](const Deck&, MPI_Comm world) { return bench_comm(*r, world); }};
  c.option("--device", r->device, "auto, cpu or cuda");
  c.option("--share", r->share, "let several ranks use one GPU");
  c.number("--mib", r->largest_mib, 1, 65536, "largest size");
  c.path("--json", r->json, "file for the results");
  return c;
}

}  // namespace weft
