// The table [generate] of the deck.
#pragma once

#include "config/deck.h"

namespace weft {

struct GenerateDeck {
  std::string weights;
  std::vector<std::string> adapters;
  std::string weights_high_noise;
  std::vector<std::string> adapters_high_noise;
  std::string experts = "auto";
  std::int64_t cfg_ranks = 1;
  bool ema = true;
  std::vector<std::string> prompts;
  std::string prompt_file;
  std::string prompt_generator;
  std::string negative_prompt;
  std::string refine;
  std::int64_t start_index = 0;
  std::int64_t end_index = 0;
  std::int64_t num_samples = 1;
  std::int64_t max_clips = 1'000'000;
  std::int64_t batch_size = 1;
  std::string resolution = "240p";
  std::string aspect_ratio = "9:16";
  std::vector<std::int64_t> image_size;
  std::string num_frames = "2s";
  double fps = 0;
  std::int64_t frame_interval = 1;
  double save_fps = 0;
  std::int64_t loop = 1;
  std::int64_t condition_frame_length = 5;
  double condition_frame_edit = 0;
  std::int64_t align = 5;
  std::vector<std::string> references;
  std::vector<std::string> mask_strategies;
  double aes = -1;
  double flow = 0;
  std::string camera_motion;
  std::string output;
  std::string sample_name;
  bool prompt_as_path = false;
  std::string watermark;
  bool tensors = false;
};

DeckTable generate_table();

}  // namespace weft
