// One product as cuBLASLt describes it.
#pragma once

#include "cublasLt.h"

namespace emulation {

struct MatrixLayout {
  cudaDataType_t type;
  cublasLtOrder_t order;
  std::uint64_t rows, columns;
  std::int64_t ld;
};

// D = epilogue(alpha op(A) op(B) + beta C).
struct Product {
  MatrixLayout a{}, b{}, c{}, d{};
  bool transposed_a = false, transposed_b = false;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* vector = nullptr;
  void* aux = nullptr;
  std::int64_t aux_ld = 0;
  cudaDataType_t bias_type = CUDA_R_32F;
  bool bias_type_given = false;  // else it is D's
  float alpha = 1, beta = 0;
};

inline bool has_aux(cublasLtEpilogue_t e) { return (e & 128) != 0; }
inline bool has_vector(cublasLtEpilogue_t e) {
  return (e & CUBLASLT_EPILOGUE_BIAS) != 0 || e == CUBLASLT_EPILOGUE_DGELU_BGRAD ||
         e == CUBLASLT_EPILOGUE_BGRADA || e == CUBLASLT_EPILOGUE_BGRADB;
}

// Computes in f32 by oneDNN; C is not read where beta is 0.
void multiply(const Product& p, const void* a, const void* b, const void* c, void* d);

}  // namespace emulation
