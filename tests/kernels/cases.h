// Every operation with a GPU side, on inputs of real and of awkward sizes: the one table of shapes,
// draws and tolerances. weft_kernels (main.cpp) checks the GPU against the CPU with it and then
// times both; test_ops runs its small cases on the CPU against the fp64 references that stand
// beside them (tests/ops/cases_test.cpp). One .cpp a header of ops/.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/tensor.h"

namespace weft {

// `small`: some seconds for all cases together on the stand-in for CUDA, with sizes that divide
// nothing (tests, sanitizers). `real`: the shapes of STDiT3-XL/2 at 51 frames 480p (T 15, S 1590)
// and 16 frames 256x256 (T 4, S 256).
enum class CaseSize { small, real };

// What bounds the operation: the ceiling that its time is compared with.
enum class Bound { bandwidth, tensor_cores };

using Values = std::vector<double>;  // of a tensor; empty for one that is not given

// Elements of an output, from `first` on.
struct Piece {
  std::size_t output;
  std::int64_t first;
  Values values;
};

struct KernelCase {
  std::string op;     // "layer_norm_modulate_forward"
  std::string shape;  // "B2 T15 S1590 C1152"
  DType dtype = DType::f32;
  std::vector<Tensor> inputs;  // in host memory
  // Calls the operation on `in`, which are the inputs on one device (it may change them), and
  // returns what it wrote. Outputs come from the current arena.
  using Run = std::function<std::vector<Tensor>(std::vector<Tensor>& in)>;
  Run run;
  double bytes =
      0;  // least traffic with the device's memory: every input read and every output written once
  double flops = 0;  // useful operations (no padding, no recomputation)
  Bound bound = Bound::bandwidth;
  // Largest |device - CPU| allowed, as a share of the largest |CPU| of the same output. For bf16
  // derived from 2^-8.
  double tolerance = 1e-5;
  // For sizes at which the CPU side would take minutes. `prepare` makes, on the device, those
  // inputs that are results of other operations. `pieces` stands in for a run on the CPU side:
  // parts of the outputs in fp64, from host copies of the inputs.
  std::function<void(std::vector<Tensor>& in)> prepare;
  std::function<std::vector<Piece>(const std::vector<Values>& in)> pieces;
  // The outputs in fp64 by the formula in the specification, from the inputs' values as `run` finds
  // them; empty where the formula is tested otherwise (tests/ops), or where there is none, as for
  // random bits.
  std::function<std::vector<Values>(const std::vector<Values>& in)> reference;
};

// Where cases are made for, one after the other: the inputs of all of them together would fill a
// small host's memory.
class Cases {
 public:
  using Take = std::function<void(const KernelCase&)>;
  explicit Cases(Take take) : take_(std::move(take)) {}
  // The case before it is complete now and goes to `take`.
  void push_back(KernelCase c);
  // The last one, to be completed.
  KernelCase& back() { return *last_; }
  void finish();

 private:
  Take take_;
  std::optional<KernelCase> last_;
};

// Calls `take` with every case of the size, kind by kind. Inputs exist from when their case, or one
// made together with it, is made until `take` returns.
void for_each_case(CaseSize size, const Cases::Take& take);

void attention_cases(CaseSize size, Cases& cases);
void batch_norm_cases(CaseSize size, Cases& cases);
void class_loss_cases(CaseSize size, Cases& cases);
void conv_cases(CaseSize size, Cases& cases);
void deform_cases(CaseSize size, Cases& cases);
void diffusion_cases(CaseSize size, Cases& cases);
void embed_cases(CaseSize size, Cases& cases);
void fp8_cases(CaseSize size, Cases& cases);
void fusion_cases(CaseSize size, Cases& cases);
void layout_cases(CaseSize size, Cases& cases);
void evaluate_cases(CaseSize size, Cases& cases);
void loss_cases(CaseSize size, Cases& cases);
void matmul_cases(CaseSize size, Cases& cases);
void modulated_cases(CaseSize size, Cases& cases);
void norm_cases(CaseSize size, Cases& cases);
void optimizer_cases(CaseSize size, Cases& cases);
void pointwise_cases(CaseSize size, Cases& cases);
void pool_cases(CaseSize size, Cases& cases);
void random_cases(CaseSize size, Cases& cases);
void reduce_cases(CaseSize size, Cases& cases);
void resize_cases(CaseSize size, Cases& cases);
void spade_cases(CaseSize size, Cases& cases);
void text_loss_cases(CaseSize size, Cases& cases);
void volume_cases(CaseSize size, Cases& cases);

// A case without inputs and without anything to run.
KernelCase make_case(std::string op, std::string shape, DType dtype, double bytes,
                     double tolerance);

// A case that memory bounds, whose sums may be taken in another order. `values`: read and written
// in all.
KernelCase bandwidth_case(std::string op, std::string shape, DType dtype, std::int64_t values,
                          std::vector<Tensor> inputs, KernelCase::Run run);

// Host tensor of the type, normal with the given deviation, a function of `seed`.
Tensor random_tensor(const Shape& shape, DType dtype, std::uint64_t seed, float deviation = 1.0f,
                     float mean = 0.0f);

// Copies of host tensors on the current arena's device; undefined tensors stay undefined.
std::vector<Tensor> copies(const std::vector<Tensor>& inputs);

Values values_of(const Tensor& on_device);
std::vector<Values> values_of(const std::vector<Tensor>& tensors);

struct Verdict {
  std::int64_t wrong = 0;  // elements
  double worst = 0;        // largest difference as a share of the largest value that is wanted
};
// Output by output; NaN equals NaN alone.
Verdict compare(const std::vector<Values>& got, const std::vector<Values>& wanted,
                double tolerance);

// The same for parts of the outputs.
Verdict compare(const std::vector<Tensor>& got, const std::vector<Piece>& wanted, double tolerance);

}  // namespace weft
