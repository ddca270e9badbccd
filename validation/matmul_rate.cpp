// The rate of weft's matrix products beside oneDNN's own, for the shapes of the step benchmark (compare_step.py):
//   ninja -C build matmul_rate && OMP_NUM_THREADS=2 build/matmul_rate [results.json]
// oneDNN's own rate is the best of its matmul primitive on plain weights, on weights packed beforehand (the packing
// not counted), and its sgemm. weft's includes bias, bias gradient and packing. Interleaved, medians of 15.
#include <omp.h>

#include <fmt/format.h>
#include <algorithm>
#include <chrono>
#include <dnnl.hpp>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/version.h"
#include "ops/matmul.h"
#include "tensor/device.h"

using namespace weft;
using dnnl::memory;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Tensor filled(const Shape& shape) {
  Tensor t = Tensor::empty(shape, DType::f32);
  for (std::int64_t i = 0; i < t.numel(); ++i)
    t.data<float>()[i] = static_cast<float>(i % 7) - 3.0f;
  return t;
}

dnnl::engine engine(dnnl::engine::kind::cpu, 0);
dnnl::stream stream(engine);

// C [m,n] = op(A) op(B) through the matmul primitive.
std::function<void()> primitive(std::int64_t m, std::int64_t n, std::int64_t k, bool a_t, bool b_t,
                                bool packed, const Tensor& a, const Tensor& b, const Tensor& c) {
  using tag = memory::format_tag;
  const auto f32 = memory::data_type::f32;
  const memory::desc ad({m, k}, f32, a_t ? tag::ba : tag::ab),
      bd({k, n}, f32, b_t ? tag::ba : tag::ab);
  const memory::desc cd({m, n}, f32, tag::ab), any({k, n}, f32, tag::any);
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(ad, packed ? any : bd, cd), engine);
  memory weights(bd, engine, b.raw());
  if (packed) {
    memory plain = weights;
    weights = memory(pd.weights_desc(), engine);
    dnnl::reorder(plain, weights).execute(stream, plain, weights);
    stream.wait();
  }
  const std::unordered_map<int, memory> args{{DNNL_ARG_SRC, memory(ad, engine, a.raw())},
                                             {DNNL_ARG_WEIGHTS, weights},
                                             {DNNL_ARG_DST, memory(cd, engine, c.raw())}};
  return [run = dnnl::matmul(pd), args] {
    run.execute(stream, args);
    stream.wait();
  };
}

}  // namespace

int main(int argc, char** argv) {
  const auto arena = Arena::reserve(std::size_t{4} << 30);
  const ArenaScope scope(*arena);
  nlohmann::ordered_json rows;
  double ours_total = 0, theirs_total = 0;
  fmt::print("{:<28} {:>9} {:>9} {:>7}\n", "product", "weft", "oneDNN", "ratio");
  for (const auto& [M, N, K] : {std::array<std::int64_t, 3>{2560, 1152, 384},
                                {2560, 384, 384},
                                {2560, 1536, 384},
                                {2560, 384, 1536},
                                {1280, 3456, 1152},
                                {1280, 1152, 1152},
                                {1280, 4608, 1152},
                                {1280, 1152, 4608}}) {
    const Tensor x = filled({M, K}), w = filled({N, K}), bias = filled({N}), dy = filled({M, N}),
                 none;
    Tensor y = filled({M, N}), dx = filled({M, K}), dw = filled({N, K}), db = filled({N});
    const auto sgemm = [&](char ta, char tb, std::int64_t m, std::int64_t n, std::int64_t k,
                           const Tensor& a, const Tensor& b, Tensor& c) {
      return [=, p = c.data<float>()] {
        dnnl_sgemm(ta, tb, m, n, k, 1, a.data<float>(), ta == 'T' ? m : k, b.data<float>(),
                   tb == 'T' ? k : n, 0, p, n);
      };
    };
    struct Side {
      const char* what;
      std::function<void()> ours;
      std::vector<std::function<void()>> theirs;
    };
    const Side sides[] = {
        {"forward",
         [&] { ops::linear_forward(x, w, bias, none, y); },
         {primitive(M, N, K, false, true, false, x, w, y),
          primitive(M, N, K, false, true, true, x, w, y), sgemm('N', 'T', M, N, K, x, w, y)}},
        {"input gradient",
         [&] { ops::linear_backward_input(dy, w, dx, false); },
         {primitive(M, K, N, false, false, false, dy, w, dx),
          primitive(M, K, N, false, false, true, dy, w, dx), sgemm('N', 'N', M, K, N, dy, w, dx)}},
        {"weight gradient",
         [&] { ops::linear_backward_weight(dy, x, dw, db, false); },
         {primitive(N, K, M, true, false, false, dy, x, dw), sgemm('T', 'N', N, K, M, dy, x, dw)}}};
    for (const Side& s : sides) {
      std::vector<std::vector<double>> times(1 + s.theirs.size());
      for (int round = 0; round < 17; ++round)
        for (std::size_t i = 0; i < times.size(); ++i) {
          const double start = now();
          (i == 0 ? s.ours : s.theirs[i - 1])();
          if (round >= 2) times[i].push_back(now() - start);
        }
      std::vector<double> medians;
      for (auto& t : times) {
        std::sort(t.begin(), t.end());
        medians.push_back(t[t.size() / 2]);
      }
      const double flops =
          2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K);
      const double theirs = *std::min_element(medians.begin() + 1, medians.end());
      ours_total += medians[0];
      theirs_total += theirs;
      const std::string name = fmt::format("{} {}x{}x{}", s.what, M, N, K);
      fmt::print("{:<28} {:>9.0f} {:>9.0f} {:>7.2f}\n", name, flops / medians[0] * 1e-9,
                 flops / theirs * 1e-9, theirs / medians[0]);
      rows.push_back({{"product", name},
                      {"weft_gflops", flops / medians[0] * 1e-9},
                      {"onednn_gflops", flops / theirs * 1e-9},
                      {"ratio", theirs / medians[0]}});
    }
  }
  fmt::print("all products: {:.3f} of oneDNN's best\n", theirs_total / ours_total);
  if (argc > 1)
    std::ofstream(argv[1]) << nlohmann::ordered_json{{"build", version_line()},
                                                     {"cpu", describe_cpu()},
                                                     {"threads", omp_get_max_threads()},
                                                     {"all", theirs_total / ours_total},
                                                     {"products", rows}}
                                  .dump(2)
                           << '\n';
  return 0;
}
