// What weft_probe runs, one function a line of tests/probe/README.md, which says what each reads
// and writes. All throw Exit::data for inputs that are missing or have another shape.
#pragma once

#include <string>
#include <vector>

#include "config/command.h"
#include "config/deck_table.h"

namespace weft {

struct ProbeRequest {
  std::string what;  // "forward", "loss", "sample" ...
  std::string deck;  // its file; empty: none is given
  std::string weights, inputs, outputs;
  bool backward = false;
  std::vector<std::string> adapters;  // FILE=FACTOR
};

int probe_stdit3(const Deck& deck, const ProbeRequest& request);
int probe_vae(const Deck& deck, const ProbeRequest& request);
int probe_wan(const Deck& deck, const ProbeRequest& request);
int probe_wan_sample(const Deck& deck, const ProbeRequest& request);
int probe_wan_vae(const Deck& deck, const ProbeRequest& request);
// A picture at the size of a clip, and what Wan2.2 reads of it; the sizes alone.
int probe_wan_condition(const Deck& deck, const ProbeRequest& request);
int probe_picture_size(const Deck& deck, const ProbeRequest& request);
std::vector<DeckTable> condition_probe_tables();
int probe_umt5(const Deck& deck, const ProbeRequest& request);
int probe_t5_rounds(const Deck& deck, const ProbeRequest& request);

// A linear layer with operands in e4m3 (ops/fp8.h), forward and the gradient of its input.
int probe_fp8_linear(const Deck& deck, const ProbeRequest& request);

// Collective: train_steps and sync_batch_norm take inputs for each rank.
int probe_segmentation(const Deck& deck, const ProbeRequest& request, MPI_Comm world);
// Keys of [model] and [train] that these two read.
std::vector<DeckTable> segmentation_probe_tables();
// What happens to labelled images before a network sees them, and to its logits.
int probe_images(const Deck& deck, const ProbeRequest& request);
int probe_scores(const Deck& deck, const ProbeRequest& request);

// CLIP: what it is shown of pictures, tokens of captions, features of both.
int probe_clip(const Deck& deck, const ProbeRequest& request);

int probe_detector(const Deck& deck, const ProbeRequest& request);
int probe_boxes(const Deck& deck, const ProbeRequest& request);
int probe_video_frames(const Deck& deck, const ProbeRequest& request);
int probe_frames(const Deck& deck, const ProbeRequest& request);

// SadTalker: faces of a picture by networks, and without; speech; the renderer; pasting.
int probe_face(const Deck& deck, const ProbeRequest& request);
int probe_geometry(const Deck& deck, const ProbeRequest& request);
int probe_speech(const Deck& deck, const ProbeRequest& request);
int probe_mel(const Deck& deck, const ProbeRequest& request);
int probe_sadtalker(const Deck& deck, const ProbeRequest& request);
int probe_paste(const Deck& deck, const ProbeRequest& request);

// GFPGAN: networks, and the way of a face out of a frame and back into it.
int probe_gfpgan(const Deck& deck, const ProbeRequest& request);
int probe_gfpgan_paste(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
