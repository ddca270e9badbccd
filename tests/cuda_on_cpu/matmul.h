// One product as cuBLASLt describes it.
#pragma once

#include <bit>
#include <cstdint>

#include "cublasLt.h"

namespace emulation {

// As the stand-in's tensor cores take f32: the mantissa cut to 10 bits.
inline float tf32(float v) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(v) & 0xffffe000u);
}

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
  bool rounds_inputs = false;                         // f32 to TF32
  const void *a_scale = nullptr, *b_scale = nullptr;  // of e4m3: floats that multiply A and B
};

// The nearest byte in e4m3, by a search among all, ties to even; past 448 that of 448.
std::uint8_t to_e4m3(float x);
float from_e4m3(std::uint8_t byte);

inline bool has_aux(cublasLtEpilogue_t e) { return (e & 128) != 0; }
inline bool has_vector(cublasLtEpilogue_t e) {
  return (e & CUBLASLT_EPILOGUE_BIAS) != 0 || e == CUBLASLT_EPILOGUE_DGELU_BGRAD ||
         e == CUBLASLT_EPILOGUE_BGRADA || e == CUBLASLT_EPILOGUE_BGRADB;
}

// Computes in f32 by oneDNN; C is not read where beta is 0.
void multiply(const Product& p, const void* a, const void* b, const void* c, void* d);

}  // namespace emulation
