// What jobs that make clips and pictures leave in their folder: `weft generate`, `weft animate`,
// `weft segment`, `weft reconstruct`, running or finished.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/progress.h"
#include "report/page.h"

namespace weft::report_page {

struct GalleryClip {
  std::string name, file;  // within the folder
  // What the job says of it: a line of the manifest. Of an animation, whose clips are made in
  // parts, "seconds" and "rank" are those of all parts.
  Json line = Json::object();
  std::vector<std::string> references;  // pictures within the folder of what it was made from
};

struct Gallery {
  std::filesystem::path folder;
  std::int64_t step = 0;  // of a training that it was sampled from
  std::string name;       // of the folder, for titles
  std::string command;    // that made it; empty: loose files
  std::vector<GalleryClip> clips;
  std::vector<std::string> failures;  // "NAME: why"
  JobStatus status;                   // of the last start
  Json ranks = Json::array();         // of the job's report
};

// Without clips for a folder that no such job has written to and that has no .png and .mp4.
Gallery load_gallery(const std::filesystem::path& folder);

// What page.js shows of it.
Json json_of(const Gallery& gallery, Embedder& embedder);

// The page of one folder or of several, whose clips of the same name lie beside each other; it lies
// in the first.
std::string gallery_page(std::span<const Gallery> galleries);

}  // namespace weft::report_page
