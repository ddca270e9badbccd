// Training STDiT3 by rectified flow, on pixels or on latents.
#pragma once

#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "models/stdit3/stdit3.h"
#include "models/video_task.h"

namespace weft {

class Stdit3Task : public VideoTask {
 public:
  explicit Stdit3Task(const Deck& deck);

  Stdit3& model() override { return model_; }
  const Stdit3& model() const override { return model_; }
  const nn::SequenceGroup& sequence_group() const override { return model_.sequence_group(); }
  std::string describe() const override;
  std::int64_t blocks(const Bucket&) const override { return 2 * deck_.get<Stdit3Deck>().depth; }

 protected:
  Flow make_flow(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                 double recompute, bool held_out) override;

 private:
  Deck held_out_deck_;  // without what is random in training alone
  Stdit3 model_;
};

}  // namespace weft
