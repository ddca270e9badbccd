// The smallest model that makes clips: what a second text-to-video model costs. A text is a shade
// of grey, by its length, and a clip is that grey. Of a real model this would be src/models/NAME/,
// and its line in src/models/registry.cpp the add_model() of the test
// (tests/jobs/generate/toy_video_mpitest.cpp).
#pragma once

#include "models/interfaces.h"

namespace weft::test {

// Latents [B,1,T,h,w]; the caption is one token of one channel, the grey. What a clip of a caption
// is to become is caption + toy.offset, without one toy.offset alone.
class ToyDenoiser : public Denoiser {
 public:
  ToyDenoiser() { offset_ = &params_.add("toy.offset", {1}, {Init::Kind::constant, 0}); }
  std::string name() const override { return "toy"; }
  ParameterTable& params() override { return params_; }
  std::set<std::string> tables() const override { return {"sampler"}; }
  std::int64_t channels() const override { return 1; }
  std::int64_t caption_channels() const override { return 1; }
  std::int64_t max_caption() const override { return 1; }
  std::string caption_keys() const override { return ""; }
  Tensor velocity(const DenoiserInput& in) override;
  double flops(std::int64_t frames, std::int64_t h, std::int64_t w) const override {
    return static_cast<double>(frames * h * w);
  }

 private:
  ParameterTable params_;
  Parameter* offset_;
};

// A latent frame is a frame's red at every second row and column; decoded it is grey again.
class ToyCodec : public VideoCodec {
 public:
  ToyCodec() : VideoCodec(1) {}
  std::string name() const override { return "toy codec"; }
  ParameterTable& params() override { return none_; }
  std::set<std::string> tables() const override { return {}; }
  std::int64_t channels() const override { return 1; }
  std::int64_t latent_frames(std::int64_t frames) const override { return frames; }
  std::int64_t pixels_a_latent() const override { return 2; }
  std::int64_t chunk_pixels() const override { return 1; }
  Normalisation normalisation() const override { return {{1}, {0}}; }
  Part part_with(std::int64_t frames, std::int64_t first, std::int64_t last) const override {
    return {frames, first, last - first, first, last - first};
  }
  Tensor encode(const Part& part, std::int64_t height, std::int64_t width,
                const FrameSource& source, const Noise* noise) override;
  void decode(const Tensor& latent, std::int64_t frames, const FrameSink& sink) override;
  double decoding_flops(double height, double width) const override { return height * width; }

 private:
  ParameterTable none_;
};

// A text of n bytes is one token, n / 100.
class ToyTextEncoder : public TextEncoder {
 public:
  std::string name() const override { return "toy text encoder"; }
  std::int64_t channels() const override { return 1; }
  std::int64_t max_tokens() const override { return 1; }
  std::string describe() const override { return "toy"; }
  EncodedTexts encode(const std::vector<std::string>& texts, const std::vector<TextFile>& files,
                      const std::function<bool()>& stop, MPI_Comm world) override;
};

}  // namespace weft::test
