#include "train/step_graphs.h"

namespace weft {

void StepGraphs::run(const std::string& key, ParameterTable& table,
                     const std::function<void()>& work) {
  if (!enabled_) return work();
  Entry& entry = entries_[key];
  if (entry.graph) {
    device_runtime().launch(entry.graph);
    table.set_step_state(entry.after);
    ++replays_;
    return;
  }
  if (!entry.seen || recorded_ == most_graphs) {
    entry.seen = true;
    return work();
  }
  device_runtime().begin_capture();
  try {
    work();
  } catch (...) {
    // The stream must leave its recording before anybody can use it again, even to report the error.
    try {
      device_runtime().end_capture();
    } catch (const std::exception&) {
    }
    throw;
  }
  entry.graph = device_runtime().end_capture();
  entry.after = table.step_state();
  ++recorded_;
  device_runtime().launch(entry.graph);
}

}  // namespace weft
