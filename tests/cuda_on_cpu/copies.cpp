// Copies and fills. Pinned memory is read and written when the copy runs, as the hardware does;
// pageable memory is read when the copy is asked for, and written before the call returns.
#include <cstring>
#include <memory>

#include "memory.h"
#include "streams.h"

using emulation::Device;
using emulation::fail;
using emulation::Where;

namespace {

bool direction_fits(cudaMemcpyKind kind, bool to_device, bool from_device) {
  switch (kind) {
    case cudaMemcpyDefault:
      return true;
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
  }
  return false;
}

// Waits for the end of what `stream` has.
cudaError_t finish(cudaStream_t stream, const char* call = __builtin_FUNCTION()) {
  emulation::run_until([stream] { return stream->queue.empty(); });
  return emulation::after_waiting(call);
}

}  // namespace

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (stream == nullptr) return fail(cudaErrorNotSupported);
  if (bytes == 0) return cudaSuccess;
  if (to == nullptr || from == nullptr) return fail(cudaErrorInvalidValue);
  const Where target = emulation::where_is(to, bytes), source = emulation::where_is(from, bytes);
  if (!direction_fits(kind, target == Where::device, source == Where::device))
    return fail(cudaErrorInvalidMemcpyDirection);
  const bool pageable = target == Where::elsewhere || source == Where::elsewhere;
  if (pageable && stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
  if (source == Where::elsewhere) {
    const std::shared_ptr<char[]> kept(new char[bytes]);
    std::memcpy(kept.get(), from, bytes);
    const cudaError_t error = emulation::enqueue(
        stream, emulation::simple("a copy", [=] { std::memcpy(to, kept.get(), bytes); }));
    if (error != cudaSuccess) return error;
  } else {
    const cudaError_t error = emulation::enqueue(
        stream, emulation::simple("a copy", [=] { std::memmove(to, from, bytes); }));
    if (error != cudaSuccess) return error;
  }
  return target == Where::elsewhere ? finish(stream) : cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (to_pitch < width || from_pitch < width) return fail(cudaErrorInvalidValue);
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                        static_cast<const char*>(from) + row * from_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t stream) {
  BEGIN_CALL(__func__);
  if (stream == nullptr) return fail(cudaErrorNotSupported);
  if (bytes == 0) return cudaSuccess;
  if (emulation::where_is(p, bytes) == Where::elsewhere) return fail(cudaErrorInvalidValue);
  return emulation::enqueue(stream,
                            emulation::simple("a fill", [=] { std::memset(p, value, bytes); }));
}

// The waiting forms run on a stream that nobody else has: like CUDA's default stream, it knows
// nothing of the order of non-blocking streams.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  BEGIN_CALL(__func__);
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureImplicit);
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, emulation::hidden_stream());
  return error != cudaSuccess ? error : finish(emulation::hidden_stream());
}
cudaError_t cudaMemset(void* p, int value, std::size_t bytes) {
  BEGIN_CALL(__func__);
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureImplicit);
  const cudaError_t error = cudaMemsetAsync(p, value, bytes, emulation::hidden_stream());
  return error != cudaSuccess ? error : finish(emulation::hidden_stream());
}
