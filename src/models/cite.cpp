#include "models/cite.h"

#include "core/host.h"
#include "models/dbnet/dbnet.h"
#include "models/flow_sampler.h"
#include "models/lora.h"
#include "models/segmentation/options.h"
#include "models/t5/options.h"
#include "models/video_vae/options.h"
#include "models/wan/options.h"

namespace weft {
namespace {

struct Citation {
  const char *key, *kind, *title, *authors, *published;
};
constexpr Citation all[] = {
    {"opensora", "article", "Open-Sora: Democratizing Efficient Video Production for All",
     "Zheng, Zangwei and others", "journal = {arXiv:2412.20404}, year = {2024}"},
    {"wan", "article", "Wan: Open and Advanced Large-Scale Video Generative Models", "{Team Wan}",
     "journal = {arXiv:2503.20314}, year = {2025}"},
    {"t5", "article",
     "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
     "Raffel, Colin and others", "journal = {JMLR}, volume = {21}, number = {140}, year = {2020}"},
    {"umt5", "inproceedings",
     "{UniMax}: Fairer and More Effective Language Sampling for Large-Scale Multilingual "
     "Pretraining",
     "Chung, Hyung Won and others", "booktitle = {ICLR}, year = {2023}"},
    {"rectified_flow", "inproceedings",
     "Flow Straight and Fast: Learning to Generate and Transfer Data with Rectified Flow",
     "Liu, Xingchao and Gong, Chengyue and Liu, Qiang", "booktitle = {ICLR}, year = {2023}"},
    {"unipc", "inproceedings",
     "{UniPC}: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models",
     "Zhao, Wenliang and others", "booktitle = {NeurIPS}, year = {2023}"},
    {"dpm++", "article",
     "{DPM-Solver++}: Fast Solver for Guided Sampling of Diffusion Probabilistic Models",
     "Lu, Cheng and others", "journal = {arXiv:2211.01095}, year = {2022}"},
    {"teacache", "inproceedings",
     "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model",
     "Liu, Feng and others", "booktitle = {CVPR}, year = {2025}"},
    {"easycache", "article",
     "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching",
     "Zhou, Xin and others", "journal = {arXiv:2507.02860}, year = {2025}"},
    {"lora", "inproceedings", "{LoRA}: Low-Rank Adaptation of Large Language Models",
     "Hu, Edward J. and others", "booktitle = {ICLR}, year = {2022}"},
    {"zero", "inproceedings",
     "{ZeRO}: Memory Optimizations Toward Training Trillion Parameter Models",
     "Rajbhandari, Samyam and others", "booktitle = {SC20}, year = {2020}"},
    {"semseg", "article", "Semantic Understanding of Scenes through the {ADE20K} Dataset",
     "Zhou, Bolei and others", "journal = {IJCV}, volume = {127}, year = {2019}"},
    {"ppm", "inproceedings", "Pyramid Scene Parsing Network", "Zhao, Hengshuang and others",
     "booktitle = {CVPR}, year = {2017}"},
    {"upernet", "inproceedings", "Unified Perceptual Parsing for Scene Understanding",
     "Xiao, Tete and others", "booktitle = {ECCV}, year = {2018}"},
    {"hrnet", "article", "Deep High-Resolution Representation Learning for Visual Recognition",
     "Wang, Jingdong and others", "journal = {TPAMI}, volume = {43}, number = {10}, year = {2021}"},
    {"mobilenetv2", "inproceedings", "{MobileNetV2}: Inverted Residuals and Linear Bottlenecks",
     "Sandler, Mark and others", "booktitle = {CVPR}, year = {2018}"},
    {"resnet", "inproceedings", "Deep Residual Learning for Image Recognition",
     "He, Kaiming and others", "booktitle = {CVPR}, year = {2016}"},
    {"resnext", "inproceedings", "Aggregated Residual Transformations for Deep Neural Networks",
     "Xie, Saining and others", "booktitle = {CVPR}, year = {2017}"},
    {"dbnet", "inproceedings", "Real-Time Scene Text Detection with Differentiable Binarization",
     "Liao, Minghui and others", "booktitle = {AAAI}, year = {2020}"},
    {"dbnet++", "article",
     "Real-Time Scene Text Detection with Differentiable Binarization and Adaptive Scale Fusion",
     "Liao, Minghui and others", "journal = {TPAMI}, volume = {45}, number = {1}, year = {2023}"},
    {"sadtalker", "inproceedings",
     "{SadTalker}: Learning Realistic {3D} Motion Coefficients for Stylized Audio-Driven Single "
     "Image Talking Face Animation",
     "Zhang, Wenxuan and others", "booktitle = {CVPR}, year = {2023}"},
    {"ssim", "article", "Image Quality Assessment: From Error Visibility to Structural Similarity",
     "Wang, Zhou and others",
     "journal = {IEEE Transactions on Image Processing}, volume = {13}, number = {4}, "
     "year = {2004}"},
    {"lpips", "inproceedings",
     "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric",
     "Zhang, Richard and others", "booktitle = {CVPR}, year = {2018}"},
    {"clip", "inproceedings",
     "Learning Transferable Visual Models From Natural Language Supervision",
     "Radford, Alec and others", "booktitle = {ICML}, year = {2021}"},
};

std::set<std::string> used_by(const Deck& deck, const std::string& command, bool texts) {
  if (command == "animate") return {"sadtalker"};  // whatever model.name says
  std::set<std::string> keys;
  const auto add = [&](bool used, const char* key) {
    if (used) keys.insert(key);
  };
  const std::string& model = deck.model.name;
  const bool wan = model.starts_with("wan"), clips = wan || model == "stdit3";
  const bool on_store = command == "train" || command == "evaluate";
  const bool denoises = clips && (on_store || command == "generate");
  add(model == "stdit3" || model == "vae", "opensora");
  add(wan, "wan");
  add(denoises, "rectified_flow");
  if (denoises || (texts && command == "encode")) {
    const T5Deck& encoder =
        wan ? static_cast<const T5Deck&>(deck.get<UmT5Deck>()) : deck.get<T5Deck>();
    add((clips && on_store) || !encoder.weights.empty(), wan ? "umt5" : "t5");
  }
  add(command == "reconstruct", "ssim");
  add(model == "vae" && command == "train" && !deck.get<VaeTrainDeck>().lpips_weights.empty(),
      "lpips");
  if (clips && command == "generate") {
    const SamplerDeck& sampler =
        wan ? static_cast<const SamplerDeck&>(deck.get<WanSamplerDeck>()) : deck.get<SamplerDeck>();
    add(sampler.solver != "euler", sampler.solver.c_str());
    add(sampler.caches(), sampler.cache.c_str());
  }
  const LoraDeck& lora =
      wan ? static_cast<const LoraDeck&>(deck.get<WanLoraDeck>()) : deck.get<LoraDeck>();
  add(denoises && (lora.on() || !lora.adapters.empty()), "lora");
  add(command == "train" && deck.parallel.zero > 0, "zero");
  if (model == "segmentation") {
    const SegmentationDeck& s = deck.get<SegmentationDeck>();
    add(true, "semseg");
    add(s.decoder.starts_with("ppm"), "ppm");
    add(s.decoder.starts_with("upernet"), "upernet");
    add(s.encoder.starts_with("hrnet"), "hrnet");
    add(s.encoder.starts_with("mobilenet"), "mobilenetv2");
    add(s.encoder.starts_with("resnet"), "resnet");
    add(s.encoder.starts_with("resnext"), "resnext");
  }
  if (model == "dbnet") {
    add(true, "dbnet");
    add(deck.get<DbnetDeck>().asf, "dbnet++");
    add(true, "resnet");
  }
  return keys;
}

}  // namespace

std::string citations(const std::string& command, const std::set<std::string>& used) {
  std::string text = fmt::format(
      "% What `weft {}` used, in BibTeX.\n\n"
      "@misc{{weft,\n"
      "  title = {{weft: training and running video and vision models as an MPI batch "
      "application}},\n"
      "  author = {{{{The weft developers}}}},\n"
      "  note = {{{}}}, year = {{2026}}}}\n",
      command, version_line());
  for (const Citation& c : all)
    if (used.contains(c.key))
      text += fmt::format("\n@{}{{{},\n  title = {{{}}},\n  author = {{{}}},\n  {}}}\n", c.kind,
                          c.key, c.title, c.authors, c.published);
  return text;
}

std::string citations(const Deck& deck, const std::string& command, bool texts) {
  return citations(command, used_by(deck, command, texts));
}

}  // namespace weft
