// OpenCV behind weft's own threads and errors. For the .cpp files of data/ and models/ only: no
// public header names OpenCV.
#pragma once

#include <opencv2/core.hpp>

#include "core/error.h"

namespace weft {

// OpenCV takes one thread, since callers have their own, and prints nothing.
inline void quiet_opencv() {
  static const bool once = [] {
    cv::setNumThreads(1);
    cv::redirectError([](int, const char*, const char*, const char*, int, void*) { return 0; });
    return true;
  }();
  (void)once;
}

// f(), with OpenCV's exceptions as Error.
template <class F>
auto with_opencv(F f) {
  quiet_opencv();
  try {
    return f();
  } catch (const cv::Exception& e) {
    throw Error(Exit::internal, fmt::format("OpenCV: {}", e.err),
                "this is a bug in weft, please report it with the log", __FILE__, __LINE__);
  }
}

}  // namespace weft
