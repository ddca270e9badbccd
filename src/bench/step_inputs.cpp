#include "bench/step_inputs.h"

#include <filesystem>

#include "core/error.h"
#include "models/stdit3/task.h"

namespace weft {

Shape TensorFile::shape(const std::string& name, std::size_t rank) const {
  const std::vector<std::int64_t>& s = shape(name);
  WEFT_CHECK(s.size() == rank, Exit::data, hint_, "input \"{}\" has {} dimensions, wanted {}", name,
             s.size(), rank);
  return Shape(std::span<const std::int64_t>(s));
}

Tensor TensorFile::f32(const std::string& name, const Shape& wanted) const {
  const SafetensorEntry& e = file_.at(name);
  const Shape got{std::span<const std::int64_t>(e.shape)};
  WEFT_CHECK(got == wanted, Exit::data, hint_, "{}: input \"{}\" has shape {}, wanted {}",
             file_.path().string(), name, got.str(), wanted.str());
  const std::vector<float> values = file_.read_f32(e);
  return Tensor::from_host(std::span<const float>(values), wanted);
}

std::vector<float> TensorFile::numbers(const std::string& name, std::int64_t count) const {
  const Tensor t = f32(name, {count}).to_host();
  return {t.span<float>().begin(), t.span<float>().end()};
}

std::vector<std::uint8_t> TensorFile::u8(const std::string& name) const {
  const SafetensorEntry& e = file_.at(name);
  WEFT_CHECK(e.dtype == DType::u8, Exit::data, hint_, "{}: input \"{}\" is {}, wanted u8",
             file_.path().string(), name, e.type);
  std::vector<std::uint8_t> values(e.end - e.begin);
  file_.read(e, std::as_writable_bytes(std::span(values)));
  return values;
}

StepInputs read_step_inputs(const TensorFile& inputs, const Stdit3Config& model) {
  StepInputs c;
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
  c.in.height = static_cast<double>(inputs.numbers("height", B)[0]);
  c.in.width = static_cast<double>(inputs.numbers("width", B)[0]);
  if (inputs.has("x_mask")) {
    const std::vector<std::int64_t> m = inputs.i64("x_mask");
    WEFT_CHECK(static_cast<std::int64_t>(m.size()) == B * xs[2], Exit::data, "x_mask is [B, T]",
               "input \"x_mask\" has {} elements", m.size());
    const std::vector<std::uint8_t> mask_bytes(m.begin(), m.end());
    c.in.x_mask = Tensor::from_host(std::span<const std::uint8_t>(mask_bytes), {B, xs[2]});
  }
  return c;
}

namespace {

class GivenTask : public Stdit3Task {
 public:
  GivenTask(const Deck& deck, const std::string& path)
      : Stdit3Task(deck),
        arena_(Arena::reserve(2 * std::filesystem::file_size(path) + (std::size_t{64} << 20))) {
    const ArenaScope scope(*arena_);
    const TensorFile file(path, given_hint);
    batch_ = read_step_inputs(file, model().config());
    batch_.in.timestep = file.f32("timestep", {batch_.x.dim(0)});
    noise_ = file.f32("noise", batch_.x.shape());
  }

 protected:
  Flow make_flow(const Bucket&, const LoadedBatch&, const Tensor&, double recompute,
                 bool) override {
    Stdit3Input in = batch_.in;
    in.recompute = recompute;
    return {batch_.x, noise_, in.timestep, "given", [this, in](Tape& tape, const Tensor& weight) {
              return flow_loss(tape, model(), batch_.x, noise_, in, weight);
            }};
  }

 private:
  std::unique_ptr<Arena> arena_;  // of the tensors below
  StepInputs batch_;
  Tensor noise_;
};

}  // namespace

Shape given_shape(const std::string& path) { return TensorFile(path, given_hint).shape("x", 5); }

std::unique_ptr<TrainingTask> make_given_task(const Deck& deck, const std::string& path) {
  return std::make_unique<GivenTask>(deck, path);
}

}  // namespace weft
