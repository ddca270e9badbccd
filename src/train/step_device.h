// Keeps a GPU busy through a step without waiting for the host: micro-batches are recorded as
// graphs and replayed, and clips are copied while the micro-batch before is computed.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "nn/parameters.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft {

// On a GPU the work of a micro-batch, some thousand kernels, is recorded once for each shape and
// then replayed: the host issues a few graphs instead. This is sound because the arena gives equal
// sequences of calls equal addresses.
//
// Collectives are never recorded. NCCL requires that all ranks capture an operation together and
// replay it from that capture; here ranks meet a shape in different steps. So a recording is cut at
// each collective, and the host issues it between two graphs: it still overlaps with the rest of
// the backward.
class StepGraphs {
 public:
  explicit StepGraphs(bool enabled) : enabled_(enabled) {}

  // Runs `work`, or replays what was recorded under the same key. The key names everything that the
  // work depends on besides the contents of its tensors: their addresses and shapes, numbers passed
  // by value, and which gradients are overwritten or added to. The first run of a key is not
  // recorded (matrix products choose their algorithms), the second is. Of the host's side of `work`
  // a replay repeats only `table`: which gradients are written, which buckets announced.
  void run(const std::string& key, ParameterTable& table, const std::function<void()>& work);
  // Runs host work in the middle of `work`, now and in every replay at the same place: behind all
  // device work before it. `act` is kept as long as the graphs, so it must not refer to anything
  // that belongs to one step.
  void aside(const std::function<void()>& act);

  std::int64_t runs() const { return runs_; }
  std::int64_t replays() const { return replays_; }
  std::size_t recorded() const { return recorded_; }

 private:
  // Further shapes are not recorded: graphs of many shapes would take unbounded memory.
  static constexpr std::size_t most_graphs = 96;

  struct Part {
    DeviceGraph graph;
    std::function<void()> then;  // what was set aside behind it; empty behind the last
  };
  struct Entry {
    bool seen = false, recorded = false;
    std::vector<Part> parts;
    ParameterTable::StepState after;
  };
  // Ends the recording under way and runs it.
  void cut(std::function<void()> then);
  // Frees all graphs and records no more: memory is short.
  void drop();

  bool enabled_;
  Entry* recording_ = nullptr;
  bool capturing_ = false;
  std::map<std::string, Entry> entries_;
  std::int64_t runs_ = 0, replays_ = 0;
  std::size_t recorded_ = 0;
};

// Brings the clips of a micro-batch to the rank's device. On a GPU two buffers take turns: while
// the compute stream works on one, the copy stream fills the other. Events order the two streams;
// the host does not wait. On the CPU clips stay where they are.
class ClipStaging {
 public:
  // `bytes` of the largest micro-batch.
  explicit ClipStaging(std::size_t bytes);

  // The clips as u8 on the device. The caller may overwrite `clips` after consumed(), on a GPU at
  // once.
  Tensor stage(std::span<const std::byte> clips);
  // To call once all work on what stage() returned has been issued to the compute stream.
  void consumed();

 private:
  std::array<Tensor, 2> buffers_;
  std::array<DeviceEvent, 2> free_;  // after the last work on each
  std::size_t turn_ = 0;
};

}  // namespace weft
