#include "parallel/mpi_memory.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace weft {

MpiMemory::~MpiMemory() {
  for (const Stage& s : {in_, out_[0], out_[1]})
    if (s.memory != nullptr) device_runtime().free_pinned(s.memory);
}

std::byte* MpiMemory::of(Stage& s) {
  if (s.memory == nullptr) s.memory = device_runtime().allocate_pinned(piece_bytes_);
  return static_cast<std::byte*>(s.memory);
}

bool MpiMemory::reached(const DeviceEvent& event) const {
  if (!event) return true;
  for (auto pause = std::chrono::microseconds(5); !device_runtime().finished(event);
       pause = std::min(pause * 2, std::chrono::microseconds(200))) {
    if (stop_) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

const std::byte* MpiMemory::read(const Tensor& t, std::int64_t first, std::int64_t count) {
  if (t.device() == DeviceKind::cpu || count == 0) return at(t, first);
  std::byte* stage = of(in_);
  device_runtime().copy(stage, at(t, first), static_cast<std::size_t>(count) * size_of(t.dtype()),
                        Stream::communication);
  return reached(device_runtime().record(Stream::communication)) ? stage : nullptr;
}

std::byte* MpiMemory::write(const Tensor& t, std::int64_t first) {
  if (t.device() == DeviceKind::cpu) return at(t, first);
  turn_ = (turn_ + 1) % out_.size();
  return reached(out_[turn_].free) ? of(out_[turn_]) : nullptr;
}

void MpiMemory::written(const Tensor& t, std::int64_t first, std::int64_t count) {
  if (t.device() == DeviceKind::cpu || count == 0) return;
  device_runtime().copy(at(t, first), out_[turn_].memory,
                        static_cast<std::size_t>(count) * size_of(t.dtype()),
                        Stream::communication);
  out_[turn_].free = device_runtime().record(Stream::communication);
}

bool MpiMemory::flush() { return reached(out_[0].free) && reached(out_[1].free); }

}  // namespace weft
