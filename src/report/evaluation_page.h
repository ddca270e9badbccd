// The page of `weft evaluate`: totals, classes by IoU, and some images with labels and predictions.
#pragma once

#include <string>

#include "jobs/evaluate/evaluation.h"

namespace weft::report_page {

// HTML that needs no other file: pictures that are not too large are in it, others are named.
std::string evaluation_page(const Evaluation& evaluation);

}  // namespace weft::report_page
