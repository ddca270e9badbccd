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
  return recompute(tape, [part = std::move(part)](Tape& t) { return std::vector<Var>{part(t)}; })
      .front();
}

std::vector<Var> recompute(Tape& tape, std::function<std::vector<Var>(Tape&)> part) {
  if (!tape.recording()) return part(tape);
  // The results get nodes of their own: those from the second run belong to the inner tape.
  std::vector<Var> out;
  {
    Tape first(Tape::Mode::discard);
    for (const Var& v : part(first)) out.push_back(make_var(v->value));
  }
  tape.record([part = std::move(part), out] {
    Tape second(Tape::Mode::replay);
    std::vector<Var> again = part(second);
    for (std::size_t i = 0; i < out.size(); ++i) again[i]->grad = std::move(out[i]->grad);
    second.backward();
  });
  return out;
}

}  // namespace weft
