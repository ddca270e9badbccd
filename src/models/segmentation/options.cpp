#include "models/segmentation/options.h"

#include <algorithm>

#include "config/deck_table.h"

namespace weft {
namespace {

void model_rows(Rows& r, SegmentationDeck& d) {
  r.text("encoder", d.encoder, "Network that makes feature maps of an image.",
         segmentation_encoders());
  r.text("decoder", d.decoder,
         "Network that makes logits of feature maps; those in _deepsup train with a second loss on "
         "the last but one map.",
         segmentation_decoders());
  r.number("num_classes", d.num_classes, 1, 255, "Classes of a pixel.");
  r.number("dropout", d.dropout, 0, below_one,
           "Probability of leaving a channel out in front of the classifiers of ppm and "
           "ppm_deepsup.");
  r.path("weights_encoder", d.weights_encoder,
         "Safetensors file of the encoder alone, under the released names: of ImageNet, or half of "
         "a released pair.");
  r.path("weights_decoder", d.weights_decoder, "Safetensors file of the decoder alone, likewise.");
  r.text("preprocessing", d.preprocessing,
         "What pixels become for the network: imagenet, or bgr as weights released before August "
         "2019 expect it.",
         {"imagenet", "bgr"});
  r.path("class_names", d.class_names,
         "Names of the classes for results: a file with one a line, or object150_info.csv; empty "
         "takes those of the data.")
      .fixed = false;
  r.path("palette", d.palette,
         "Colours of the classes in pictures: a list of \"#rrggbb\", or a file with one a line; "
         "empty takes those of the data, or ADE20K's.")
      .fixed = false;
}

void check_model(const SegmentationDeck& d, const DeckDemand& demand) {
  const Misfit m = segmentation_misfit(d.encoder, d.decoder);
  demand(m.what.empty(), m.what, m.hint);
}

}  // namespace

const std::vector<std::string>& segmentation_encoders() {
  static const std::vector<std::string> names = {
      "resnet18dilated", "resnet50dilated", "resnet101dilated",   "resnet18", "resnet50",
      "resnet101",       "resnext101",      "mobilenetv2dilated", "hrnetv2"};
  return names;
}

const std::vector<std::string>& segmentation_decoders() {
  static const std::vector<std::string> names = {"c1",          "c1_deepsup",   "ppm",
                                                 "ppm_deepsup", "upernet_lite", "upernet"};
  return names;
}

Misfit segmentation_misfit(const std::string& encoder, const std::string& decoder) {
  const std::string pair =
      fmt::format("model.decoder = \"{}\" does not fit model.encoder = \"{}\": ", decoder, encoder);
  if (decoder.starts_with("upernet") &&
      (encoder.starts_with("resnet18") || !encoder.starts_with("res")))
    return {pair + "it takes maps of 256, 512, 1024 and 2048 channels",
            "take resnet50, resnet101 or resnext101 as the encoder (resnet50dilated and "
            "resnet101dilated fit too), or c1 or ppm as the decoder"};
  if (decoder.ends_with("_deepsup") && encoder == "hrnetv2")
    return {pair + "the second loss needs a second map, and this encoder has one",
            "take c1 or ppm as the decoder"};
  return {};
}

std::vector<DeckTable> segmentation_tables() {
  DeckTable model = deck_table("model", model_rows, check_model);
  model.next = "model";
  model.fixed = true;
  return {model, segmentation_train_table()};
}

namespace {

void rows(Rows& r, SegmentationTrainDeck& d) {
  r.number("lr_encoder", d.lr_encoder, 0, 1e3, "Segmentation: learning rate of the encoder.");
  r.number("lr_decoder", d.lr_decoder, 0, 1e3, "Segmentation: learning rate of the decoder.");
  r.number("deep_sup_scale", d.deep_sup_scale, 0, 1e3,
           "Segmentation: weight of the loss on conv4, in decoders that end in deepsup.");
  r.flag("fix_bn", d.fix_bn,
         "Segmentation: batch norm takes its running statistics as they are, and dropout is off.");
  r.flag("sync_bn", d.sync_bn,
         "Segmentation: the ranks share the statistics of batch norm; train.micro_batches is then "
         "a multiple of the ranks.");
  r.number("bn_ranks", d.bn_ranks, 0, many,
           "Segmentation: ranks that share them, consecutive ones; 0 is all.");
  r.number("bn_momentum", d.bn_momentum, -1, 1,
           "Segmentation: momentum of the running statistics. -1 is the original's: 0.001, so that "
           "they are means over the last 1,000 steps, and 0.1 in HRNet's encoder. Short runs want "
           "more.");
  r.number("class_weight", d.class_weight, 0, 1e6,
           "Segmentation: weight of each class in the cross entropy; empty: all alike.");
  r.text("class_weight_by", d.class_weight_by,
         "Segmentation: these weights from how many pixels each class has in data.path, as ingest "
         "counted them.",
         {"none", "median_frequency", "inverse_frequency"});
  r.number("dice_weight", d.dice_weight, 0, 1e3,
           "Segmentation: weight of the Dice loss, which is added to the cross entropy; 0: none.");
  r.number("ohem_thresh", d.ohem_thresh, 0, 1,
           "Segmentation: OHEM: the cross entropy counts the pixels whose class has a probability "
           "below this, often 0.7; 0: all.");
  r.number("ohem_min_kept", d.ohem_min_kept, 0, many,
           "Segmentation: OHEM counts at least so many pixels an image, the hardest, at "
           "data.label_rate.");
}

void check_loss(const SegmentationTrainDeck& d, const DeckDemand& demand) {
  demand(d.class_weight.empty() || d.class_weight_by == "none",
         fmt::format("train.class_weight and train.class_weight_by = \"{}\" both weigh the classes",
                     d.class_weight_by),
         "leave one of them out");
  demand(
      d.class_weight.empty() || std::ranges::any_of(d.class_weight, [](double w) { return w > 0; }),
      "train.class_weight is 0 for every class", "give a class a weight above 0");
}

}  // namespace

DeckTable segmentation_train_table() {
  DeckTable t = deck_table("train", rows, check_loss);
  t.next = "parallel";
  t.fixed = true;
  return t;
}

}  // namespace weft
