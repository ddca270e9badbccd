#include <algorithm>

#include "core/error.h"
#include "models/pixels.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/generator.h"
#include "models/sadtalker/keypoints.h"
#include "models/sadtalker/renderer.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// Pictures u8 [B,H,W,3] whose sides are multiples of `stride`.
Tensor read_pictures(const ProbeInputs& inputs, std::int64_t stride) {
  const Shape s = inputs.shape("image", 4);
  WEFT_CHECK(s[3] == 3 && s[1] % stride == 0 && s[2] % stride == 0 && s.numel() > 0, Exit::data,
             fmt::format("give [B,H,W,3] whose H and W are multiples of {}", stride),
             "input \"image\" is {}", s.str());
  return Tensor::from_host(std::span<const std::uint8_t>(inputs.u8("image")), s);
}

// [N,C,...] of x [N,...,C], both seen with five dimensions.
Tensor channels_first(const Tensor& x, const Shape& five, const Shape& result) {
  Tensor y = Tensor::empty(result, x.dtype());
  Tensor view = y.view({five[0], five[4], five[1], five[2], five[3]});
  ops::to_channels_first(x.view(five), view);
  return y;
}

// [N,3,H,W] of [N,H,W,3].
Tensor planes(const Tensor& x) {
  const Shape& s = x.shape();
  return channels_first(x, {s[0], 1, s[1], s[2], s[3]}, {s[0], s[3], s[1], s[2]});
}

// The tensors of several, which are alike, one behind the other along axis 0.
Tensor stacked(const std::vector<Tensor>& parts) {
  std::vector<float> values;
  for (const Tensor& part : parts) {
    const Tensor host = part.to_host();
    const auto some = host.span<float>();
    values.insert(values.end(), some.begin(), some.end());
  }
  std::vector<std::int64_t> dims(parts[0].shape().dims().begin(), parts[0].shape().dims().end());
  dims[0] *= std::ssize(parts);
  return Tensor::from_host(std::span<const float>(values),
                           Shape(std::span<const std::int64_t>(dims)));
}

void probe_keypoints(const Deck& deck, const ProbeRequest& request, const ModelSource& weights) {
  KeypointNet net(deck.get<SadtalkerDeck>());
  weights.load(net.params(), sadtalker_weight_names({"kp_extractor."}), false);
  net.fold();
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const Tensor pictures = read_pictures(inputs, net.stride());
  outputs.add("keypoints", net.forward(network_pixels(pictures, unit_scale, DType::f32)));
  outputs.write(request.outputs);
}

void probe_transform(const Deck& deck, const ProbeRequest& request, const ModelSource& weights) {
  const SadtalkerDeck& d = deck.get<SadtalkerDeck>();
  MappingNet net(d);
  weights.load(net.params(), mapping_weight_names(), false);
  net.fold();
  const ProbeInputs inputs(request.inputs);
  const std::int64_t B = inputs.shape("windows", 3)[0], C = d.coefficients(), K = d.num_kp;
  const Tensor columns = inputs.f32("windows", {B, C, MappingNet::window});
  Tensor rows = Tensor::empty({B, 1, 1, MappingNet::window, C}, DType::f32);
  ops::to_channels_last(columns.view({B, C, 1, 1, MappingNet::window}), rows);
  const Tensor canonical = inputs.f32("kp_canonical", {B, K, 3}).to_host();
  std::vector<float> yaw, pitch, roll, t, expression, rotation, keypoints;
  const std::vector<HeadMotion> motions = net.forward(rows.view({B, MappingNet::window, C}));
  for (std::size_t b = 0; b < motions.size(); ++b) {
    const HeadMotion& m = motions[b];
    yaw.push_back(static_cast<float>(m.yaw));
    pitch.push_back(static_cast<float>(m.pitch));
    roll.push_back(static_cast<float>(m.roll));
    for (const double v : m.t) t.push_back(static_cast<float>(v));
    for (const double v : m.expression) expression.push_back(static_cast<float>(v));
    for (const double v : head_rotation(m.yaw, m.pitch, m.roll))
      rotation.push_back(static_cast<float>(v));
    const auto K3 = static_cast<std::size_t>(3 * K);
    const std::vector<float> moved =
        moved_keypoints(canonical.span<float>().subspan(b * K3, K3), m);
    keypoints.insert(keypoints.end(), moved.begin(), moved.end());
  }
  ProbeOutputs outputs;
  outputs.add("yaw", yaw, {B});
  outputs.add("pitch", pitch, {B});
  outputs.add("roll", roll, {B});
  outputs.add("t", t, {B, 3});
  outputs.add("exp", expression, {B, 3 * K});
  outputs.add("rotation", rotation, {B, 3, 3});
  outputs.add("keypoints", keypoints, {B, K, 3});
  outputs.write(request.outputs);
}

void probe_generator(const Deck& deck, const ProbeRequest& request, const ModelSource& weights) {
  const SadtalkerDeck& d = deck.get<SadtalkerDeck>();
  FaceGenerator net(d);
  const bool bf16 = deck.model.dtype == "bf16";
  weights.load(net.params(), sadtalker_weight_names({"generator."}), bf16);
  net.fold();
  const ProbeInputs inputs(request.inputs);
  const Tensor pictures = read_pictures(inputs, net.stride());
  const std::int64_t B = pictures.dim(0);
  const Tensor source = inputs.f32("kp_source", {B, d.num_kp, 3}),
               driving = inputs.f32("kp_driving", {B, d.num_kp, 3});
  std::vector<Tensor> masks, occlusions, deformations, images;
  for (std::int64_t b = 0; b < B; ++b) {
    const FaceGenerator::Features features = net.encode(
        network_pixels(pictures.slice(b, b + 1), unit_scale, bf16 ? DType::bf16 : DType::f32));
    const FaceGenerator::Frames f =
        net.render(features, source.slice(b, b + 1), driving.slice(b, b + 1), true);
    const Shape& m = f.motion.mask.shape();
    masks.push_back(channels_first(f.motion.mask, m, {1, m[4], m[1], m[2], m[3]}));
    Tensor occlusion = Tensor::empty({1, 1, m[2], m[3]}, DType::f32);
    ops::convert(f.motion.occlusion.view(occlusion.shape()), occlusion);
    occlusions.push_back(occlusion);
    deformations.push_back(f.motion.deformation);
    images.push_back(planes(f.picture));
  }
  ProbeOutputs outputs;
  outputs.add("mask", stacked(masks));
  outputs.add("occlusion", stacked(occlusions));
  outputs.add("deformation", stacked(deformations));
  outputs.add("image", stacked(images));
  outputs.write(request.outputs);
}

void probe_render(const Deck& deck, const ProbeRequest& request, const ModelSource& weights) {
  const SadtalkerDeck& d = deck.get<SadtalkerDeck>();
  const Renderer renderer(deck, weights, weights);
  const ProbeInputs inputs(request.inputs);
  const Shape s = inputs.shape("image", 3);
  WEFT_CHECK(s[2] == 3, Exit::data, probe_hint, "input \"image\" is {}", s.str());
  const ImageFile picture{s[0], s[1], inputs.u8("image")};
  const std::int64_t T = inputs.shape("coeff", 2)[0];
  const Tensor own = inputs.f32("source_coeff", {1, d.coefficients()}).to_host(),
               predicted = inputs.f32("coeff", {T, 70}).to_host();
  const std::vector<std::int64_t> crop = inputs.i64("crop_size");
  WEFT_CHECK(crop.size() == 2 && crop[0] > 0 && crop[1] > 0 && crop[1] / crop[0] < 64, Exit::data,
             probe_hint, "input \"crop_size\" is no width and height");

  const Renderer::Source source = renderer.prepare(picture, own.span<float>());
  const DrivingRows rows = driving_rows(d, predicted.span<float>(), own.span<float>());
  const Tensor keypoints = renderer.keypoints(source, rows, 0, T);
  std::vector<Tensor> pictures;
  std::vector<std::uint8_t> resized;
  const std::int64_t height = d.size * crop[1] / crop[0];
  for (std::int64_t t = 0; t < T; ++t)
    pictures.push_back(planes(renderer.pictures(source, keypoints.slice(t, t + 1))));
  std::vector<std::uint8_t> frames;
  for (std::int64_t t = 0; t < T; t += d.batch_size) {
    const auto some = renderer.render(source, rows, t, std::min(d.batch_size, T - t));
    frames.insert(frames.end(), some.begin(), some.end());
  }
  const auto bytes = static_cast<std::size_t>(s.numel());
  for (std::size_t at = 0; at < frames.size(); at += bytes) {
    const ImageFile frame{s[0], s[1], {frames.data() + at, frames.data() + at + bytes}};
    const ImageFile fitted = resize_bilinear(frame, height, d.size);
    resized.insert(resized.end(), fitted.values.begin(), fitted.values.end());
  }
  ProbeOutputs outputs;
  outputs.add("kp_source", source.keypoints.view({d.num_kp, 3}));
  outputs.add("kp_driving", keypoints);
  outputs.add("prediction", stacked(pictures));
  outputs.add("frames",
              Tensor::from_host(std::span<const std::uint8_t>(frames), {T, s[0], s[1], 3}));
  outputs.add("frames_resized",
              Tensor::from_host(std::span<const std::uint8_t>(resized), {T, height, d.size, 3}));
  outputs.write(request.outputs);
}

}  // namespace

int probe_sadtalker(const Deck& deck, const ProbeRequest& request) {
  const RankDevice device = choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ModelSource weights("--weights", request.weights, "", false, MPI_COMM_SELF);
  if (request.what == "sadtalker_kp")
    probe_keypoints(deck, request, weights);
  else if (request.what == "sadtalker_transform")
    probe_transform(deck, request, weights);
  else if (request.what == "sadtalker_generator")
    probe_generator(deck, request, weights);
  else
    probe_render(deck, request, weights);
  return 0;
}

}  // namespace weft
