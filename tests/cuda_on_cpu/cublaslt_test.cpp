// cuBLASLt's products and epilogues against plain loops in double.
#include "cublasLt.h"

#include <cmath>
#include <tuple>

#include "cuda_bf16.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

constexpr std::int64_t m = 16, n = 7, k = 11;  // D is m x n, column-major

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double gelu_slope(double x) {
  const double h = 1e-6;
  return (gelu(x + h) - gelu(x - h)) / (2 * h);
}
// Small multiples of 1/8: exact in bf16.
double value(std::int64_t i) { return static_cast<double>(i * 29 % 31 - 15) / 8.0; }

template <class T>
std::vector<T> values(std::int64_t count, std::int64_t first) {
  std::vector<T> v;
  for (std::int64_t i = 0; i < count; ++i) v.push_back(static_cast<float>(value(i + first)));
  return v;
}

template <class T>
constexpr cudaDataType_t type_of = sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;

struct Call {
  bool transposed_a = false, transposed_b = false;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float alpha = 1, beta = 0;
  std::int64_t lda = 20, ldb = 20, ldd = 18;
  std::int64_t aux_ld = 16;
};

template <class In, class Out>
struct Result {
  cublasStatus_t heuristic, status;
  int algorithms = 0;
  std::vector<Out> d, vector, aux;
};

// Operands are value(i) of their storage: A from 0, B from 1000, C from 2000, vector from 3000, aux
// from 4000.
template <class In, class Out>
Result<In, Out> run(const Call& c, int algorithm = 0) {
  Result<In, Out> r{};
  const Stream stream;
  const Array<In> a(values<In>(20 * 20, 0)), b(values<In>(20 * 20, 1000));
  const Array<Out> d(values<Out>(18 * n, 2000)), vector(values<Out>(16, 3000)),
      aux(values<Out>(16 * n, 4000));
  const Array<char> workspace(8192);
  cublasLtHandle_t handle;
  cublasLtCreate(&handle);
  cublasLtMatmulDesc_t operation;
  cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto x) {
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(operation, attribute, &x, sizeof x),
              CUBLAS_STATUS_SUCCESS);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, c.transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, c.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
  set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector.get());
  set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.get());
  set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, c.aux_ld);
  const auto layout = [](cudaDataType_t t, bool transposed, std::int64_t rows, std::int64_t columns,
                         std::int64_t ld) {
    cublasLtMatrixLayout_t l;
    const auto [r_, c_] = transposed ? std::pair(columns, rows) : std::pair(rows, columns);
    cublasLtMatrixLayoutCreate(&l, t, static_cast<std::uint64_t>(r_),
                               static_cast<std::uint64_t>(c_), ld);
    return l;
  };
  const auto la = layout(type_of<In>, c.transposed_a, m, k, c.lda),
             lb = layout(type_of<In>, c.transposed_b, k, n, c.ldb),
             ld = layout(type_of<Out>, false, m, n, c.ldd);
  cublasLtMatmulPreference_t wishes;
  cublasLtMatmulPreferenceCreate(&wishes);
  const std::size_t space = 8192;
  cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space,
                                       sizeof space);
  cublasLtMatmulHeuristicResult_t found[8];
  r.heuristic = cublasLtMatmulAlgoGetHeuristic(handle, operation, la, lb, ld, ld, wishes, 8, found,
                                               &r.algorithms);
  if (r.algorithms > 0) {
    r.status =
        cublasLtMatmul(handle, operation, &c.alpha, a.get(), la, b.get(), lb, &c.beta, d.get(), ld,
                       d.get(), ld, &found[algorithm].algo, workspace.get(), space, stream);
    r.d = d.read();
    r.vector = vector.read();
    r.aux = aux.read();
  }
  cublasLtMatmulPreferenceDestroy(wishes);
  for (const auto l : {la, lb, ld}) cublasLtMatrixLayoutDestroy(l);
  cublasLtMatmulDescDestroy(operation);
  cublasLtDestroy(handle);
  return r;
}

double a_of(const Call& c, std::int64_t i, std::int64_t l) {
  return value(c.transposed_a ? i * c.lda + l : l * c.lda + i);
}
double b_of(const Call& c, std::int64_t l, std::int64_t j) {
  return value(1000 + (c.transposed_b ? l * c.ldb + j : j * c.ldb + l));
}
double sum_of(const Call& c, std::int64_t i, std::int64_t j) {
  double sum = 0;
  for (std::int64_t l = 0; l < k; ++l) sum += a_of(c, i, l) * b_of(c, l, j);
  return c.alpha * sum + c.beta * value(2000 + j * c.ldd + i);
}

template <class In, class Out>
void expect_right(const Call& c) {
  const auto r = run<In, Out>(c);
  ASSERT_EQ(r.status, CUBLAS_STATUS_SUCCESS);
  // One rounding of the output; sums of these operands are exact in f32, tanh is good to some ulp.
  const double tolerance = sizeof(Out) == 2 ? std::ldexp(1.0, -8) : 3e-6;
  const auto near = [&](Out got, double want) {
    EXPECT_NEAR(static_cast<float>(got), want, tolerance * std::fmax(1.0, std::fabs(want)));
  };
  const auto e = c.epilogue;
  std::vector<double> gradient(m, 0.0);
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t i = 0; i < m; ++i) {
      double x = sum_of(c, i, j);
      if (e & CUBLASLT_EPILOGUE_BIAS) x += value(3000 + i);
      if (e & CUBLASLT_EPILOGUE_GELU) {
        if (e & 128) near(r.aux[static_cast<std::size_t>(j * 16 + i)], x);
        x = gelu(x);
      } else if (e == CUBLASLT_EPILOGUE_DGELU || e == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
        x *= gelu_slope(value(4000 + j * 16 + i));
        gradient[static_cast<std::size_t>(i)] += x;
      }
      near(r.d[static_cast<std::size_t>(j * c.ldd + i)], x);
    }
  // Between the columns nothing is touched.
  EXPECT_EQ(static_cast<double>(static_cast<float>(r.d[16])), value(2016));
  for (std::int64_t i = 0; i < m; ++i)
    if (e == CUBLASLT_EPILOGUE_DGELU_BGRAD)
      near(r.vector[static_cast<std::size_t>(i)], gradient[static_cast<std::size_t>(i)]);
    else if (e == CUBLASLT_EPILOGUE_BGRADA || (e == CUBLASLT_EPILOGUE_BGRADB && i < n)) {
      double sum = 0;
      for (std::int64_t l = 0; l < k; ++l)
        sum += e == CUBLASLT_EPILOGUE_BGRADA ? a_of(c, i, l) : b_of(c, l, i);
      near(r.vector[static_cast<std::size_t>(i)], sum);
    }
}

TEST(CublasLt, ProductsOfAllTranspositionsAndTypes) {
  for (const bool ta : {false, true})
    for (const bool tb : {false, true}) {
      const Call c{ta, tb, CUBLASLT_EPILOGUE_DEFAULT, 0.5f, 2.0f};
      expect_right<float, float>(c);
      expect_right<__nv_bfloat16, __nv_bfloat16>(c);
      expect_right<__nv_bfloat16, float>(c);
    }
}

TEST(CublasLt, Epilogues) {
  for (const auto e :
       {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS,
        CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
        CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB}) {
    SCOPED_TRACE(e);
    const Call c{true, false, e};
    expect_right<float, float>(c);
    expect_right<__nv_bfloat16, __nv_bfloat16>(c);
  }
}

TEST(CublasLt, RefusesWhatTheLibraryRefuses) {
  Call c{false, false, CUBLASLT_EPILOGUE_GELU_AUX};
  c.aux_ld = 17;
  EXPECT_EQ((run<float, float>(c).heuristic), CUBLAS_STATUS_NOT_SUPPORTED);
  c = {};
  c.lda = 15;  // fewer than the rows
  EXPECT_EQ((run<float, float>(c).heuristic), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ((run<float, __nv_bfloat16>(Call{}).heuristic), CUBLAS_STATUS_NOT_SUPPORTED);
  const auto fine = run<float, float>(Call{});
  EXPECT_EQ(fine.algorithms, 3);
  EXPECT_EQ((run<float, float>(Call{}, 2).d), fine.d);
}

}  // namespace
}  // namespace stand_in_test
