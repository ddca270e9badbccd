// Convolutions of maps seen at four times their size, against the same with that map written out.
#include "models/sadtalker/render/quadruple.h"

#include <gmock/gmock.h>

#include "ops/resize.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

class QuadrupleTest : public OpTest {};

TEST_F(QuadrupleTest, IsTheConvolutionOfTheLargeMap) {
  ParameterTable table;
  FoldedNet net(table, "");
  const FoldedConv* conv = net.add("conv", "", 6, 5, ops::Conv::same(3), true);
  Quadruple quadruple(conv);
  table.allocate_for_inference(false);
  table.initialise(3);
  net.fold();
  quadruple.fold();
  const Tensor x = to_tensor(random_values(2 * 3 * 4 * 6, 1), {2, 1, 3, 4, 6});
  Tensor large = Tensor::empty({2, 1, 12, 16, 6}, DType::f32);
  ops::nearest_forward(x, 0, large, false);
  const Tensor wanted = convolve(*conv, large, 0.2f), got = quadruple.forward(x, 0.2f);
  ASSERT_EQ(got.shape(), wanted.shape());
  for (std::int64_t i = 0; i < got.numel(); ++i)
    ASSERT_NEAR(got.data<float>()[i], wanted.data<float>()[i], 1e-5) << i;
}

}  // namespace
}  // namespace weft::test
