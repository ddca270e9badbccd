// Convolutions by oneDNN's own kernels. Weights are reordered
// into the layout that the kernel prefers at every call. Primitives are made once per shape and
// kept (onednn.h).
#include <algorithm>
#include <cstdlib>
#include <dnnl.hpp>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "core/error.h"
#include "ops/conv.h"

WEFT_CPU_BEGIN
#include "ops/cpu/conv/parts.h"
#include "ops/cpu/onednn.h"
namespace {
#include "ops/cpu/simd.h"

using dnnl::memory;
using Dims = memory::dims;

dnnl::stream& stream() {
  static dnnl::stream s(engine());
  return s;
}

// Layouts and attributes of a geometry. A kernel of one frame is a convolution of planes.
struct Layout {
  memory::desc x, w, y, bias, any_w;
  Dims strides, dilations, before, after;
};

Layout layout(const Geometry& g) {
  using tag = memory::format_tag;
  constexpr auto f32 = memory::data_type::f32;
  Layout l;
  l.bias = memory::desc({g.cout}, f32, tag::a);
  // oneDNN counts the elements that a dilated kernel leaves out.
  const std::int64_t skipped = g.dilation - 1;
  Dims w{g.cout / g.groups, g.cin / g.groups, g.kh, g.kw};
  if (g.kt == 1 && g.stride_t == 1) {
    l.x = memory::desc({g.n * g.t, g.cin, g.h, g.w}, f32, tag::acdb);
    l.y = memory::desc({g.n * g.to, g.cout, g.ho, g.wo}, f32, tag::acdb);
    l.strides = {g.stride, g.stride};
    l.dilations = {skipped, skipped};
    l.before = {g.top, g.left};
    l.after = {g.bottom, g.right};
  } else {
    w.insert(w.begin() + 2, g.kt);
    l.x = memory::desc({g.n, g.cin, g.t, g.h, g.w}, f32, tag::acdeb);
    l.y = memory::desc({g.n, g.cout, g.to, g.ho, g.wo}, f32, tag::acdeb);
    l.strides = {g.stride_t, g.stride, g.stride};
    l.dilations = {0, skipped, skipped};
    l.before = {g.front, g.top, g.left};
    l.after = {g.back, g.bottom, g.right};
  }
  if (g.groups > 1) w.insert(w.begin(), g.groups);
  constexpr tag row_major[] = {tag::abcd, tag::abcde, tag::abcdef};
  l.w = memory::desc(w, f32, row_major[w.size() - 4]);
  l.any_w = memory::desc(w, f32, tag::any);
  return l;
}

struct Primitive {
  dnnl::primitive run;
  memory::desc weights, scratchpad;  // weights as the kernel wants them
  dnnl::reorder reorder;             // of weights to or from ours, where they differ
  bool reorders = false;
};

dnnl::convolution_forward::primitive_desc forward_desc(const Layout& l, bool bias, bool add) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  dnnl::post_ops epilogue;
  if (add) epilogue.append_sum(1.0f);
  attributes.set_post_ops(epilogue);
  constexpr auto kind = dnnl::prop_kind::forward_training;
  constexpr auto algorithm = dnnl::algorithm::convolution_direct;
  using Op = dnnl::convolution_forward;
  return bias ? describe<Op>(attributes, kind, algorithm, l.x, l.any_w, l.bias, l.y, l.strides,
                             l.dilations, l.before, l.after)
              : describe<Op>(attributes, kind, algorithm, l.x, l.any_w, l.y, l.strides, l.dilations,
                             l.before, l.after);
}

template <class Desc>
Primitive finish(const Desc& chosen, const memory::desc& weights, const memory::desc& ours,
                 bool to_ours) {
  Primitive p;
  p.weights = weights;
  p.scratchpad = chosen.scratchpad_desc();
  p.reorders = weights != ours;
  if (p.reorders)
    p.reorder =
        to_ours ? dnnl::reorder(dnnl::reorder::primitive_desc(engine(), weights, engine(), ours))
                : dnnl::reorder(dnnl::reorder::primitive_desc(engine(), ours, engine(), weights));
  return p;
}

memory at(const memory::desc& d, const float* p) {
  return memory(d, engine(), const_cast<float*>(p));
}

// What a call takes of the arena: weights in the kernel's layout where that is not ours, and the
// kernel's own scratch.
struct Scratch {
  explicit Scratch(const Primitive& p)
      : packed(p.reorders ? of(p.weights) : Tensor()), scratchpad(of(p.scratchpad)) {}
  static Tensor of(const memory::desc& d) {
    return d.get_size() > 0 ? floats(static_cast<std::int64_t>(d.get_size() / 4 + 1)) : Tensor();
  }
  Tensor packed, scratchpad;
};

// The weights in the kernel's layout.
memory in_layout(const Primitive& p, const Layout& l, const float* w, const Scratch& scratch) {
  memory ours = at(l.w, w);
  if (!p.reorders) return ours;
  memory theirs = at(p.weights, scratch.packed.data<float>());
  p.reorder.execute(stream(), ours, theirs);
  return theirs;
}

void execute(const Primitive& p, const Scratch& scratch, std::unordered_map<int, memory> args) {
  if (scratch.scratchpad.defined())
    args.emplace(DNNL_ARG_SCRATCHPAD, at(p.scratchpad, scratch.scratchpad.data<float>()));
  p.run.execute(stream(), args);
  stream().wait();
}

// The descriptor of either backward.
template <class Backward>
typename Backward::primitive_desc backward_desc(const Layout& l) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return describe_backward<Backward>(attributes, forward_desc(l, false, false),
                                     dnnl::algorithm::convolution_direct, l.x, l.any_w, l.y,
                                     l.strides, l.dilations, l.before, l.after);
}

}  // namespace

void direct_forward(const Geometry& g, const float* x, const float* w, const float* bias, bool add,
                    float* y) {
  static Recent<std::pair<Geometry, int>, Primitive> made;
  const Layout l = layout(g);
  const Primitive& p = made.get({g, (bias ? 1 : 0) + (add ? 2 : 0)}, [&] {
    const auto chosen = forward_desc(l, bias != nullptr, add);
    Primitive fresh = finish(chosen, chosen.weights_desc(), l.w, false);
    fresh.run = dnnl::convolution_forward(chosen);
    return fresh;
  });
  const Scratch scratch(p);
  if (planning()) return;
  std::unordered_map<int, memory> args{{DNNL_ARG_SRC, at(l.x, x)},
                                       {DNNL_ARG_WEIGHTS, in_layout(p, l, w, scratch)},
                                       {DNNL_ARG_DST, at(l.y, y)}};
  if (bias) args.emplace(DNNL_ARG_BIAS, at(l.bias, bias));
  execute(p, scratch, std::move(args));
}

void direct_backward_input(const Geometry& g, const float* dy, const float* w, float* dx) {
  static Recent<Geometry, Primitive> made;
  const Layout l = layout(g);
  const Primitive& p = made.get(g, [&] {
    const auto chosen = backward_desc<dnnl::convolution_backward_data>(l);
    Primitive fresh = finish(chosen, chosen.weights_desc(), l.w, false);
    fresh.run = dnnl::convolution_backward_data(chosen);
    return fresh;
  });
  const Scratch scratch(p);
  if (planning()) return;
  execute(p, scratch,
          {{DNNL_ARG_DIFF_DST, at(l.y, dy)},
           {DNNL_ARG_WEIGHTS, in_layout(p, l, w, scratch)},
           {DNNL_ARG_DIFF_SRC, at(l.x, dx)}});
}

void direct_backward_weight(const Geometry& g, const float* x, const float* dy, float* dw,
                            bool accumulate) {
  static Recent<Geometry, Primitive> made;
  const Layout l = layout(g);
  const Primitive& p = made.get(g, [&] {
    const auto chosen = backward_desc<dnnl::convolution_backward_weights>(l);
    Primitive fresh = finish(chosen, chosen.diff_weights_desc(), l.w, true);
    fresh.run = dnnl::convolution_backward_weights(chosen);
    return fresh;
  });
  const Scratch scratch(p);
  const Tensor summand = accumulate ? floats(g.w_numel()) : Tensor();
  if (planning()) return;
  // The kernel overwrites its result: a gradient that accumulates is made aside and added below.
  float* ours = accumulate ? summand.data<float>() : dw;
  memory gradient = at(p.weights, p.reorders ? scratch.packed.data<float>() : ours);
  execute(p, scratch,
          {{DNNL_ARG_SRC, at(l.x, x)},
           {DNNL_ARG_DIFF_DST, at(l.y, dy)},
           {DNNL_ARG_DIFF_WEIGHTS, gradient}});
  if (p.reorders) {
    memory plain = at(l.w, ours);
    p.reorder.execute(stream(), gradient, plain);
    stream().wait();
  }
  if (!accumulate) return;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < g.w_numel(); ++i) dw[i] += ours[i];
}

WEFT_CPU_END
