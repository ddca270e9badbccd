#include "models/segmentation/segmentation.h"

#include <algorithm>

#include "core/error.h"

namespace weft {
namespace {

bool is_dilated(const std::string& encoder) { return encoder.ends_with("dilated"); }

std::variant<ResNet, MobileNet, HrNet> make_encoder(ConvNet& net, const std::string& name) {
  if (name == "mobilenetv2dilated") return MobileNet(net);
  if (name == "hrnetv2") {
    net.start = ConvStart::uniform;
    net.momentum = 0.1f;
    return HrNet(net);
  }
  ResNetShape shape;
  if (is_dilated(name)) shape.output_stride = 8;
  if (name.starts_with("resnet18")) {
    shape.blocks = {2, 2, 2, 2};
    shape.bottleneck = false;
    shape.expansion = 1;
  }
  if (name.find("101") != std::string::npos) shape.blocks = {3, 4, 23, 3};
  if (name == "resnext101") {
    net.start = ConvStart::fan_out_of_group;
    shape.planes = 128;
    shape.expansion = 2;
    shape.groups = 32;
  }
  return ResNet(net, shape);
}

SegmentationDecoder make_decoder(ConvNet& net, const SegmentationDeck& deck,
                                 const std::vector<Feature>& maps) {
  const bool deepsup = deck.decoder.ends_with("_deepsup");
  if (deck.decoder.starts_with("c1")) return C1Decoder(net, maps, deck.num_classes, deepsup);
  if (deck.decoder.starts_with("ppm")) return PpmDecoder(net, maps, deck.num_classes, deepsup);
  return UperNetDecoder(net, maps, deck.num_classes, deck.decoder == "upernet" ? 512 : 256);
}

void check(const SegmentationDeck& deck) {
  const auto known = [](const char* key, const std::string& name,
                        const std::vector<std::string>& names) {
    WEFT_CHECK(std::ranges::find(names, name) != names.end(), Exit::usage,
               fmt::format("take one of {}", fmt::join(names, ", ")),
               "model.{} = \"{}\" is not known", key, name);
  };
  known("encoder", deck.encoder, segmentation_encoders());
  known("decoder", deck.decoder, segmentation_decoders());
  const Misfit misfit = segmentation_misfit(deck.encoder, deck.decoder);
  WEFT_CHECK(misfit.what.empty(), Exit::usage, misfit.hint, "{}", misfit.what);
}

}  // namespace

Segmentation::Segmentation(const SegmentationDeck& deck)
    : deck_(deck), params_(std::make_unique<ParameterTable>()) {
  check(deck);
  encoder_layers_ = std::make_unique<ConvNet>(*params_, "encoder.");
  encoder_layers_->matrix_group = encoder_matrices;
  encoder_layers_->vector_group = encoder_vectors;
  encoder_ = std::make_unique<Encoder>(make_encoder(*encoder_layers_, deck.encoder));
  decoder_layers_ = std::make_unique<ConvNet>(*params_, "decoder.");
  decoder_layers_->start = ConvStart::fan_in;
  decoder_layers_->beta = 1e-4f;
  decoder_layers_->matrix_group = decoder_matrices;
  decoder_layers_->vector_group = decoder_vectors;
  const std::vector<Feature> maps =
      std::visit([](const auto& e) { return e.features(); }, *encoder_);
  decoder_ = std::make_unique<SegmentationDecoder>(make_decoder(*decoder_layers_, deck, maps));
}

int Segmentation::stride() const { return is_dilated(deck_.encoder) ? 8 : 32; }
int Segmentation::label_rate() const {
  return std::visit([](const auto& d) { return d.rate(); }, *decoder_);
}
std::int64_t Segmentation::dropout_channels() const {
  return std::visit([](const auto& d) { return d.dropout_channels(); }, *decoder_);
}
std::int64_t Segmentation::aux_dropout_channels() const {
  return std::visit([](const auto& d) { return d.aux_dropout_channels(); }, *decoder_);
}
bool Segmentation::has_aux() const { return deck_.decoder.ends_with("_deepsup"); }

std::int64_t Segmentation::blocks() const {
  return std::visit([](const auto& e) { return e.blocks(); }, *encoder_);
}

Segmentation::Logits Segmentation::forward(nn::Context c, const Var& image,
                                           nn::BatchNormGroup& group, const Dropout& dropout,
                                           bool want_aux, std::int64_t recomputed) {
  WEFT_CHECK(!want_aux || !has_aux() || stride() == 8, Exit::usage,
             "take a dilated encoder, or the decoder without _deepsup",
             "model.decoder = \"{}\" does not train with model.encoder = \"{}\": its second loss "
             "would be on a map of another size than the labels",
             deck_.decoder, deck_.encoder);
  const std::vector<Var> maps =
      std::visit([&](const auto& e) { return e.forward(c, image, group, recomputed); }, *encoder_);
  return std::visit([&](const auto& d) { return d.forward(c, maps, group, dropout, want_aux); },
                    *decoder_);
}

double Segmentation::flops(std::int64_t height, std::int64_t width, bool with_aux) const {
  return 2 * (encoder_layers_->multiply_adds(height, width, with_aux) +
              decoder_layers_->multiply_adds(height, width, with_aux));
}

}  // namespace weft
