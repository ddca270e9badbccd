// `weft inspect PATH`: what a clip store, a checkpoint, a safetensors file or a list of pictures
// with text holds, verified.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

// Prints to stdout. PATH is a clip store, a safetensors file, a run directory, a checkpoint in it
// (step_N) or its link `latest`, or pictures with text (data/text_images/text_images.h), the first
// of which is written to the PNG `picture` unless that is empty. Every hash there is gets checked.
// Returns 0; throws Exit::data for a broken file and Exit::checkpoint for a broken checkpoint.
int inspect(const std::string& path, const MediaDeck& limits, const std::string& picture);
Command inspect_command();

}  // namespace weft
