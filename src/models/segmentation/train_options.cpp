#include "models/segmentation/train_options.h"

namespace weft {
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
}

}  // namespace

DeckTable segmentation_train_table() {
  DeckTable t = deck_table("train", rows);
  t.next = "parallel";
  t.fixed = true;
  return t;
}

}  // namespace weft
