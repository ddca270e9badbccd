// Semantic segmentation: an encoder and a decoder of CSAILVision/semantic-segmentation-pytorch
// under its names (docs/models/segmentation.md), its weight files, and what it takes of pixels.
#pragma once

#include <memory>

#include "checkpoint/weights.h"
#include "models/segmentation/networks.h"
#include "ops/layout.h"

namespace weft {

// What pixels become for the network (docs/models/segmentation.md, Pixels), by model.preprocessing:
// ImageNet's statistics of RGB in 0 to 1; or BGR in 0 to 255 less its mean.
inline ops::PixelScale pixel_scale(const SegmentationDeck& deck) {
  if (deck.preprocessing == "bgr")
    return {1.0f, {102.9801f, 115.9465f, 122.7717f}, {1.0f, 1.0f, 1.0f}, true};
  return {255.0f, {0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}, false};
}

class Segmentation {
 public:
  using Dropout = SegmentationDropout;
  using Logits = SegmentationLogits;

  // Groups of its parameters: norms and biases, which take no weight decay, and convolutions, of
  // the encoder and of the decoder.
  enum Group { encoder_vectors, decoder_vectors, encoder_matrices, decoder_matrices };

  // The deck's encoder and decoder go together (segmentation_misfit). All parameters that released
  // files have are in the table, also those that only training uses. The table outlives the
  // network's values.
  explicit Segmentation(const SegmentationDeck& deck);

  ParameterTable& params() { return *params_; }
  const ParameterTable& params() const { return *params_; }

  // Sides of images are multiples of this: 8 of the dilated encoders, otherwise 32.
  int stride() const { return deck_.encoder.ends_with("dilated") ? 8 : 32; }
  // Logits have size H / label_rate(): 4, 8 or 32.
  int label_rate() const { return decoder_->rate(); }
  // Channels of the maps in front of the classifiers; 0: no dropout there.
  std::int64_t dropout_channels() const { return decoder_->dropout_channels(); }
  std::int64_t aux_dropout_channels() const { return decoder_->aux_dropout_channels(); }
  // Whether the decoder has deep supervision.
  bool has_aux() const { return deck_.decoder.ends_with("_deepsup"); }

  // image [N,1,H,W,3], normalised -> logits [N,1,H/rate,W/rate,classes]; aux is null unless the
  // decoder has deep supervision and it is wanted. The first `recomputed` of blocks() keep only
  // their inputs. With ranks that share statistics all make the same calls.
  Logits forward(nn::Context c, const Var& image, nn::BatchNormGroup& group, const Dropout& dropout,
                 bool want_aux, std::int64_t recomputed = 0);
  std::int64_t blocks() const { return encoder_->blocks(); }

  // Operations of a forward of one image, two a multiply-add, as the original computes it: PPM's
  // and UPerNet's branches cost less here.
  double flops(std::int64_t height, std::int64_t width, bool with_aux = false) const;

 private:
  SegmentationDeck deck_;
  std::unique_ptr<ParameterTable> params_;
  std::unique_ptr<ConvNet> encoder_layers_, decoder_layers_;
  std::unique_ptr<FeatureNet> encoder_;
  std::unique_ptr<SegmentationDecoder> decoder_;
};

// Weight files: the released pair, one file of both, an encoder of ImageNet.
// How they may differ from the table (docs/models/segmentation.md, Weights): they may lack what
// only training over several ranks reads of norms (_tmp_running_mean, _tmp_running_var,
// _running_iter), may count batches (num_batches_tracked), and may hold what the encoder's
// classifier of ImageNet needs. `prefix`: "encoder." or "decoder." for a file of that half, whose
// names are without it.
WeightNames segmentation_weight_names(const std::string& prefix = "");

// Reads `whole`, a file with encoder. and decoder. in front of names, or else encoder and decoder
// from files of their own, whichever are given (model.weights, model.weights_encoder,
// model.weights_decoder). What no file is given for keeps its values. Exit::usage if both are
// given; Exit::data names what is missing, left over or of another shape. Returns what was read,
// for the log; "" for nothing. `start`: of the training that starts from them, with its
// weights_partial.
std::string load_segmentation(const std::string& whole, const SegmentationDeck& deck,
                              ParameterTable& table, const ModelDeck* start = nullptr);

}  // namespace weft
