// Captures and graphs: work with edges, executed in any order that the edges allow.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <thread>

#include "memory.h"
#include "random.h"
#include "streams.h"

namespace emulation {
namespace {

std::vector<std::shared_ptr<Capture>> active;
int executable_graphs = 0;

std::size_t bytes_of(const Graph& graph) {
  return graph_bytes + graph.nodes.size() * graph_node_bytes;
}

// CUDA's per-thread mode, by which a thread may be excused from others' captures.
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::size_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()); }

// One execution of a graph.
struct Run {
  std::vector<std::size_t> ready;
  std::vector<std::size_t> missing;  // of each node, how many before it
  std::vector<std::shared_ptr<void>> states;
  std::size_t left = 0;
};

void leave(Capture& capture) {
  for (CUstream_st* s : capture.streams) {
    s->tail.clear();
    s->capture.reset();
  }
}

// Does everything captured come before the end of the origin's stream?
bool joined(const Capture& capture) {
  std::vector<bool> reached(capture.graph.nodes.size(), false);
  std::vector<std::size_t> open = capture.origin->tail;
  while (!open.empty()) {
    const std::size_t n = open.back();
    open.pop_back();
    if (reached[n]) continue;
    reached[n] = true;
    const auto& after = capture.graph.nodes[n].after;
    open.insert(open.end(), after.begin(), after.end());
  }
  return std::all_of(reached.begin(), reached.end(), [](bool r) { return r; });
}

}  // namespace

bool forbidden_by_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  bool forbidden = false;
  for (const auto& c : active) {
    const bool mine = c->thread == this_thread();
    const bool applies = c->mode == cudaStreamCaptureModeGlobal
                             ? mine || thread_mode == cudaStreamCaptureModeGlobal
                             : c->mode == cudaStreamCaptureModeThreadLocal && mine;
    if (!applies) continue;
    c->invalid = true;
    forbidden = true;
  }
  return forbidden;
}

Work graph_work(std::shared_ptr<const Graph> graph) {
  const auto prepare = [graph]() -> std::shared_ptr<void> {
    const auto run = std::make_shared<Run>();
    run->left = graph->nodes.size();
    for (std::size_t i = 0; i < graph->nodes.size(); ++i) {
      const Graph::Node& node = graph->nodes[i];
      run->states.push_back(node.work.prepare ? node.work.prepare() : nullptr);
      run->missing.push_back(node.after.size());
      if (node.after.empty()) run->ready.push_back(i);
    }
    return run;
  };
  return {"a graph",
          [graph](std::shared_ptr<void>& state) {
            const auto& nodes = graph->nodes;
            Run& run = *static_cast<Run*>(state.get());
            if (run.left == 0) return Progress::done;
            // One step of one node that can move.
            const auto count = run.ready.size();
            const auto first = static_cast<std::size_t>(random_below(count));
            for (std::size_t i = 0; i < count; ++i) {
              const std::size_t at = (first + i) % count, n = run.ready[at];
              const Progress p = nodes[n].work.step(run.states[n]);
              if (p == Progress::blocked) continue;
              if (p == Progress::more) return Progress::more;
              run.states[n].reset();
              run.ready.erase(run.ready.begin() + static_cast<std::ptrdiff_t>(at));
              for (const std::size_t later : nodes[n].before)
                if (--run.missing[later] == 0) run.ready.push_back(later);
              return --run.left == 0 ? Progress::done : Progress::more;
            }
            return Progress::blocked;
          },
          prepare};
}

}  // namespace emulation

using emulation::Device;
using emulation::fail;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  BEGIN_CALL(__func__);
  if (stream == nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return fail(cudaErrorInvalidValue);
  auto capture = std::make_shared<emulation::Capture>();
  capture->origin = stream;
  capture->streams = {stream};
  capture->mode = mode;
  capture->thread = emulation::this_thread();
  stream->capture = capture;
  stream->tail.clear();
  emulation::active.push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  BEGIN_CALL(__func__);
  *graph = nullptr;
  if (stream == nullptr || !stream->capture) return fail(cudaErrorInvalidValue);
  const auto capture = stream->capture;
  if (capture->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
  cudaError_t error = cudaSuccess;
  if (capture->invalid)
    error = cudaErrorStreamCaptureInvalidated;
  else if (!emulation::joined(*capture))
    error = cudaErrorStreamCaptureUnjoined;
  emulation::leave(*capture);
  std::erase(emulation::active, capture);
  if (error != cudaSuccess) return fail(error);
  auto& nodes = capture->graph.nodes;
  for (std::size_t n = 0; n < nodes.size(); ++n)
    for (const std::size_t earlier : nodes[n].after) nodes[earlier].before.push_back(n);
  *graph = new CUgraph_st{std::make_shared<emulation::Graph>(std::move(capture->graph))};
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  BEGIN_CALL(__func__);
  if (stream == nullptr) return fail(cudaErrorStreamCaptureImplicit);
  *status = !stream->capture           ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(emulation::thread_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, CUgraphNode_st** nodes, std::size_t* count) {
  if (graph == nullptr || nodes != nullptr) return fail(cudaErrorNotSupported);  // the count only
  *count = graph->graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  BEGIN_CALL(__func__);
  if (graph == nullptr) return fail(cudaErrorInvalidValue);
  static const char* most = std::getenv("WEFT_EMULATION_GRAPHS");
  if (most != nullptr && emulation::executable_graphs >= std::atoi(most))
    return fail(cudaErrorMemoryAllocation);
  if (!emulation::charge(emulation::bytes_of(*graph->graph)))
    return fail(cudaErrorMemoryAllocation);
  ++emulation::executable_graphs;
  *exec = new CUgraphExec_st{graph->graph};
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t) {
  return exec == nullptr ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (exec == nullptr) return fail(cudaErrorInvalidValue);
  // A graph inside a graph would share its work's state.
  if (stream != nullptr && stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
  if (exec->graph->nodes.empty()) return cudaSuccess;
  return emulation::enqueue(stream, emulation::graph_work(exec->graph));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  BEGIN_CALL(__func__);
  if (exec != nullptr) {
    --emulation::executable_graphs;
    emulation::give_back(emulation::bytes_of(*exec->graph));
  }
  delete exec;
  return cudaSuccess;
}
