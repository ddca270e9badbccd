// Ways of computing the same thing on a GPU, and which of them a run takes: the first, or the
// fastest by measurement. A way that no GPU has run competes only where device.try names it. CUDA
// side: kernels/matmul/ways.cu.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::kernels {

struct UntestedWay {
  std::string_view name, what;
};
inline constexpr std::array<UntestedWay, 5> untested_ways{{
    {"five",
     "the backward of attention by five products of tiles instead of seven, its sums in no fixed "
     "order (compute capability 9.0)"},
    {"fp8",
     "the e4m3 products of model.dtype = \"fp8\" by the library; otherwise products in bf16 take "
     "the same rounded operands"},
    {"gelu_sums", "the bias gradient of an MLP's first layer summed in its product's epilogue"},
    {"kept", "activations kept for the backward, GELU's output among them, where memory is free"},
    {"second_stream", "the gradient of a layer's weights beside that of its input"},
}};

// Multiplications from which a choice is worth measuring: a microsecond of an H100.
constexpr std::int64_t least_measured_product = std::int64_t{1} << 27;

struct Ways {
  std::vector<std::string> tried;  // names of untested_ways
  // Lines of measured choices, as ways_table() gave them: a run with the same table repeats its
  // choices, and with them its bits. What it lacks is measured where it first occurs, or the first
  // way is taken: so is what has fewer multiplications than `least`.
  std::string table;
  bool measure = false;
  std::int64_t least = least_measured_product;
  // For tests: this way wherever it is offered, unmeasured.
  std::string only;
};

// Weak symbols, as the operations: null in a build without CUDA.
[[gnu::weak]] void set_ways(Ways ways);
// The table with what was measured since. Lines "GPU and library TAB work TAB way TAB
// microseconds"; those of other GPUs stay.
[[gnu::weak]] std::string ways_table();
[[gnu::weak]] std::string ways_identity();  // "GPU and library"
// "five in 2 choices, gelu_sums in none (wrong)": of the ways that are tried, how many of the
// table's choices took each; "" where none is.
[[gnu::weak]] std::string ways_taken();

}  // namespace weft::kernels
