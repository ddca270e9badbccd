#include "nn/batch_norm.h"

#include <utility>

#include "core/error.h"
#include "nn/nn.h"
#include "ops/pointwise.h"

namespace weft::nn {
namespace {

using detail::note_done, detail::use;

// One batch norm.
struct Term {
  Var x;
  BatchNorm w;
  Tensor stats = {};

  std::int64_t channels() const { return x->value.dim(-1); }
};
// act of the sum of one or two of them, or of one and a residual.
struct Sum {
  std::vector<Term> terms;
  Var residual;
  Activation act;
  Var out = {};

  bool lone() const { return terms.size() == 1 && !residual; }
};

// The terms' places in the tensor that is exchanged: 2C (+ `more`) numbers each.
std::vector<Tensor> places(const Tensor& all, const std::vector<Sum>& sums, std::int64_t more) {
  std::vector<Tensor> parts;
  std::int64_t at = 0;
  for (const Sum& s : sums)
    for (const Term& t : s.terms) {
      const std::int64_t count = 2 * t.channels() + more;
      parts.push_back(all.slice(at, at + count));
      at += count;
    }
  return parts;
}
Tensor room(const std::vector<Sum>& sums, std::int64_t more) {
  std::int64_t count = 0;
  for (const Sum& s : sums)
    for (const Term& t : s.terms) count += 2 * t.channels() + more;
  return Tensor::empty({count}, DType::f64);
}

// A dry run notes it whatever the group, so that one without ranks tells what there would be to
// exchange.
void exchange(const Tensor& sums, BatchNormGroup& group) {
  if (ops::planning()) return detail::note_exchange("all_reduce", {sums});
  if (group.size == 1) return;
  WEFT_ASSERT(group.ranks != nullptr && group.ranks->size() == group.size);
  group.blocked_seconds += group.ranks->wait(group.ranks->all_reduce_sum(detail::lent(sums)));
}

void take_statistics(Context c, std::vector<Sum>& sums, BatchNormGroup& group) {
  if (group.use_running) {
    for (Sum& s : sums)
      for (Term& t : s.terms) {
        t.stats = Tensor::empty({4, t.channels()}, DType::f32);
        ops::batch_norm_running_statistics(t.w.running_mean->value, t.w.running_var->value,
                                           group.eps, t.stats);
      }
    return;
  }
  const auto form =
      group.size > 1 ? ops::BatchNormForm::synchronised : ops::BatchNormForm::ordinary;
  const Tensor all = room(sums, 1);
  std::vector<Tensor> parts = places(all, sums, 1);
  auto part = parts.begin();
  for (const Sum& s : sums)
    for (const Term& t : s.terms) {
      const std::int64_t positions = t.x->value.numel() / t.channels();
      WEFT_CHECK(group.size > 1 || positions > 1 || ops::planning(), Exit::data,
                 "train with two or more samples a rank, with larger images, or on more ranks",
                 "batch norm {} has one position of {} to take a variance of", t.w.weight->name,
                 t.x->value.shape().str());
      ops::batch_norm_sums(t.x->value, *part++);
    }
  exchange(all, group);
  part = parts.begin();
  for (Sum& s : sums)
    for (Term& t : s.terms) {
      t.stats = Tensor::empty({4, t.channels()}, DType::f32);
      Tensor none[5];
      const BatchNorm& w = t.w;
      const float momentum = group.momentum >= 0 ? group.momentum : w.momentum;
      const auto running = [&](int i, Parameter* p) -> Tensor& {
        return c.tape.counts_uses() && p != nullptr ? p->value : none[i];
      };
      WEFT_ASSERT(w.running_iter != nullptr || form == ops::BatchNormForm::ordinary);
      ops::batch_norm_statistics(*part++, form, group.eps, momentum, t.stats,
                                 running(0, w.running_mean), running(1, w.running_var),
                                 running(2, w.tmp_running_mean), running(3, w.tmp_running_var),
                                 running(4, w.running_iter));
    }
}

// The gradient of a term's x; dy is what the activation passes, or all of it for a sum that is
// `lone`. `takes`: nothing else needs dy, and the gradient may lie in its memory.
void send_back(const Term& t, const Sum& s, Tensor& dy, const Tensor& sums, bool takes) {
  if (!t.x->needs_grad) return;
  const Activation act = s.lone() ? s.act : Activation::none;
  const auto run = [&](Tensor& dx, bool accumulate) {
    ops::batch_norm_backward(t.x->value, t.stats, t.w.weight->value, t.w.bias->value, act, dy, sums,
                             dx, accumulate);
  };
  if (takes && !t.x->grad.defined()) {
    run(dy, false);
    give_grad(t.x, std::move(dy));
    return;
  }
  const auto [dx, accumulate] = grad_target(t.x);
  run(dx, accumulate);
}

void backward(std::vector<Sum>& sums, BatchNormGroup& group, ParameterTable& table) {
  Tensor all = room(sums, 0), none;
  std::vector<Tensor> parts = places(all, sums, 0);
  std::vector<Tensor> gradients;
  gradients.reserve(sums.size());
  auto part = parts.begin();
  for (Sum& s : sums) {
    Tensor& dy = gradients.emplace_back(std::exchange(zeroed_grad(s.out), Tensor()));
    for (Term& t : s.terms) {
      // With a residual the first term's pass makes dy what the activation lets through.
      const bool first = &t == s.terms.data();
      const Tensor y = s.lone() || s.act == Activation::none || !first ? Tensor() : s.out->value;
      const auto gradient = [&](Parameter* p) -> Tensor& {
        return p->trainable ? p->grad_to_add() : none;
      };
      ops::batch_norm_backward_sums(t.x->value, t.stats, t.w.weight->value, t.w.bias->value,
                                    first ? s.act : Activation::none, y, dy, *part++,
                                    gradient(t.w.weight), gradient(t.w.bias));
    }
    s.out.reset();  // y, if nothing else holds it
  }
  if (!group.use_running) exchange(all, group);
  part = parts.begin();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    Sum& s = sums[i];
    Tensor dy = std::move(gradients[i]);
    bool residual_waits = s.residual && s.residual->needs_grad;
    if (residual_waits && s.residual->grad.defined()) {
      give_grad(s.residual, dy);
      residual_waits = false;
    }
    for (Term& t : s.terms) {
      send_back(t, s, dy, *part++, &t == &s.terms.back() && !residual_waits);
      note_done(table, {t.w.weight, t.w.bias});
      t = {};
    }
    if (residual_waits) give_grad(s.residual, std::move(dy));
  }
}

void run(Context c, std::vector<Sum>& sums, BatchNormGroup& group) {
  for (const Sum& s : sums)
    for (const Term& t : s.terms) use(c, {t.w.weight, t.w.bias});
  take_statistics(c, sums, group);
  const bool overwrites = !c.tape.recording() && !c.tape.counts_uses();  // Tape::Mode::infer
  for (Sum& s : sums) {
    const Term &a = s.terms.front(), &b = s.terms.back();
    const bool two = s.terms.size() == 2;
    const Tensor none;
    Tensor y = overwrites ? a.x->value : Tensor::empty(a.x->value.shape(), a.x->value.dtype());
    ops::batch_norm_apply(a.x->value, a.stats, a.w.weight->value, a.w.bias->value,
                          two          ? b.x->value
                          : s.residual ? s.residual->value
                                       : none,
                          two ? b.stats : none, two ? b.w.weight->value : none,
                          two ? b.w.bias->value : none, s.act, y);
    s.out = make_var(y);
  }
  if (c.tape.recording())
    c.tape.record(
        [sums, &group, &table = c.parameters]() mutable { backward(sums, group, table); });
}

}  // namespace

Var batch_norm(Context c, const Var& x, const BatchNorm& w, BatchNormGroup& group, Activation act,
               const Var& residual) {
  std::vector<Sum> sums{{{{x, w}}, residual, act}};
  run(c, sums, group);
  return sums[0].out;
}

std::vector<Var> batch_norms(Context c, const std::vector<BatchNormCall>& calls,
                             BatchNormGroup& group) {
  std::vector<Sum> sums;
  for (const BatchNormCall& call : calls)
    sums.push_back({{{call.x, *call.w}}, call.residual, call.act});
  run(c, sums, group);
  std::vector<Var> out;
  for (const Sum& s : sums) out.push_back(s.out);
  return out;
}

Var batch_norm_add(Context c, const BatchNormCall& a, const BatchNormCall& b, BatchNormGroup& group,
                   Activation act) {
  WEFT_ASSERT(a.act == Activation::none && b.act == Activation::none);
  std::vector<Sum> sums{{{{a.x, *a.w}, {b.x, *b.w}}, nullptr, act}};
  run(c, sums, group);
  return sums[0].out;
}

}  // namespace weft::nn

namespace weft {

nn::BatchNorm add_batch_norm(ParameterTable& table, const std::string& name, std::int64_t channels,
                             float beta, float momentum, bool shared) {
  const auto add = [&](const char* suffix, std::int64_t count, float start, bool trainable) {
    return &table.add(name + suffix, {count}, Init::constant(start), trainable);
  };
  nn::BatchNorm w;
  w.weight = add(".weight", channels, 1, true);
  w.bias = add(".bias", channels, beta, true);
  w.running_mean = add(".running_mean", channels, 0, false);
  w.running_var = add(".running_var", channels, 1, false);
  w.momentum = momentum;
  if (!shared) return w;
  w.tmp_running_mean = add("._tmp_running_mean", channels, 0, false);
  w.tmp_running_var = add("._tmp_running_var", channels, 1, false);
  w.running_iter = add("._running_iter", 1, 1, false);
  return w;
}

}  // namespace weft
