// Reverse-mode differentiation over a list of closures. A forward function calls nn:: operations;
// each records how to send its output's gradient to its inputs. backward() runs the records in
// reverse and drops each one, so that activations return to the arena as it goes.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tensor/tensor.h"

namespace weft {

// A value of the forward pass and, during the backward pass, its gradient (of the value's type and
// shape).
struct Node {
  Tensor value;
  Tensor grad;
  bool needs_grad = true;
};
using Var = std::shared_ptr<Node>;

inline Var make_var(Tensor value, bool needs_grad = true) {
  return std::make_shared<Node>(Node{std::move(value), Tensor(), needs_grad});
}

class Tape {
 public:
  enum class Mode {
    record,   // forward of a training step
    replay,   // the second forward of a recomputed part: recorded, but its parameter uses were
              // counted before
    discard,  // the first forward of a recomputed part: not recorded, parameter uses are counted
    infer,    // no backward will follow
  };
  explicit Tape(Mode mode = Mode::record) : mode_(mode) {}

  bool recording() const { return mode_ == Mode::record || mode_ == Mode::replay; }
  bool counts_uses() const { return mode_ == Mode::record || mode_ == Mode::discard; }

  void record(std::function<void()> step) { steps_.push_back(std::move(step)); }
  // Runs every record in reverse. The caller has set the gradient of the result.
  void backward();

 private:
  Mode mode_;
  std::vector<std::function<void()>> steps_;
};

// The tensor for the gradient of `v`: allocated if this is its first contribution, in which case
// `accumulate` is false.
struct GradTarget {
  Tensor& grad;
  bool accumulate;
};
GradTarget grad_target(const Var& v);
// The same for operations that only ever add: zeroed at the first contribution.
Tensor& zeroed_grad(const Var& v);
// Adds `g` to the gradient of `v`; the first contribution takes the tensor over without a copy, so
// the caller must not use `g` afterwards.
void give_grad(const Var& v, Tensor g);

// Runs `part` without recording and keeps only its inputs (which `part` has captured); the backward
// pass runs it again. For whole blocks: memory of one block instead of all, for one more forward.
Var recompute(Tape& tape, std::function<Var(Tape&)> part);
// The same for a part with several results, each of which is used.
std::vector<Var> recompute(Tape& tape, std::function<std::vector<Var>(Tape&)> part);

}  // namespace weft
