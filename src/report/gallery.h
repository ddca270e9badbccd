// What jobs that make clips and pictures leave in their folder: `weft generate`, `weft animate`,
// `weft segment`, `weft reconstruct`, running or finished.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "report/html.h"

namespace weft::report_page {

struct GalleryClip {
  std::string name, file;  // within the folder
  std::string text;        // prompt, or what it was made from; may be empty
  std::vector<std::pair<std::string, std::string>> facts;    // seed, size and so on
  std::vector<std::pair<std::string, std::string>> classes;  // of a segmentation: name, colour
  double seconds = std::numeric_limits<double>::quiet_NaN();
  bool sound = false;
  // Pictures within the folder of what it was made from: file, and what it is.
  std::vector<std::pair<std::string, std::string>> references;
};

// A rank's part of the work, as the job's report has it.
struct RankWork {
  double made = 0, busy = 0;  // items; seconds
};

struct Gallery {
  std::filesystem::path folder;
  std::int64_t step = 0;  // of a training that it was sampled from
  std::string name;       // of the folder, for titles
  std::string command;    // that made it; empty: loose files
  std::vector<GalleryClip> clips;
  std::vector<std::string> failures;  // "NAME: why"
  JobStatus status;                   // of the last start
  std::vector<RankWork> ranks;
  double wall_seconds = 0;  // from the start of the work until the last item; 0: unknown
};

// Without clips for a folder that no such job has written to and that has no .png and .mp4.
Gallery load_gallery(const std::filesystem::path& folder);

// The figures of a gallery, and of several, whose clips of the same name lie beside each other.
std::string clip_figures(const std::filesystem::path& base, const Gallery& gallery,
                         Embedder& embedder);
std::string clips_beside(const std::filesystem::path& base, std::span<const Gallery> galleries,
                         Embedder& embedder);

// The page of one folder or of several; it lies in the first.
std::string gallery_page(std::span<const Gallery> galleries);

}  // namespace weft::report_page
