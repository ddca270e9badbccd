#include "models/video_vae/patch_gan.h"

#include "tests/nn/fixture.h"

namespace weft::test {
namespace {

// One derivative by two ways: u . (tangent along v) forward is (gradient of u . logits) . v
// backward. Kinks do not matter.
TEST_F(OpTest, TangentsOfTheDiscriminatorAreItsGradients) {
  ParameterTable table;
  PatchGan gan(table, "discriminator.");
  table.allocate(1 << 16, false, true);
  table.initialise(3);
  const Shape shape{1, 2, 24, 32, 3};
  const Vec x = random_values(shape.numel(), 1), v = random_values(shape.numel(), 2);
  const Var frames = make_var(to_tensor(x, shape)), along = make_var(to_tensor(v, shape));
  Tape plain(Tape::Mode::infer), tape;
  const nn::Dual both = gan.forward({plain, table}, nn::Dual{make_var(to_tensor(x, shape)), along});
  const Var logits = gan.forward({tape, table}, frames);
  EXPECT_TRUE(same_bits(both.value->value, logits->value));
  const Vec u = random_values(logits->value.numel(), 3);
  logits->grad = to_tensor(u, logits->value.shape());
  table.begin_step([](int) {});
  tape.backward();
  const double backward = dot(to_values(frames->grad), v);
  EXPECT_NEAR(against(both.tangent->value, u) / backward, 1, 1e-4);
}

}  // namespace
}  // namespace weft::test
