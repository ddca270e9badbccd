// Lists of pictures with polygons around their text.
#pragma once

#include <string>
#include <vector>

#include "data/text_images/text_images.h"

namespace weft {

struct TextListEntry {
  std::string name, path;  // as the list has it; from the working directory
  std::vector<TextRegion> regions;
};

// `path` is one of
//   LIST.jsonl   one JSON object a line: {"path": "a.jpg", "polygons": [{"points": [[x, y], ...],
//                "ignore": false}, ...]}; other keys do not count, ignore may be left out
//   LIST.txt     the path of a picture a line
//   FOLDER       its pictures (folders.h), by name
// For the last two the polygons of NAME.jpg are in gt_NAME.txt beside it or, if there is none, in
// the folder gt/ beside it. A line is "x1,y1,x2,y2,x3,y3,x4,y4,TEXT"; a region with the text ###
// is ignored. A byte order mark and CRLF do no harm. Paths in a list are relative to it.
//
// Pictures are not opened. A polygon has 3 to 1,000 points within a million pixels of the origin.
// Throws Exit::data, naming list, line and value.
std::vector<TextListEntry> read_text_list(const std::string& path, const MediaDeck& limits);

}  // namespace weft
