// weft_kernels: every operation on this rank's device, checked against the CPU side, then timed
// against what the device reaches at best. Checks without times: --check-only; times without
// checks, which take the CPU side long at real sizes: --time-only.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "cli/cli.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "ops/ways.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/rounding.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

struct KernelsRequest {
  std::string size = "real";  // small or real
  std::string filter;         // part of the operation's name
  std::string device = "auto";
  std::string json;         // file for the results
  bool check_only = false;  // for compute-sanitizer and tests
  bool time_only = false;
  std::string way;  // taken wherever there is a choice
  bool ways = false;
  bool rounding = false;
};

// The ways beside the first that operations have (kernels/matmul/ways.cuh); "": whichever is
// measured to be the fastest.
std::vector<std::string> other_ways() {
  std::vector<std::string> names{"", "pieces"};
  for (const kernels::UntestedWay& way : kernels::untested_ways) names.emplace_back(way.name);
  return names;
}
// Takes it from now on, wherever there is a choice.
void take(const std::string& way) {
  const std::vector<std::string> all = other_ways();
  kernels::set_ways(
      {.tried = {all.begin() + 2, all.end()}, .measure = true, .least = 0, .only = way});
}

// Prints a line a shape, pass, side and algorithm: the largest error and the root mean square, as
// shares of the result's root mean square, how many times those of plain summation they are, and
// the time.
int print_rounding(const std::string& filter) {
  fmt::print(
      "{}\n{}\n{:<24} {:<16} {:<15} {:>6} {:>9} {:<4} {:<16} {:>9} {:>9} {:>6} {:>6} {:>8}\n",
      version_line(), describe_cpu(), "layer", "input", "pass", "terms", "plain sum", "side",
      "algorithm", "largest", "rms", "max x", "rms x", "ms");
  for (const RoundingShape& s : rounding_shapes()) {
    if (s.name.find(filter) == std::string::npos) continue;
    for (const RoundingCase& c : measure_rounding(s, 3e7))
      for (const RoundingRow& r : c.rows) {
        fmt::print(
            "{:<24} {:<16} {:<15} {:>6} {:>9.1e} {:<4} {:<16} {:>9.1e} {:>9.1e} {:>6.2f} {:>6.2f} "
            "{:>8.2f}{}\n",
            c.shape, s.x.str(), c.pass, c.terms, c.plain.largest, r.side,
            r.taken ? r.algorithm : "(" + r.algorithm + ")", r.error.largest, r.error.rms,
            r.error.largest / c.plain.largest, r.error.rms / c.plain.rms, r.seconds * 1e3,
            r.error.largest > rounding_bound * c.plain.largest ? " !" : "");
        std::fflush(stdout);
      }
  }
  return 0;
}

// What this device reaches at best: bytes a second of a plain copy, operations a second of a large
// matrix product.
struct Ceilings {
  double bandwidth = 0, f32 = 0, bf16 = 0;
};

// The case on the device beside the CPU side, or beside its own reference.
Verdict check(const KernelCase& c, Arena& host_arena) {
  // Fresh copies for every run: an operation may change its inputs.
  const auto fresh = [&] {
    std::vector<Tensor> inputs = copies(c.inputs);
    if (c.prepare) c.prepare(inputs);
    return inputs;
  };
  if (c.pieces) {
    std::vector<Tensor> inputs = fresh();
    const std::vector<Piece> wanted = c.pieces(values_of(inputs));
    return compare(c.run(inputs), wanted, c.tolerance);
  }
  std::vector<Values> wanted;
  {
    const ArenaScope on_host(host_arena);
    std::vector<Tensor> inputs = copies(c.inputs);
    wanted = values_of(c.run(inputs));
  }
  std::vector<Tensor> inputs = fresh();
  return compare(values_of(c.run(inputs)), wanted, c.tolerance);
}

// Every operation that can be done in several ways, in each of them, and in the one that is
// measured to be the fastest whatever its size. Exit::internal if any result is wrong, or if a way
// was left out because it differs from the first.
int run_ways(const KernelsRequest& request, Arena& host_arena) {
  WEFT_CHECK(on_cuda() && &kernels::set_ways != nullptr, Exit::usage, "run it on a GPU",
             "--ways: the CPU has one way of everything");
  fmt::print("{}\n{}\n{:<34} {:<30} {:>5} {:<14} {:>9} {:>6}\n", version_line(),
             device_runtime().describe(), "operation", "shape", "type", "way", "worst", "wrong");
  std::int64_t wrong = 0, checked = 0;
  std::map<std::string, std::int64_t> cases;
  for_each_case(request.size == "small" ? CaseSize::small : CaseSize::real,
                [&](const KernelCase& c) {
                  if (c.op.find(request.filter) == std::string::npos) return;
                  for (const std::string& way : other_ways()) {
                    take(way);
                    const Verdict verdict = check(c, host_arena);
                    const bool dropped = kernels::ways_taken().find("wrong") != std::string::npos;
                    if (kernels::ways_table().empty() && !dropped) {
                      // It has no such way; where all are offered and none is measured, no other.
                      if (way.empty()) return;
                      continue;
                    }
                    ++checked;
                    ++cases[way];
                    wrong += verdict.wrong > 0 || dropped;
                    fmt::print("{:<34} {:<30} {:>5} {:<14} {:>9.1e} {:>6}\n", c.op, c.shape,
                               name_of(c.dtype), way.empty() ? "measured" : way, verdict.worst,
                               dropped ? "left out" : std::to_string(verdict.wrong));
                    std::fflush(stdout);
                  }
                });
  WEFT_CHECK(wrong == 0, Exit::internal,
             "run weft doctor: if the GPU is well, this is a bug in weft",
             "{} of {} cases are wrong", wrong, checked);
  for (const auto& [way, n] : cases)
    fmt::print("{}: {}\n", way.empty() ? "measured" : way, counted(n, "case"));
  fmt::print("all {} cases are right\n", checked);
  return 0;
}

// Prints a line a case with time, GB/s or TFLOP/s, share of the ceiling measured in the same run
// and the number of wrong elements. Exit::internal if any is wrong.
int run_kernels(const KernelsRequest& request) {
  WEFT_CHECK(!request.check_only || !request.time_only, Exit::usage, "give one of them, or neither",
             "--check-only and --time-only leave nothing to do");
  choose_device(request.device, true, MPI_COMM_SELF);
  set_threads(0, 1);
  const bool small = request.size == "small";
  const auto arena = Arena::reserve(arena_capacity(MemoryDeck(), 1));
  const ArenaScope scope(*arena);
  const auto host_arena = Arena::reserve(std::size_t{1} << 40, DeviceKind::cpu);
  if (request.rounding) {
    const ArenaScope on_host(*host_arena);
    return print_rounding(request.filter);
  }
  if (request.ways) return run_ways(request, *host_arena);
  WEFT_CHECK(request.way.empty() || std::ranges::count(other_ways(), request.way) > 0, Exit::usage,
             "take one that --ways shows", "--way {} is no way", request.way);
  if (!request.way.empty() && on_cuda()) take(request.way);

  const bool timed = !request.check_only, checks = on_cuda() && !request.time_only;
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
  for_each_case(small ? CaseSize::small : CaseSize::real, [&](const KernelCase& c) {
    if (c.op.find(request.filter) == std::string::npos) return;
    Verdict verdict;
    if (checks) {
      verdict = check(c, *host_arena);
      ++checked;
    }
    double seconds = 0, share = 0;
    if (timed) {
      std::vector<Tensor> inputs = copies(c.inputs);
      if (c.prepare) c.prepare(inputs);
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
               checks ? fmt::format("{:.1e}", verdict.worst) : "",
               checks ? fmt::format("{}", verdict.wrong) : "-");
    std::fflush(stdout);  // to a file too: an aborted run still shows what it did
    table.push_back({{"op", c.op},
                     {"shape", c.shape},
                     {"dtype", name_of(c.dtype)},
                     {"seconds", seconds},
                     {"bytes", c.bytes},
                     {"flops", c.flops},
                     {"share_of_ceiling", share},
                     {"tolerance", c.tolerance}});
    if (!checks) return;
    table.back()["worst"] = verdict.worst;
    table.back()["wrong"] = verdict.wrong;
  });
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
    out << dump_json(j, 2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  WEFT_CHECK(wrong_cases == 0, Exit::internal,
             "run weft doctor: if the GPU is well, this is a bug in weft",
             "{} of {} cases are wrong", wrong_cases, checked);
  if (checks) fmt::print("all {} cases are right\n", checked);
  return 0;
}

Command kernels_command() {
  const auto r = std::make_shared<KernelsRequest>();
  Command c{"", "every operation on the device: checked against the CPU side, then timed",
            [r](const Deck&, MPI_Comm) { return run_kernels(*r); }};
  c.first_rank_only = true;
  c.option("--size", r->size, "small or real").choices = {"small", "real"};
  c.option("--filter", r->filter, "part of the operation's name");
  c.option("--device", r->device, "auto, cpu or cuda");
  c.option("--json", r->json, "file for the results");
  c.option("--check-only", r->check_only, "no timing");
  c.option("--time-only", r->time_only, "no checks");
  c.option("--way", r->way, "this way of computing, wherever a GPU has the choice (--ways)");
  c.option("--ways", r->ways, "checks every way of computing that an operation has on a GPU");
  c.option(
      "--rounding", r->rounding,
      "only how convolutions and products on the CPU round, beside plain sums (--filter: part of "
      "a layer's name)");
  return c;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const weft::Command command = weft::kernels_command();
  return weft::run_program(argc, argv, {"weft_kernels", command.help, "", {command}, nullptr});
}
