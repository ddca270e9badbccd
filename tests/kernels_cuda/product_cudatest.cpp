// Matrix products beyond what the cases of ops/matmul.h show: the plain kernel of last resort, and
// choices that are measured once, kept in a table, and found again.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "emulation.h"
#include "matmul/product.cuh"
#include "matmul/ways.cuh"
#include "nn/nn.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "ops/ways.h"
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
  ~Products() override { kernels::set_ways({}); }

  // From here on what lacks an entry is measured, every untested way with it.
  static void measure(const std::string& table = "", std::int64_t least = 0) {
    std::vector<std::string> all;
    for (const kernels::UntestedWay& way : kernels::untested_ways) all.emplace_back(way.name);
    kernels::set_ways({.tried = all, .table = table, .measure = true, .least = least});
  }
  // From here on this way is taken wherever there is a choice.
  static void take(const std::string& way) {
    std::vector<std::string> all;
    for (const kernels::UntestedWay& w : kernels::untested_ways) all.emplace_back(w.name);
    kernels::set_ways({.tried = all, .only = way});
  }
  static std::vector<std::string> lines() {
    std::vector<std::string> all;
    std::istringstream table(kernels::ways_table());
    for (std::string line; std::getline(table, line);) all.push_back(line);
    return all;
  }
  // Lines whose key begins so.
  static std::int64_t choices_of(const std::string& operation) {
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

// Work of a known cost, and a known result.
bool spend(const kernels::Outputs& to, std::size_t times) {
  for (std::size_t i = 0; i < times; ++i)
    device_runtime().zero(to[0].raw(), to[0].bytes(), Stream::compute);
  const std::vector<float> ones(256, 1.0f);
  to[0].view({to[0].numel()}).slice(0, 256).set(std::span<const float>(ones));
  return true;
}
const std::vector<std::string> three{"first", "second", "third"};
Tensor a_mebibyte() { return Tensor::empty({1 << 18}, DType::f32); }

int choose(const std::string& key, const kernels::RunWay& run) {
  return kernels::choose(key, three, {a_mebibyte()}, 1e-4, run);
}
bool must_not_run(int, const kernels::Outputs&) {
  ADD_FAILURE() << "measured";
  return true;
}

TEST_F(Products, WithoutATableTheFirstWayIsTakenUnmeasured) {
  EXPECT_FALSE(kernels::has_choice(std::int64_t{1} << 40));
  EXPECT_EQ(choose("work", must_not_run), 0);
  EXPECT_TRUE(lines().empty());
}

TEST_F(Products, TheFasterWayIsKeptInTheTableAndFoundAgain) {
  // The first costs fifty times the second; the third would cost nothing but cannot be done.
  const auto run = [&](int way, const kernels::Outputs& to) {
    return way < 2 && spend(to, way == 0 ? 50 : 1);
  };
  // The host may stand still whenever the faster one is measured, but not in ten tries.
  for (int k = 0, chosen = 0; k < 10 && chosen != 1; ++k) {
    measure();
    chosen = choose("work", run);
  }
  ASSERT_EQ(lines().size(), 1u);
  EXPECT_NE(lines()[0].find("\twork\tsecond\t"), std::string::npos) << lines()[0];
  // As a process that starts again, whether it measures or not.
  for (const bool again : {true, false}) {
    const std::string table = kernels::ways_table();
    kernels::set_ways({.table = table, .measure = again});
    EXPECT_EQ(choose("work", must_not_run), 1);
    EXPECT_EQ(kernels::ways_table(), table);
  }
  // A way that is not offered any more: measured again, or the first.
  const std::string table = kernels::ways_table();
  kernels::set_ways({.table = table});
  EXPECT_EQ(kernels::choose("work", {"first", "third"}, {a_mebibyte()}, 1e-4, must_not_run), 0);
}

TEST_F(Products, LinesOfOtherGpusAreKeptAndStrangeOnesAreNot) {
  measure();
  choose("other", [](int, const kernels::Outputs& to) { return spend(to, 1); });
  const std::string identity = lines().at(0).substr(0, lines()[0].find('\t'));
  measure("another GPU\twork\tsecond\t1.0\nhalf a li\n" + identity + "\twork\tx\n" + identity +
          "\twork\tthird\t1.0\n" + identity + "\twork\tsecond\t1.0\n");
  EXPECT_EQ(choose("work", must_not_run), 2);
  EXPECT_EQ(lines(), (std::vector<std::string>{"another GPU\twork\tsecond\t1.0",
                                               identity + "\twork\tthird\t1"}));
}

// A way that does other work than the first is not taken, however fast it is.
TEST_F(Products, AWrongWayIsDroppedWithItsName) {
  const std::int64_t n = 1 << 16;
  std::vector<float> right = numbers(n, 3), off = right, one_off = right;
  for (float& x : off) x *= 1.01f;
  one_off[n - 5] += 8;
  Tensor out = Tensor::empty({n}, DType::f32);
  const auto run_with = [&](const std::vector<float>& second) {
    return [&, second](int way, const kernels::Outputs& to) {
      if (way == 2) return false;
      if (way == 0) spend(to, 50);
      Tensor t = to[0];
      t.set(std::span<const float>(way == 0 ? right : second));
      return true;
    };
  };
  for (const auto& wrong : {off, one_off, std::vector<float>(n, NAN), std::vector<float>(n)}) {
    measure();
    testing::internal::CaptureStderr();
    EXPECT_EQ(kernels::choose("work", three, {out}, 4e-3, run_with(wrong)), 0);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("WARN"), std::string::npos) << said;
    EXPECT_NE(said.find("way second of work is not taken: its results differ from first's"),
              std::string::npos)
        << said;
  }
  std::vector<float> rounded = right;
  for (float& x : rounded) x = static_cast<float>(bf16(x * 1.001f));
  testing::internal::CaptureStderr();
  measure();
  kernels::choose("work", three, {out}, 4e-3, run_with(rounded));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(Products, SmallOnesAreNotMeasured) {
  const std::int64_t m = 40, n = 24, k = 56;  // a shape that no other test has
  const Tensor x = on_device(numbers(m * k, 1), {m, k}, DType::f32);
  const Tensor w = on_device(numbers(n * k, 2), {n, k}, DType::f32);
  const Tensor bias = on_device(numbers(n, 3), {n}, DType::f32);
  Tensor y = Tensor::empty({m, n}, DType::f32), h = Tensor::empty({m, n}, DType::f32);
  measure("", kernels::least_measured_product);
  ops::linear_forward(x, w, bias, Tensor(), y);
  ops::linear_gelu_forward(x, w, bias, y, h);
  EXPECT_TRUE(lines().empty());
  measure("", m * n * k);
  ops::linear_forward(x, w, bias, Tensor(), y);
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(Products, MeasuringLeavesAccumulatingOutputsAlone) {
  measure();
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
  measure();
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

TEST_F(Products, AnMlpIsTheSameInEveryWay) {
  const std::int64_t m = 24, n = 40, k = 16;
  const Tensor x = on_device(numbers(m * k, 1), {m, k}, DType::f32);
  const Tensor w = on_device(numbers(n * k, 2), {n, k}, DType::f32);
  const Tensor bias = on_device(numbers(n, 3), {n}, DType::f32);
  std::vector<std::vector<float>> results;
  for (const std::string way : {"", "fused", "pieces"}) {
    way.empty() ? measure() : take(way);
    Tensor z = Tensor::empty({m, n}, DType::f32), h = Tensor::empty({m, n}, DType::f32);
    ops::linear_gelu_forward(x, w, bias, z, h);
    EXPECT_EQ(choices_of("linear_gelu_forward"), 1);
    results.push_back(on_host(h));
    results.push_back(on_host(z));
    ops::linear_gelu_forward(x, w, bias, h, h);  // in place
    EXPECT_EQ(choices_of("linear_gelu_forward in place"), 1);
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
      kernels::set_ways({});
      Gradients want(l);
      in_turn(want);
      measure();
      Gradients measured(l);
      run(measured);
      EXPECT_EQ(measured.values(), want.values());
      EXPECT_GE(choices_of("linear_backward with bias"), 1);
      take("second_stream");
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
      kernels::set_ways({});
      Gradients want(l);
      ops::linear_backward_weight(l.dy, l.x, want.dw, want.db, true);
      ops::linear_gelu_backward_input(l.dy, l.w, l.z, want.dx, none, with_sums ? want.sums : none,
                                      true);
      measure();
      Gradients measured(l);
      run(measured);
      const float bound = dtype == DType::bf16 ? 0.02f : 1e-5f;
      expect_near(measured.values(), want.values(), bound);
      EXPECT_GE(choices_of(with_sums ? "linear_gelu_backward and sums with bias"
                                     : "linear_gelu_backward with bias"),
                1);
      take("second_stream");
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

// dz's sums by a kernel behind the product, by the library, or with nothing fused.
TEST_F(Products, EveryWayToSumAGeluGradientIsRight) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Layer l(dtype);
    Tensor none;
    const auto run = [&](Gradients& g, bool accumulate) {
      ops::linear_gelu_backward_input(l.dy, l.w, l.z, g.dx, none, g.sums, accumulate);
    };
    measure();
    Gradients first(l);
    run(first, true);
    EXPECT_GE(choices_of("linear_gelu_backward_input without h with bias"), 1);
    const auto before = Gradients(l).values()[3];
    for (const std::string way : {"fused", "gelu_sums", "pieces"})
      for (const bool accumulate : {false, true}) {
        take(way);
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
