#include "commands/probe.h"

#include <unistd.h>

#include "core/device.h"
#include "core/error.h"
#include "diffusion/rectified_flow.h"
#include "formats/safetensors.h"
#include "models/weights.h"

namespace weft {
namespace {

// Tensors of the inputs file, checked against the shapes that the model will assume.
class Inputs {
 public:
  explicit Inputs(const std::string& path) : file_(SafetensorsFile::open(path)) {}

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  const std::vector<std::int64_t>& shape(const std::string& name) const {
    return file_.at(name).shape;
  }
  Tensor f32(const std::string& name, const Shape& wanted) const {
    const SafetensorEntry& e = file_.at(name);
    const Shape got{std::span<const std::int64_t>(e.shape)};
    WEFT_CHECK(got == wanted, Exit::data, "see docs/probe.md for the inputs of each probe",
               "{}: input \"{}\" has shape {}, wanted {}", file_.path().string(), name, got.str(),
               wanted.str());
    const std::vector<float> values = file_.read_f32(e);
    Tensor t = Tensor::empty(wanted, DType::f32);
    std::copy(values.begin(), values.end(), t.data<float>());
    return t;
  }
  std::vector<std::int64_t> i64(const std::string& name) const {
    return file_.read_i64(file_.at(name));
  }

 private:
  SafetensorsFile file_;
};

// Results by name, written at the end.
class Outputs {
 public:
  void add(const std::string& name, const Tensor& t) { tensors_.emplace_back(name, t); }
  void write(const std::string& path) const {
    std::vector<SafetensorWrite> list;
    for (const auto& [name, t] : tensors_)
      list.push_back({name, t.dtype(), {t.shape().dims().begin(), t.shape().dims().end()},
                      std::as_bytes(t.span<float>())});
    write_safetensors(path, list);
  }

 private:
  std::vector<std::pair<std::string, Tensor>> tensors_;
};

struct Case {
  Stdit3Input in;
  Tensor x, y;
  CaptionBatch captions;
};

Case read_case(const Inputs& inputs, const ModelDeck& model) {
  Case c;
  const auto& xs = inputs.shape("x");
  WEFT_CHECK(xs.size() == 5 && xs[1] == model.in_channels, Exit::data,
             "x is [B, in_channels, T, H, W]", "input \"x\" has {} dimensions", xs.size());
  const std::int64_t B = xs[0];
  c.x = inputs.f32("x", Shape(std::span<const std::int64_t>(xs)));
  const auto& ys = inputs.shape("y");
  WEFT_CHECK(ys.size() == 4 && ys[0] == B && ys[1] == 1, Exit::data,
             "y is [B, 1, length, caption_channels]", "input \"y\" has {} dimensions", ys.size());
  const std::int64_t length = ys[2];
  c.y = inputs.f32("y", {B, 1, length, model.caption_channels});
  std::vector<std::int64_t> mask;
  if (inputs.has("mask")) mask = inputs.i64("mask");
  WEFT_CHECK(mask.empty() || (static_cast<std::int64_t>(mask.size()) % length == 0 &&
                              B % (static_cast<std::int64_t>(mask.size()) / length) == 0),
             Exit::data, "its rows must divide the batch", "input \"mask\" does not fit y");
  c.captions = pack_captions(mask, length, B, false);
  c.in.captions = upload(c.captions, c.y);
  c.in.fps = inputs.f32("fps", {B});
  c.in.height = static_cast<double>(inputs.f32("height", {B}).data<float>()[0]);
  c.in.width = static_cast<double>(inputs.f32("width", {B}).data<float>()[0]);
  if (inputs.has("x_mask")) {
    const std::vector<std::int64_t> m = inputs.i64("x_mask");
    WEFT_CHECK(static_cast<std::int64_t>(m.size()) == B * xs[2], Exit::data, "x_mask is [B, T]",
               "input \"x_mask\" has {} elements", m.size());
    c.in.x_mask = Tensor::empty({B, xs[2]}, DType::u8);
    std::copy(m.begin(), m.end(), c.in.x_mask.data<std::uint8_t>());
  }
  return c;
}

void add_parameter_grads(ParameterTable& table, Outputs& out) {
  for (const auto& p : table.all())
    if (p->trainable) out.add("grad." + p->name, p->grad);
}

}  // namespace

int probe(Deck deck, const ProbeRequest& request) {
  const auto arena =
      Arena::reserve(static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                     static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
  const ArenaScope scope(*arena);
  set_threads(static_cast<int>(deck.run.threads), 1);
  Stdit3 model(deck.model);
  model.params().allocate(1 << 22, deck.model.dtype == "bf16", request.backward);
  load_weights(request.weights, model.params());
  const Inputs inputs(request.inputs);
  Outputs outputs;
  Case c = read_case(inputs, deck.model);
  const std::int64_t B = c.x.dim(0);
  Tape tape(request.backward ? Tape::Mode::record : Tape::Mode::infer);
  model.params().begin_step([](int) {});

  if (request.what == "forward") {
    c.in.x = c.x;
    c.in.timestep = inputs.f32("timestep", {B});
    const Var x = make_var(c.x), y = make_var(c.y);
    const Var out = model.forward(tape, c.in, x, y);
    outputs.add("out", out->value);
    if (request.backward) {
      out->grad = inputs.f32("cotangent", out->value.shape());
      tape.backward();
      model.params().finish_step();
      outputs.add("grad.x", x->grad);
      outputs.add("grad.y", zeroed_grad(y));
      add_parameter_grads(model.params(), outputs);
    }
  } else if (request.what == "loss") {
    c.in.timestep = inputs.f32("timestep", {B});
    const Tensor noise = inputs.f32("noise", c.x.shape());
    outputs.add("loss",
                flow_loss(tape, model, c.x, noise, c.in, 1.0f / static_cast<float>(B)));
    if (request.backward) {
      tape.backward();
      model.params().finish_step();
      add_parameter_grads(model.params(), outputs);
    }
  } else {
    SampleRequest s;
    s.z = c.x;
    s.y = c.y;
    s.captions = c.captions;
    s.fps = c.in.fps;
    s.size = {c.in.height, c.in.width, inputs.i64("num_frames").at(0)};
    // The golden cases come from the original, which does not clamp the length of short clips.
    outputs.add("samples", flow_sample(model, deck.sampler, deck.diffusion, s));
  }
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
