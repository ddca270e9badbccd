#include "models/face/retina_face.h"

#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr std::int64_t pyramid_width = 256;  // channels of the pyramid

}  // namespace

RetinaFace::RetinaFace() : net_(params_, "body."), body_(net_) {
  net_.prefix = "fpn.";
  for (std::size_t i = 0; i < levels; ++i) {
    const std::string name = fmt::format("output{}", i + 1);
    lateral_[i] = net_.add(name + ".0", name + ".1", std::int64_t{512} << i, pyramid_width,
                           ops::Conv::same(1));
  }
  for (std::size_t i = 0; i < merge_.size(); ++i) {
    const std::string name = fmt::format("merge{}", i + 1);
    merge_[i] =
        net_.add(name + ".0", name + ".1", pyramid_width, pyramid_width, ops::Conv::same(3));
  }
  net_.prefix.clear();
  for (std::size_t i = 0; i < levels; ++i) context_[i] = add_context(fmt::format("ssh{}.", i + 1));
  const auto head = [&](const char* name, std::size_t i, std::int64_t out) {
    return net_.add(fmt::format("{}.{}.conv1x1", name, i), "", pyramid_width, out,
                    ops::Conv::same(1), true);
  };
  // Two priors: a logit each of face and no face, 4 offsets of the box, x and y of five marks.
  for (std::size_t i = 0; i < levels; ++i)
    heads_[i] = {head("ClassHead", i, 2 * 2), head("BboxHead", i, 2 * 4),
                 head("LandmarkHead", i, 2 * 10)};
}

RetinaFace::Context RetinaFace::add_context(const std::string& name) {
  const auto conv = [&](const char* part, std::int64_t in, std::int64_t out) {
    return net_.add(name + part + ".0", name + part + ".1", in, out, ops::Conv::same(3));
  };
  return {conv("conv3X3", pyramid_width, 128), conv("conv5X5_1", pyramid_width, 64),
          conv("conv5X5_2", 64, 64), conv("conv7X7_2", 64, 64), conv("conv7x7_3", 64, 64)};
}

Tensor RetinaFace::context(const Context& c, const Tensor& x) {
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  ops::put_channels(convolve(*c.one, x, 0), 0, y);
  const Tensor first = convolve(*c.first, x, 0);
  ops::put_channels(convolve(*c.two, first, 0), 128, y);
  ops::put_channels(convolve(*c.three, convolve(*c.second, first, 0), 0), 192, y);
  return y;
}

std::array<RetinaFace::Level, RetinaFace::levels> RetinaFace::forward(const Tensor& image) const {
  std::array<Tensor, levels> maps;
  {
    std::array<Tensor, 4> body = body_.forward(image, 1);
    for (std::size_t i = 0; i < levels; ++i) {
      maps[i] = convolve(*lateral_[i], body[i + 1], 0);
      body[i + 1].release();
    }
  }
  // From the coarsest level down, each to the size of the next.
  for (std::size_t i = merge_.size(); i-- > 0;) {
    ops::nearest_forward(maps[i + 1], 0, maps[i], true);
    maps[i] = convolve(*merge_[i], maps[i], 0);
  }
  std::array<Level, levels> all;
  for (std::size_t i = 0; i < levels; ++i) {
    const Tensor y = context(context_[i], maps[i]);
    maps[i].release();
    all[i] = {convolve(*heads_[i].classes, y), convolve(*heads_[i].boxes, y),
              convolve(*heads_[i].marks, y)};
  }
  return all;
}

WeightNames retina_face_weight_names() {
  WeightNames names;
  names.spare = counts_batches;
  names.others = [](const std::string& name) { return std::vector<std::string>{"module." + name}; };
  return names;
}

}  // namespace weft
