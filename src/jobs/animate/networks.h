// The networks of a rank: each is loaded once, and only if a clip needs it.
#pragma once

#include <mpi.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/model_source.h"
#include "jobs/animate/clips.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/gfpgan/enhancer.h"
#include "models/sadtalker/renderer.h"
#include "models/sadtalker/speech_motion.h"
#include "tensor/tensor.h"

namespace weft {

class AnimateNetworks {
 public:
  // Collective: finds the weights of all that `clips` take. Exit::usage, Exit::checkpoint.
  AnimateNetworks(const Deck& deck, const std::vector<ClipRequest>& clips, MPI_Comm world);

  // Stands for the weights that decide the clip's pixels.
  std::string identity(const ClipRequest& clip) const;
  std::string describe() const;

  // Reads the weights that these clips take: to render them, and to prepare those in `prepare`.
  // Before the arena is reserved.
  void load(const std::vector<const ClipRequest*>& render,
            const std::vector<const ClipRequest*>& prepare);

  const Renderer& renderer(const ClipRequest& clip) const;
  // Empty for a clip whose landmarks are given.
  FaceFinder finder(const ClipRequest& clip);
  FaceCoefficients& coefficients() { return *coefficients_; }
  SpeechMotion& speech() { return *speech_; }
  Enhancer& enhancer() { return *enhancer_; }
  Enhancer::Counts enhanced() const { return enhancer_ ? enhancer_->counts() : Enhancer::Counts(); }

  // Peak bytes of the arena for a clip of a picture of that size: dry runs, of what is loaded.
  MemoryNeed plan(const ClipRequest& clip, const AnimateSize& size, bool prepare,
                  std::size_t capacity = 0);
  // Operations, two a multiply-add, of what is loaded.
  ClipCost cost(const ClipRequest& clip, const AnimateSize& size);

 private:
  const ModelSource& source(const std::string& key) const;

  const Deck& deck_;
  Deck full_deck_;  // of the full modes, whose mapping network takes more coefficients
  Deck crop_deck_;
  std::map<std::string, ModelSource> sources_;  // by key of [animate]
  std::optional<Renderer> crop_, full_;
  std::optional<FaceDetector> detector_;
  std::optional<LandmarkNet> landmarks_;
  std::optional<FaceCoefficients> coefficients_;
  std::optional<SpeechMotion> speech_;
  std::optional<Enhancer> enhancer_;
};

// Whether frames are enhanced, whether they are pasted back into the picture, and whether a
// picture's face has to be looked for, there or in reference videos.
inline bool is_enhanced(const ClipRequest& c) { return !c.animate.enhancer.empty(); }
inline bool is_full(const ClipRequest& c) { return c.sadtalker.full(); }
inline bool has_references(const ClipRequest& c) {
  return !c.animate.ref_eyeblink.empty() || !c.animate.ref_pose.empty();
}
inline bool finds_faces(const ClipRequest& c) {
  return c.animate.landmarks.empty() || has_references(c);
}

}  // namespace weft
