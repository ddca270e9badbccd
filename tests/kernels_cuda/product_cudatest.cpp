// Matrix products beyond what the cases of ops/matmul.h show: the plain kernel of last resort, and
// choices that are measured once, kept in a table, and found again.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "emulation.h"
#include "matmul/product.cuh"
#include "matmul/tuning.cuh"
#include "nn/nn.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

std::vector<float> numbers(std::int64_t n, int seed) {
  std::vector<float> v(n);
  std::uint32_t state = static_cast<std::uint32_t>(seed) * 2654435761u + 1;
  for (float& x : v) {
    state = state * 1664525u + 1013904223u;
    // Eighths from -2 to 2: exact in bf16, and sums of a few hundred products are exact in f32.
    x = static_cast<float>(static_cast<int>(state >> 24) % 33 - 16) / 8.0f;
  }
  return v;
}

Tensor on_device(const std::vector<float>& v, const Shape& shape, DType dtype) {
  Tensor t = Tensor::empty(shape, dtype);
  if (dtype == DType::f32) {
    t.set(std::span<const float>(v));
  } else {
    std::vector<bf16> rounded;
    for (const float x : v) rounded.emplace_back(x);
    t.set(std::span<const bf16>(rounded));
  }
  return t;
}

std::vector<float> on_host(const Tensor& t) {
  const Tensor h = t.to_host();
  std::vector<float> v;
  for (std::int64_t i = 0; i < h.numel(); ++i)
    v.push_back(h.dtype() == DType::f32 ? h.data<float>()[i]
                                        : static_cast<float>(h.data<bf16>()[i]));
  return v;
}

class Products : public testing::Test {
 protected:
  Products() {
    kernels::set_matmul_tuning("");
    std::filesystem::remove(table_);
  }
  ~Products() override {
    kernels::set_matmul_tuning("");
    std::filesystem::remove(table_);
  }

  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::ifstream file(table_);
    for (std::string line; std::getline(file, line);) all.push_back(line);
    return all;
  }
  // As a process that starts again.
  void start_again() {
    kernels::set_matmul_tuning("");
    kernels::set_matmul_tuning(table_, 0);
  }

  // The same with every choice of the table turned to `option`.
  void start_again_with(int option) {
    const std::vector<std::string> all = lines();
    std::ofstream file(table_);
    for (const std::string& line : all) {
      const auto a = line.find('\t', line.find('\t') + 1), b = line.find('\t', a + 1);
      file << line.substr(0, a + 1) << option << line.substr(b) << '\n';
    }
    file.close();
    start_again();
  }
  // Lines whose key begins so.
  std::int64_t choices_of(const std::string& operation) const {
    const std::vector<std::string> all = lines();
    return std::count_if(all.begin(), all.end(), [&](const std::string& line) {
      return line.find("\t" + operation + " ") != std::string::npos;
    });
  }

  static Arena& arena() {
    static const std::unique_ptr<Arena> one = [] {
      use_gpu(0);
      return Arena::reserve(std::size_t{1} << 28, DeviceKind::cuda);
    }();
    return *one;
  }
  ArenaScope scope_{arena()};
  std::string table_ = testing::TempDir() + "weft_products_" + std::to_string(getpid());
};

TEST_F(Products, ThePlainKernelTakesEveryLayoutAndSize) {
  struct Size {
    std::int64_t m, n, k;
  };
  for (const Size s : {Size{1, 1, 1}, Size{65, 3, 17}, Size{64, 130, 32}, Size{5, 70, 129}})
    for (const DType in : {DType::f32, DType::bf16})
      for (const DType out : {DType::f32, in})
        for (const bool at : {false, true})
          for (const bool bt : {false, true})
            for (const bool with_c : {false, true}) {
              const auto a = numbers(s.m * s.k, 1), b = numbers(s.k * s.n, 2);
              const auto c = numbers(s.m * s.n, 3), bias = numbers(s.n, 4);
              const Tensor ta = on_device(a, {s.m, s.k}, in), tb = on_device(b, {s.k, s.n}, in);
              const Tensor tc = on_device(c, {s.m, s.n}, out);
              const Tensor tbias = on_device(bias, {s.n}, DType::f32);
              Tensor td = Tensor::empty({s.m, s.n}, out);
              kernels::Product p{s.m, s.n, s.k, at, bt, in, out};
              p.epilogue = with_c ? kernels::Epilogue::none : kernels::Epilogue::bias;
              p.add = with_c;
              kernels::product_plain(p, {ta.raw(), tb.raw(), with_c ? tc.raw() : nullptr, td.raw(),
                                         tbias.device_data<float>(), nullptr});
              const auto d = on_host(td);
              for (std::int64_t i = 0; i < s.m; ++i)
                for (std::int64_t j = 0; j < s.n; ++j) {
                  float sum = with_c ? c[i * s.n + j] : bias[j];
                  for (std::int64_t k = 0; k < s.k; ++k)
                    sum += a[at ? k * s.m + i : i * s.k + k] * b[bt ? j * s.k + k : k * s.n + j];
                  const float expected = out == DType::bf16 ? static_cast<float>(bf16(sum)) : sum;
                  ASSERT_EQ(d[i * s.n + j], expected)
                      << kernels::describe(p) << " at " << i << ", " << j;
                }
            }
}

TEST_F(Products, RoundTheirFactorsToTf32OnlyWhereThatIsAllowed) {
  const std::int64_t m = 16, n = 8, k = 32;
  auto a = numbers(m * k, 1), b = numbers(k * n, 2);
  for (float& x : a) x += 1e-5f;  // more than TF32 holds
  const Tensor ta = on_device(a, {m, k}, DType::f32), tb = on_device(b, {k, n}, DType::f32);
  const auto product = [&] {
    Tensor td = Tensor::empty({m, n}, DType::f32);
    EXPECT_TRUE(kernels::product_lt({m, n, k, false, false, DType::f32, DType::f32},
                                    {ta.raw(), tb.raw(), nullptr, td.raw(), nullptr, nullptr}));
    return on_host(td);
  };
  double largest = 0, off = 0, off_rounded = 0;
  const auto exact = product();
  allow_tf32(true);
  const auto rounded = product();
  allow_tf32(false);
  EXPECT_EQ(product(), exact);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t l = 0; l < k; ++l) sum += double{a[i * k + l]} * b[l * n + j];
      largest = std::max(largest, std::abs(sum));
      off = std::max(off, std::abs(exact[i * n + j] - sum));
      off_rounded = std::max(off_rounded, std::abs(rounded[i * n + j] - sum));
    }
  EXPECT_LT(off, 1e-6 * largest);
  EXPECT_GT(off_rounded, 1e-6 * largest);
  EXPECT_LT(off_rounded, 1e-3 * largest);
}

// Work of a known cost: `mebibytes` of zeros.
bool spend(Tensor& t, std::size_t mebibytes) {
  for (std::size_t i = 0; i < mebibytes; ++i)
    device_runtime().zero(t.raw(), std::size_t{1} << 20, Stream::compute);
  return true;
}

TEST_F(Products, WithoutATableTheFirstOptionIsTakenUnmeasured) {
  EXPECT_FALSE(kernels::must_measure("work"));
  EXPECT_EQ(kernels::choose("work", 3,
                            [](int) {
                              ADD_FAILURE() << "measured";
                              return true;
                            }),
            0);
}

TEST_F(Products, TheFasterOptionIsKeptInTheTableAndFoundAgain) {
  Tensor t = Tensor::empty({1 << 18}, DType::f32);
  // Option 0 costs fifty times option 1; option 2 would cost nothing but cannot run.
  const auto run = [&](int option) { return option < 2 && spend(t, option == 0 ? 50 : 1); };
  // The host may stand still whenever the faster one is measured, but not in ten tries.
  for (int k = 0, chosen = 0; k < 10 && chosen != 1; ++k) {
    std::filesystem::remove(table_);
    start_again();
    EXPECT_TRUE(kernels::must_measure("work"));
    chosen = kernels::choose("work", 3, run);
  }
  ASSERT_EQ(lines().size(), 1u);
  EXPECT_NE(lines()[0].find("\twork\t1\t"), std::string::npos) << lines()[0];

  start_again();
  EXPECT_FALSE(kernels::must_measure("work"));
  EXPECT_EQ(kernels::choose("work", 3,
                            [](int) {
                              ADD_FAILURE() << "measured again";
                              return true;
                            }),
            1);
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(Products, TheFirstLineOfAKeyCountsAndStrangeLinesDoNot) {
  kernels::set_matmul_tuning(table_, 0);
  Tensor t = Tensor::empty({1 << 18}, DType::f32);
  kernels::choose("other", 2, [&](int) { return spend(t, 1); });
  const std::string identity = lines().at(0).substr(0, lines()[0].find('\t'));
  {
    std::ofstream file(table_);
    file << "another GPU\twork\t0\t1.0\n"
         << "half a li\n"
         << identity << "\twork\tx\t1.0\n"
         << identity << "\twork\t-1\t1.0\n"
         << identity << "\twork\t2\t1.0\n"
         << identity << "\twork\t1\t1.0\n";
  }
  start_again();
  EXPECT_EQ(kernels::choose("work", 3, [](int) { return false; }), 2);
  // An entry of a library that proposed more is not an index into today's options.
  EXPECT_EQ(kernels::choose("work", 2, [](int) { return false; }), 0);
}

TEST_F(Products, OnlyWhatTheTableGrewByIsRead) {
  kernels::set_matmul_tuning(table_, 0);
  Tensor t = Tensor::empty({1 << 18}, DType::f32);
  kernels::choose("work", 2, [&](int) { return spend(t, 1); });
  const std::string identity = lines().at(0).substr(0, lines()[0].find('\t'));
  EXPECT_TRUE(kernels::must_measure("other"));
  // The line that was read, under another name, and half of a new one.
  std::string first = lines()[0];
  first.replace(first.find("\twork\t"), 6, "\twark\t");
  const auto write = [&](const std::string& second) {
    std::ofstream(table_) << first << '\n' << second;
  };
  write(identity + "\tother\t1");
  EXPECT_TRUE(kernels::must_measure("wark"));
  EXPECT_TRUE(kernels::must_measure("other"));
  write(identity + "\tother\t1\t2.5\n");
  EXPECT_FALSE(kernels::must_measure("other"));
  EXPECT_TRUE(kernels::must_measure("wark"));
}

TEST_F(Products, SmallOnesAreNotMeasured) {
  kernels::set_matmul_tuning(table_);
  const std::int64_t m = 40, n = 24, k = 56;  // a shape that no other test has
  const Tensor x = on_device(numbers(m * k, 1), {m, k}, DType::f32);
  const Tensor w = on_device(numbers(n * k, 2), {n, k}, DType::f32);
  const Tensor bias = on_device(numbers(n, 3), {n}, DType::f32);
  Tensor y = Tensor::empty({m, n}, DType::f32), h = Tensor::empty({m, n}, DType::f32);
  ops::linear_forward(x, w, bias, Tensor(), y);
  ops::linear_gelu_forward(x, w, bias, y, h);
  EXPECT_TRUE(lines().empty());
  kernels::set_matmul_tuning(table_, m * n * k);
  ops::linear_forward(x, w, bias, Tensor(), y);
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(Products, ATableThatCannotBeWrittenStopsTheJob) {
  kernels::set_matmul_tuning(testing::TempDir() + "no_such_folder/table", 0);
  Tensor t = Tensor::empty({1 << 18}, DType::f32);
  try {
    kernels::choose("work", 2, [&](int) { return spend(t, 1); });
    FAIL() << "nothing thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_NE(std::string(e.what()).find("no_such_folder"), std::string::npos) << e.what();
    EXPECT_NE(e.hint().find("WEFT_MATMUL_CACHE"), std::string::npos);
  }
}

TEST_F(Products, MeasuringLeavesAccumulatingOutputsAlone) {
  kernels::set_matmul_tuning(table_, 0);
  const std::int64_t m = 24, n = 16, k = 32;
  const auto dy = numbers(m * n, 1), x = numbers(m * k, 2), dw = numbers(n * k, 3),
             db = numbers(n, 4);
  const Tensor tdy = on_device(dy, {m, n}, DType::bf16), tx = on_device(x, {m, k}, DType::bf16);
  Tensor tdw = on_device(dw, {n, k}, DType::f32), tdb = on_device(db, {n}, DType::f32);
  ops::linear_backward_weight(tdy, tx, tdw, tdb, true);
  EXPECT_GE(lines().size(), 1u);
  const auto got_w = on_host(tdw), got_b = on_host(tdb);
  for (std::int64_t j = 0; j < n; ++j) {
    float bias = db[j];
    for (std::int64_t i = 0; i < m; ++i) bias += dy[i * n + j];
    EXPECT_EQ(got_b[j], bias);
    for (std::int64_t q = 0; q < k; ++q) {
      float sum = dw[j * k + q];
      for (std::int64_t i = 0; i < m; ++i) sum += dy[i * n + j] * x[i * k + q];
      EXPECT_EQ(got_w[j * k + q], sum) << j << ", " << q;
    }
  }
}

TEST_F(Products, ACaptureNeitherMeasuresNorKeepsWhatItTook) {
  const std::int64_t m = 24, n = 48, k = 32;  // a shape that no other test has
  const auto dy = numbers(m * n, 1), w = numbers(n * k, 2);
  const Tensor tdy = on_device(dy, {m, n}, DType::f32), tw = on_device(w, {n, k}, DType::f32);
  Tensor dx = on_device(std::vector<float>(m * k, 0.0f), {m, k}, DType::f32);
  Tensor other = Tensor::empty({m, m}, DType::f32);
  ops::linear_forward(tdy, tdy, Tensor(), Tensor(), other);  // the library's workspace is made
  kernels::set_matmul_tuning(table_, 0);
  device_runtime().begin_capture();
  ops::linear_backward_input(tdy, tw, dx, true);
  const DeviceGraph graph = device_runtime().end_capture({});
  EXPECT_TRUE(lines().empty());
  for (int i = 0; i < 3; ++i) device_runtime().launch(graph);
  std::vector<float> expected(m * k);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t q = 0; q < k; ++q)
      for (std::int64_t j = 0; j < n; ++j) expected[i * k + q] += dy[i * n + j] * w[j * k + q];
  auto got = on_host(dx);
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], 3 * expected[i]) << i;
  ops::linear_backward_input(tdy, tw, dx, false);
  EXPECT_EQ(lines().size(), 1u);
  EXPECT_EQ(on_host(dx), expected);
}

TEST_F(Products, AnMlpIsTheSameWhicheverWayIsMeasuredFaster) {
  const std::int64_t m = 24, n = 40, k = 16;
  const Tensor x = on_device(numbers(m * k, 1), {m, k}, DType::f32);
  const Tensor w = on_device(numbers(n * k, 2), {n, k}, DType::f32);
  const Tensor bias = on_device(numbers(n, 3), {n}, DType::f32);
  std::vector<std::vector<float>> results;
  for (const int option : {0, 1, 2}) {
    // The third time there is no table at all.
    kernels::set_matmul_tuning(table_, 0);
    Tensor z = Tensor::empty({m, n}, DType::f32), h = Tensor::empty({m, n}, DType::f32);
    if (option == 2)
      kernels::set_matmul_tuning("");
    else if (lines().empty())
      ops::linear_gelu_forward(x, w, bias, z, h);
    if (option != 2) start_again_with(option);
    ops::linear_gelu_forward(x, w, bias, z, h);
    results.push_back(on_host(h));
    results.push_back(on_host(z));
  }
  for (std::size_t r = 2; r < results.size(); ++r)
    for (std::size_t i = 0; i < results[r].size(); ++i)
      EXPECT_NEAR(results[r][i], results[r % 2][i], 1e-5f * (1 + std::abs(results[r % 2][i])));
}

// The operands of a layer's backward, or of that of the second half of an MLP.
struct Layer {
  std::int64_t m = 24, n = 40, k = 16;
  DType dtype;
  Tensor dy, x, w, z;

  explicit Layer(DType type)
      : dtype(type),
        dy(on_device(numbers(m * n, 1), {m, n}, type)),
        x(on_device(numbers(m * k, 2), {m, k}, type)),
        w(on_device(numbers(n * k, 3), {n, k}, type)),
        z(on_device(numbers(m * k, 4), {m, k}, type)) {}
};

// What it writes: dw, its bias, dx or dz, dz's sums. All are filled, so that they can be added to.
struct Gradients {
  Tensor dw, db, dx, sums;

  explicit Gradients(const Layer& l)
      : dw(on_device(numbers(l.n * l.k, 5), {l.n, l.k}, DType::f32)),
        db(on_device(numbers(l.n, 6), {l.n}, DType::f32)),
        dx(on_device(numbers(l.m * l.k, 7), {l.m, l.k}, l.dtype)),
        sums(on_device(numbers(l.k, 8), {l.k}, DType::f32)) {}
  std::vector<std::vector<float>> values() const {
    return {on_host(dw), on_host(db), on_host(dx), on_host(sums)};
  }
};

// `bound`: the difference allowed, as a share of the output's largest value.
void expect_near(const std::vector<std::vector<float>>& got,
                 const std::vector<std::vector<float>>& want, float bound) {
  for (std::size_t t = 0; t < want.size(); ++t) {
    float largest = 0;
    for (const float v : want[t]) largest = std::max(largest, std::abs(v));
    for (std::size_t i = 0; i < want[t].size(); ++i)
      ASSERT_NEAR(got[t][i], want[t][i], bound * largest) << "output " << t << ", element " << i;
  }
}

// On two streams, in any order that these allow, and in a recorded graph: the same as one after the
// other. Sums of eighths are exact, so bits can be compared.
TEST_F(Products, GradientsBesideEachOtherAreThoseOfOneAfterTheOther) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool accumulate : {false, true}) {
      const Layer l(dtype);
      const auto run = [&](Gradients& g) {
        ops::linear_backward(l.dy, l.x, l.w, g.dw, g.db, accumulate, g.dx, accumulate);
      };
      const auto in_turn = [&](Gradients& g) {
        ops::linear_backward_weight(l.dy, l.x, g.dw, g.db, accumulate);
        ops::linear_backward_input(l.dy, l.w, g.dx, accumulate);
      };
      kernels::set_matmul_tuning("");
      Gradients want(l);
      in_turn(want);
      kernels::set_matmul_tuning(table_, 0);
      Gradients measured(l);
      run(measured);
      EXPECT_EQ(measured.values(), want.values());
      EXPECT_GE(choices_of("linear_backward with bias"), 1);
      start_again_with(1);
      for (unsigned long long seed = 1; seed <= 12; ++seed) {
        device_runtime().synchronize();
        emulation::set_seed(seed);
        Gradients beside(l);
        run(beside);
        // Memory that comes back at once is the next operation's.
        Tensor next = Tensor::empty({1 << 12}, DType::f32);
        ops::fill_zero(next);
        EXPECT_EQ(beside.values(), want.values()) << "seed " << seed;
      }
      Gradients recorded(l), twice(l);
      in_turn(twice);
      in_turn(twice);
      device_runtime().begin_capture();
      run(recorded);
      const DeviceGraph graph = device_runtime().end_capture({});
      device_runtime().launch(graph);
      device_runtime().launch(graph);
      EXPECT_EQ(recorded.values(), twice.values());
    }
}

TEST_F(Products, GradientsOfAnMlpBesideEachOtherAreThoseOfOneAfterTheOther) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool with_sums : {false, true}) {
      const Layer l(dtype);
      Tensor none;
      const auto run = [&](Gradients& g) {
        ops::linear_gelu_backward(l.dy, l.x, l.w, l.z, g.dw, g.db, true, g.dx,
                                  with_sums ? g.sums : none, true);
      };
      kernels::set_matmul_tuning("");
      Gradients want(l);
      ops::linear_backward_weight(l.dy, l.x, want.dw, want.db, true);
      ops::linear_gelu_backward_input(l.dy, l.w, l.z, want.dx, none, with_sums ? want.sums : none,
                                      true);
      kernels::set_matmul_tuning(table_, 0);
      Gradients measured(l);
      run(measured);
      const float bound = dtype == DType::bf16 ? 0.02f : 1e-5f;
      expect_near(measured.values(), want.values(), bound);
      EXPECT_GE(choices_of(with_sums ? "linear_gelu_backward and sums with bias"
                                     : "linear_gelu_backward with bias"),
                1);
      start_again_with(1);
      for (unsigned long long seed = 1; seed <= 12; ++seed) {
        device_runtime().synchronize();
        emulation::set_seed(seed);
        Gradients beside(l);
        run(beside);
        expect_near(beside.values(), want.values(), bound);
      }
      Gradients recorded(l);
      device_runtime().begin_capture();
      run(recorded);
      const DeviceGraph graph = device_runtime().end_capture({});
      device_runtime().launch(graph);
      expect_near(recorded.values(), want.values(), bound);
    }
}

// dz's sums by a kernel behind the product (0), by the library (1), or with nothing fused (2).
TEST_F(Products, EveryWayToSumAGeluGradientIsRight) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Layer l(dtype);
    Tensor none;
    const auto run = [&](Gradients& g, bool accumulate) {
      ops::linear_gelu_backward_input(l.dy, l.w, l.z, g.dx, none, g.sums, accumulate);
    };
    kernels::set_matmul_tuning(table_, 0);
    Gradients first(l);
    run(first, true);
    EXPECT_GE(choices_of("linear_gelu_backward_input without h with bias"), 1);
    const auto before = Gradients(l).values()[3];
    for (const int way : {0, 1, 2})
      for (const bool accumulate : {false, true}) {
        start_again_with(way);
        Gradients g(l);
        run(g, accumulate);
        const auto dz = on_host(g.dx), sums = on_host(g.sums);
        for (std::int64_t q = 0; q < l.k; ++q) {
          double sum = accumulate ? before[q] : 0, scale = 1;
          for (std::int64_t i = 0; i < l.m; ++i) {
            sum += dz[i * l.k + q];
            scale += std::abs(dz[i * l.k + q]);
          }
          EXPECT_NEAR(sums[q], sum, (dtype == DType::bf16 ? 0.01 : 1e-6) * scale)
              << "way " << way << ", column " << q;
        }
      }
  }
}

// An MLP's gradients with its activation kept from the forward, and computed again.
TEST_F(Products, AnMlpHasTheSameGradientsWhetherItKeepsItsActivationOrNot) {
  const std::int64_t m = 24, C = 16, hidden = 64;
  for (const bool bf16_model : {false, true}) {
    ParameterTable table;
    const auto layer = [&](const std::string& name, std::int64_t out, std::int64_t in) {
      nn::Linear l;
      l.weight = &table.add(name + ".weight", {out, in}, Init{});
      l.bias = &table.add(name + ".bias", {out}, Init{});
      return l;
    };
    const nn::Linear fc1 = layer("fc1", hidden, C), fc2 = layer("fc2", C, hidden);
    table.allocate(1 << 12, bf16_model, true);
    int seed = 10;
    for (Parameter* p : {fc1.weight, fc1.bias, fc2.weight, fc2.bias})
      p->set(0, numbers(p->shape.numel(), ++seed));
    const DType dtype = bf16_model ? DType::bf16 : DType::f32;
    const Tensor x = on_device(numbers(m * C, 1), {m, C}, dtype);
    const auto gradients = [&](std::size_t allowed) {
      table.begin_step([](int) {});
      Tape tape;
      tape.allow(allowed);
      const Var in = make_var(x), out = nn::mlp({tape, table}, in, fc1, fc2);
      EXPECT_EQ(tape.kept(), allowed);
      out->grad = on_device(numbers(m * C, 2), {m, C}, dtype);
      tape.backward();
      table.finish_step();
      return std::vector<std::vector<float>>{on_host(table.grads()), on_host(in->grad)};
    };
    const auto again = gradients(0);
    const auto kept = gradients(static_cast<std::size_t>(m * hidden) * size_of(dtype));
    double error = 0, norm = 0;
    for (std::size_t t = 0; t < again.size(); ++t)
      for (std::size_t i = 0; i < again[t].size(); ++i) {
        error += std::pow(kept[t][i] - again[t][i], 2);
        norm += std::pow(again[t][i], 2);
      }
    EXPECT_GT(norm, 0);
    EXPECT_LT(std::sqrt(error / norm), bf16_model ? 4e-3 : 1e-6);
  }
}

}  // namespace
}  // namespace weft
