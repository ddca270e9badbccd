// Text detection by differentiable binarization: DBNet and DBNet++ under the names of mmocr's
// released files (docs/models/dbnet.md).
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/weights.h"
#include "config/deck.h"
#include "config/deck_table.h"
#include "models/resnet/resnet.h"
#include "ops/layout.h"

namespace weft {

// The text detector's keys of the deck: [model] and [postprocess].
// The network (docs/models/dbnet.md).
struct DbnetDeck {
  std::string backbone = "oclip_resnet50";
  bool asf = true;
  double conv2_gain = 1;
  std::string deformable = "auto";
  std::string weights_backbone;
};

// How text regions are found in a probability map (docs/models/dbnet.md, Post-processing).
struct PostprocessDeck {
  double mask_threshold = 0.3;
  double min_text_score = 0.3;
  double min_text_width = 5;
  double unclip_ratio = 1.5;
  double epsilon_ratio = 0.002;
  std::int64_t max_candidates = 3000;
};

std::vector<DeckTable> dbnet_tables();

// The keys of [train] that belong to the text detector alone.
struct DbnetTrainDeck {
  double lr_detector = 0.007;
};
DeckTable dbnet_train_table();

class Dbnet {
 public:
  // `deformable`: the 3x3 convolutions of layer2 to layer4 are DCNv2. The table holds all that
  // released files have, also what only training uses.
  Dbnet(const DbnetDeck& deck, bool deformable);

  ParameterTable& params() { return *params_; }
  const ParameterTable& params() const { return *params_; }

  // Sides of pictures are multiples of this.
  static constexpr int stride = 32;

  struct Maps {
    Var probability;  // logits [N,1,H,W,1]
    Var threshold;    // logits likewise; null unless wanted
  };
  // image [N,1,H,W,3], normalised -> maps. The first `recomputed` of blocks() keep only their
  // inputs.
  Maps forward(nn::Context c, const Var& image, nn::BatchNormGroup& group, bool want_threshold,
               std::int64_t recomputed = 0) const;
  std::int64_t blocks() const { return backbone_->blocks(); }

  // Multiplies the weights of the 3x3 convolutions of layer2 to layer4 that are not deformable,
  // once they are loaded. Exit::usage for a backbone of basic blocks, which has none of these.
  void scale_conv2(float gain);

  // Operations of a forward of one picture, two a multiply-add.
  double flops(std::int64_t height, std::int64_t width, bool with_threshold = false) const;

 private:
  // Feature maps of the backbone to one map [N,1,H/4,W/4,256].
  Var neck(nn::Context c, std::vector<Var> maps) const;
  // Channels of each of the four scales' maps in it, weighed by what all of them show there.
  Var fuse_scales(nn::Context c, const Var& joined) const;

  // A map of that size to logits of the picture's size.
  struct Head {
    const ConvLayer* conv;
    nn::ConvWeights up;
    const NormLayer* up_norm;
    nn::ConvWeights out;
  };
  Head add_head(const std::string& name, const Feature& in);
  Var head(nn::Context c, const Head& h, const Var& x, nn::BatchNormGroup& group) const;

  struct ScaleFusion {
    const ConvLayer *conv, *channel_in, *channel_out, *spatial_in, *spatial_out, *attention;
  };

  std::unique_ptr<ParameterTable> params_;
  std::unique_ptr<ConvNet> backbone_layers_, neck_layers_, head_layers_;
  std::unique_ptr<ResNet> backbone_;
  std::array<const ConvLayer*, 4> lateral_, smooth_;
  std::optional<ScaleFusion> fusion_;
  Head probability_, threshold_;
};

// Whether files have offsets of deformable convolutions.
bool has_offsets(const WeightFiles& files);

// What pixels become for the network: ImageNet's statistics of RGB in 0 to 255.
ops::PixelScale dbnet_pixel_scale();

// What a training starts from: a released file, or a backbone of ImageNet or oCLIP.
// Reads `whole`, or else deck.weights_backbone, whichever is given; the rest of the table keeps its
// values. A file of the backbone has its names without "backbone." and may hold a classifier; it
// may lack the offsets of deformable convolutions, which then start at 0. Exit::usage if both are
// given, or if `whole` has deformable convolutions and the table none; Exit::data names what is
// missing, left over or of another shape (as model.weights_partial allows).
std::string load_dbnet(const ModelDeck& model, const DbnetDeck& deck, ParameterTable& table);

}  // namespace weft
