#include "train/clip_staging.h"

#include "core/error.h"

namespace weft {

ClipStaging::ClipStaging(std::size_t bytes) {
  if (!on_cuda()) return;
  for (Tensor& b : buffers_) b = Tensor::persistent({static_cast<std::int64_t>(bytes)}, DType::u8);
  // The buffers were zeroed on the compute stream: the first copies come after that.
  for (DeviceEvent& e : free_) e = device_runtime().record(Stream::compute);
}

Tensor ClipStaging::stage(std::span<const std::byte> clips) {
  const auto size = static_cast<std::int64_t>(clips.size());
  if (!on_cuda()) return Tensor::borrow(const_cast<std::byte*>(clips.data()), {size}, DType::u8);
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
