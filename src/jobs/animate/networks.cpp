#include "jobs/animate/networks.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

// Operations of the speech's networks, a frame, about: they are a thousandth of a rendered frame.
constexpr double speech_flops = 0.4e9;
constexpr double sound_flops = 0.1e9;  // as many as would take as long as the sound of a frame

Deck with_mode(const Deck& deck, const char* mode) {
  Deck copy = deck;
  copy.get<SadtalkerDeck>().preprocess = mode;
  return copy;
}

}  // namespace

AnimateNetworks::AnimateNetworks(const Deck& deck, const std::vector<ClipRequest>& clips,
                                 MPI_Comm world)
    : deck_(deck), full_deck_(with_mode(deck, "full")), crop_deck_(with_mode(deck, "crop")) {
  const AnimateDeck& a = deck.get<AnimateDeck>();
  const auto find = [&](const char* name, const std::string& weights, bool wanted) {
    if (!wanted) return;
    const std::string key = std::string("animate.") + name;
    WEFT_CHECK(!weights.empty(), Exit::usage,
               fmt::format("set {} to a safetensors file, or to random:1 to try", key),
               "{} is empty", key);
    sources_.try_emplace(name, key, weights, "", false, world);
  };
  const auto any = [&](auto&& is) { return std::ranges::any_of(clips, is); };
  const bool enhanced = any(is_enhanced);
  find("weights", a.weights, true);
  find("mapping_weights", a.mapping_weights, any([](const auto& c) { return !is_full(c); }));
  find("mapping_full_weights", a.mapping_full_weights, any(is_full));
  find("detector_weights", a.detector_weights, enhanced || any(finds_faces));
  find("landmark_weights", a.landmark_weights, any(finds_faces));
  find("gfpgan_weights", a.gfpgan_weights, enhanced);
  find("parsenet_weights", a.parsenet_weights, enhanced);
}

const ModelSource& AnimateNetworks::source(const std::string& key) const {
  return sources_.at(key);
}

std::string AnimateNetworks::identity(const ClipRequest& clip) const {
  std::string all = deck_.model.dtype;
  const auto add = [&](const char* key, bool used) {
    if (used) all += fmt::format("\n{} {}", key, source(key).identity());
  };
  add("weights", true);
  add("mapping_weights", !is_full(clip));
  add("mapping_full_weights", is_full(clip));
  add("detector_weights", is_enhanced(clip) || finds_faces(clip));
  add("landmark_weights", finds_faces(clip));
  add("gfpgan_weights", is_enhanced(clip));
  add("parsenet_weights", is_enhanced(clip));
  return all;
}

std::string AnimateNetworks::describe() const {
  std::string all;
  for (const auto& [name, source] : sources_)
    all += fmt::format("{}{} {}", all.empty() ? "" : ", ", name, source.describe());
  return all;
}

void AnimateNetworks::load(const std::vector<const ClipRequest*>& render,
                           const std::vector<const ClipRequest*>& prepare) {
  const auto any = [](const std::vector<const ClipRequest*>& clips, auto&& is) {
    return std::ranges::any_of(clips, [&](const ClipRequest* c) { return is(*c); });
  };
  if (any(render, [](const auto& c) { return !is_full(c); }))
    crop_.emplace(crop_deck_, source("weights"), source("mapping_weights"));
  if (any(render, is_full))
    full_.emplace(full_deck_, source("weights"), source("mapping_full_weights"));
  const AnimateDeck& a = deck_.get<AnimateDeck>();
  const bool find = any(prepare, finds_faces);
  if (find || any(render, is_enhanced)) detector_.emplace(deck_, source("detector_weights"));
  if (find) landmarks_.emplace(deck_, source("landmark_weights"));
  if (!prepare.empty()) {
    coefficients_.emplace(deck_, source("weights"));
    speech_.emplace(deck_, source("weights"));
  }
  if (any(render, is_enhanced))
    enhancer_.emplace(deck_, source("gfpgan_weights"), source("parsenet_weights"), *detector_,
                      EnhancerSize{a.gfpgan_channels, a.parsenet_channels});
}

const Renderer& AnimateNetworks::renderer(const ClipRequest& clip) const {
  return is_full(clip) ? *full_ : *crop_;
}

FaceFinder AnimateNetworks::finder(const ClipRequest& clip) {
  if (!finds_faces(clip)) return {};
  return {&*detector_, &*landmarks_};
}

MemoryNeed AnimateNetworks::plan(const ClipRequest& clip, const AnimateSize& size, bool prepare,
                                 std::size_t capacity) {
  const SadtalkerDeck& s = clip.sadtalker;
  MemoryNeed most = renderer(clip).plan(s.size, s.size, s.batch_size, capacity);
  const auto add = [&](const MemoryNeed& need) {
    most.bytes = std::max(most.bytes, need.bytes);
    most.fits = most.fits && need.fits;
  };
  if (prepare) {
    if (finds_faces(clip)) {
      add(detector_->plan(size.height, size.width, capacity));
      add(landmarks_->plan(capacity));
    }
    add(coefficients_->plan(capacity));
    add(speech_->plan(capacity));
  }
  if (is_enhanced(clip))
    // The source's features stay in the arena meanwhile; the renderer's plan is above them.
    add(enhancer_->plan(is_full(clip) ? size.height : s.size, is_full(clip) ? size.width : s.size,
                        capacity));
  return most;
}

ClipCost AnimateNetworks::cost(const ClipRequest& clip, const AnimateSize& size) {
  const SadtalkerDeck& s = clip.sadtalker;
  const auto frames = static_cast<double>(size.frames);
  const Renderer::Cost render = renderer(clip).flops(s.size, s.size);
  ClipCost cost{0, render.frame, sound_flops * frames, size.frames};
  if (is_enhanced(clip)) {
    cost.frame += enhancer_->flops(1);
    cost.frame += is_full(clip) ? detector_->flops(size.height, size.width)
                                : detector_->flops(s.size, s.size);
  }
  if (!coefficients_) return cost;
  cost.prepare = coefficients_->flops() + speech_flops * frames;
  if (finds_faces(clip)) {
    const double face = detector_->flops(LandmarkNet::side, LandmarkNet::side) +
                        landmarks_->flops() + coefficients_->flops();
    cost.prepare += detector_->flops(size.height, size.width) + landmarks_->flops() + face;
    if (has_references(clip)) cost.prepare += frames * face;
  }
  return cost;
}

}  // namespace weft
