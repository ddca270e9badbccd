// On a GPU the work of a micro-batch, some thousand kernels, is recorded once for each shape and then replayed: the host
// issues one graph instead. The arena gives equal sequences of calls equal addresses, which is what makes this sound.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "core/device.h"
#include "nn/parameters.h"

namespace weft {

class StepGraphs {
 public:
  explicit StepGraphs(bool enabled) : enabled_(enabled) {}

  // Runs `work`, or what it recorded before under the same key. The key names everything that the work depends on besides
  // the contents of its tensors: their addresses, shapes, and which gradients are overwritten or added to. The first run
  // of a key is a plain one (matrix products choose their algorithms), the second is recorded. What `work` does on the
  // host is repeated for `table` alone: which gradients are written, which buckets announced.
  void run(const std::string& key, ParameterTable& table, const std::function<void()>& work);

  std::int64_t replays() const { return replays_; }
  std::size_t recorded() const { return recorded_; }

 private:
  // More shapes than this run plainly: graphs of many shapes would take memory without end.
  static constexpr std::size_t most_graphs = 64;

  struct Entry {
    bool seen = false;
    DeviceGraph graph;
    ParameterTable::StepState after;
  };

  bool enabled_;
  std::map<std::string, Entry> entries_;
  std::int64_t replays_ = 0;
  std::size_t recorded_ = 0;
};

}  // namespace weft
