#include "train/step_graphs.h"

#include <utility>

namespace weft {

void StepGraphs::run(const std::string& key, ParameterTable& table,
                     const std::function<void()>& work) {
  if (!enabled_) return work();
  Entry& entry = entries_[key];
  if (entry.recorded) {
    for (const Part& part : entry.parts) {
      device_runtime().launch(part.graph);
      if (part.then) part.then();
    }
    table.set_step_state(entry.after);
    ++replays_;
    return;
  }
  if (!entry.seen || recorded_ == most_graphs) {
    entry.seen = true;
    return work();
  }
  recording_ = &entry;
  try {
    device_runtime().begin_capture();
    capturing_ = true;
    work();
    cut({});
  } catch (...) {
    // The stream must leave its recording before anybody can use it again, even to report the error.
    try {
      if (std::exchange(capturing_, false)) device_runtime().end_capture();
    } catch (const std::exception&) {
    }
    recording_ = nullptr;
    entry.parts.clear();
    throw;
  }
  recording_ = nullptr;
  entry.after = table.step_state();
  entry.recorded = true;
  ++recorded_;
}

void StepGraphs::aside(const std::function<void()>& act) {
  if (recording_ == nullptr) return act();
  cut(act);
  act();
  device_runtime().begin_capture();
  capturing_ = true;
}

void StepGraphs::cut(std::function<void()> then) {
  capturing_ = false;
  DeviceGraph graph = device_runtime().end_capture();
  device_runtime().launch(graph);
  recording_->parts.push_back({std::move(graph), std::move(then)});
}

}  // namespace weft
