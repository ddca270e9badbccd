#include "models/dbnet/options.h"

#include "config/deck_table.h"

namespace weft {
namespace {

void model_rows(Rows& r, DbnetDeck& d) {
  r.text("backbone", d.backbone,
         "Text detector: network that makes feature maps of a picture. oclip_resnet50 has three "
         "convolutions in front and pools by averages.",
         {"oclip_resnet50", "resnet50", "resnet18"});
  r.flag("asf", d.asf,
         "Text detector: adaptive scale fusion behind the feature pyramid; DBNet++ has it, DBNet "
         "has not.");
  r.number("conv2_gain", d.conv2_gain, 0, 100,
           "Text detector: factor of each 3x3 convolution of layer2 to layer4 when pictures are "
           "scored. 1 is the published network; Open-Sora 1.2 computes 0.5.");
  r.text("deformable", d.deformable,
         "Text detector: whether these convolutions are deformable (DCNv2); auto: if the weights "
         "have conv_offset. A training takes auto as off.",
         {"auto", "on", "off"});
  r.path("weights_backbone", d.weights_backbone,
         "Text detector: safetensors file of the backbone alone that training starts from, of "
         "ImageNet or oCLIP, without \"backbone.\" in front of its names.");
}

void postprocess_rows(Rows& r, PostprocessDeck& d) {
  r.number("mask_threshold", d.mask_threshold, 0, 1,
           "Pixels whose probability of text is above this make regions.");
  r.number("min_text_score", d.min_text_score, 0, 1,
           "Regions whose mean probability is below this are left out.");
  r.number("min_text_width", d.min_text_width, 0, 1e6,
           "Pixels that the shorter side of a region's box has at least.");
  r.number("unclip_ratio", d.unclip_ratio, 0, 100,
           "Regions grow by this times area / perimeter: the network marks shrunk ones.");
  r.number("epsilon_ratio", d.epsilon_ratio, 0, 1,
           "Outlines are simplified within this share of their length. DBNet++ takes 0.002, DBNet "
           "0.01.");
  r.number("max_candidates", d.max_candidates, 0, 1e6,
           "Maximum number of outlines examined in a picture (plus one), from the bottom up.");
}

}  // namespace

std::vector<DeckTable> dbnet_tables() {
  DeckTable model = deck_table("model", model_rows);
  model.next = "model";
  model.fixed = true;
  return {model, deck_table("postprocess", postprocess_rows), dbnet_train_table()};
}

namespace {

void rows(Rows& r, DbnetTrainDeck& d) {
  r.number("lr_detector", d.lr_detector, 0, 1e3, "Text detector: learning rate.");
}

}  // namespace

DeckTable dbnet_train_table() {
  DeckTable t = deck_table("train", rows);
  t.next = "parallel";
  t.fixed = true;
  return t;
}

}  // namespace weft
