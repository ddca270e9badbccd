#include "nn/tape.h"

#include "ops/pointwise.h"

namespace weft {

void Tape::backward() {
  while (!steps_.empty()) {
    // The record dies after it has run, which returns the activations it holds to the arena.
    const std::function<void()> step = std::move(steps_.back());
    steps_.pop_back();
    step();
  }
}

GradTarget grad_target(const Var& v) {
  if (v->grad.defined()) return {v->grad, true};
  v->grad = Tensor::empty(v->value.shape(), v->value.dtype());
  return {v->grad, false};
}

Tensor& zeroed_grad(const Var& v) {
  if (!v->grad.defined()) {
    v->grad = Tensor::empty(v->value.shape(), v->value.dtype());
    ops::fill_zero(v->grad);
  }
  return v->grad;
}

void give_grad(const Var& v, Tensor g) {
  if (!v->grad.defined())
    v->grad = std::move(g);
  else
    ops::add_inplace(g, v->grad);
}

Var recompute(Tape& tape, std::function<Var(Tape&)> part) {
  if (!tape.recording()) return part(tape);
  Tape first(Tape::Mode::discard);
  // The result gets its own node: the one from the second run belongs to the inner tape.
  const Var out = make_var(part(first)->value);
  tape.record([part = std::move(part), out] {
    Tape second(Tape::Mode::replay);
    const Var again = part(second);
    again->grad = std::move(out->grad);
    second.backward();
  });
  return out;
}

}  // namespace weft
