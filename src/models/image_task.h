// What trainings of networks on images have in common (segmentation, text detection): batches of
// images with u8 maps of labels, no image shared by ranks, batch norm whose running statistics the
// ranks average, costs that follow from the image's size.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/batch_norm.h"
#include "ops/layout.h"
#include "train/task.h"

namespace weft {

class ImageTask : public TrainingTask {
 public:
  explicit ImageTask(const Deck& deck) : deck_(deck) {}

  bool bf16() const override { return deck_.model.dtype == "bf16"; }
  void open(std::span<const Bucket> buckets) override { check(buckets); }
  std::string start_weights() override;
  void share_clips(Communicator* group) override;
  void join_ranks(MPI_Comm world, Communicator* whole) override;
  Communicator* inner_ranks() override { return all_.get(); }

  double least_recompute() const override { return deck_.model.recompute; }
  double cost(const Bucket& bucket, double recompute) const override;
  // Averages over the ranks the running statistics that each of them has by itself, so that all
  // have and save the same.
  void end_step(const StepReport& report, std::int64_t step, std::int64_t clips) override;

  ClipFacts facts(const Bucket&) override { return {.unit = "images"}; }

 protected:
  // Reads what the deck's files have of the weights, and says what it read.
  virtual std::string load_start() = 0;
  // Operations of a forward of one image.
  virtual double flops(std::int64_t height, std::int64_t width) const = 0;

  // What a micro-batch trains on.
  struct Batch {
    Tensor images;             // f32 or bf16 [N,1,H,W,3], normalised
    std::vector<Tensor> maps;  // u8 [N,H/rate,W/rate] each
  };
  // `bytes` holds pixels and `maps` maps of one image after the other; while planning it is
  // undefined.
  Batch unpack(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
               const ops::PixelScale& scale, std::size_t maps, std::int64_t rate) const;
  // The blocks whose activations are computed again, of as many as there are.
  static std::int64_t recomputed_blocks(double share, std::int64_t blocks);

  const Deck& deck_;
  nn::BatchNormGroup norm_;
  std::unique_ptr<Communicator> all_;  // over which running statistics are averaged; null: none
};

}  // namespace weft
