#include "models/image_task.h"

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "ops/pointwise.h"
#include "tensor/device.h"
#include "train/data_parallel.h"

namespace weft {
namespace {

// Bytes on their device; waits for nothing.
void copy_bytes(const Tensor& from, Tensor to) {
  if (from.device() == DeviceKind::cuda)
    device_runtime().copy(to.raw(), from.raw(), from.bytes(), Stream::compute);
  else
    std::memcpy(to.raw(), from.raw(), from.bytes());
}

}  // namespace

std::string ImageTask::start_weights() {
  params().initialise(static_cast<std::uint64_t>(deck_.run.seed));
  return load_start();
}

void ImageTask::share_clips(Communicator* group) {
  WEFT_CHECK(group == nullptr, Exit::usage, "set parallel.sp = 1",
             "images cannot be shared by ranks (parallel.sp = {})", deck_.parallel.sp);
}

void ImageTask::join_ranks(MPI_Comm world, Communicator* whole) {
  int size = 1;
  MPI_Comm_size(world, &size);
  if (size > 1) all_ = whole != nullptr ? whole->split(world) : make_communicator(world);
}

double ImageTask::cost(const Bucket& bucket, double recompute) const {
  return flops(bucket.height, bucket.width) * (3 + recompute);
}

ImageTask::Batch ImageTask::unpack(const Bucket& bucket, const LoadedBatch& clips,
                                   const Tensor& bytes, const ops::PixelScale& scale,
                                   std::size_t maps, std::int64_t rate) const {
  const MicroBatch& what = clips.what;
  const auto N = static_cast<std::int64_t>(what.clips.size());
  // Images of any size are padded to the largest of their micro-batch; others fill the bucket.
  const bool sized = !what.views.empty();
  const std::int64_t H = sized ? what.height : bucket.height, W = sized ? what.width : bucket.width;
  Batch b;
  b.images = Tensor::empty({N, 1, H, W, 3}, bf16() ? DType::bf16 : DType::f32);
  for (std::size_t m = 0; m < maps; ++m)
    b.maps.push_back(Tensor::empty({N, H / rate, W / rate}, DType::u8));
  std::vector<std::int32_t> sizes;
  for (std::size_t i = 0; i < what.clips.size(); ++i)
    for (const std::int64_t side :
         {sized ? what.views[i].height : H, sized ? what.views[i].width : W})
      sizes.push_back(static_cast<std::int32_t>(side));
  const Tensor valid = Tensor::from_host(std::span<const std::int32_t>(sizes), {N, 2});
  if (!bytes.defined()) return b;
  const auto stride = static_cast<std::int64_t>(bucket.clip_bytes(H, W));
  for (std::int64_t i = 0; i < N; ++i) {
    std::int64_t at = i * stride;
    const auto next = [&](std::int64_t count) {
      at += count;
      return bytes.slice(at - count, at);
    };
    Tensor image = b.images.slice(i, i + 1);
    ops::normalise_images(next(3 * H * W).view({1, H, W, 3}), valid.slice(i, i + 1), scale, image);
    for (const Tensor& map : b.maps) copy_bytes(next((H / rate) * (W / rate)), map.slice(i, i + 1));
  }
  return b;
}

std::int64_t ImageTask::recomputed_blocks(double share, std::int64_t blocks) {
  return static_cast<std::int64_t>(std::ceil(share * static_cast<double>(blocks) - 1e-9));
}

void ImageTask::end_step(const StepReport&, std::int64_t, std::int64_t) {
  if (!all_) return;
  Tensor& running = params().fixed();
  all_->wait(all_->all_reduce_sum(running));
  ops::scaled_add(running, 1.0f / static_cast<float>(all_->size()), Tensor(), running, false);
}

}  // namespace weft
