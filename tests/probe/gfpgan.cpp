#include <algorithm>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/sadtalker/gfpgan/networks.h"
#include "models/sadtalker/gfpgan/paste.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// Input "image" [1,3,512,512] as the networks take it.
Tensor image_of(const ProbeInputs& inputs, bool bf16) {
  Tensor last = Tensor::empty({1, 1, face_side, face_side, 3}, DType::f32);
  ops::to_channels_last(
      inputs.f32("image", {1, 3, face_side, face_side}).view({1, 3, 1, face_side, face_side}),
      last);
  if (!bf16) return last;
  Tensor image = Tensor::empty(last.shape(), DType::bf16);
  ops::convert(last, image);
  return image;
}

// y [1,1,512,512,C] as f32 [1,C,512,512].
Tensor channels_first(const Tensor& y) {
  Tensor f32 = Tensor::empty(y.shape(), DType::f32),
         first = Tensor::empty({1, y.dim(4), 1, face_side, face_side}, DType::f32);
  ops::convert(y, f32);
  ops::to_channels_first(f32, first);
  return first.view({1, y.dim(4), face_side, face_side});
}

void load(const ProbeRequest& request, ParameterTable& params, const WeightNames& names,
          bool bf16) {
  params.allocate_for_inference(bf16);
  load_weights(request.weights, params, names);
}

// The bytes of a U8 input that has that shape.
std::vector<std::uint8_t> bytes_of(const ProbeInputs& inputs, const std::string& name,
                                   const std::vector<std::int64_t>& shape) {
  WEFT_CHECK(inputs.shape(name) == shape, Exit::data, "tests/probe/README.md lists the inputs",
             "input \"{}\" is {}, not {}", name,
             Shape(std::span<const std::int64_t>(inputs.shape(name))).str(),
             Shape(std::span<const std::int64_t>(shape)).str());
  return inputs.u8(name);
}

}  // namespace

int probe_gfpgan(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const bool bf16 = deck.model.dtype == "bf16";
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  if (request.what == "gfpgan") {
    Restorer net;
    load(request, net.params(), restorer_names(), bf16);
    net.prepare();
    std::vector<Tensor> noise;
    for (const std::int64_t s : net.noise_sides())
      noise.push_back(inputs.f32(fmt::format("noise.{:03}", noise.size()), {1, 1, s, s}));
    outputs.add("face", channels_first(net.run(image_of(inputs, bf16), noise)));
  } else {
    ParseNet net;
    load(request, net.params(), parse_net_names(), bf16);
    net.fold();
    const Tensor image = image_of(inputs, bf16);
    outputs.add("logits", channels_first(net.logits(image)));
    outputs.add("classes", net.parse(image));
  }
  outputs.write(request.outputs);
  return 0;
}

int probe_gfpgan_paste(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const auto& f = inputs.shape("frame");
  const std::vector<std::int64_t> scales = inputs.i64("scale");
  WEFT_CHECK(f.size() == 3 && f[2] == 3 && f[0] > 0 && f[1] > 0 && f[0] < 16384 && f[1] < 16384,
             Exit::data, "give the pixels of a picture [H,W,3]", "input \"frame\" is {}",
             Shape(std::span<const std::int64_t>(f)).str());
  WEFT_CHECK(scales.size() == 1 && (scales[0] == 1 || scales[0] == 2), Exit::data,
             "give one number, 1 or 2", "input \"scale\" has {} numbers, the first {}",
             scales.size(), scales.empty() ? 0 : scales[0]);
  const auto& p = inputs.shape("points");
  WEFT_CHECK(p.size() == 3 && p[0] > 0 && p[0] < 256, Exit::data, "give [F,5,2], F 1 to 255",
             "input \"points\" is {}", Shape(std::span<const std::int64_t>(p)).str());
  const std::int64_t count = p[0], pixels = face_side * face_side;
  const Tensor points = inputs.f32("points", {count, 5, 2}).to_host();
  const std::vector<std::uint8_t> faces =
                                      bytes_of(inputs, "faces", {count, face_side, face_side, 3}),
                                  classes =
                                      bytes_of(inputs, "classes", {count, face_side, face_side});
  const ImageFile frame{f[0], f[1], inputs.u8("frame")};
  ImageFile result = scales[0] == 1 ? frame : doubled_frame(frame);
  std::vector<FacePatch> patches;
  std::vector<float> transforms;
  std::vector<std::uint8_t> crops;
  for (std::int64_t i = 0; i < count; ++i) {
    FacePoints own;
    for (std::size_t k = 0; k < 10; ++k)
      own[k / 2][k % 2] = points.span<float>()[static_cast<std::size_t>(10 * i) + k];
    const auto transform = face_transform(own);
    WEFT_CHECK(transform.has_value(), Exit::data, "give the places of five different points",
               "input \"points\": those of face {} have no transform", i);
    for (const double v : transform->m) transforms.push_back(static_cast<float>(v));
    const std::vector<std::uint8_t> crop = warp_face(frame, *transform);
    crops.insert(crops.end(), crop.begin(), crop.end());
    const auto at = [&](const auto& all, std::int64_t each) {
      return std::span<const std::uint8_t>(all).subspan(i * each, each);
    };
    auto patch = make_patch(at(faces, pixels * 3), face_mask(at(classes, pixels)),
                            back_transform(*transform, static_cast<int>(scales[0])), result.height,
                            result.width);
    if (patch) patches.push_back(std::move(*patch));
  }
  paste(patches, result);
  ProbeOutputs outputs;
  const auto add = [&]<class T>(const char* name, const std::vector<T>& values,
                                const Shape& shape) {
    outputs.add(name, Tensor::from_host(std::span<const T>(values), shape));
  };
  add("transforms", transforms, {count, 2, 3});
  add("crops", crops, {count, face_side, face_side, 3});
  add("result", result.values, {result.height, result.width, 3});
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
