// cuBLASLt's products: descriptions are checked as the library checks them, then queued with copies
// of everything they say; matmul.cpp computes.
#include "matmul.h"

#include <algorithm>
#include <cstring>

#include "device.h"
#include "memory.h"
#include "streams.h"

using emulation::MatrixLayout;
using emulation::Product;

struct cublasLtContext {};
struct cublasLtMatrixDescription {
  MatrixLayout layout;
};
struct cublasLtMatmulDescription {
  Product product;
  cublasComputeType_t compute;
  cudaDataType_t scale;
};
struct cublasLtMatmulWishes {
  std::uint64_t workspace = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t alignment[4] = {256, 256, 256, 256};
};

namespace {

struct Status {
  cublasStatus_t status;
  const char *name, *text;
};
constexpr Status statuses[] = {
    {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED", "no handle"},
    {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "no memory"},
    {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE", "an invalid parameter"},
    {CUBLAS_STATUS_ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH", "not on this architecture"},
    {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED", "execution failed"},
    {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "an internal error"},
    {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "not supported"},
};
const Status& status_of(cublasStatus_t s) {
  const auto* found = std::find_if(std::begin(statuses), std::end(statuses),
                                   [=](const Status& x) { return x.status == s; });
  return found == std::end(statuses) ? statuses[6] : *found;
}

template <class T>
cublasStatus_t take(T& to, const void* value, std::size_t bytes) {
  if (value == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t take_as_int(T& to, const void* value, std::size_t bytes) {
  std::int32_t number = 0;
  const cublasStatus_t s = take(number, value, bytes);
  if (s == CUBLAS_STATUS_SUCCESS) to = static_cast<T>(number);
  return s;
}

bool layout_fits(const MatrixLayout& l) {
  const std::uint64_t least = l.order == CUBLASLT_ORDER_COL ? l.rows : l.columns;
  return l.rows > 0 && l.columns > 0 && l.ld >= static_cast<std::int64_t>(least);
}

// Whether the library multiplies e4m3 so: both operands with the inner dimension contiguous, bf16
// out, from 8.9 on.
bool multiplies_e4m3(const Product& p, cublasComputeType_t compute) {
  const emulation::Capability& gpu = emulation::capability();
  const auto by_16 = [](auto x) { return x % 16 == 0; };
  return gpu.major * 10 + gpu.minor >= 89 && compute == CUBLAS_COMPUTE_32F && p.transposed_a &&
         !p.transposed_b && p.d.type == CUDA_R_16BF && p.d.order == CUBLASLT_ORDER_COL &&
         p.a.order == CUBLASLT_ORDER_COL && p.b.order == CUBLASLT_ORDER_COL && by_16(p.a.rows) &&
         by_16(p.a.ld) && by_16(p.b.ld) && by_16(p.d.rows) && by_16(p.d.ld) &&
         (p.epilogue == CUBLASLT_EPILOGUE_DEFAULT || p.epilogue == CUBLASLT_EPILOGUE_BIAS);
}

// What the library says of a product before it looks at addresses.
cublasStatus_t check(const Product& p, cublasComputeType_t compute, cudaDataType_t scale) {
  if (!layout_fits(p.a) || !layout_fits(p.b) || !layout_fits(p.c) || !layout_fits(p.d))
    return CUBLAS_STATUS_INVALID_VALUE;
  const auto [m, ka] =
      p.transposed_a ? std::pair(p.a.columns, p.a.rows) : std::pair(p.a.rows, p.a.columns);
  const auto [kb, n] =
      p.transposed_b ? std::pair(p.b.columns, p.b.rows) : std::pair(p.b.rows, p.b.columns);
  if (ka != kb || m != p.d.rows || n != p.d.columns || p.c.rows != m || p.c.columns != n)
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool f32 = p.a.type == CUDA_R_32F && p.d.type == CUDA_R_32F;
  const bool bf16 = p.a.type == CUDA_R_16BF && (p.d.type == CUDA_R_16BF || p.d.type == CUDA_R_32F);
  const bool e4m3 = p.a.type == CUDA_R_8F_E4M3;
  if (!e4m3 && (p.a_scale != nullptr || p.b_scale != nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
  if (e4m3 && !multiplies_e4m3(p, compute)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.a.type != p.b.type || p.c.type != p.d.type || p.c.order != p.d.order ||
      (!f32 && !bf16 && !e4m3) || scale != CUDA_R_32F ||
      (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC &&
       (compute != CUBLAS_COMPUTE_32F_FAST_TF32 || !f32)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.bias_type != p.d.type && emulation::has_vector(p.epilogue))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.d.order != CUBLASLT_ORDER_COL)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (emulation::has_aux(p.epilogue) &&
      (p.aux_ld % 8 != 0 || p.aux_ld < static_cast<std::int64_t>(p.d.rows)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  switch (p.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB:
      return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

bool aligned(const void* p, std::uint64_t to) {
  return reinterpret_cast<std::uintptr_t>(p) % to == 0;
}
std::size_t size_of(cudaDataType_t t) { return t == CUDA_R_8F_E4M3 ? 1 : t == CUDA_R_16BF ? 2 : 4; }
// Bytes from a matrix's first element to behind its last.
std::size_t extent(const MatrixLayout& l) {
  const bool columns = l.order == CUBLASLT_ORDER_COL;
  const std::uint64_t lines = columns ? l.columns : l.rows, length = columns ? l.rows : l.columns;
  return ((lines - 1) * static_cast<std::uint64_t>(l.ld) + length) * size_of(l.type);
}
bool on_device(const void* p, std::size_t bytes) {
  return p != nullptr && emulation::where_is(p, bytes) == emulation::Where::device;
}

}  // namespace

const char* cublasLtGetStatusName(cublasStatus_t s) { return status_of(s).name; }
const char* cublasLtGetStatusString(cublasStatus_t s) { return status_of(s).text; }
std::size_t cublasLtGetVersion() { return 130000; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) {
  const emulation::Device device;
  if (emulation::call_fails(__func__)) return CUBLAS_STATUS_NOT_INITIALIZED;
  *h = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
  delete h;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *d = new cublasLtMatmulDescription{{}, compute, scale};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  delete d;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  Product& p = d->product;
  int operation = CUBLAS_OP_N;
  cublasStatus_t s = CUBLAS_STATUS_NOT_SUPPORTED;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
      return take_as_int(d->compute, value, bytes);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
      return take_as_int(d->scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      s = take(operation, value, bytes);
      p.transposed_a = operation != CUBLAS_OP_N;
      return s;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      s = take(operation, value, bytes);
      p.transposed_b = operation != CUBLAS_OP_N;
      return s;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take_as_int(p.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(p.vector, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return take(p.aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return take(p.aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
      return take(p.a_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return take(p.b_scale, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      p.bias_type_given = true;
      return take_as_int(p.bias_type, value, bytes);
  }
  return s;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t columns,
                                          std::int64_t ld) {
  *l = new cublasLtMatrixDescription{{type, CUBLASLT_ORDER_COL, rows, columns, ld}};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  delete l;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, std::size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return take_as_int(l->layout.type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return take_as_int(l->layout.order, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return take(l->layout.rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return take(l->layout.columns, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return take(l->layout.ld, value, bytes);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
  *p = new cublasLtMatmulWishes;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  delete p;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take(p->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return take(p->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return take(p->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return take(p->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return take(p->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return take(p->alignment[3], value, bytes);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

namespace {

// A library with few kernels: none for data that is not aligned to 16 bytes, none with an epilogue
// in f32, and the first that it proposes refuses to run.
bool few_kernels() {
  static const char* const kind = std::getenv("WEFT_EMULATION_MATMUL");
  return kind != nullptr && std::strcmp(kind, "few") == 0;
}

Product product_of(const cublasLtMatmulDescription& d, cublasLtMatrixLayout_t a,
                   cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out) {
  Product p = d.product;
  p.a = a->layout;
  p.b = b->layout;
  p.c = c->layout;
  p.d = out->layout;
  if (!p.bias_type_given) p.bias_type = p.d.type;
  return p;
}

}  // namespace

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t wishes, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  *found = 0;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (emulation::call_fails(__func__)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
  const Product p = product_of(*desc, a, b, c, d);
  if (const cublasStatus_t s = check(p, desc->compute, desc->scale); s != CUBLAS_STATUS_SUCCESS)
    return s;
  // Three that differ in what they ask for: 16-byte alignment and workspace, the first alone,
  // neither.
  const std::uint32_t least = *std::min_element(wishes->alignment, wishes->alignment + 4);
  const auto offer = [&](std::uint64_t alignment, std::uint64_t workspace) {
    if (*found >= wanted || least < alignment || wishes->workspace < workspace) return;
    auto& r = results[(*found)++];
    r = {};
    r.algo.data[0] = alignment;
    r.algo.data[1] = workspace;
    r.workspaceSize = workspace;
    r.state = CUBLAS_STATUS_SUCCESS;
    r.wavesCount = 1.0f;
  };
  if (few_kernels() && p.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.d.type == CUDA_R_32F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  offer(16, 4096);
  offer(16, 0);
  if (!few_kernels() && p.a.type != CUDA_R_8F_E4M3) offer(size_of(p.a.type), 0);
  return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
  const emulation::Device device;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (emulation::call_fails(__func__)) return CUBLAS_STATUS_EXECUTION_FAILED;
  Product p = product_of(*desc, a_layout, b_layout, c_layout, d_layout);
  if (const cublasStatus_t s = check(p, desc->compute, desc->scale); s != CUBLAS_STATUS_SUCCESS)
    return s;
  p.rounds_inputs = desc->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  std::memcpy(&p.alpha, alpha, sizeof p.alpha);
  std::memcpy(&p.beta, beta, sizeof p.beta);
  if (!on_device(a, extent(p.a)) || !on_device(b, extent(p.b)) || !on_device(d, extent(p.d)) ||
      (p.beta != 0 && !on_device(c, extent(p.c))))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (c == d && p.c.ld != p.d.ld) return CUBLAS_STATUS_INVALID_VALUE;
  for (const void* scale : {p.a_scale, p.b_scale})
    if (scale != nullptr && !on_device(scale, sizeof(float))) return CUBLAS_STATUS_INVALID_VALUE;
  if (emulation::has_vector(p.epilogue) && p.vector == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (emulation::has_aux(p.epilogue) && p.aux == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  const std::uint64_t alignment = algo != nullptr              ? algo->data[0]
                                  : p.a.type == CUDA_R_8F_E4M3 ? 16
                                                               : size_of(p.a.type);
  if (!aligned(a, alignment) || !aligned(b, alignment) || !aligned(d, alignment) ||
      (p.beta != 0 && !aligned(c, alignment)) ||
      (emulation::has_aux(p.epilogue) && !aligned(p.aux, 16)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (algo != nullptr && (algo->data[1] > workspace_bytes || (few_kernels() && algo->data[1] > 0)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const std::size_t scribble = algo == nullptr ? 0 : algo->data[1];
  const cudaError_t error = emulation::enqueue(stream, emulation::simple("cublasLtMatmul", [=] {
                                                 // What the library leaves in the workspace is
                                                 // nobody's business.
                                                 if (scribble > 0)
                                                   std::memset(workspace, 0xff, scribble);
                                                 emulation::multiply(p, a, b, c, d);
                                               }));
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
