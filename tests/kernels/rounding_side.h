// The algorithms of one side of the CPU's convolutions. Included by rounding.cpp in a namespace for
// each.

static std::string algorithm(const RoundingShape& s, Pass pass) {
  const ops::Conv& c = s.conv;
  if (is_depthwise(s.x, s.out, c)) return "depthwise";
  if (c.is_product()) return "product";
  Geometry g = geometry(s.x, c.output(s.x, s.out), c);
  if (pass == Pass::backward_weight) return winograd_fits(g) ? "winograd" : "oneDNN";
  if (pass == Pass::backward_input) {
    const std::optional<Geometry> flipped = flipped_geometry(g);
    if (!flipped) return "oneDNN";
    g = *flipped;
  }
  switch (algorithm_of(g)) {
    case Algorithm::winograd_volume:
      return "winograd_volume";
    case Algorithm::winograd:
      return "winograd";
    case Algorithm::fourier:
      return "fourier";
    case Algorithm::blocked:
      return "blocked";
    case Algorithm::direct:
      break;
  }
  return "oneDNN";
}

// What ops/conv.h takes.
static void take(const RoundingShape& s, Pass pass, const Data& d, Tensor& to) {
  Tensor none;
  if (pass == Pass::forward)
    conv_forward(d.x, d.w, none, none, s.conv, to);
  else if (pass == Pass::backward_input)
    conv_backward_input(d.dy, d.w, s.conv, to, false);
  else
    conv_backward_weight(d.x, d.dy, s.conv, to, none, false);
}

static void library(const RoundingShape& s, Pass pass, const Data& d, Tensor& to) {
  const Geometry g = geometry(s.x, s.conv.output(s.x, s.out), s.conv);
  const float *x = d.x.data<float>(), *w = d.w.data<float>(), *dy = d.dy.data<float>();
  if (pass == Pass::forward)
    direct_forward(g, x, w, nullptr, false, to.data<float>());
  else if (pass == Pass::backward_input)
    direct_backward_input(g, dy, w, to.data<float>());
  else
    direct_backward_weight(g, x, dy, to.data<float>(), false);
}
