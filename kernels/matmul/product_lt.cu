// Matrix products by cuBLASLt. CPU twin src/ops/cpu/matmul/matmul.cpp, cases
// tests/kernels/matmul.cpp. A product of [M,K] and [K,N] is 2 M N K operations over (M K + K N
// + M N) elements: 489 operations a byte and more in STDiT3's blocks, so the tensor cores bound it
// and the epilogues below are what saves time: each keeps one pass over [M,N] out of memory. The
// library counts in columns: row-major D = A B is its D^T = B^T A^T, without moving anything.
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "launch.cuh"
#include "matmul/product.cuh"
#include "matmul/ways.cuh"
#include "tensor/device.h"
#include "tensor/device_cuda.h"

namespace weft::kernels {
namespace {

void check(cublasStatus_t status, const char* call, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_if_gpu_failed(call, __FILE__, line);
  throw Error(Exit::hardware, std::string(call) + " failed: " + cublasLtGetStatusString(status),
              "see `weft doctor`; a library older than the build's, or a sick GPU, shows there",
              __FILE__, line);
}
#define LT_CHECK(call) check((call), #call, __LINE__)

constexpr std::size_t workspace_bytes = 32u << 20;
constexpr std::int64_t longest_bias = 1 << 16;
constexpr int proposals = 8;

cublasLtHandle_t library() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t made = nullptr;
    LT_CHECK(cublasLtCreate(&made));
    return made;
  }();
  return handle;
}

// What the products of a stream share, for it runs one at a time.
struct Scratch {
  void* workspace = device_runtime().allocate(workspace_bytes, false);
  // The rounded bias of the product under way.
  bf16* bias = static_cast<bf16*>(device_runtime().allocate(longest_bias * sizeof(bf16), false));
};

Scratch& scratch_of(Stream stream) {
  static std::map<Stream, Scratch> all;
  // The second stream may first be taken by a product that is recorded, when nothing can be
  // allocated: its scratch is made with the first product's.
  if (is_tried("second_stream")) all[Stream::second];
  return all[stream];
}

cudaDataType_t type_of(DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }
cudaDataType_t type_of_operands(const Product& p) {
  return p.e4m3 ? CUDA_R_8F_E4M3 : type_of(p.in);
}

cublasLtEpilogue_t epilogue_of(Epilogue e) {
  switch (e) {
    case Epilogue::none:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu_bias:
      return CUBLASLT_EPILOGUE_GELU_BIAS;
    case Epilogue::gelu_bias_aux:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::gelu_gradient:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::gelu_gradient_sums:
      return CUBLASLT_EPILOGUE_DGELU_BGRAD;
    // A is the library's second operand.
    case Epilogue::bias_gradient:
      return CUBLASLT_EPILOGUE_BGRADB;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// The largest power of two, up to 16, that divides the address: 16 is all that the fast kernels ask
// for, and a finer distinction would let the choice of algorithm, and so the bits, depend on where
// the arena put a tensor.
std::uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return p == nullptr
             ? 16
             : static_cast<std::uint32_t>(std::min<std::uintptr_t>(address & -address, 16));
}

// What an algorithm is chosen for.
struct Key {
  Product product;
  bool in_place;                          // C is D
  std::uint32_t a, b, c, d, vector, aux;  // alignments
  bool tf32;                              // f32 may be rounded to it
  auto operator<=>(const Key&) const = default;

  std::string text() const {
    std::string t = describe(product) + (in_place ? " in place aligned" : " aligned");
    for (const std::uint32_t alignment : {a, b, c, d, vector, aux})
      t += ' ' + std::to_string(alignment);
    return tf32 ? t + " tf32" : t;
  }
};

// The library's descriptions of one product and its algorithms, best guess first.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  std::array<cublasLtMatmulAlgo_t, proposals> algorithms{};
  int options = 0;      // algorithms that there are
  int chosen = -1;      // not yet
  int generation = -1;  // of the ways, for which it was chosen
};

template <class T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  LT_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

// Describes a stored row-major matrix to the library, for which it is the transpose. `row`:
// elements from row to row, or 0.
cublasLtMatrixLayout_t layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns,
                              std::int64_t row) {
  cublasLtMatrixLayout_t l = nullptr;
  LT_CHECK(cublasLtMatrixLayoutCreate(&l, type, static_cast<std::uint64_t>(columns),
                                      static_cast<std::uint64_t>(rows), row > 0 ? row : columns));
  return l;
}

// The addresses that the operation itself holds, not the call.
void point(const Plan& plan, const void* vector, const void* aux) {
  if (vector != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
  if (aux != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
}
// A and B change places: the library computes the transpose.
void point_at_scales(const Plan& plan, const Operands& x) {
  set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(x.b_scale));
  set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(x.a_scale));
}

Plan make_plan(const Key& key, const Operands& x, const void* vector) {
  const Product& p = key.product;
  const void* const aux = x.aux;
  Plan plan;
  LT_CHECK(cublasLtMatmulDescCreate(
      &plan.operation, key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p.epilogue));
  point(plan, vector, aux);
  if (p.e4m3) point_at_scales(plan, x);
  if (aux != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.columns);
  const cudaDataType_t in = type_of_operands(p);
  plan.a = p.b_transposed ? layout(in, p.columns, p.inner, p.b_row)
                          : layout(in, p.inner, p.columns, p.b_row);
  plan.b =
      p.a_transposed ? layout(in, p.inner, p.rows, p.a_row) : layout(in, p.rows, p.inner, p.a_row);
  plan.d = layout(type_of(p.out), p.rows, p.columns, p.d_row);

  cublasLtMatmulPreference_t wanted = nullptr;
  LT_CHECK(cublasLtMatmulPreferenceCreate(&wanted));
  set(wanted, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  // Where the inner dimension is split, parts are kept in f32 and added by a second kernel in their
  // order. In-place reduction is left out, for its order is the scheduler's; and reduction in the
  // output's type, for it rounds parts.
  set(wanted, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  // A and B change places: the library computes the transpose.
  set(wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b);
  set(wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a);
  set(wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c);
  set(wanted, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.d);
  cublasLtMatmulHeuristicResult_t results[proposals]{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(library(), plan.operation, plan.a, plan.b, plan.d, plan.d,
                                     wanted, proposals, results, &found);
  if (status != CUBLAS_STATUS_SUCCESS) {  // "not supported" has several codes
    throw_if_gpu_failed("cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
    found = 0;
  }
  LT_CHECK(cublasLtMatmulPreferenceDestroy(wanted));
  for (int i = 0; i < found; ++i)
    if (results[i].state == CUBLAS_STATUS_SUCCESS)
      plan.algorithms[plan.options++] = results[i].algo;
  return plan;
}

cublasStatus_t run(const Plan& plan, int algorithm, const Product& p, const Operands& x) {
  const float one = 1.0f, beta = p.add ? 1.0f : 0.0f;
  const cublasStatus_t status =
      cublasLtMatmul(library(), plan.operation, &one, x.b, plan.a, x.a, plan.b, &beta,
                     p.add ? x.c : x.d, plan.d, x.d, plan.d, &plan.algorithms[algorithm],
                     scratch_of(x.stream).workspace, workspace_bytes, cuda_stream(x.stream));
  if (status != CUBLAS_STATUS_SUCCESS) throw_if_gpu_failed("cublasLtMatmul", __FILE__, __LINE__);
  return status;
}

// The algorithm to take: the library's first proposal, or the fastest. Measuring changes no
// operand: C is read in place, and D, aux and sums go elsewhere.
int choose_algorithm(const Plan& plan, const Key& key, const Operands& x) {
  const Product& p = key.product;
  if (plan.options < 2 || !has_choice(p.rows * p.columns * p.inner)) return 0;
  const auto as = [](void* at, const Shape& shape, DType dtype) {
    return Tensor::borrow(at, shape, dtype, DeviceKind::cuda);
  };
  const Shape whole{p.rows, std::max(p.columns, p.d_row)};
  Outputs outputs{as(x.d, whole, p.out), Tensor(), Tensor()};
  if (p.epilogue == Epilogue::gelu_bias_aux) outputs[1] = as(x.aux, whole, p.out);
  if (p.epilogue == Epilogue::bias_gradient) outputs[2] = as(x.vector, {p.rows}, DType::f32);
  if (p.epilogue == Epilogue::gelu_gradient_sums) outputs[2] = as(x.vector, {p.columns}, p.out);
  std::vector<std::string> ways;
  for (int i = 0; i < plan.options; ++i) ways.push_back(std::to_string(i));
  return choose(key.text(), ways, outputs, tolerance_of(p.in), [&](int way, const Outputs& to) {
    Operands y = x;
    y.d = to[0].raw();
    y.stream = Stream::compute;
    point(plan, to[2].defined() ? to[2].raw() : nullptr, to[1].defined() ? to[1].raw() : nullptr);
    return run(plan, way, p, y) == CUBLAS_STATUS_SUCCESS;
  });
}

}  // namespace

std::string describe(const Product& p) {
  constexpr const char* epilogues[] = {
      "", " bias", " gelu", " gelu and z", " gelu slope", " gelu slope and sums", " bias gradient"};
  return std::to_string(p.rows) + "x" + std::to_string(p.columns) + "x" + std::to_string(p.inner) +
         (p.a_transposed ? " T" : " N") + (p.b_transposed ? "T " : "N ") +
         std::string(p.e4m3 ? "e4m3" : name_of(p.in)) + "->" + std::string(name_of(p.out)) +
         epilogues[static_cast<int>(p.epilogue)] + (p.add ? " added" : "") +
         (p.a_row + p.b_row + p.d_row > 0
              ? " rows " + std::to_string(p.a_row) + "," + std::to_string(p.b_row) + "," +
                    std::to_string(p.d_row)
              : "");
}

bool product_lt(const Product& p, const Operands& x) {
  const bool has_bias = p.epilogue == Epilogue::bias || p.epilogue == Epilogue::gelu_bias ||
                        p.epilogue == Epilogue::gelu_bias_aux;
  const bool rounds = has_bias && p.out == DType::bf16 && x.vector_type == DType::f32;
  if (rounds && p.columns > longest_bias) return false;
  if (x.aux != nullptr && p.columns % 8 != 0) return false;  // the library's own rule
  bf16* const rounded = scratch_of(x.stream).bias;
  const void* vector = rounds ? static_cast<const void*>(rounded) : x.vector;
  const Key key{p,
                p.add && x.c == x.d,
                alignment_of(x.a),
                alignment_of(x.b),
                alignment_of(p.add ? x.c : x.d),
                alignment_of(x.d),
                alignment_of(vector),
                alignment_of(x.aux),
                p.in == DType::f32 && tf32_allowed()};
  static std::map<Key, Plan> plans;
  auto it = plans.find(key);
  if (it == plans.end()) it = plans.emplace(key, make_plan(key, x, vector)).first;
  Plan& plan = it->second;
  if (plan.options == 0) return false;
  if (p.e4m3) point_at_scales(plan, x);
  if (rounds) round_vector(static_cast<const float*>(x.vector), rounded, p.columns, x.stream);
  const bool known = plan.chosen >= 0 && plan.generation == ways_generation();
  // Pointers from the last call may dangle: the bias may belong to another training of this
  // process.
  if (!known) point(plan, vector, x.aux);
  int chosen = known ? plan.chosen : choose_algorithm(plan, key, x);
  point(plan, vector, x.aux);
  cublasStatus_t status = run(plan, chosen, p, x);
  // A proposal may still be refused when it is run: the next one is tried, always in the same
  // order.
  while (status == CUBLAS_STATUS_NOT_SUPPORTED && chosen + 1 < plan.options)
    status = run(plan, ++chosen, p, x);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
    plan.options = 0;
    return false;
  }
  check(status, "cublasLtMatmul", __LINE__);
  // The choice of a capture is not kept, because a capture cannot measure.
  if (!known && !compute_is_capturing()) {
    plan.chosen = chosen;
    plan.generation = ways_generation();
  }
  return true;
}

}  // namespace weft::kernels
