// Streams, events and captures from the inside. Everything here is called with the device held.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "lost.h"

namespace emulation {

// What one step of a piece of work came to: its end, some of it, or nothing now because it waits
// for something.
enum class Progress { done, more, blocked };

// One piece of work. `state` is the work's own from the start of an execution to its end; a graph
// executes the same work many times.
struct Work {
  std::string what;  // for messages
  std::function<Progress(std::shared_ptr<void>& state)> step;
  // Makes the state of an execution when the host asks for it; without one it starts empty.
  std::function<std::shared_ptr<void>()> prepare{};
};
// Work that is done in one go.
Work simple(std::string what, std::function<void()> run);

// One record of an event.
struct Mark {
  bool done = false;
  double seconds = 0;  // host clock when it ran
};

struct Graph {
  struct Node {
    Work work;
    std::vector<std::size_t> after,
        before;  // nodes: it waits for the first, the second wait for it
  };
  std::vector<Node> nodes;
};

struct Capture {
  Graph graph;
  CUstream_st* origin = nullptr;
  std::vector<CUstream_st*> streams;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::size_t thread = 0;
  bool invalid = false;
};

// Every call that would reach a GPU's context begins here: a process has one device, the first that
// it touches. Dies on another.
void touch_device();

// One OS thread at a time uses the device; they take turns in the order in which they came.
class Device {
 public:
  Device();
  ~Device();
  bool outermost() const;  // not inside another call
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
};

// The first line of a call that returns a cudaError_t: takes the device, and fails where the GPU is
// lost. A call made by another one is not a call of the program.
#define BEGIN_CALL(name) \
  const emulation::Device device; \
  if (device.outermost() ? emulation::call_fails(name) : emulation::gpu_is_lost()) \
  return emulation::fail(cudaErrorIllegalAddress)

// Puts work at the stream's end, or into the graph being captured from it.
cudaError_t enqueue(cudaStream_t stream, Work work);

// Runs queued work in a legal order until `finished` says true, or the GPU is lost. The Device is
// let go of between steps.
void run_until(const std::function<bool()>& finished);
// A random few steps.
void run_some();

// Sets what cudaGetLastError returns and gives it back.
cudaError_t fail(cudaError_t error);
// What a call returns that has waited: the GPU may have been lost meanwhile.
inline cudaError_t after_waiting(const char* call) {
  return failed_meanwhile(call) ? fail(cudaErrorIllegalAddress) : cudaSuccess;
}

// Is this thread capturing in a mode that forbids waiting, allocating and the like? Then the
// capture is invalid from now.
bool forbidden_by_capture();
cudaStream_t first_stream();
// For calls without a stream that wait for their end.
cudaStream_t hidden_stream();
// The kernels that ran last, newest first: "a, b, c".
std::string last_kernels();
void remember_kernel(const void* kernel);
// Executes a graph with its own random order.
Work graph_work(std::shared_ptr<const Graph> graph);

}  // namespace emulation

struct CUstream_st {
  struct Item {
    emulation::Work work;
    std::shared_ptr<void> state;
  };
  std::deque<Item> queue;
  int priority = 0;
  std::shared_ptr<emulation::Capture> capture;
  bool hidden = false;            // carries cudaMemcpy and the like
  std::vector<std::size_t> tail;  // nodes of the capture that the next one comes after
};

struct CUevent_st {
  bool timing = true;
  std::shared_ptr<emulation::Mark> last;  // null: never recorded
  std::weak_ptr<emulation::Capture> capture;
  bool captured = false;
  std::vector<std::size_t> tail;
};

struct CUgraph_st {
  std::shared_ptr<const emulation::Graph> graph;
};
struct CUgraphExec_st {
  std::shared_ptr<const emulation::Graph> graph;
};
