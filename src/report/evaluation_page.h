// The pages of `weft evaluate`: totals, classes by IoU or Hmean by score, and some images with
// truth and prediction.
#pragma once

#include <string>

#include "jobs/evaluate/detection_scores.h"
#include "jobs/evaluate/segmentation_scores.h"

namespace weft::report_page {

// HTML that needs no other file: pictures that are not too large are in it, others are named.
std::string segmentation_page(const SegmentationScores& scores);
std::string detection_page(const DetectionScores& scores);

}  // namespace weft::report_page
