// What cuBLASLt refuses. Its products and epilogues are those of the cases of
// tests/kernels/matmul.cpp.
#include "cublasLt.h"

#include <cstdlib>
#include <string>
#include <utility>

#include "cuda_bf16.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

constexpr std::int64_t m = 16, n = 7, k = 11;  // D is m x n, column-major

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

// A product of e4m3: D 32 x 3 of inner dimension 16, what the library wants of one.
struct Fp8Call {
  cublasOperation_t a = CUBLAS_OP_T, b = CUBLAS_OP_N;
  std::int64_t k = 16;
  cudaDataType_t d = CUDA_R_16BF;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};
cublasStatus_t proposals_for(const Fp8Call& c) {
  constexpr std::int64_t rows = 32, columns = 3;
  cublasLtHandle_t handle;
  cublasLtCreate(&handle);
  cublasLtMatmulDesc_t operation;
  cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto x) {
    cublasLtMatmulDescSetAttribute(operation, attribute, &x, sizeof x);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, c.a);
  set(CUBLASLT_MATMUL_DESC_TRANSB, c.b);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
  const auto layout = [](cudaDataType_t t, std::int64_t r, std::int64_t columns_) {
    cublasLtMatrixLayout_t l;
    cublasLtMatrixLayoutCreate(&l, t, static_cast<std::uint64_t>(r),
                               static_cast<std::uint64_t>(columns_), r);
    return l;
  };
  const auto la =
      c.a == CUBLAS_OP_T ? layout(CUDA_R_8F_E4M3, c.k, rows) : layout(CUDA_R_8F_E4M3, rows, c.k);
  const auto lb = c.b == CUBLAS_OP_N ? layout(CUDA_R_8F_E4M3, c.k, columns)
                                     : layout(CUDA_R_8F_E4M3, columns, c.k);
  const auto ld = layout(c.d, rows, columns);
  cublasLtMatmulPreference_t wishes;
  cublasLtMatmulPreferenceCreate(&wishes);
  cublasLtMatmulHeuristicResult_t found[8];
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, operation, la, lb, ld, ld, wishes, 8, found, &count);
  cublasLtMatmulPreferenceDestroy(wishes);
  for (const auto l : {la, lb, ld}) cublasLtMatrixLayoutDestroy(l);
  cublasLtMatmulDescDestroy(operation);
  cublasLtDestroy(handle);
  return status;
}

TEST(CublasLt, RefusesE4m3AsTheLibraryDoes) {
  // The default device is of 8.0, which has none.
  const char* capability = std::getenv("WEFT_EMULATION_CAPABILITY");
  const bool has_e4m3 =
      capability != nullptr && std::string(capability) != "8.0" && std::string(capability) != "8.6";
  EXPECT_EQ(proposals_for({}), has_e4m3 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
  Fp8Call bias{};
  bias.epilogue = CUBLASLT_EPILOGUE_BIAS;
  EXPECT_EQ(proposals_for(bias), has_e4m3 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
  for (const Fp8Call& c :
       {Fp8Call{CUBLAS_OP_N}, Fp8Call{CUBLAS_OP_T, CUBLAS_OP_T},
        Fp8Call{CUBLAS_OP_T, CUBLAS_OP_N, 24}, Fp8Call{CUBLAS_OP_T, CUBLAS_OP_N, 16, CUDA_R_32F},
        Fp8Call{CUBLAS_OP_T, CUBLAS_OP_N, 16, CUDA_R_16BF, CUBLASLT_EPILOGUE_GELU_AUX_BIAS}})
    EXPECT_EQ(proposals_for(c), CUBLAS_STATUS_NOT_SUPPORTED);
}

}  // namespace
}  // namespace stand_in_test
