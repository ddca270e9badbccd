// Semantic segmentation: an encoder and a decoder of CSAILVision/semantic-segmentation-pytorch
// under its names (docs/models/segmentation.md).
#pragma once

#include <memory>
#include <variant>

#include "models/resnet/resnet.h"
#include "models/segmentation/decoders.h"
#include "models/segmentation/hrnet.h"
#include "models/segmentation/mobilenet.h"
#include "models/segmentation/options.h"

namespace weft {

class Segmentation {
 public:
  using Dropout = SegmentationDropout;
  using Logits = SegmentationLogits;

  // Groups of its parameters: norms and biases, which take no weight decay, and convolutions, of
  // the encoder and of the decoder.
  enum Group { encoder_vectors, decoder_vectors, encoder_matrices, decoder_matrices };

  // Exit::usage for a pair that does not go together. All parameters that released files have are
  // in the table, also those that only training uses. The table outlives the network's values.
  explicit Segmentation(const SegmentationDeck& deck);

  ParameterTable& params() { return *params_; }
  const ParameterTable& params() const { return *params_; }

  // Sides of images are multiples of this: 8 of the dilated encoders, otherwise 32.
  int stride() const;
  // Logits have size H / label_rate(): 4, 8 or 32.
  int label_rate() const;
  // Of the maps in front of the classifiers; 0: no dropout there.
  std::int64_t dropout_channels() const;
  std::int64_t aux_dropout_channels() const;
  // Whether the decoder has deep supervision.
  bool has_aux() const;

  // image [N,1,H,W,3], normalised -> logits [N,1,H/rate,W/rate,classes]; aux is null unless the
  // decoder has deep supervision and it is wanted. The first `recomputed` of blocks() keep only
  // their inputs. With ranks that share statistics all make the same calls.
  Logits forward(nn::Context c, const Var& image, nn::BatchNormGroup& group, const Dropout& dropout,
                 bool want_aux, std::int64_t recomputed = 0);
  std::int64_t blocks() const;

  // Of a forward of one image, two a multiply-add, as the original computes it: PPM's and UPerNet's
  // branches cost less here.
  double flops(std::int64_t height, std::int64_t width, bool with_aux = false) const;

 private:
  using Encoder = std::variant<ResNet, MobileNet, HrNet>;

  SegmentationDeck deck_;
  std::unique_ptr<ParameterTable> params_;
  std::unique_ptr<ConvNet> encoder_layers_, decoder_layers_;
  std::unique_ptr<Encoder> encoder_;
  std::unique_ptr<SegmentationDecoder> decoder_;
};

}  // namespace weft
