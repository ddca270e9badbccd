// Events. A wait or a synchronisation means the record that was the last when it was called, as
// CUDA defines.
#include <chrono>

#include "streams.h"

using emulation::Device;
using emulation::fail;
using emulation::Mark;
using emulation::Progress;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  BEGIN_CALL(__func__);
  *event = new CUevent_st;
  (*event)->timing = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  BEGIN_CALL(__func__);
  delete event;  // pending records and waits hold their marks themselves
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (stream == nullptr) return fail(cudaErrorNotSupported);
  if (stream->capture) {
    event->captured = true;
    event->capture = stream->capture;
    event->tail = stream->tail;
    return cudaSuccess;
  }
  event->captured = false;
  event->last = std::make_shared<Mark>();
  return emulation::enqueue(stream, emulation::simple("an event", [mark = event->last] {
                              mark->done = true;
                              mark->seconds = now();
                            }));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  BEGIN_CALL(__func__);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (stream == nullptr) return fail(cudaErrorNotSupported);
  if (event->captured) {
    const auto capture = event->capture.lock();
    if (!capture) return fail(cudaErrorCapturedEvent);  // of a capture that has ended
    if (stream->capture && stream->capture != capture) return fail(cudaErrorStreamCaptureMerge);
    if (!stream->capture) {
      stream->capture = capture;
      stream->tail.clear();
      capture->streams.push_back(stream);
    }
    stream->tail.insert(stream->tail.end(), event->tail.begin(), event->tail.end());
    return cudaSuccess;
  }
  if (stream->capture) {
    // Work outside the graph cannot be waited for in it.
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureIsolation);
  }
  if (!event->last) return cudaSuccess;
  return emulation::enqueue(stream, {"a wait for an event", [mark = event->last](auto&) {
                                       return mark->done ? Progress::done : Progress::blocked;
                                     }});
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  BEGIN_CALL(__func__);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (event->captured) return fail(cudaErrorCapturedEvent);
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  if (const auto mark = event->last) emulation::run_until([&] { return mark->done; });
  return emulation::after_waiting(__func__);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  BEGIN_CALL(__func__);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (event->captured) return fail(cudaErrorCapturedEvent);
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  const auto mark = event->last;
  if (!mark || mark->done) return cudaSuccess;
  emulation::run_some();
  if (emulation::gpu_is_lost()) return emulation::after_waiting(__func__);
  return mark->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  BEGIN_CALL(__func__);
  if (from == nullptr || to == nullptr || !from->timing || !to->timing || !from->last || !to->last)
    return fail(cudaErrorInvalidResourceHandle);
  if (!from->last->done || !to->last->done) return fail(cudaErrorNotReady);
  *milliseconds = static_cast<float>((to->last->seconds - from->last->seconds) * 1e3);
  return cudaSuccess;
}
