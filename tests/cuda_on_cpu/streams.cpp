// Streams as queues that run only when the host waits, in a random legal order: a stream is drawn
// and runs a random number of steps, so that one stream may get far ahead of another wherever no
// event holds it.
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "faults.h"
#include "memory.h"
#include "random.h"

namespace emulation {
namespace {

struct Turns {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t next = 0, serving = 0;
} turns;
thread_local int depth = 0;

std::vector<CUstream_st*> streams;
std::vector<const void*> kernels;  // the last ones, newest last

void release_turn() {
  const std::lock_guard lock(turns.mutex);
  ++turns.serving;
  turns.changed.notify_all();
}
void take_turn() {
  std::unique_lock lock(turns.mutex);
  const std::uint64_t mine = turns.next++;
  turns.changed.wait(lock, [&] { return turns.serving == mine; });
}

// One step of a stream's first work.
Progress step(CUstream_st& s) {
  CUstream_st::Item& item = s.queue.front();
  const Progress p = item.work.step(item.state);
  if (p == Progress::done) s.queue.pop_front();
  return p;
}

// Runs a few steps of a random stream; false if no stream could move.
bool run_burst() {
  if (gpu_is_lost()) return false;
  std::vector<CUstream_st*> candidates;
  for (CUstream_st* s : streams)
    if (!s->queue.empty()) candidates.push_back(s);
  shuffle_order(candidates.data(), static_cast<int>(candidates.size()));
  for (CUstream_st* s : candidates) {
    bool moved = false;
    // Bursts of 1 .. 64 steps: both fine interleaving and running far ahead.
    for (std::uint64_t n = std::uint64_t{1} << random_below(7); n > 0 && !s->queue.empty(); --n) {
      if (step(*s) == Progress::blocked || gpu_is_lost()) break;
      moved = true;
    }
    if (moved) return true;
  }
  return false;
}

}  // namespace

Device::Device() {
  touch_device();
  if (depth++ == 0) take_turn();
}
Device::~Device() {
  if (--depth == 0) release_turn();
}
bool Device::outermost() const { return depth == 1; }

Work simple(std::string what, std::function<void()> run) {
  return {std::move(what), [run = std::move(run)](std::shared_ptr<void>&) {
            run();
            return Progress::done;
          }};
}

cudaError_t enqueue(cudaStream_t stream, Work work) {
  if (stream == nullptr) return fail(cudaErrorNotSupported);  // the legacy default stream
  if (!stream->capture) {
    auto state = work.prepare ? work.prepare() : nullptr;
    stream->queue.push_back({std::move(work), std::move(state)});
    return cudaSuccess;
  }
  Capture& capture = *stream->capture;
  if (capture.invalid) return fail(cudaErrorStreamCaptureInvalidated);
  capture.graph.nodes.push_back({std::move(work), stream->tail, {}});
  stream->tail = {capture.graph.nodes.size() - 1};
  return cudaSuccess;
}

void run_until(const std::function<bool()>& finished) {
  catch_faults();
  while (!finished() && !gpu_is_lost()) {
    bool moved = false;
    {
      const OpenMemory open;
      // Closing and opening costs as much as a small kernel: not between single steps.
      for (int i = 0; i < 16 && !finished(); ++i) {
        moved = run_burst();
        if (!moved) break;
      }
    }
    if (finished() || gpu_is_lost()) return;
    const int held = std::exchange(depth, 0);
    release_turn();
    // Blocked work waits for other ranks or for another thread of this one.
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
    take_turn();
    depth = held;
  }
}

void run_some() {
  catch_faults();
  const OpenMemory open;
  for (std::uint64_t n = random_below(4); n > 0; --n)
    if (!run_burst()) return;
}

cudaStream_t first_stream() {
  const auto first =
      std::find_if(streams.begin(), streams.end(), [](auto* s) { return !s->hidden; });
  return first == streams.end() ? nullptr : *first;
}
cudaStream_t hidden_stream() {
  static CUstream_st* const hidden = [] {
    auto* s = new CUstream_st;
    s->hidden = true;
    streams.push_back(s);
    return s;
  }();
  return hidden;
}

void remember_kernel(const void* kernel) {
  kernels.push_back(kernel);
  if (kernels.size() > 4) kernels.erase(kernels.begin());
}
std::string last_kernels() {
  std::string text;
  for (auto k = kernels.rbegin(); k != kernels.rend(); ++k)
    text += (text.empty() ? "" : ", ") + name_of(*k);
  return text.empty() ? "none" : text;
}

}  // namespace emulation

using emulation::Device;
using emulation::fail;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  BEGIN_CALL(__func__);
  *stream = new CUstream_st;
  (*stream)->priority = priority;
  emulation::streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  // It would synchronise with the legacy default stream, which nobody can use here.
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (stream == nullptr || stream->capture) return fail(cudaErrorInvalidResourceHandle);
  // CUDA lets the work finish by itself.
  emulation::run_until([&] { return stream->queue.empty(); });
  std::erase(emulation::streams, stream);
  delete stream;
  return emulation::after_waiting(__func__);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (stream == nullptr) return fail(cudaErrorNotSupported);
  if (emulation::forbidden_by_capture() || stream->capture)
    return fail(cudaErrorStreamCaptureUnsupported);
  emulation::run_until([&] { return stream->queue.empty(); });
  return emulation::after_waiting(__func__);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (stream == nullptr) return fail(cudaErrorNotSupported);
  if (emulation::forbidden_by_capture() || stream->capture)
    return fail(cudaErrorStreamCaptureUnsupported);
  emulation::run_some();
  if (emulation::gpu_is_lost()) return emulation::after_waiting(__func__);
  return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  BEGIN_CALL(__func__);
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  emulation::run_until([] {
    return std::all_of(emulation::streams.begin(), emulation::streams.end(),
                       [](const CUstream_st* s) { return s->queue.empty(); });
  });
  if (emulation::gpu_is_lost())
    return device.outermost() ? emulation::after_waiting(__func__) : fail(cudaErrorIllegalAddress);
  emulation::check_all_marks();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  BEGIN_CALL(__func__);
  return emulation::enqueue(stream, emulation::simple("a host function", [=] { function(data); }));
}
