#include "models/dbnet/detector.h"

#include "core/error.h"
#include "nn/image_ops.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {

DetectorSource::DetectorSource(const Deck& deck, const std::string& key, const std::string& weights,
                               bool ema, MPI_Comm world)
    : source_(key, weights, deck.run.dir, ema, world) {
  const std::string& wish = deck.get<DbnetDeck>().deformable;
  const auto files = source_.files();
  deformable_ = wish == "on" || (wish == "auto" && files && has_offsets(*files));
}

Detector::Detector(const Deck& deck, const DetectorSource& source)
    : deck_(deck), model_(deck.get<DbnetDeck>(), source.deformable()) {
  source.model().load(model_.params(), dbnet_weight_names(), deck.model.dtype == "bf16");
  model_.scale_conv2(static_cast<float>(deck.get<DbnetDeck>().conv2_gain));
}

Tensor Detector::run(const Tensor& pictures) {
  const std::int64_t N = pictures.dim(0), H = pictures.dim(1), W = pictures.dim(2);
  WEFT_ASSERT(H % Dbnet::stride == 0 && W % Dbnet::stride == 0);
  const DType dtype = deck_.model.dtype == "bf16" ? DType::bf16 : DType::f32;
  std::vector<std::int32_t> whole;
  for (std::int64_t i = 0; i < N; ++i)
    whole.insert(whole.end(), {static_cast<std::int32_t>(H), static_cast<std::int32_t>(W)});
  Tensor image = Tensor::empty({N, 1, H, W, 3}, dtype);
  ops::normalise_images(pictures, Tensor::from_host(std::span<const std::int32_t>(whole), {N, 2}),
                        dbnet_pixel_scale(), image);
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, model_.params()};
  nn::BatchNormGroup norm;
  norm.use_running = true;
  Var x = make_var(std::exchange(image, {}), false);
  const Var logits = model_.forward(c, std::exchange(x, nullptr), norm, false).probability;
  Tensor probability = logits->value;
  if (dtype != DType::f32) {
    probability = Tensor::empty(logits->value.shape(), DType::f32);
    ops::convert(logits->value, probability);
  }
  ops::sigmoid_forward(probability, probability);
  return probability.view({N, H, W});
}

std::vector<std::vector<float>> Detector::detect(std::span<const std::uint8_t> pictures,
                                                 std::int64_t count, std::int64_t height,
                                                 std::int64_t width) {
  const std::int64_t together = at_once(count);
  const auto bytes = static_cast<std::size_t>(together * height * width * 3);
  std::vector<std::vector<float>> all;
  for (std::int64_t i = 0; i < count; i += together) {
    const Tensor some =
        Tensor::from_host(pictures.subspan(static_cast<std::size_t>(i / together) * bytes, bytes),
                          {together, height, width, 3});
    for (std::vector<float>& map : maps_of(run(some))) all.push_back(std::move(map));
  }
  return all;
}

// On the CPU one by one: there the number of pictures changes the order of the products' sums, and
// a file's result must not depend on which others it happens to be with.
std::int64_t Detector::at_once(std::int64_t count) { return on_cuda() ? count : 1; }

std::vector<std::vector<float>> Detector::maps_of(const Tensor& probability) const {
  const std::int64_t count = probability.dim(0);
  Tensor counts = Tensor::empty({count}, DType::i32);
  ops::count_above(probability, static_cast<float>(deck_.get<PostprocessDeck>().mask_threshold),
                   counts);
  const Tensor text = counts.to_host();
  std::vector<std::vector<float>> maps(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    if (text.span<std::int32_t>()[static_cast<std::size_t>(i)] == 0) continue;
    const Tensor map = probability.slice(i, i + 1).to_host();
    const auto values = map.span<float>();
    maps[static_cast<std::size_t>(i)].assign(values.begin(), values.end());
  }
  return maps;
}

MemoryNeed Detector::plan(std::int64_t count, std::int64_t height, std::int64_t width,
                          std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  run(Tensor::empty({at_once(count), height, width, 3}, DType::u8));
  return arena->need();
}

double Detector::flops(std::int64_t height, std::int64_t width) const {
  return model_.flops(height, width);
}

}  // namespace weft
