// cuDNN's arithmetic: the patches of each output position become rows, oneDNN multiplies them with
// the weights, what the graph adds is added in f32, and everything is rounded once where it is
// stored.
#include "convolution.h"

#include <dnnl.h>

#include <algorithm>

#include "cuda_bf16.h"
#include "matmul.h"
#include "random.h"

namespace emulation {
namespace {

float get(const ConvTensor& t, const void* data, std::int64_t i) {
  return t.type == CUDNN_DATA_BFLOAT16 ? from_bf16(static_cast<const std::uint16_t*>(data)[i])
                                       : static_cast<const float*>(data)[i];
}
void set(const ConvTensor& t, void* data, std::int64_t i, float v) {
  if (t.type == CUDNN_DATA_BFLOAT16)
    static_cast<std::uint16_t*>(data)[i] = to_bf16(v);
  else
    static_cast<float*>(data)[i] = v;
}

// Calls f(position, offset) for all positions of space of a tensor's sample; position counts
// row-major.
template <class F>
void positions(const std::vector<std::int64_t>& sizes, F&& f) {
  std::vector<std::int64_t> at(sizes.size(), 0);
  std::int64_t count = 1;
  for (const std::int64_t s : sizes) count *= s;
  for (std::int64_t p = 0; p < count; ++p) {
    f(p, at);
    for (std::size_t d = sizes.size(); d-- > 0;) {
      if (++at[d] < sizes[d]) break;
      at[d] = 0;
    }
  }
}

std::vector<std::int64_t> space(const ConvTensor& t) {
  return {t.sizes.begin() + 2, t.sizes.end()};
}
std::int64_t product(const std::vector<std::int64_t>& v) {
  std::int64_t p = 1;
  for (const std::int64_t s : v) p *= s;
  return p;
}
std::int64_t offset(const ConvTensor& t, std::int64_t sample, const std::vector<std::int64_t>& at) {
  std::int64_t o = sample * t.strides[0];
  for (std::size_t d = 0; d < at.size(); ++d) o += at[d] * t.strides[d + 2];
  return o;
}

// For every output position and every element of the kernel the offset in x's sample, -1 in the
// padding.
std::vector<std::int64_t> patches(const ConvGraph& g) {
  const auto out = space(g.y), kernel = space(g.w), in = space(g.x);
  const std::int64_t taps = product(kernel);
  std::vector<std::int64_t> map(product(out) * taps);
  positions(out, [&](std::int64_t p, const std::vector<std::int64_t>& o) {
    positions(kernel, [&](std::int64_t tap, const std::vector<std::int64_t>& k) {
      std::vector<std::int64_t> at(o.size());
      bool inside = true;
      for (std::size_t d = 0; d < o.size(); ++d) {
        at[d] = o[d] * g.stride[d] + k[d] * g.dilation[d] - g.before[d];
        inside = inside && at[d] >= 0 && at[d] < in[d];
      }
      map[p * taps + tap] = inside ? offset(g.x, 0, at) : -1;
    });
  });
  return map;
}

// A tensor's sample (or all weights) as dense rows [positions, channels].
std::vector<float> dense(const ConvGraph& g, const ConvTensor& t, const void* data,
                         std::int64_t sample) {
  const std::int64_t C = t.sizes[1];
  std::vector<float> rows(product(space(t)) * C);
  positions(space(t), [&](std::int64_t p, const std::vector<std::int64_t>& at) {
    for (std::int64_t c = 0; c < C; ++c) {
      const float v = get(t, data, offset(t, sample, at) + c * t.strides[1]);
      rows[p * C + c] = g.rounds_inputs ? tf32(v) : v;
    }
  });
  return rows;
}

void multiply(bool ta, bool tb, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
              const float* b, float beta, float* c) {
  dnnl_sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, 1.0f, a, ta ? m : k, b, tb ? k : n, beta, c,
             n);
}

}  // namespace

std::int64_t ConvTensor::numel() const { return product(sizes); }
std::int64_t ConvTensor::extent() const {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * (type == CUDNN_DATA_BFLOAT16 ? 2 : 4);
}

std::string fault_of(const ConvGraph& g) {
  const std::size_t n = g.before.size();
  if (g.x.sizes.size() != n + 2 || g.w.sizes.size() != n + 2 || g.y.sizes.size() != n + 2 ||
      g.after.size() != n || g.stride.size() != n || g.dilation.size() != n)
    return "dimensions differ in number";
  if (g.x.sizes[0] != g.y.sizes[0] || g.x.sizes[1] % g.w.sizes[1] != 0 ||
      g.w.sizes[0] != g.y.sizes[1] || g.y.sizes[1] % g.groups() != 0)
    return "samples or channels do not agree";
  for (std::size_t d = 0; d < n; ++d) {
    const std::int64_t room =
        g.x.sizes[d + 2] + g.before[d] + g.after[d] - g.dilation[d] * (g.w.sizes[d + 2] - 1) - 1;
    if (room < 0 || g.y.sizes[d + 2] != room / g.stride[d] + 1)
      return "the result has another size";
  }
  return "";
}

void convolve(const ConvGraph& g, void* x, void* w, void* y, const std::vector<void*>& added) {
  const std::vector<std::int64_t> map = patches(g);
  const std::int64_t P = product(space(g.y)), taps = product(space(g.w)), in = g.x.sizes[1],
                     out = g.y.sizes[1], K = taps * in;
  // Weights as [out, taps, in], zero between channels of different groups.
  const std::int64_t ins = g.w.sizes[1], outs = out / g.groups();
  std::vector<float> weights(out * K);
  const bool weight_wanted = g.pass == ConvPass::backward_filter;
  if (!weight_wanted)
    for (std::int64_t o = 0; o < out; ++o) {
      const std::vector<float> rows = dense(g, g.w, w, o);
      for (std::int64_t tap = 0; tap < taps; ++tap)
        std::copy_n(rows.begin() + tap * ins, ins,
                    weights.begin() + o * K + tap * in + o / outs * ins);
    }
  const auto store = [&](const ConvTensor& t, void* data, std::int64_t i, float v) {
    v = static_cast<float>(g.alpha) * v;
    if (g.noise != 0) v *= 1.0f + g.noise * static_cast<float>(random_below(3));
    set(t, data, i, g.beta != 0 ? v + static_cast<float>(g.beta) * get(t, data, i) : v);
  };
  for (std::int64_t s = 0; s < g.x.sizes[0]; ++s) {
    std::vector<float> rows(P * K), result(static_cast<std::size_t>(P * out));
    if (g.pass != ConvPass::backward_data)
      for (std::int64_t p = 0; p < P * taps; ++p)
        for (std::int64_t c = 0; c < in; ++c) {
          const std::int64_t at = map[p];
          const float v = at < 0 ? 0.0f : get(g.x, x, at + s * g.x.strides[0] + c * g.x.strides[1]);
          rows[p * in + c] = g.rounds_inputs ? tf32(v) : v;
        }
    if (g.pass == ConvPass::forward) {
      multiply(false, true, P, out, K, rows.data(), weights.data(), 0.0f, result.data());
      positions(space(g.y), [&](std::int64_t p, const std::vector<std::int64_t>& at) {
        for (std::int64_t o = 0; o < out; ++o) {
          float v = result[p * out + o];
          for (std::size_t i = 0; i < added.size(); ++i) {
            const ConvTensor& t = g.added[i];
            const bool whole = t.sizes == g.y.sizes;
            v += get(t, added[i], (whole ? offset(t, s, at) : 0) + o * t.strides[1]);
          }
          store(g.result, y, offset(g.result, s, at) + o * g.result.strides[1], v);
        }
      });
    } else {
      const std::vector<float> dy = dense(g, g.y, y, s);
      if (weight_wanted) {
        multiply(true, false, out, K, P, dy.data(), rows.data(), s > 0 ? 1.0f : 0.0f,
                 weights.data());
      } else {
        multiply(false, false, P, K, out, dy.data(), weights.data(), 0.0f, rows.data());
        std::vector<float> dx(g.x.strides[0], 0.0f);
        for (std::int64_t p = 0; p < P * taps; ++p)
          if (const std::int64_t at = map[p]; at >= 0)
            for (std::int64_t c = 0; c < in; ++c) dx[at + c * g.x.strides[1]] += rows[p * in + c];
        for (std::int64_t i = 0; i < g.x.strides[0]; ++i)
          store(g.x, x, s * g.x.strides[0] + i, dx[i]);
      }
    }
  }
  if (weight_wanted)
    positions(space(g.w), [&](std::int64_t tap, const std::vector<std::int64_t>& at) {
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t c = 0; c < ins; ++c)
          store(g.w, w, offset(g.w, o, at) + c * g.w.strides[1],
                weights[o * K + tap * in + o / outs * ins + c]);
    });
}

}  // namespace emulation
