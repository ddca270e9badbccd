// Which of FFmpeg's filter graphs a deck may ask for.
#pragma once

#include <string>

namespace weft {

// Takes a description such as "testsrc2=duration=2:rate=24:size=320x240,hue=s=0" apart and lets it pass if every filter of it is
// known to open no file, device or connection; the names are in the .cpp. Quotes and backslashes are refused, so that FFmpeg
// cannot read it otherwise. Throws Exit::data with the filter that is refused. FFmpeg itself is not called: some
// filters open files as soon as they are parsed.
void check_source_graph(const std::string& graph);

}  // namespace weft
