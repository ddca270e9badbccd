#include "commands/bench_comm.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/arena.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/version.h"
#include "parallel/communicator.h"
#include "parallel/rank_device.h"

namespace weft {
namespace {

// Small integers, so that sums are exact in f32 in whatever order they are made.
float term(std::int64_t element, int rank) {
  return static_cast<float>((element * 7 + rank * 13) % 31 - 15);
}

double all_reduce_seconds(Communicator& comm, const Tensor& t) {
  if (!on_cuda()) {
    const double start = now_seconds();
    comm.wait(comm.all_reduce_sum(t));
    return now_seconds() - start;
  }
  DeviceRuntime& gpu = device_runtime();
  const DeviceEvent begin = gpu.record(Stream::compute);
  comm.wait(comm.all_reduce_sum(t));
  const DeviceEvent end = gpu.record(Stream::compute);
  gpu.synchronize(end);
  return gpu.seconds(begin, end);
}

}  // namespace

int bench_comm(const BenchCommRequest& request, MPI_Comm world) {
  const RankDevice device = choose_device(request.device, request.share, world);
  set_threads(0, device.host_ranks);
  const auto comm = make_communicator(world);
  const int ranks = comm->size();
  const auto largest = static_cast<std::int64_t>(request.largest_mib * (1 << 20) / 4);
  WEFT_CHECK(largest >= 1024, Exit::usage, "use --mib 1 or more", "--mib {}", request.largest_mib);
  if (comm->rank() == 0)
    fmt::print("{}\n{} ranks, {}\n{:>12} {:>12} {:>10} {:>10} {:>8}\n", version_line(), ranks,
               comm->describe(), "bytes", "us", "GB/s", "bus GB/s", "wrong");
  auto table = nlohmann::ordered_json::array();
  double wrong_everywhere = 0;
  for (std::int64_t n = 1024; n <= largest; n *= 4) {
    std::vector<float> terms(static_cast<std::size_t>(n)), sums(terms.size(), 0.0f);
    for (std::int64_t i = 0; i < n; ++i) {
      terms[static_cast<std::size_t>(i)] = term(i, comm->rank());
      for (int r = 0; r < ranks; ++r) sums[static_cast<std::size_t>(i)] += term(i, r);
    }
    Tensor t = Tensor::persistent({n}, DType::f32);
    t.set(std::span<const float>(terms));
    all_reduce_seconds(*comm, t);
    const Tensor got = t.to_host();
    double wrong = 0;
    for (std::int64_t i = 0; i < n; ++i)
      if (got.data<float>()[i] != sums[static_cast<std::size_t>(i)]) ++wrong;
    Tensor total = Tensor::persistent({1}, DType::f64);
    total.set(std::span<const double>(&wrong, 1));
    comm->wait(comm->all_reduce_sum(total));
    wrong = total.to_host().data<double>()[0];
    wrong_everywhere += wrong;

    const std::vector<float> zeros(terms.size(), 0.0f);  // many sums of sums would overflow
    t.set(std::span<const float>(zeros));
    std::vector<double> times;
    for (int i = 0; i < 7; ++i) times.push_back(all_reduce_seconds(*comm, t));
    std::nth_element(times.begin(), times.begin() + 3, times.end());
    const double seconds = times[3], rate = 4.0 * static_cast<double>(n) / seconds;
    const double bus = rate * 2 * (ranks - 1) / ranks;
    if (comm->rank() == 0)
      fmt::print("{:>12} {:>12.1f} {:>10.2f} {:>10.2f} {:>8.0f}\n", 4 * n, seconds * 1e6,
                 rate * 1e-9, bus * 1e-9, wrong);
    table.push_back(
        {{"bytes", 4 * n}, {"seconds", seconds}, {"bus_bytes_per_second", bus}, {"wrong", wrong}});
  }
  if (comm->rank() == 0 && !request.json.empty()) {
    const nlohmann::ordered_json j{{"build", version_line()},
                                   {"ranks", ranks},
                                   {"communicator", comm->describe()},
                                   {"sizes", table}};
    std::ofstream out(request.json);
    out << j.dump(2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  WEFT_CHECK(wrong_everywhere == 0, Exit::hardware, "run weft doctor on these nodes",
             "{:.0f} elements were reduced to wrong sums", wrong_everywhere);
  return 0;
}

}  // namespace weft
