// A clip of segments that were encoded apart, with its sound.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "media/media_source.h"

namespace weft {

// What is heard: a file's sound, at its own rate and in mono or stereo as it is there, or samples.
struct Mp4Sound {
  std::string file = {};
  std::span<const float> samples = {};  // mono, where no file is named; empty: a silent clip
  std::int64_t rate = 16000;            // of samples
};

// Joins segments written by Mp4Writer (Mp4Options::segment) into `output`: their pictures are
// copied packet by packet, in the order given, and the sound is encoded as AAC (FFmpeg's own
// encoder; rates that AAC lacks become 48 kHz). The sound is cut to the length of the pictures; a
// shorter one ends before them. The same segments and sound give the same bytes. Memory does not
// depend on the length. The file has its name only once it is whole (OUTPUT.tmp until then).
// Returns the frames of the clip. Throws Exit::data: a segment that is missing, damaged or encoded
// differently from the first (size, settings), at another rate, or a sound that cannot be read.
std::int64_t join_mp4(const std::vector<std::string>& segments, const Mp4Sound& sound, double fps,
                      const std::string& output, const MediaAccess& access = {});

}  // namespace weft
