#include "train/step_device.h"

#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace weft {

void StepGraphs::run(const std::string& key, ParameterTable& table,
                     const std::function<void()>& work) {
  ++runs_;
  if (!enabled_) return work();
  Entry& entry = entries_[key];
  // The replayed host work: what was set aside runs behind the graph it followed.
  if (entry.recorded) {
    for (const Part& part : entry.parts) {
      device_runtime().launch(part.graph);
      if (part.then) part.then();
    }
    table.set_step_state(entry.after);
    ++replays_;
    return;
  }
  // The first run of a key is never recorded: matrix products choose their algorithms in it.
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
    // The stream must leave capture mode before any further use, even to report the error.
    try {
      if (std::exchange(capturing_, false)) device_runtime().end_capture({});
    } catch (const std::exception&) {
    }
    recording_ = nullptr;
    entry.parts.clear();
    throw;
  }
  recording_ = nullptr;
  if (!enabled_) {
    drop();
    return;
  }
  entry.after = table.step_state();
  entry.recorded = true;
  ++recorded_;
}

void StepGraphs::drop() {
  device_runtime().synchronize();  // they may be running
  for (auto& [key, entry] : entries_) {
    entry.parts.clear();
    entry.recorded = false;
  }
  recorded_ = 0;
  if (std::exchange(enabled_, false))
    log::warn(
        "no memory is left for a graph of a micro-batch: kernels are launched one by one from "
        "now on, which is slower where they are short (lower memory.arena_gib or "
        "train.batch_size)");
}

void StepGraphs::aside(const std::function<void()>& act) {
  if (recording_ == nullptr) return act();
  // Recorded work has not run yet: cut() launches it, so `act` comes behind it now as in replays.
  cut(act);
  act();
  device_runtime().begin_capture();
  capturing_ = true;
}

void StepGraphs::cut(std::function<void()> then) {
  capturing_ = false;
  DeviceGraph graph = device_runtime().end_capture([this] { drop(); });
  device_runtime().launch(graph);
  recording_->parts.push_back({std::move(graph), std::move(then)});
}

ClipStaging::ClipStaging(std::size_t bytes) {
  if (!on_cuda()) return;
  for (Tensor& b : buffers_) b = Tensor::persistent({static_cast<std::int64_t>(bytes)}, DType::u8);
  // The compute stream zeroes the buffers: the first copies must wait for that.
  for (DeviceEvent& e : free_) e = device_runtime().record(Stream::compute);
}

Tensor ClipStaging::stage(std::span<const std::byte> clips) {
  const auto size = static_cast<std::int64_t>(clips.size());
  if (!on_cuda()) return Tensor::borrow(const_cast<std::byte*>(clips.data()), {size}, DType::u8);
  // The copy waits until the compute stream is done with the buffer's last micro-batch; the compute
  // stream then waits for the copy. The host waits for neither.
  turn_ = 1 - turn_;
  DeviceRuntime& gpu = device_runtime();
  gpu.wait(Stream::copy, free_[turn_]);
  Tensor to = buffers_[turn_].slice(0, size);
  gpu.upload(to.raw(), clips.data(), clips.size(), Stream::copy);
  gpu.wait(Stream::compute, gpu.record(Stream::copy));
  return to;
}

void ClipStaging::consumed() {
  if (on_cuda()) free_[turn_] = device_runtime().record(Stream::compute);
}

}  // namespace weft
