// The ways of one side of the CPU's convolutions. Included by rounding.cpp in a namespace for each.

static std::string way(const RoundingShape& s, Pass pass) {
  const ops::Conv& c = s.conv;
  if (is_depthwise(s.x, s.out, c)) return "depthwise";
  if (is_linear(c)) return "product";
  Geometry g = geometry(s.x, c.output(s.x, s.out), c);
  if (pass == Pass::backward_weight) return winograd_fits(g) ? "winograd" : "oneDNN";
  if (pass == Pass::backward_input) {
    const std::optional<Geometry> turned = turned_round(g);
    if (!turned) return "oneDNN";
    g = *turned;
  }
  if (volume_fits(g)) return "winograd_volume";
  if (winograd_fits(g)) return "winograd";
  if (fourier_fits(g)) return "fourier";
  return blocked_fits(g) ? "blocked" : "oneDNN";
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
