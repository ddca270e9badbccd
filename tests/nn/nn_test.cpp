// The tape: accumulation, recompute, and what returns to the arena.

#include "nn/nn.h"
#include "fixture.h"
#include "ops/fp8.h"
#include "ops/layout.h"
#include "ops/pointwise.h"

namespace weft::test {
namespace {

// A chain of residual blocks x + mlp(LN(x)) that share one modulation, like a transformer's.
class TapeTest : public OpTest {
 protected:
  static constexpr std::int64_t C = 32, tokens = 64, layers = 6;

  void SetUp() override {
    for (std::int64_t i = 0; i < layers; ++i) {
      const std::string name = std::to_string(i);
      const auto linear = [&](const std::string& part, std::int64_t out, std::int64_t in) {
        nn::Linear l;
        l.weight = &table_.add(name + part + ".weight", {out, in}, Init{});
        l.bias = &table_.add(name + part + ".bias", {out}, Init{});
        return l;
      };
      fc1_.push_back(linear(".fc1", 4 * C, C));
      fc2_.push_back(linear(".fc2", C, 4 * C));
    }
    shared_ = &table_.add("table", {3, C}, Init{});
    table_.allocate(1 << 16, false, true);
    randomise(table_, 5);
  }

  Var forward(Tape& tape, const Tensor& in, std::int64_t recomputed, std::int64_t depth = layers) {
    Var x = make_var(in);
    const Var t = make_var(to_tensor(random_values(3 * C, 9), {1, 3 * C}));
    const Var m = nn::modulation({tape, table_}, *shared_, t);
    const Tensor rows = to_tensor({0}, {1}, DType::i32);
    for (std::int64_t i = 0; i < depth; ++i) {
      const auto block = [this, x, m, rows, i](Tape& part) {
        const nn::Context c{part, table_};
        const Var u = nn::layer_norm_modulate(c, x, m, rows, 0, 1);
        const auto k = static_cast<std::size_t>(i);
        return nn::gate_residual(c, x, nn::mlp(c, u, fc1_[k], fc2_[k]), m, rows, 2, Tensor());
      };
      x = i < recomputed ? recompute(tape, block) : block(tape);
    }
    return x;
  }

  struct Run {
    Vec out, grads;
    std::size_t peak, kept;
  };
  // `allowed` bytes of optional activations may be kept.
  Run step(std::int64_t recomputed, std::size_t allowed = 0) {
    const std::size_t before = arena_->used();
    Run r;
    {
      table_.begin_step([](int) {});
      const Tensor in = to_tensor(random_values(tokens * C, 1), {1, 1, tokens, C});
      Tape tape;
      tape.allow(allowed);
      arena_->reset_peak();
      const Var y = forward(tape, in, recomputed);
      r.out = to_values(y->value);
      y->grad = to_tensor(random_values(tokens * C, 2), {1, 1, tokens, C});
      tape.backward();
      r.peak = arena_->peak();
      r.kept = tape.kept();
      table_.finish_step();
      r.grads = to_values(table_.grads());
    }
    EXPECT_EQ(arena_->used(), before) << "activations or gradients stayed behind";
    return r;
  }

  ParameterTable table_;
  std::vector<nn::Linear> fc1_, fc2_;
  Parameter* shared_ = nullptr;
};

TEST_F(TapeTest, RecomputeRepeatsTheBitsInLessMemory) {
  const Run plain = step(0), half = step(layers / 2), all = step(layers);
  EXPECT_GT(dot(plain.grads, plain.grads), 0);
  EXPECT_EQ(plain.out, half.out);
  EXPECT_EQ(plain.out, all.out);
  EXPECT_EQ(plain.grads, half.grads);
  EXPECT_EQ(plain.grads, all.grads);
  EXPECT_LT(half.peak, plain.peak);
  EXPECT_LT(all.peak, half.peak);
}

// The activation of an MLP, kept or computed again: f32 has the same bits, the peak grows by what
// is kept, and what has no room is recomputed.
TEST_F(TapeTest, KeptActivationsRepeatTheBitsInMoreMemory) {
  constexpr std::size_t each = tokens * 4 * C * sizeof(float);
  const Run plain = step(0);
  EXPECT_EQ(plain.kept, 0u);
  for (const std::size_t count : {std::size_t{1}, std::size_t{4}, std::size_t{layers}}) {
    const Run some = step(0, (count + 1) * each - 1);
    EXPECT_EQ(some.kept, count * each);
    EXPECT_EQ(some.out, plain.out);
    EXPECT_EQ(some.grads, plain.grads);
    EXPECT_GT(some.peak, plain.peak + (count - 1) * each);
    EXPECT_LE(some.peak, plain.peak + count * each);
  }
  EXPECT_EQ(step(0, each - 1).peak, plain.peak);
  // Recomputed blocks keep nothing.
  EXPECT_EQ(step(layers, layers * each).kept, 0u);
}

TEST_F(TapeTest, ActivationsReturnAsTheBackwardRuns) {
  table_.begin_step([](int) {});
  const Tensor in = to_tensor(random_values(tokens * C, 1), {1, 1, tokens, C});
  Tape tape;
  const std::size_t before = arena_->used();
  Var y = forward(tape, in, 0);
  const std::size_t forward_holds = arena_->used() - before;
  y->grad = to_tensor(random_values(tokens * C, 2), {1, 1, tokens, C});
  y.reset();
  arena_->reset_peak();
  tape.backward();
  // Gradients and scratch of one block beside activations that shrink: far from twice the forward's
  // share.
  EXPECT_LT(arena_->peak() - before, forward_holds + forward_holds / 3);
  EXPECT_EQ(arena_->used(), before);
}

TEST_F(TapeTest, InferRecordsNothingAndHoldsOneBlock) {
  const Tensor in = to_tensor(random_values(tokens * C, 1), {1, 1, tokens, C});
  std::size_t peaks[2];
  for (const std::int64_t depth : {std::int64_t{2}, layers}) {
    const std::size_t before = arena_->used();
    arena_->reset_peak();
    Tape tape(Tape::Mode::infer);
    const Var y = forward(tape, in, 0, depth);
    peaks[depth == layers] = arena_->peak() - before;
    EXPECT_EQ(arena_->used() - before, y->value.bytes()) << "more than the result is left";
    EXPECT_FALSE(tape.recording());
    tape.backward();
    EXPECT_FALSE(y->grad.defined());
  }
  EXPECT_EQ(peaks[0], peaks[1]) << "memory grows with the depth";
  // Recompute has nothing to do without a backward.
  Tape tape(Tape::Mode::infer);
  EXPECT_EQ(to_values(forward(tape, in, layers)->value), step(0).out);
}

TEST_F(TapeTest, MicroBatchesAddUp) {
  const Vec g = random_values(tokens * C, 2);
  const auto micro = [&](std::uint64_t stream) {
    Tape tape;
    const Var y = forward(tape, to_tensor(random_values(tokens * C, stream), {1, 1, tokens, C}), 2);
    y->grad = to_tensor(g, {1, 1, tokens, C});
    tape.backward();
  };
  const auto grads_of = [&](std::vector<std::uint64_t> streams) {
    table_.begin_step([](int) {});
    for (const auto s : streams) micro(s);
    table_.finish_step();
    return to_values(table_.grads());
  };
  const Vec a = grads_of({11}), b = grads_of({12}), both = grads_of({11, 12});
  Vec sum = a;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  EXPECT_GT(relative_error(a, sum), 0.1) << "two equal micro-batches would prove nothing";
  EXPECT_LT(relative_error(both, sum), 1e-6);
  EXPECT_EQ(grads_of({11}), a) << "a step sees the one before it";
}

TEST_F(TapeTest, TheFirstContributionIsTakenOverTheNextAreAdded) {
  const Var v = make_var(to_tensor({1, 2}, {2}));
  Tensor first = to_tensor({3, 4}, {2});
  const void* place = first.raw();
  give_grad(v, std::move(first));
  EXPECT_EQ(v->grad.raw(), place);
  give_grad(v, to_tensor({10, 20}, {2}));
  EXPECT_EQ(to_values(v->grad), (Vec{13, 24}));
  EXPECT_TRUE(grad_target(v).accumulate);
  EXPECT_EQ(to_values(zeroed_grad(v)), (Vec{13, 24}));
  const Var fresh = make_var(to_tensor({1, 2}, {2}));
  EXPECT_FALSE(grad_target(fresh).accumulate);
  EXPECT_EQ(fresh->grad.shape(), (Shape{2}));
  const Var zeroed = make_var(to_tensor({1, 2}, {2}));
  EXPECT_EQ(to_values(zeroed_grad(zeroed)), (Vec{0, 0}));
}

}  // namespace

// Gradients of small composed functions against differences of the same forward.
namespace {

class NnTest : public OpTest {
 protected:
  nn::Linear add_linear(const std::string& name, std::int64_t out, std::int64_t in) {
    nn::Linear l;
    l.weight = &table_.add(name + ".weight", {out, in}, Init{});
    l.bias = &table_.add(name + ".bias", {out}, Init{});
    return l;
  }
  void ready(bool bf16 = false) {
    table_.allocate(1 << 16, bf16, true);
    randomise(table_, 3);
    table_.begin_step([](int) {});
  }

  // One forward and backward of `f` at `inputs`; then every parameter and every input is held to
  // its slope.
  using Function = std::function<Var(nn::Context, const std::vector<Var>&)>;
  void check(const Function& f, const std::vector<Tensor>& inputs, double bound = 1e-3) {
    Tape tape;
    std::vector<Var> vars;
    for (const Tensor& t : inputs) vars.push_back(make_var(t));
    const Var out = f({tape, table_}, vars);
    const Vec g = random_values(out->value.numel(), 77);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    table_.finish_step();
    const auto loss = [&] {
      Tape again(Tape::Mode::infer);
      std::vector<Var> fresh;
      for (const Tensor& t : inputs) fresh.push_back(make_var(t));
      return against(f({again, table_}, fresh)->value, g);
    };
    expect_parameter_slopes(table_, loss, bound);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(vars[i]->grad.shape(), inputs[i].shape());
      expect_slope("input " + std::to_string(i), inputs[i], to_values(vars[i]->grad), loss, bound);
    }
  }

  ParameterTable table_;
};

TEST_F(NnTest, LinearChainWithReusedValues) {
  const nn::Linear a = add_linear("a", 12, 8), b = add_linear("b", 12, 12);
  const nn::Linear fc1 = add_linear("fc1", 20, 12), fc2 = add_linear("fc2", 12, 20);
  ready();
  // h serves as operand, as residual and as addend; s is added to itself; b's weights are used
  // twice.
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var h = nn::linear(c, in[0], a);
        const Var u = nn::linear(c, h, b, h);
        const Var v = nn::mlp(c, nn::add(c, u, h), fc1, fc2);
        const Var s = nn::silu(c, nn::linear(c, v, b, u));
        return nn::add(c, s, s);
      },
      {to_tensor(random_values(2 * 5 * 8, 1), {2, 5, 8})});
}

TEST_F(NnTest, ModulatedBlock) {
  const std::int64_t B = 2, T = 3, S = 5, C = 12;
  const nn::Linear t6 = add_linear("t6", 3 * C, 6), p = add_linear("p", C, C);
  Parameter& six = table_.add("table", {3, C}, Init{});
  Parameter& two = table_.add("final", {3, C}, Init{});
  ready();
  // Rows 0, 1: the samples; 2, 3: their clean frames.
  const Tensor rows = to_tensor({0, 2, 0, 3, 3, 1}, {B * T}, DType::i32);
  const Tensor keep = to_tensor({1.5, 0.5}, {B});
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var m = nn::modulation(c, six, nn::linear(c, nn::silu(c, in[1]), t6));
        const Var u = nn::layer_norm_modulate(c, in[0], m, rows, 0, 1);
        const Var x = nn::gate_residual(c, in[0], nn::linear(c, u, p), m, rows, 2, keep);
        const Var last = nn::modulation(c, two, in[2]);
        const Var o = nn::layer_norm_modulate(c, x, last, rows, 2, 0);
        return nn::layer_norm_modulate(c, o, last, rows, 1, 0, B);
      },
      {to_tensor(random_values(B * T * S * C, 1), {B, T, S, C}),
       to_tensor(random_values(2 * B * 6, 2), {2 * B, 6}),
       to_tensor(random_values(2 * B * C, 3, 0.5), {2 * B, C})});
}

// Queries and keys as Wan makes them: two norms of one input, one of them turned; three heads.
TEST_F(NnTest, AffineNormAndRmsRope) {
  const std::int64_t B = 2, N = 7, heads = 3, D = 6, C = heads * D;
  Parameter& w = table_.add("norm.weight", {C}, Init{});
  Parameter& b = table_.add("norm.bias", {C}, Init{});
  Parameter& q = table_.add("q_norm.weight", {C}, Init{});
  Parameter& k = table_.add("k_norm.weight", {C}, Init{});
  ready();
  Tensor rope = Tensor::empty({N, D / 2, 2}, DType::f32);
  ops::rope_table_3d(2, 2, 3, rope);
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var u = nn::layer_norm_affine(c, in[0], w, b);
        return nn::add(c, nn::rms_rope(c, u, q, rope, heads),
                       nn::rms_rope(c, u, k, Tensor(), heads));
      },
      {to_tensor(random_values(B * N * C, 1), {B, N, C})});
}

// A residual stream in f32 beside branches in bf16: the same as all in f32, up to the branches'
// rounding; the stream and its gradient are not rounded at all.
TEST_F(NnTest, ResidualStreamInF32) {
  const std::int64_t B = 2, N = 5, C = 40;
  Parameter& table = table_.add("table", {3, C}, Init{});
  Parameter& w = table_.add("norm.weight", {C}, Init{});
  Parameter& b = table_.add("norm.bias", {C}, Init{});
  ready();
  const Tensor t = to_tensor(random_values(B * 3 * C, 2, 0.5), {B, 3 * C});
  const Tensor rows = to_tensor({0, 1}, {B}, DType::i32);
  Vec out[2], dx[2], dw[2];
  for (const DType dtype : {DType::f32, DType::bf16}) {
    table_.begin_step([](int) {});
    Tape tape;
    const nn::Context c{tape, table_};
    const Var x = make_var(to_tensor(random_values(B * N * C, 1), {B, N, C}));
    const Var m = nn::modulation(c, table, make_var(t));
    const Var u = nn::layer_norm_modulate(c, x, m, rows, 0, 1, 0, dtype);
    EXPECT_EQ(u->value.dtype(), dtype);
    const Var y = nn::gate_residual(c, x, u, m, rows, 2, Tensor());
    EXPECT_EQ(y->value.dtype(), DType::f32);
    const Var z = nn::add(c, y, nn::layer_norm_affine(c, y, w, b, dtype));
    z->grad = to_tensor(random_values(B * N * C, 3), {B, N, C});
    tape.backward();
    const int i = dtype == DType::bf16;
    out[i] = to_values(z->value);
    dx[i] = to_values(x->grad);
    dw[i] = to_values(w.grad);
  }
  for (const Vec* v : {out, dx, dw}) {
    EXPECT_LT(relative_error(v[1], v[0]), 0x1p-8);
    EXPECT_GT(relative_error(v[1], v[0]), 0);
  }
}

// Layers of fp8 differ from those of bf16 in two products, and have GELU by itself; what they hand
// to the gradients of weights is not rounded.
TEST_F(NnTest, Fp8LayersRoundTheOperandsOfTwoProducts) {
  const std::int64_t N = 6, C = 32, hidden = 48;
  nn::Linear fc1 = add_linear("fc1", hidden, C), fc2 = add_linear("fc2", C, hidden);
  for (const nn::Linear* l : {&fc1, &fc2}) l->weight->bf16_only = l->bias->bf16_only = true;
  ready(true);
  const Tensor in = to_tensor(random_values(N * C, 1), {N, C}, DType::bf16);
  const Tensor dy = to_tensor(random_values(N * C, 2), {N, C}, DType::bf16);
  struct Result {
    Vec y, dx, dw;
  };
  const auto run = [&](bool fp8, auto&& function) {
    fc1.fp8 = fc2.fp8 = fp8;
    table_.begin_step([](int) {});
    Tape tape;
    const Var x = make_var(in);
    const Var y = function(nn::Context{tape, table_}, x);
    const Vec values = to_values(y->value);
    y->grad = Tensor::empty(y->value.shape(), DType::bf16);
    ops::convert(dy.view({dy.numel()}).slice(0, y->value.numel()).view(y->value.shape()), y->grad);
    tape.backward();
    return Result{values, to_values(x->grad), to_values(fc2.weight->grad)};
  };
  const auto layer = [&](nn::Context c, const Var& x) {
    return nn::linear(c, nn::view(c, x, {N * C / hidden, hidden}), fc2);
  };
  const Result exact = run(false, layer), rounded_layer = run(true, layer);
  const Tensor x = in.view({N * C / hidden, hidden});
  Tensor y = Tensor::empty({N * C / hidden, C}, DType::bf16);
  ops::fp8_linear_forward(x, fc2.weight->working, fc2.bias->working, Tensor(), y);
  EXPECT_EQ(rounded_layer.y, to_values(y));
  Tensor dx = Tensor::empty(x.shape(), DType::bf16);
  ops::fp8_linear_backward_input(dy.view({N * C}).slice(0, y.numel()).view(y.shape()),
                                 fc2.weight->working, dx, false);
  EXPECT_EQ(rounded_layer.dx, to_values(dx));
  EXPECT_EQ(rounded_layer.dw, exact.dw);

  const auto mlp = [&](nn::Context c, const Var& v) { return nn::mlp(c, v, fc1, fc2); };
  const Result plain = run(false, mlp), rounded_mlp = run(true, mlp);
  for (const auto& [a, b] : {std::pair(&rounded_layer.y, &exact.y),
                             {&rounded_layer.dx, &exact.dx},
                             {&rounded_mlp.y, &plain.y},
                             {&rounded_mlp.dx, &plain.dx},
                             {&rounded_mlp.dw, &plain.dw}}) {
    EXPECT_LT(relative_error(*a, *b), 0.1);
    EXPECT_GT(relative_error(*a, *b), 0.003);
  }
}

TEST_F(NnTest, FramesOutsideTheSelectionPassUnchanged) {
  ready();
  const Tensor x = to_tensor(random_values(4 * 3 * 8, 1), {2, 2, 3, 8});
  const Var m = make_var(to_tensor(random_values(4 * 2 * 8, 2), {4, 2, 8}));
  const Tensor rows = to_tensor({0, 2, 3, 1}, {4}, DType::i32);
  Tape tape(Tape::Mode::infer);
  const Tensor y = nn::layer_norm_modulate({tape, table_}, make_var(x), m, rows, 0, 1, 2)->value;
  const Tensor all = nn::layer_norm_modulate({tape, table_}, make_var(x), m, rows, 0, 1)->value;
  for (const std::int64_t frame : {0, 3})
    EXPECT_TRUE(same_bits(y.view({4, 24}).slice(frame, frame + 1),
                          x.view({4, 24}).slice(frame, frame + 1)));
  for (const std::int64_t frame : {1, 2})
    EXPECT_TRUE(same_bits(y.view({4, 24}).slice(frame, frame + 1),
                          all.view({4, 24}).slice(frame, frame + 1)));
}

TEST_F(NnTest, AttentionBlock) {
  // D = 6: cross attention key by key; D = 24: with its projections absorbed.
  for (const std::int64_t D : {6, 24}) {
    table_ = ParameterTable();
    const std::int64_t B = 2, T = 3, S = 4, H = 2, C = H * D;
    const nn::Linear qkv = add_linear("qkv", 3 * C, C), proj = add_linear("proj", C, C);
    nn::CrossAttention cross;
    cross.q = add_linear("q", C, C);
    cross.kv = add_linear("kv", 2 * C, C);
    cross.proj = add_linear("cross", C, C);
    Parameter& q_norm = table_.add("q_norm.weight", {D}, Init{});
    Parameter& k_norm = table_.add("k_norm.weight", {D}, Init{});
    ready();
    Tensor rope = Tensor::empty({T, D / 2, 2}, DType::f32);
    for (std::int64_t i = 0; i < T * D / 2; ++i) {
      const double angle =
          static_cast<double>(i / (D / 2)) * std::pow(10.0, -static_cast<double>(i % 3));
      rope.data<float>()[2 * i] = static_cast<float>(std::cos(angle));
      rope.data<float>()[2 * i + 1] = static_cast<float>(std::sin(angle));
    }
    const Tensor offsets = to_tensor({0, 3, 4}, {B + 1}, DType::i32);
    check(
        [&](nn::Context c, const std::vector<Var>& in) {
          const auto tokens = [&](const Var& x) {
            return nn::view(c, nn::linear(c, x, qkv), {B, T, S, 3, H, D});
          };
          // One projection and one pair of norms for both axes, one cross attention applied twice:
          // every gradient has two contributions.
          Var x = in[0];
          for (const bool time : {false, true}) {
            const Var a = nn::self_attention(c, tokens(x), &q_norm, &k_norm, time ? rope : Tensor(),
                                             time ? ops::Axis::time : ops::Axis::space);
            x = nn::cross_attention(c, nn::linear(c, a, proj, x), in[1], cross, offsets, {3, 1}, H);
          }
          return x;
        },
        {to_tensor(random_values(B * T * S * C, 1), {B, T, S, C}),
         to_tensor(random_values(4 * C, 2), {4, C})},
        1e-3);
  }
}

// q and k after norm and rotation are kept where the tape allows it, and where a GPU's backward
// would have to make them again: along space. A CPU's results do not depend on it.
TEST_F(NnTest, SelfAttentionKeepsQueriesAndKeys) {
  const std::int64_t T = 2, S = 5, H = 2, D = 4;
  Parameter& q_norm = table_.add("q_norm.weight", {D}, Init{});
  Parameter& k_norm = table_.add("k_norm.weight", {D}, Init{});
  ready();
  constexpr std::size_t bytes = 2 * 5 * 2 * 2 * 4 * sizeof(float);
  const auto kept = [&](std::size_t allowed, bool norm, ops::Axis axis, Vec& gradient) {
    Tape tape;
    tape.allow(allowed);
    const nn::Context c{tape, table_};
    const Var qkv = make_var(to_tensor(random_values(T * S * 3 * H * D, 1), {1, T, S, 3, H, D}));
    table_.begin_step([](int) {});
    const Var y = nn::self_attention(c, qkv, norm ? &q_norm : nullptr, norm ? &k_norm : nullptr,
                                     Tensor(), axis);
    y->grad = to_tensor(random_values(T * S * H * D, 2), {1, T, S, H * D});
    tape.backward();
    table_.finish_step();
    gradient = to_values(qkv->grad);
    return tape.kept();
  };
  Vec without, with;
  EXPECT_EQ(kept(bytes - 1, true, ops::Axis::space, without), 0u);
  EXPECT_EQ(kept(2 * bytes, true, ops::Axis::space, with), bytes);
  EXPECT_EQ(with, without);
  EXPECT_EQ(kept(2 * bytes, true, ops::Axis::time, with), 0u);
  EXPECT_EQ(kept(2 * bytes, false, ops::Axis::space, with), 0u);
}

TEST_F(NnTest, Attention) {
  const std::int64_t B = 2, N = 5, H = 2, C = 16, L = 7;
  // One projection for keys and values: a bias of keys alone changes nothing.
  const nn::Linear q = add_linear("q", C, C), kv = add_linear("kv", C, C);
  ready();
  // Four and two keys, the last one of the first sample counted three times, and a row of padding.
  const Tensor offsets = to_tensor({0, 4, 6}, {B + 1}, DType::i32);
  const Tensor bias = to_tensor({std::log(3.0), 0.0}, {B});
  check(
      [&](nn::Context c, const std::vector<Var>& in) {
        const Var own = nn::linear(c, in[0], kv), text = nn::linear(c, in[1], kv);
        const Var self = nn::attention(c, nn::linear(c, in[0], q), own, own, Tensor(), Tensor(), H);
        return nn::attention(c, nn::linear(c, self, q), text, text, offsets, bias, H);
      },
      {to_tensor(random_values(B * N * C, 1), {B, N, C}),
       to_tensor(random_values(L * C, 2), {L, C})},
      1e-3);
}

// Whether the absorbed form is taken is a matter of speed: a caption that is long enough for the
// plain form has the same output and gradients when the longer caption beside it, whose output has
// none, is taken away.
TEST_F(NnTest, AbsorbedAndPlainCrossAttentionAgree) {
  const std::int64_t N = 50, H = 2, C = 48;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    table_ = ParameterTable();
    nn::CrossAttention cross;
    cross.q = add_linear("q", C, C);
    cross.kv = add_linear("kv", 2 * C, C);
    cross.proj = add_linear("proj", C, C);
    ready(dtype == DType::bf16);
    const Tensor x = to_tensor(random_values(2 * N * C, 1), {2, 1, N, C}, dtype);
    const Tensor y = to_tensor(random_values(20 * C, 2), {20, C}, dtype);
    Vec g = random_values(2 * N * C, 3);
    std::fill(g.begin() + N * C, g.end(), 0.0);
    struct Result {
      Tensor out;
      std::vector<Vec> gradients;
    };
    const auto run = [&](const Vec& offsets, const std::vector<std::int64_t>& lengths) {
      table_.begin_step([](int) {});
      Tape tape;
      const auto samples = std::ssize(lengths);
      const Var in = make_var(x.slice(0, samples));
      const Var rows = make_var(y.slice(0, static_cast<std::int64_t>(offsets.back())));
      const Var out =
          nn::cross_attention({tape, table_}, in, rows, cross,
                              to_tensor(offsets, {samples + 1}, DType::i32), lengths, H);
      const Tensor first = out->value.slice(0, 1);
      out->grad = to_tensor(g, x.shape(), dtype).slice(0, samples);
      tape.backward();
      return Result{first,
                    {to_values(in->grad.slice(0, 1)), to_values(rows->grad.slice(0, 3)),
                     to_values(cross.q.weight->grad), to_values(cross.q.bias->grad),
                     to_values(cross.proj.weight->grad), to_values(cross.proj.bias->grad)}};
    };
    // 17 rows are padded to 32 keys: 4 H 32 > 3 C, so that the first run is plain and the second
    // absorbed.
    const Result both = run({0, 3, 20}, {3, 17}), alone = run({0, 3}, {3});
    const double bound = dtype == DType::bf16 ? 0x1p-6 : 1e-6;
    EXPECT_LT(relative_error(to_values(alone.out), to_values(both.out)), bound);
    for (std::size_t k = 0; k < both.gradients.size(); ++k)
      EXPECT_LT(relative_error(alone.gradients[k], both.gradients[k]), 2 * bound) << k;
    EXPECT_FALSE(same_bits(alone.out, both.out))
        << "both took the same form: the test compares nothing";
  }
}

// What an operation hands on may not be written by it afterwards: two inputs never share one
// gradient.
TEST_F(NnTest, AddGivesEachSideItsOwnGradient) {
  ready();
  const Vec g = random_values(6, 1);
  const Var a = make_var(to_tensor(random_values(6, 2), {2, 3}));
  const Var b = make_var(to_tensor(random_values(6, 3), {2, 3}));
  Tape tape;
  const nn::Context c{tape, table_};
  const Var sum = nn::add(c, a, b);
  const Var all = nn::add(c, nn::add(c, sum, b), a);
  all->grad = to_tensor(g, {2, 3});
  tape.backward();
  ASSERT_NE(a->grad.raw(), b->grad.raw());
  for (std::size_t i = 0; i < g.size(); ++i) {
    EXPECT_EQ(a->grad.data<float>()[i], 2 * static_cast<float>(g[i]));
    EXPECT_EQ(b->grad.data<float>()[i], 2 * static_cast<float>(g[i]));
  }
}

TEST_F(NnTest, ViewSharesMemoryAndReturnsTheGradientsShape) {
  ready();
  Tape tape;
  const nn::Context c{tape, table_};
  const Var x = make_var(to_tensor(random_values(12, 1), {3, 4}));
  const std::size_t before = arena_->used();
  const Var y = nn::view(c, x, {2, 6}), z = nn::view(c, x, {12});
  EXPECT_EQ(arena_->used(), before);
  EXPECT_EQ(y->value.raw(), x->value.raw());
  y->grad = to_tensor(Vec(12, 1.0), {2, 6});
  z->grad = to_tensor(Vec(12, 2.0), {12});
  tape.backward();
  EXPECT_EQ(x->grad.shape(), (Shape{3, 4}));
  EXPECT_EQ(to_values(x->grad), Vec(12, 3.0));
}

TEST_F(NnTest, Bf16TakesTheWorkingWeights) {
  const nn::Linear a = add_linear("a", 8, 8), b = add_linear("b", 8, 8);
  ready(true);
  const Vec values = rounded(random_values(4 * 8, 1), DType::bf16);
  const Vec g = rounded(random_values(4 * 8, 2), DType::bf16);
  Vec out[2], grad[2];
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const int k = dtype == DType::bf16;
    table_.begin_step([](int) {});
    Tape tape;
    const nn::Context c{tape, table_};
    const Var x = make_var(to_tensor(values, {4, 8}, dtype));
    const Var y = nn::mlp(c, x, a, b);
    EXPECT_EQ(y->value.dtype(), dtype);
    y->grad = to_tensor(g, {4, 8}, dtype);
    tape.backward();
    out[k] = to_values(y->value);
    grad[k] = to_values(a.weight->grad);
  }
  EXPECT_LT(relative_error(out[1], out[0]), 0x1p-6);
  EXPECT_LT(relative_error(grad[1], grad[0]), 0x1p-6);
  // The f32 masters move, the working copy does not: a bf16 forward must not see it before the
  // refresh.
  for (float& v : a.weight->value.span<float>()) v += 1.0f;
  const auto run = [&] {
    Tape tape(Tape::Mode::infer);
    return to_values(
        nn::mlp({tape, table_}, make_var(to_tensor(values, {4, 8}, DType::bf16)), a, b)->value);
  };
  EXPECT_EQ(run(), out[1]);
  table_.refresh_working();
  EXPECT_NE(run(), out[1]);
}

}  // namespace
}  // namespace weft::test
