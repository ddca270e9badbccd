#include "bench/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/ceiling.h"
#include "bench/kernels/cases.h"
#include "core/error.h"
#include "core/philox.h"
#include "core/version.h"
#include "parallel/rank_device.h"
#include "tensor/arena.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

std::vector<KernelCase> all_cases(CaseSize size) {
  std::vector<KernelCase> all;
  for (const auto make : {norm_cases, attention_cases, temporal_cases, matmul_cases,
                          pointwise_cases, wire_cases, embed_cases, loss_cases, optimizer_cases,
                          conv_cases, vae_cases, text_cases, vae_loss_cases}) {
    std::vector<KernelCase> some = make(size);
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

// Copies of host tensors on the current arena's device; what is not given stays so.
std::vector<Tensor> copies(const std::vector<Tensor>& inputs) {
  std::vector<Tensor> to;
  for (const Tensor& t : inputs) {
    to.push_back(t.defined() ? Tensor::empty(t.shape(), t.dtype()) : Tensor());
    if (t.defined()) to.back().set(std::span(static_cast<const std::byte*>(t.raw()), t.bytes()));
  }
  return to;
}

std::vector<double> values(const Tensor& on_device) {
  const Tensor t = on_device.to_host();
  std::vector<double> v(static_cast<std::size_t>(t.numel()));
  for (std::size_t i = 0; i < v.size(); ++i) switch (t.dtype()) {
      case DType::f32:
        v[i] = static_cast<double>(t.data<float>()[i]);
        break;
      case DType::bf16:
        v[i] = static_cast<double>(static_cast<float>(t.data<bf16>()[i]));
        break;
      case DType::f64:
        v[i] = t.data<double>()[i];
        break;
      case DType::i32:
        v[i] = t.data<std::int32_t>()[i];
        break;
      case DType::u8:
        v[i] = t.data<std::uint8_t>()[i];
        break;
      default:
        WEFT_ASSERT(false);
    }
  return v;
}

struct Verdict {
  std::int64_t wrong = 0;
  double worst = 0;  // largest difference as a share of the largest reference value
};

Verdict compare(const std::vector<Tensor>& got, const std::vector<Tensor>& wanted,
                double tolerance) {
  WEFT_ASSERT(got.size() == wanted.size());
  Verdict v;
  for (std::size_t o = 0; o < got.size(); ++o) {
    const std::vector<double> a = values(got[o]), b = values(wanted[o]);
    WEFT_ASSERT(a.size() == b.size());
    double largest = 0;
    for (const double x : b)
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    if (largest == 0) largest = 1;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
      const double off = std::abs(a[i] - b[i]) / largest;
      if (!(off <= tolerance)) ++v.wrong;  // a NaN is wrong, too
      v.worst = std::isnan(off) ? off : std::max(v.worst, off);
    }
  }
  return v;
}

// What this device reaches at best: bytes a second of a plain copy, operations a second of a large matrix product.
struct Ceilings {
  double bandwidth = 0, f32 = 0, bf16 = 0;
};

}  // namespace

Tensor random_tensor(const Shape& shape, DType dtype, std::uint64_t seed, float deviation,
                     float mean) {
  // Counter-based and on all threads: real shapes have hundreds of millions of elements.
  const Philox random(seed, Purpose::noise, 0, 0);
  Tensor t = Tensor::host(shape, dtype);
  const std::int64_t count = t.numel();
#pragma omp parallel for schedule(static)
  for (std::int64_t first = 0; first < count; first += 4) {
    const auto words = random.block(static_cast<std::uint32_t>(first / 4));
    for (std::int64_t i = first; i < std::min(first + 4, count); ++i) {
      const auto pair = static_cast<std::size_t>(i - first) / 2 * 2;
      const float v = mean + deviation * Philox::gauss(words[pair], words[pair + 1], i % 2 != 0);
      if (dtype == DType::bf16)
        t.data<bf16>()[i] = bf16(v);
      else
        t.data<float>()[i] = v;
    }
  }
  return t;
}

int bench_kernels(const BenchKernelsRequest& request) {
  choose_device(request.device, true, MPI_COMM_SELF);
  set_threads(0, 1);
  const bool small = request.size == "small";
  const auto arena = Arena::reserve(arena_capacity(MemoryDeck(), 1));
  const ArenaScope scope(*arena);
  const auto host_arena = Arena::reserve(std::size_t{1} << 40, DeviceKind::cpu);

  const bool timed = !request.check_only;
  const Ceilings ceilings =
      timed ? Ceilings{copy_rate(), product_rate(DType::f32), product_rate(DType::bf16)}
            : Ceilings();
  fmt::print("{}\n{}\n", version_line(), on_cuda() ? device_runtime().describe() : describe_cpu());
  if (!on_cuda())
    fmt::print(
        "no GPU: the CPU side is timed, and there is nothing to check it against here (test_ops "
        "does)\n");
  if (timed)
    fmt::print("ceilings: copy {:.0f} GB/s, product {:.2f} TFLOP/s in f32, {:.2f} in bf16\n",
               ceilings.bandwidth * 1e-9, ceilings.f32 * 1e-12, ceilings.bf16 * 1e-12);
  fmt::print("{:<34} {:<30} {:>5} {:>10} {:>9} {:>9} {:>6} {:>9} {:>6}\n", "operation", "shape",
             "type", "us", "GB/s", "TFLOP/s", "share", "worst", "wrong");

  auto table = nlohmann::ordered_json::array();
  std::int64_t wrong_cases = 0, checked = 0;
  for (const KernelCase& c : all_cases(small ? CaseSize::small : CaseSize::real)) {
    if (c.op.find(request.filter) == std::string::npos) continue;
    Verdict verdict;
    if (on_cuda()) {
      std::vector<Tensor> wanted, host_inputs;
      {
        const ArenaScope on_host(*host_arena);
        host_inputs = copies(c.inputs);
        wanted = c.run(host_inputs);
      }
      std::vector<Tensor> inputs = copies(c.inputs);
      verdict = compare(c.run(inputs), wanted, c.tolerance);
      ++checked;
    }
    double seconds = 0, share = 0;
    if (timed) {
      std::vector<Tensor> inputs = copies(c.inputs);
      seconds = seconds_of([&] { c.run(inputs); });
      const double peak = c.dtype == DType::bf16 ? ceilings.bf16 : ceilings.f32;
      share = c.bound == Bound::bandwidth ? c.bytes / seconds / ceilings.bandwidth
                                          : c.flops / seconds / peak;
    }
    if (verdict.wrong > 0) ++wrong_cases;
    const auto rate = [&](double amount, double unit, const char* format) {
      return seconds > 0 && amount > 0 ? fmt::format(fmt::runtime(format), amount / seconds / unit)
                                       : "";
    };
    fmt::print("{:<34} {:<30} {:>5} {:>10} {:>9} {:>9} {:>6} {:>9} {:>6}\n", c.op, c.shape,
               name_of(c.dtype), timed ? fmt::format("{:.1f}", seconds * 1e6) : "",
               rate(c.bytes, 1e9, "{:.0f}"), rate(c.flops, 1e12, "{:.2f}"),
               timed ? fmt::format("{:.0f} %", share * 100) : "",
               on_cuda() ? fmt::format("{:.1e}", verdict.worst) : "",
               on_cuda() ? fmt::format("{}", verdict.wrong) : "-");
    std::fflush(stdout);  // into a file too: a run that is ended has told what it did
    table.push_back({{"op", c.op},
                     {"shape", c.shape},
                     {"dtype", name_of(c.dtype)},
                     {"seconds", seconds},
                     {"bytes", c.bytes},
                     {"flops", c.flops},
                     {"share_of_ceiling", share},
                     {"tolerance", c.tolerance},
                     {"worst", verdict.worst},
                     {"wrong", verdict.wrong}});
  }
  WEFT_CHECK(!table.empty(), Exit::usage, "--filter is a part of an operation's name",
             "no operation is called \"{}\"", request.filter);
  if (!request.json.empty()) {
    const nlohmann::ordered_json j{
        {"build", version_line()},
        {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
        {"copy_bytes_per_second", ceilings.bandwidth},
        {"product_f32_flops", ceilings.f32},
        {"product_bf16_flops", ceilings.bf16},
        {"cases", table}};
    std::ofstream out(request.json);
    out << j.dump(2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  WEFT_CHECK(wrong_cases == 0, Exit::internal,
             "run weft doctor: if the GPU is well, this is a bug in weft",
             "{} of {} cases are wrong", wrong_cases, checked);
  if (on_cuda()) fmt::print("all {} cases are right\n", checked);
  return 0;
}

Command bench_kernels_command() {
  const auto r = std::make_shared<BenchKernelsRequest>();
  Command c{"kernels", "every operation on the device: checked against the CPU side, then timed",
            [r](const Deck&, MPI_Comm) { return bench_kernels(*r); }};
  c.first_rank_only = true;
  c.option("--size", r->size, "small or real").choices = {"small", "real"};
  c.option("--filter", r->filter, "part of the operation's name");
  c.option("--device", r->device, "auto, cpu or cuda");
  c.option("--json", r->json, "file for the results");
  c.option("--check-only", r->check_only, "no timing");
  return c;
}

}  // namespace weft
