// One matrix product with what is fused to it: by cuBLASLt (product_lt.cu), or by a plain kernel
// for shapes and addresses that the library takes no part in (product_plain.cu). Row-major
// throughout.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "tensor/tensor.h"

namespace weft::kernels {

// What happens to the sum before it is stored.
enum class Epilogue {
  none,
  bias,           // + vector[column]
  gelu_bias,      // gelu(. + vector[column])
  gelu_bias_aux,  // the same, and aux = . + vector[column]
  gelu_gradient,  // . * gelu'(aux)
  bias_gradient,  // none; but vector[row] is written with the sum of A's row over `inner`
};

// D [rows, columns] = A [rows, inner] B [inner, columns] (+ C).
struct Product {
  std::int64_t rows, columns, inner;
  bool a_transposed, b_transposed;  // stored as [inner, rows], as [columns, inner]
  DType in, out;  // of A and B, of C and D: both f32, both bf16, or bf16 in and f32 out
  Epilogue epilogue = Epilogue::none;
  bool add = false;  // C is added; it may be D
  // Elements from row to row as stored, of A, of B, of C and D; 0: as many as a row has.
  std::int64_t a_row = 0, b_row = 0, d_row = 0;
  bool e4m3 = false;  // A and B are bytes in e4m3 instead of `in`, B transposed (ops/fp8.h)
  auto operator<=>(const Product&) const = default;
};

// "23850x1152x4608 NT bf16->bf16 bias": for messages and for the table of measured choices.
std::string describe(const Product& p);

struct Operands {
  const void *a, *b, *c;  // c: null unless p.add
  void* d;
  void* vector;                    // null unless the epilogue has one; f32, a bias of vector_type
  void* aux;                       // [rows, columns] of D's type, or null
  DType vector_type = DType::f32;  // or D's
  // Of e4m3, on the device: what A and B are multiplied by.
  const float *a_scale = nullptr, *b_scale = nullptr;
};

// False where the library has no algorithm for it; then nothing has happened. Accumulates in f32;
// f32 operands are rounded to TF32 where tensor/device.h allows that, else not at all. An f32 bias
// is rounded to bf16 where D is bf16: the library takes no other.
bool product_lt(const Product& p, const Operands& x);

// Any sizes and addresses; epilogue none or bias. About a tenth of the FFMA rate: the last resort.
void product_plain(const Product& p, const Operands& x);

// sums [columns] (+)= column sums of x [rows, columns], f32 or bf16, in an order that depends on
// the shape alone.
void column_sums(const Tensor& x, std::int64_t rows, std::int64_t columns, float* sums,
                 bool accumulate);

// y [n] += x [n].
void add_vector(const float* x, float* y, std::int64_t n);

// y [n] = x [n] rounded to bf16.
void round_vector(const float* x, bf16* y, std::int64_t n);

}  // namespace weft::kernels
