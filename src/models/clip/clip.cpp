#include "models/clip/clip.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "models/images.h"
#include "ops/attention.h"
#include "ops/layout.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {
namespace {

constexpr float norm_eps = 1e-5f;
constexpr const char* vision = "vision_model.";
constexpr const char* text = "text_model.";
// The scale of OpenAI's and Hugging Face's preprocessing.
constexpr ops::PixelScale pixel_scale{
    255.0f, {0.48145466f, 0.4578275f, 0.40821073f}, {0.26862954f, 0.26130258f, 0.27577711f}, false};

// ---- Layers

// Values come from files alone; random starts are for tests.
Init normal(std::int64_t fan_in) {
  return Init::normal(1.0f / std::sqrt(static_cast<float>(fan_in)));
}

nn::NormWeights fixed_norm(ParameterTable& params, const std::string& name, std::int64_t C) {
  return {&params.add(name + ".weight", {C}, Init::constant(1), false),
          &params.add(name + ".bias", {C}, Init::constant(0), false)};
}

nn::Linear fixed_linear(ParameterTable& params, const std::string& name, std::int64_t out,
                        std::int64_t in) {
  return {&params.add(name + ".weight", {out, in}, normal(in), false),
          &params.add(name + ".bias", {out}, Init::constant(0), false)};
}

// LayerNorm of the rows of x [M,C]: a GroupNorm whose samples are the rows, with one group.
Tensor layer_norm(const Tensor& x, const nn::NormWeights& w) {
  Tensor y = Tensor::empty(x.shape(), DType::f32);
  Tensor stats = Tensor::empty({x.dim(0), 1, 2}, DType::f32);
  ops::group_norm_forward(x, w.weight->value, w.bias->value, 1, norm_eps, false, y, stats);
  return y;
}

// On the CPU products take weights that were packed once (ops/matmul.h): a row's result does not
// depend on the other rows or on the number of threads, which prefetching changes.
bool packs() { return this_device().kind == DeviceKind::cpu; }
void pack(Tensor& w) {
  if (packs()) ops::pack_weight(w);
}

// x [M,in] w^T + bias (+ residual), w packed where it has to be.
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual = {}) {
  Tensor y = Tensor::empty({x.dim(0), w.dim(0)}, DType::f32);
  if (!packs()) {
    ops::linear_forward(x, w, bias, residual, y);
    return y;
  }
  Tensor rows = Tensor::empty({ops::packed_rows(x.dim(0)), x.dim(1)}, DType::f32);
  ops::pack_rows(x, rows);
  ops::packed_linear_forward(rows, w, bias, residual, y);
  return y;
}
Tensor linear(const Tensor& x, const nn::Linear& l, const Tensor& residual = {}) {
  return linear(x, l.weight->value, l.bias->value, residual);
}

// z / (1 + exp(-1.702 z)) = SiLU(1.702 z) / 1.702.
void quick_gelu(Tensor& z) {
  constexpr float slope = 1.702f;
  Tensor scaled = Tensor::empty(z.shape(), DType::f32), y = Tensor::empty(z.shape(), DType::f32);
  ops::scaled_add(z, slope, Tensor(), scaled, false);
  ops::silu_forward(scaled, y);
  ops::scaled_add(y, 1 / slope, Tensor(), z, false);
}

// Matrices [C,C] one below the other, or biases.
Tensor stacked(std::initializer_list<Parameter*> parts) {
  const Shape& one = (*parts.begin())->shape;
  std::vector<float> all;
  for (const Parameter* p : parts) {
    const Tensor host = p->value.to_host();
    all.insert(all.end(), host.span<float>().begin(), host.span<float>().end());
  }
  const auto rows = static_cast<std::int64_t>(parts.size()) * one[0];
  Tensor t = Tensor::persistent(one.rank() == 1 ? Shape{rows} : Shape{rows, one[1]}, DType::f32);
  t.set(std::span<const float>(all));
  for (Parameter* p : parts) p->value.release();
  return t;
}

// A whole model's files hold both encoders; each reads its own.
void load(WeightFiles& files, ParameterTable& params, const std::string& prefix,
          const std::string& projection) {
  params.allocate_for_inference(false);
  WeightNames names;
  names.section = "clip";
  names.spare = [=](const std::string& name) {
    return (!name.starts_with(prefix) && name != projection) || name.ends_with(".position_ids");
  };
  check_weights(files, params, names);
  read_weights(files, params, names);
}

template <class Run>
MemoryNeed dry_run(std::size_t capacity, const Run& run) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  run();
  return arena->need();
}

// ---- Shapes

const SafetensorEntry& entry_of(const WeightFiles& files, const std::string& name,
                                std::size_t rank) {
  const WeightFiles::Tensor* t = files.find(name);
  WEFT_CHECK(t != nullptr && t->entry.shape.size() == rank, Exit::data,
             "clip.weights takes a CLIP model under Hugging Face's names: its folder, or OpenAI's "
             "file converted with tools/convert_weights.py",
             "{} has no tensor {} of {} dimensions", files.path().string(), name, rank);
  return t->entry;
}

ClipShape::Tower tower_of(const WeightFiles& files, const std::string& prefix) {
  ClipShape::Tower tower;
  const auto layer = [&](std::int64_t i) {
    return fmt::format("{}encoder.layers.{}.mlp.fc1.weight", prefix, i);
  };
  const SafetensorEntry& first = entry_of(files, layer(0), 2);
  tower.mlp = first.shape[0];
  tower.width = first.shape[1];
  while (files.find(layer(tower.layers)) != nullptr) ++tower.layers;
  WEFT_CHECK(tower.width > 0 && tower.width % ClipShape::head_width == 0, Exit::data,
             "take a CLIP model of OpenAI, such as ViT-L/14",
             "{}: {} has {} channels, which are not heads of {}", files.path().string(), layer(0),
             tower.width, ClipShape::head_width);
  return tower;
}

}  // namespace

ClipShape clip_shape(WeightFiles& files) {
  ClipShape s;
  strip_prefix(files, {"visual_projection.weight", std::string(vision) + "post_layernorm.weight"});
  s.vision = tower_of(files, vision);
  const std::string embeddings = std::string(vision) + "embeddings.";
  const SafetensorEntry& patch = entry_of(files, embeddings + "patch_embedding.weight", 4);
  s.patch = patch.shape[3];
  const std::int64_t tokens =
      entry_of(files, embeddings + "position_embedding.weight", 2).shape[0] - 1;
  s.grid = std::llround(std::sqrt(static_cast<double>(std::max<std::int64_t>(tokens, 0))));
  WEFT_CHECK(s.patch > 0 && s.grid > 0 && s.grid * s.grid == tokens && s.side() <= 4096, Exit::data,
             "take a CLIP model with square pictures, such as ViT-L/14",
             "{}: {} patches of {} pixels are no square", files.path().string(), tokens, s.patch);
  s.channels = entry_of(files, "visual_projection.weight", 2).shape[0];
  if (files.find("text_projection.weight") == nullptr) return s;
  s.text = tower_of(files, text);
  const std::string of_text = std::string(text) + "embeddings.";
  s.vocabulary = entry_of(files, of_text + "token_embedding.weight", 2).shape[0];
  s.positions = entry_of(files, of_text + "position_embedding.weight", 2).shape[0];
  WEFT_CHECK(s.positions >= 2, Exit::data, "take a CLIP model of OpenAI, such as ViT-L/14",
             "{}: captions of {} tokens", files.path().string(), s.positions);
  return s;
}

std::vector<std::uint8_t> clip_pixels(const RgbView& picture, std::int64_t side) {
  WEFT_ASSERT(picture.height > 0 && picture.width > 0 && side > 0);
  const std::int64_t shorter = std::min(picture.height, picture.width);
  // torchvision's int() and round(), halves to even.
  const auto scaled = [&](std::int64_t length) {
    return static_cast<std::int64_t>(static_cast<double>(side * length) /
                                     static_cast<double>(shorter));
  };
  const auto middle = [&](std::int64_t length) {
    return static_cast<std::int64_t>(std::nearbyint(static_cast<double>(length - side) / 2));
  };
  const std::int64_t height = scaled(picture.height), width = scaled(picture.width);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(side * side * 3));
  pillow_resize_window(picture, height, width, PillowFilter::bicubic,
                       {middle(height), middle(width), side, side}, out.data(), side * 3);
  return out;
}

ClipLayers::ClipLayers(ParameterTable& params, const std::string& prefix,
                       const ClipShape::Tower& shape) {
  const std::int64_t C = shape.width, F = shape.mlp;
  for (std::int64_t i = 0; i < shape.layers; ++i) {
    const std::string name = fmt::format("{}encoder.layers.{}.", prefix, i);
    const std::string attention = name + "self_attn.";
    Layer l;
    l.norm1 = fixed_norm(params, name + "layer_norm1", C);
    l.q = fixed_linear(params, attention + "q_proj", C, C);
    l.k = fixed_linear(params, attention + "k_proj", C, C);
    l.v = fixed_linear(params, attention + "v_proj", C, C);
    l.out = fixed_linear(params, attention + "out_proj", C, C);
    l.norm2 = fixed_norm(params, name + "layer_norm2", C);
    l.fc1 = fixed_linear(params, name + "mlp.fc1", F, C);
    l.fc2 = fixed_linear(params, name + "mlp.fc2", C, F);
    layers_.push_back(std::move(l));
  }
}

void ClipLayers::prepare() {
  for (Layer& l : layers_) {
    l.qkv = stacked({l.q.weight, l.k.weight, l.v.weight});
    l.qkv_bias = stacked({l.q.bias, l.k.bias, l.v.bias});
    for (Tensor* w : {&l.qkv, &l.out.weight->value, &l.fc1.weight->value, &l.fc2.weight->value})
      pack(*w);
  }
}

template <class Attend>
Tensor ClipLayers::forward(Tensor x, const Attend& attend) const {
  for (const Layer& l : layers_) {
    Tensor qkv = linear(layer_norm(x, l.norm1), l.qkv, l.qkv_bias);
    const Tensor attended = attend(std::exchange(qkv, Tensor()));
    x = linear(attended, l.out, x);
    Tensor z = linear(layer_norm(x, l.norm2), l.fc1);
    quick_gelu(z);
    x = linear(z, l.fc2, x);
  }
  return x;
}

// ---- Pictures

ClipImageEncoder::ClipImageEncoder(WeightFiles& files, const ClipShape& shape)
    : shape_(shape), layers_(params_, vision, shape.vision) {
  const std::int64_t C = shape.vision.width, tokens = shape.grid * shape.grid + 1;
  const std::string name = vision, embeddings = name + "embeddings.";
  class_ = &params_.add(embeddings + "class_embedding", {C}, normal(C), false);
  patches_ = &params_.add(embeddings + "patch_embedding.weight", {C, 3, shape.patch, shape.patch},
                          normal(3 * shape.patch * shape.patch), false);
  positions_ =
      &params_.add(embeddings + "position_embedding.weight", {tokens, C}, normal(C), false);
  pre_ = fixed_norm(params_, name + "pre_layrnorm", C);  // as it is released
  post_ = fixed_norm(params_, name + "post_layernorm", C);
  projection_ = &params_.add("visual_projection.weight", {shape.channels, C}, normal(C), false);
  load(files, params_, vision, projection_->name);
  layers_.prepare();
  pack(patches_->value);
  pack(projection_->value);
  // The class token is the same in every picture: its embedding goes into its position's.
  const Tensor first = class_->value.to_host(), places = positions_->value.to_host();
  std::vector<float> sums(places.span<float>().begin(), places.span<float>().end());
  for (std::int64_t c = 0; c < C; ++c) sums[c] += first.span<float>()[c];
  positions_and_class_ = Tensor::persistent({tokens, C}, DType::f32);
  positions_and_class_.set(std::span<const float>(sums));
}

Tensor ClipImageEncoder::forward(const Tensor& pixels) const {
  const std::int64_t N = pixels.dim(0), C = shape_.vision.width, side = shape_.side();
  const std::int64_t P = shape_.grid * shape_.grid, S = P + 1, D = ClipShape::head_width;
  const std::int64_t H = shape_.vision.heads(), p = shape_.patch;
  // 1. Patches are rows of a product; a class token comes in front of them.
  Tensor frames = Tensor::empty({N, 3, 1, side, side}, DType::f32);
  ops::to_channels_first(network_pixels(pixels, pixel_scale, DType::f32), frames);
  Tensor rows = Tensor::empty({N, 1, P, 3 * p * p}, DType::f32);
  ops::patchify_forward(frames, {1, static_cast<int>(p), static_cast<int>(p)}, rows);
  frames.release();
  const Tensor embedded =
      linear(rows.view({N * P, 3 * p * p}), patches_->value.view({C, 3 * p * p}), Tensor());
  rows.release();
  Tensor x = Tensor::empty({N, 1, S, C}, DType::f32);
  ops::fill_zero(x);
  ops::copy_tokens(embedded.view({N, 1, P, C}), {1, P, 0, 0, 0, 1}, x);
  ops::add_position(positions_and_class_, x);
  // 2. Layers.
  const Tensor y = layers_.forward(layer_norm(x.view({N * S, C}), pre_), [&](const Tensor& qkv) {
    Tensor out = Tensor::empty({N * S, C}, DType::f32), lse = Tensor::empty({N, H, S}, DType::f32);
    Tensor view = out.view({N, 1, S, C}), none;
    ops::self_attention_forward(qkv.view({N, 1, S, 3, H, D}), none, none, none, ops::Axis::space,
                                view, lse, none);
    return out;
  });
  // 3. The class token in the common space.
  Tensor first = Tensor::empty({N, 1, 1, C}, DType::f32);
  ops::copy_tokens(y.view({N, 1, S, C}), {1, 1, 0, 0, 0, 0}, first);
  return linear(layer_norm(first.view({N, C}), post_), projection_->value, Tensor());
}

std::vector<float> ClipImageEncoder::encode(std::span<const std::uint8_t> pixels) const {
  const std::int64_t side = shape_.side(), bytes = side * side * 3;
  const std::int64_t count = std::ssize(pixels) / bytes, together = on_cuda() ? count : 1;
  std::vector<float> features;
  for (std::int64_t i = 0; i < count; i += together) {
    const Tensor some =
        Tensor::from_host(pixels.subspan(static_cast<std::size_t>(i * bytes),
                                         static_cast<std::size_t>(together * bytes)),
                          {together, side, side, 3});
    const Tensor host = forward(some).to_host();
    features.insert(features.end(), host.span<float>().begin(), host.span<float>().end());
  }
  check_finite(features, "CLIP's image encoder");
  return features;
}

MemoryNeed ClipImageEncoder::plan(std::int64_t count, std::size_t capacity) const {
  return dry_run(capacity, [&] {
    const std::int64_t side = shape_.side();
    forward(Tensor::empty({on_cuda() ? count : 1, side, side, 3}, DType::u8));
  });
}

// ---- Captions

ClipTextEncoder::ClipTextEncoder(WeightFiles& files, const ClipShape& shape)
    : shape_(shape), layers_(params_, text, shape.text) {
  WEFT_CHECK(shape.text.layers > 0, Exit::data,
             "take the whole CLIP model, with text_model.* and text_projection.weight",
             "{} has no text encoder", files.path().string());
  const std::int64_t C = shape.text.width;
  const std::string name = text, embeddings = name + "embeddings.";
  tokens_ =
      &params_.add(embeddings + "token_embedding.weight", {shape.vocabulary, C}, normal(C), false);
  positions_ = &params_.add(embeddings + "position_embedding.weight", {shape.positions, C},
                            normal(C), false);
  final_ = fixed_norm(params_, name + "final_layer_norm", C);
  projection_ = &params_.add("text_projection.weight", {shape.channels, C}, normal(C), false);
  load(files, params_, text, projection_->name);
  layers_.prepare();
  pack(projection_->value);
}

Tensor ClipTextEncoder::forward(const std::vector<std::vector<std::int32_t>>& captions) const {
  const std::int64_t C = shape_.text.width, H = shape_.text.heads();
  // Captions one behind the other, each up to its end mark. A token sees those up to itself: in
  // cross_attention_forward it is a sample of its own, with one query, whose keys are these, one
  // sample's behind the other's.
  std::vector<std::int32_t> ids, places, last, seen, offsets{0};
  for (const std::vector<std::int32_t>& caption : captions) {
    const auto length = std::distance(caption.begin(), std::ranges::max_element(caption)) + 1;
    WEFT_ASSERT(!caption.empty() && length <= shape_.positions);
    const auto first = static_cast<std::int32_t>(ids.size());
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(length); ++i) {
      WEFT_ASSERT(caption[i] >= 0 && caption[i] < shape_.vocabulary);
      ids.push_back(caption[i]);
      places.push_back(i);
      for (std::int32_t k = 0; k <= i; ++k) seen.push_back(first + k);
      offsets.push_back(static_cast<std::int32_t>(seen.size()));
    }
    last.push_back(static_cast<std::int32_t>(ids.size()) - 1);
  }
  const auto on_device = [](const std::vector<std::int32_t>& v) {
    return Tensor::from_host(std::span<const std::int32_t>(v), {std::ssize(v)});
  };
  const auto rows_of = [](const Tensor& index, const Tensor& table) {
    Tensor y = Tensor::empty({index.numel(), table.dim(1)}, DType::f32);
    ops::embedding_forward(index, table, y);
    return y;
  };
  const std::int64_t M = std::ssize(ids);
  const Tensor keys = on_device(seen), samples = on_device(offsets);
  Tensor x = rows_of(on_device(ids), tokens_->value);
  ops::add_inplace(rows_of(on_device(places), positions_->value), x);
  x = layers_.forward(std::move(x), [&](const Tensor& qkv) {
    Tensor q = Tensor::empty({M, C}, DType::f32), kv = Tensor::empty({M, 2 * C}, DType::f32);
    ops::take_channels(qkv, 0, q, false);
    ops::take_channels(qkv, C, kv, false);
    const Tensor prefixes = rows_of(keys, kv);
    Tensor out = Tensor::empty({M, C}, DType::f32), lse = Tensor::empty({M, H, 1}, DType::f32);
    Tensor view = out.view({M, 1, C});
    ops::cross_attention_forward(q.view({M, 1, C}),
                                 prefixes.view({keys.numel(), 2, H, ClipShape::head_width}),
                                 samples, static_cast<int>(H), view, lse);
    return out;
  });
  return linear(layer_norm(rows_of(on_device(last), x), final_), projection_->value, Tensor());
}

MemoryNeed ClipTextEncoder::plan(std::size_t capacity) const {
  std::vector<std::int32_t> longest(static_cast<std::size_t>(shape_.positions), 0);
  longest.back() = 1;
  return dry_run(capacity, [&] { forward({longest}); });
}

// ---- Scores

AestheticPredictor::AestheticPredictor(const std::string& weights, std::int64_t channels) {
  // Dropouts have numbers, too.
  constexpr std::array<std::pair<int, std::int64_t>, 5> outputs{
      {{0, 1024}, {2, 128}, {4, 64}, {6, 16}, {7, 1}}};
  std::int64_t in = channels;
  for (const auto& [number, out] : outputs) {
    layers_.push_back(fixed_linear(params_, fmt::format("layers.{}", number), out, in));
    in = out;
  }
  params_.allocate_for_inference(false);
  WeightNames names;
  names.section = "clip";
  load_weights(weights, params_, names);
  for (const nn::Linear& l : layers_) pack(l.weight->value);
}

std::vector<float> AestheticPredictor::score(const Tensor& features) const {
  Tensor x = features;
  for (const nn::Linear& l : layers_) x = linear(x, l);
  const Tensor host = x.to_host();
  return {host.span<float>().begin(), host.span<float>().end()};
}

std::vector<float> unit_length(std::span<const float> v) {
  double squares = 0;
  for (const float x : v) squares += static_cast<double>(x) * static_cast<double>(x);
  const double norm = std::max(std::sqrt(squares), 1e-12);
  std::vector<float> out;
  for (const float x : v) out.push_back(static_cast<float>(static_cast<double>(x) / norm));
  return out;
}

double clip_score(std::span<const float> picture, std::span<const float> caption) {
  WEFT_ASSERT(picture.size() == caption.size());
  double both = 0, a = 0, b = 0;
  for (std::size_t i = 0; i < picture.size(); ++i) {
    const double x = picture[i], y = caption[i];
    both += x * y, a += x * x, b += y * y;
  }
  return 100 * both / (std::max(std::sqrt(a), 1e-12) * std::max(std::sqrt(b), 1e-12));
}

}  // namespace weft
