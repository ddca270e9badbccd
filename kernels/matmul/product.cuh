// One matrix product with what is fused to it: by cuBLASLt (product_lt.cu), or by a plain kernel
// for shapes and addresses that the library takes no part in (product_plain.cu). Row-major
// throughout.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace weft::kernels {

// What happens to the sum before it is stored.
enum class Epilogue {
  none,
  bias,                // + vector[column]
  gelu_bias,           // gelu(. + vector[column])
  gelu_bias_aux,       // the same, and aux = . + vector[column]
  gelu_gradient,       // . * gelu'(aux)
  gelu_gradient_sums,  // the same, and vector[column] is written with the sum of D's column
  bias_gradient,       // none; but vector[row] is written with the sum of A's row over `inner`
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

// Where work goes: a stream, and the blocks of the arena that it uses there. They go back with this
// object, which must outlive the moment when the compute stream waits for the other one: the arena
// hands them out again in the order of the compute stream.
struct Work {
  Stream stream = Stream::compute;
  std::vector<Tensor> blocks;

  Tensor scratch(const Shape& shape, DType dtype) {
    return blocks.emplace_back(Tensor::empty(shape, dtype));
  }
};

struct Operands {
  const void *a, *b, *c;  // c: null unless p.add
  void* d;
  // Null unless the epilogue has one. A bias is of vector_type, the sums of gelu_gradient_sums of
  // D's type, those of bias_gradient f32.
  void* vector = nullptr;
  void* aux = nullptr;             // [rows, columns] of D's type, or null
  DType vector_type = DType::f32;  // or D's
  Stream stream = Stream::compute;
  // What A and B in e4m3 are multiplied by, on the device.
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
                 bool accumulate, Work& work);
inline void column_sums(const Tensor& x, std::int64_t rows, std::int64_t columns, float* sums,
                        bool accumulate) {
  Work work;
  column_sums(x, rows, columns, sums, accumulate, work);
}

// y [n] (+)= x [n], which is f32 or bf16.
void add_vector(const void* x, DType dtype, float* y, std::int64_t n, bool accumulate,
                Stream stream);

// y [n] = x [n] rounded to bf16.
void round_vector(const float* x, bf16* y, std::int64_t n, Stream stream = Stream::compute);

}  // namespace weft::kernels
