// The table of cases that weft_kernels holds the GPU to (tests/kernels/cases.h), on the CPU:
// every case against its fp64 reference, and every case with one thread and with several.
#include <fmt/format.h>
#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

// An environment variable, until its end.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

void expect_reference(const KernelCase& c) {
  std::vector<Tensor> inputs = copies(c.inputs);
  const std::vector<Values> wanted = c.reference(values_of(inputs));
  const Verdict v = compare(values_of(c.run(inputs)), wanted, c.tolerance);
  EXPECT_EQ(v.wrong, 0) << c.op << " " << c.shape << " " << name_of(c.dtype) << ": " << v.worst
                        << " of the largest value, at most " << c.tolerance;
}

void expect_same_for_any_thread_count(const KernelCase& c) {
  const int threads = omp_get_max_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int n : {1, 3}) {
    omp_set_num_threads(n);
    std::vector<Tensor> inputs = copies(c.inputs);
    results.push_back(c.run(inputs));
  }
  omp_set_num_threads(threads);
  for (std::size_t i = 0; i < results[0].size(); ++i)
    EXPECT_EQ(std::memcmp(results[0][i].raw(), results[1][i].raw(), results[0][i].bytes()), 0)
        << c.op << " " << c.shape << " " << name_of(c.dtype) << ", output " << i;
}

TEST_F(OpTest, EveryCaseMatchesItsReference) {
  std::int64_t compared = 0;
  for_each_case(CaseSize::small, [&](const KernelCase& c) {
    if (!c.reference) return;
    expect_reference(c);
    ++compared;
  });
  EXPECT_GE(compared, 600) << "cases have lost their references";
}

// All inputs of the real size together are more than a small host has.
TEST(Cases, CasesGoOneByOne) {
  std::vector<std::string> taken;
  std::vector<std::weak_ptr<int>> inputs;
  Cases cases([&](const KernelCase& c) {
    for (std::size_t i = 0; i < taken.size(); ++i)
      EXPECT_TRUE(inputs[i].expired()) << taken[i] << " is still there when " << c.op << " runs";
    taken.push_back(c.op + c.shape);
  });
  for (const char* op : {"a", "b", "c"}) {
    KernelCase c = make_case(op, "", DType::f32, 0, 0);
    auto input = std::make_shared<int>();
    inputs.push_back(input);
    c.run = [input = std::move(input)](std::vector<Tensor>& in) { return in; };
    cases.push_back(std::move(c));
    cases.back().shape = " completed";
  }
  cases.finish();
  EXPECT_EQ(taken, (std::vector<std::string>{"a completed", "b completed", "c completed"}));
}

TEST(Reference, SlopesAreDerivatives) {
  const double h = 1e-5;
  for (double x = -6; x < 6; x += 0.37) {
    EXPECT_NEAR(fp64::gelu_slope(x), (fp64::gelu(x + h) - fp64::gelu(x - h)) / (2 * h), 1e-9);
    EXPECT_NEAR(fp64::silu_slope(x), (fp64::silu(x + h) - fp64::silu(x - h)) / (2 * h), 1e-9);
  }
}

// Sums are made in an order that does not depend on the thread count, or a restarted run would not
// repeat its bits.
TEST_F(OpTest, EveryCaseIsTheSameForAnyThreadCount) {
  for_each_case(CaseSize::small, [&](const KernelCase& c) {
    // oneDNN's sgemm for AVX2 (and on Arm, for convolutions alone), which small convolutions use
    // too, divides the sums of narrow products among threads.
    const bool of_weights =
        c.op == "conv_backward_weight" ||
        (ops::products_by_onednn && (c.op == "linear_backward_weight" ||
                                     c.op == "linear_backward" || c.op == "linear_gelu_backward"));
    if (of_weights && !ops::cpu_is_v4()) return;
    expect_same_for_any_thread_count(c);
  });
}

// Gradients of linear layers in bf16 on processors unlike this one (ops/cpu/matmul/matmul.cpp):
// with AVX-512 but without its instruction for bf16 they are oneDNN's, as with AMX; where oneDNN
// has none, they are made in f32. What the environment says is read once, so each is a process of
// its own.
TEST_F(OpTest, GradientsInBf16MatchOnOtherProcessors) {
  if (!ops::cpu_is_v4()) GTEST_SKIP() << "this processor has no AVX-512";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  struct Processor {
    const char *ours, *library;  // WEFT_CPU_ISA, ONEDNN_MAX_CPU_ISA; empty: no limit
    bool repeats;                // its bits at any thread count
  };
  const Processor processors[] = {
      {"v4", "", true}, {"v4", "AVX512_CORE", true}, {"", "AVX2", false}};
  for (const Processor& p : processors) {
    const Variable ours("WEFT_CPU_ISA", p.ours), library("ONEDNN_MAX_CPU_ISA", p.library);
    const auto check = [&] {
      std::int64_t compared = 0;
      Cases cases([&](const KernelCase& c) {
        if (c.dtype != DType::bf16 || !c.op.starts_with("linear_backward")) return;
        expect_reference(c);
        if (p.repeats) expect_same_for_any_thread_count(c);
        ++compared;
      });
      matmul_cases(CaseSize::small, cases);
      cases.finish();
      EXPECT_GE(compared, 20);
      std::_Exit(HasFailure() ? 1 : 0);
    };
    EXPECT_EXIT(check(), testing::ExitedWithCode(0), "")
        << "WEFT_CPU_ISA=" << p.ours << " ONEDNN_MAX_CPU_ISA=" << p.library;
  }
}

}  // namespace
}  // namespace weft::test
