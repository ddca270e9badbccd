// Uploads through the pinned ring (tensor/device_cuda.cpp): what is given back to the caller at
// once must arrive as it was.
#include <gtest/gtest.h>

#include <vector>

#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

constexpr std::int64_t mib = 1 << 20;

// Rounds of the 64 MiB ring that leave a small piece at its end, and the next ones skip it. The
// copies of a round wait behind an event, so that only the ring itself keeps the next round from
// overwriting what they read.
TEST(UploadRing, ARoundNeverOverwritesItsOwnCopies) {
  if (!on_cuda()) use_gpu(0);
  DeviceRuntime& device = device_runtime();
  const std::vector<std::int64_t> sizes = {16, 16, 16, 2, 1, 16, 16, 16, 1, 16, 16, 3};
  std::vector<Tensor> to;
  for (const std::int64_t size : sizes) to.push_back(Tensor::persistent({size * mib}, DType::u8));
  const Tensor load = Tensor::persistent({256 * mib}, DType::u8);
  device.synchronize();
  const auto hold_copies = [&] {
    for (int i = 0; i < 8; ++i) device.zero(load.raw(), load.bytes(), Stream::compute);
    device.wait(Stream::copy, device.record(Stream::compute));
  };
  hold_copies();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (i == 5 || i == 9) hold_copies();  // the rounds begin here
    const std::vector<std::uint8_t> from(to[i].bytes(), static_cast<std::uint8_t>(i + 1));
    device.upload(to[i].raw(), from.data(), from.size(), Stream::copy);
  }
  device.synchronize();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Tensor got = to[i].to_host();
    const auto* bytes = static_cast<const std::uint8_t*>(got.raw());
    std::int64_t wrong = 0;
    for (std::int64_t j = 0; j < got.numel(); ++j) wrong += bytes[j] != i + 1;
    EXPECT_EQ(wrong, 0) << "upload " << i;
  }
}

}  // namespace
}  // namespace weft
