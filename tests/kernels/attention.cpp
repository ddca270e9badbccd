// Cases of ops/attention.h (kernels/attention/ beside src/ops/cpu/attention/).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

#include "ops/attention.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using Tensors = std::vector<Tensor>;

// f32: sums of some thousand products in another order, and another exponential. bf16:
// probabilities, their gradient and the normalised q and k are rounded to 8 bits where the CPU side
// keeps 24, and so is every result: a few 2^-8 of the largest element, more where several such
// factors meet in a gradient. Large scores move the exponential in f32 by as much as they are
// large; in bf16 that is lost among the rest.
double tolerance_of(DType dtype, bool backward, float deviation) {
  if (dtype == DType::f32) return (backward ? 1e-5 : 5e-6) * std::max(1.0f, deviation * deviation);
  return (backward ? 6.0 : 4.0) / 256;
}

struct Self {
  std::int64_t B, T, S, H, D;
  ops::Axis axis = ops::Axis::space;
  bool norm = true, rope = false;
  float deviation = 1.0f;
};

// f32 [positions, D/2, 2] = (cos, sin), frequencies as rotary embeddings have them.
Tensor rotary_table(std::int64_t positions, std::int64_t D) {
  Tensor t = Tensor::host({positions, D / 2, 2}, DType::f32);
  float* at = t.data<float>();
  for (std::int64_t p = 0; p < positions; ++p)
    for (std::int64_t i = 0; i < D / 2; ++i) {
      const double angle =
          static_cast<double>(p) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(D));
      *at++ = static_cast<float>(std::cos(angle));
      *at++ = static_cast<float>(std::sin(angle));
    }
  return t;
}

// A tensor that may be missing: its place among a case's inputs, or -1.
Tensor at(const Tensors& in, int place) { return place < 0 ? Tensor() : in[place]; }

void add_self(Cases& cases, const Self& a, DType dtype) {
  const std::int64_t C = a.H * a.D;
  const bool space = a.axis == ops::Axis::space;
  const std::int64_t length = space ? a.S : a.T, sequences = space ? a.B * a.T : a.B * a.S;
  const Shape out_shape{a.B, a.T, a.S, C}, lse_shape{sequences, a.H, length};
  const auto tokens = static_cast<double>(a.B * a.T * a.S);
  const auto element = static_cast<double>(size_of(dtype));
  const double products =
      2.0 * tokens * static_cast<double>(length * C);  // one of the matrix products
  const double statistics = 4.0 * tokens * static_cast<double>(a.H);

  KernelCase f;
  f.op = "self_attention_forward";
  f.shape =
      fmt::format("B{} T{} S{} H{} D{} along {}{}{}{}", a.B, a.T, a.S, a.H, a.D, space ? "S" : "T",
                  a.norm ? " norm" : "", a.rope ? " rope" : "", a.deviation > 1.0f ? " large" : "");
  f.dtype = dtype;
  f.inputs = {random_tensor({a.B, a.T, a.S, 3, a.H, a.D}, dtype, 1, a.deviation)};
  const auto add = [](Tensors& to, Tensor t) {
    to.push_back(std::move(t));
    return static_cast<int>(to.size()) - 1;
  };
  const int wq = a.norm ? add(f.inputs, random_tensor({a.D}, DType::f32, 2, 0.3f, 1.0f)) : -1;
  const int wk = a.norm ? add(f.inputs, random_tensor({a.D}, DType::f32, 3, 0.3f, 1.0f)) : -1;
  const int rope = a.rope ? add(f.inputs, rotary_table(length, a.D)) : -1;
  f.run = [=](Tensors& in) {
    Tensor out = Tensor::empty(out_shape, dtype), lse = Tensor::empty(lse_shape, DType::f32), qk;
    ops::self_attention_forward(in[0], at(in, wq), at(in, wk), at(in, rope), a.axis, out, lse, qk);
    return Tensors{out, lse};
  };
  f.reference = [=](const std::vector<Values>& in) {
    const auto given = [&](int place) { return place < 0 ? Values() : in[place]; };
    return fp64::self_attention(a.B, a.T, a.S, a.H, a.D, a.axis, in[0], given(wq), given(wk),
                                given(rope));
  };
  f.bytes = 4 * element * tokens * static_cast<double>(C) + statistics;
  f.flops = 2 * products;
  // Along T a head has too few rows to keep the tensor cores busy.
  f.bound = space && length >= 256 ? Bound::tensor_cores : Bound::bandwidth;
  f.tolerance = tolerance_of(dtype, false, a.deviation);

  KernelCase b = f;
  b.reference = nullptr;
  b.op = "self_attention_backward";
  Tensor out = Tensor::host(out_shape, dtype), lse = Tensor::host(lse_shape, DType::f32), no_qk;
  ops::self_attention_forward(f.inputs[0], at(f.inputs, wq), at(f.inputs, wk), at(f.inputs, rope),
                              a.axis, out, lse, no_qk);
  const int first = add(b.inputs, out);
  add(b.inputs, lse);
  add(b.inputs, random_tensor(out_shape, dtype, 4));
  const int dwq = a.norm ? add(b.inputs, random_tensor({a.D}, DType::f32, 5)) : -1;
  const int dwk = a.norm ? add(b.inputs, random_tensor({a.D}, DType::f32, 6)) : -1;
  b.run = [=](Tensors& in) {
    Tensor dqkv = Tensor::empty(in[0].shape(), dtype), q = at(in, dwq), k = at(in, dwk);
    ops::self_attention_backward(in[0], at(in, wq), at(in, wk), at(in, rope), a.axis, at(in, first),
                                 at(in, first + 1), at(in, first + 2), dqkv, q, k, Tensor());
    return a.norm ? Tensors{dqkv, q, k} : Tensors{dqkv};
  };
  b.bytes = 8 * element * tokens * static_cast<double>(C) + statistics;
  b.flops = 5 * products;
  b.tolerance = tolerance_of(dtype, true, a.deviation);
  cases.push_back(std::move(f));
  cases.push_back(std::move(b));
}

// Captions of `lengths` tokens, then `padding` rows that belong to no caption.
void add_cross(Cases& cases, std::int64_t N, std::int64_t H, std::int64_t D,
               const std::vector<std::int32_t>& lengths, std::int64_t padding, DType dtype,
               float deviation = 1.0f) {
  const auto B = static_cast<std::int64_t>(lengths.size());
  const std::int64_t C = H * D;
  Tensor offsets = Tensor::host({B + 1}, DType::i32);
  std::int32_t total = 0, longest = 0;
  for (std::int64_t b = 0; b < B; ++b) {
    offsets.data<std::int32_t>()[b] = total;
    total += lengths[b];
    longest = std::max(longest, lengths[b]);
  }
  offsets.data<std::int32_t>()[B] = total;
  const std::int64_t rows = total + padding;
  const Shape q_shape{B, N, C}, kv_shape{rows, 2, H, D}, lse_shape{B, H, N};
  const auto element = static_cast<double>(size_of(dtype));
  const double queries = element * static_cast<double>(B * N * C);
  const double keys = element * static_cast<double>(2 * rows * C);
  const double products = 2.0 * static_cast<double>(N * total * C);
  const double statistics = 4.0 * static_cast<double>(B * H * N);

  KernelCase f;
  f.op = "cross_attention_forward";
  f.shape = fmt::format("B{} N{} H{} D{} captions {} padding {}{}", B, N, H, D, total, padding,
                        deviation > 1.0f ? " large" : "");
  f.dtype = dtype;
  f.inputs = {random_tensor(q_shape, dtype, 1, deviation),
              random_tensor(kv_shape, dtype, 2, deviation), offsets};
  // The padding must not be read.
  std::memset(static_cast<std::byte*>(f.inputs[1].raw()) +
                  static_cast<std::size_t>(total * 2 * C) * size_of(dtype),
              0xff, static_cast<std::size_t>(padding * 2 * C) * size_of(dtype));
  f.run = [=](Tensors& in) {
    Tensor out = Tensor::empty(q_shape, dtype), lse = Tensor::empty(lse_shape, DType::f32);
    ops::cross_attention_forward(in[0], in[1], in[2], static_cast<int>(H), out, lse);
    return Tensors{out, lse};
  };
  f.reference = [=](const std::vector<Values>& in) {
    Values out(B * N * C), lse(B * H * N);
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < N; ++i)
        for (std::int64_t h = 0; h < H; ++h) {
          const auto first = static_cast<std::int64_t>(in[2][b]);
          Values scores(static_cast<std::int64_t>(in[2][b + 1]) - first);
          const double *q = in[0].data() + (b * N + i) * C + h * D,
                       *k = in[1].data() + first * 2 * C + h * D;
          for (std::int64_t j = 0; j < std::ssize(scores); ++j)
            for (std::int64_t d = 0; d < D; ++d)
              scores[j] += q[d] * k[j * 2 * C + d] / std::sqrt(static_cast<double>(D));
          lse[(b * H + h) * N + i] =
              fp64::attend(scores, k + C, 2 * C, D, out.data() + (b * N + i) * C + h * D);
        }
    return std::vector<Values>{out, lse};
  };
  f.bytes = 2 * queries + keys + statistics;
  f.flops = 2 * products;
  f.bound = longest >= 256 ? Bound::tensor_cores : Bound::bandwidth;
  f.tolerance = tolerance_of(dtype, false, deviation);

  KernelCase b = f;
  b.reference = [=](const std::vector<Values>& in) {
    Values dq(B * N * C), dkv(rows * 2 * C);
    for (std::int64_t i = 0; i < B * N; ++i)
      for (std::int64_t h = 0; h < H; ++h) {
        const auto first = static_cast<std::int64_t>(in[2][i / N]);
        const std::int64_t at = i * C + h * D, key = first * 2 * C + h * D;
        const double *q = in[0].data() + at, *k = in[1].data() + key;
        const auto scores =
            fp64::scores_of(q, k, 2 * C, static_cast<std::int64_t>(in[2][i / N + 1]) - first, D, 0);
        fp64::attend_backward(scores, q, k, k + C, 2 * C, D, in[5].data() + at, dq.data() + at,
                              dkv.data() + key, dkv.data() + key + C);
      }
    return std::vector<Values>{dq, dkv};
  };
  b.op = "cross_attention_backward";
  Tensor out = Tensor::host(q_shape, dtype), lse = Tensor::host(lse_shape, DType::f32);
  ops::cross_attention_forward(f.inputs[0], f.inputs[1], offsets, static_cast<int>(H), out, lse);
  b.inputs.insert(b.inputs.end(), {out, lse, random_tensor(q_shape, dtype, 3)});
  b.run = [=](Tensors& in) {
    Tensor dq = Tensor::empty(q_shape, dtype), dkv = Tensor::empty(kv_shape, dtype);
    ops::cross_attention_backward(in[0], in[1], in[2], static_cast<int>(H), in[3], in[4], in[5], dq,
                                  dkv);
    return Tensors{dq, dkv};
  };
  b.bytes = 4 * queries + 2 * keys + statistics;
  b.flops = 5 * products;
  b.tolerance = tolerance_of(dtype, true, deviation);
  cases.push_back(std::move(f));
  cases.push_back(std::move(b));
}

// Self attention along T: temporal.cu's and temporal_mma.cu's, or flash attention.
struct Temporal {
  std::int64_t B, T, S, H, D;
  bool norm = true, rope = true;
  // Of q, k and v. Without norm, 12 makes scores of some hundreds, far beyond exp's range; without
  // rotation q' and k' are q and k, so that bf16 rounds nothing that such scores would make large.
  float spread = 1;

  Shape qkv() const { return {B, T, S, 3, H, D}; }
  Shape out() const { return {B, T, S, H * D}; }
  Shape lse() const { return {B * S, H, T}; }
};

KernelCase make_temporal(const char* op, const Temporal& s, DType dtype, bool backward) {
  KernelCase c;
  c.op = op;
  c.shape =
      fmt::format("time B{} T{} S{} H{} D{}{}{}{}", s.B, s.T, s.S, s.H, s.D,
                  s.norm ? "" : " no norm", s.rope ? "" : " no rope", s.spread > 1 ? " large" : "");
  c.dtype = dtype;
  c.bound = Bound::bandwidth;
  // q, k, v, and without weights an empty place each.
  c.inputs = {random_tensor(s.qkv(), dtype, 1, s.spread),
              s.norm ? random_tensor({s.D}, DType::f32, 2, 0.5f, 1.0f) : Tensor(),
              s.norm ? random_tensor({s.D}, DType::f32, 3, 0.5f, 1.0f) : Tensor(),
              s.rope ? rotary_table(s.T, s.D) : Tensor()};
  // bf16: the probabilities, q' and k' are rounded to 2^-9 each, and so is the result.
  // f32 of several frames is flash attention's, with its tolerance.
  c.tolerance =
      dtype == DType::bf16 ? 1.0 / 64 : std::max(2e-5, tolerance_of(dtype, backward, s.spread));
  return c;
}

double elements(const Temporal& s) { return static_cast<double>(s.B * s.T * s.S * s.H * s.D); }

void add_temporal_forward(Cases& cases, const Temporal& s, DType dtype) {
  auto c = make_temporal("self_attention_forward", s, dtype, false);
  c.bytes = 4 * elements(s) * static_cast<double>(size_of(dtype)) +
            4.0 * static_cast<double>(s.lse().numel());
  c.flops = 4 * elements(s) * static_cast<double>(s.T);
  c.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty(s.out(), dtype), lse = Tensor::empty(s.lse(), DType::f32), no_qk;
    ops::self_attention_forward(in[0], in[1], in[2], in[3], ops::Axis::time, out, lse, no_qk);
    return std::vector<Tensor>{out, lse};
  };
  c.reference = [=](const std::vector<Values>& in) {
    return fp64::self_attention(s.B, s.T, s.S, s.H, s.D, ops::Axis::time, in[0], in[1], in[2],
                                in[3]);
  };
  cases.push_back(std::move(c));
}

void add_temporal_backward(Cases& cases, const Temporal& s, DType dtype) {
  auto c = make_temporal("self_attention_backward", s, dtype, true);
  c.bytes = 8 * elements(s) * static_cast<double>(size_of(dtype)) +
            4.0 * static_cast<double>(s.lse().numel());
  c.flops = 10 * elements(s) * static_cast<double>(s.T);
  // `out` and `lse` as the CPU side's forward gives them, so that both sides start from the same.
  Tensor out = Tensor::host(s.out(), dtype), lse = Tensor::host(s.lse(), DType::f32), none;
  ops::self_attention_forward(c.inputs[0], c.inputs[1], c.inputs[2], c.inputs[3], ops::Axis::time,
                              out, lse, none);
  c.inputs.insert(c.inputs.end(), {out, lse, random_tensor(s.out(), dtype, 4)});
  if (s.norm) {
    c.inputs.push_back(random_tensor({s.D}, DType::f32, 5));
    c.inputs.push_back(random_tensor({s.D}, DType::f32, 6));
  }
  if (dtype == DType::bf16) c.tolerance = 1.0 / 32;  // dP - delta cancels
  c.run = [=](std::vector<Tensor>& in) {
    Tensor dqkv = Tensor::empty(s.qkv(), dtype);
    Tensor dwq = s.norm ? in[7] : Tensor(), dwk = s.norm ? in[8] : Tensor(), no_qk;
    // Scores of some hundreds differ between the sides by 1e-4, in the order of their sums. With
    // the other side's lse, probabilities then add up to as much more or less than 1, which the
    // gradient multiplies by dP.
    if (s.spread > 1)
      ops::self_attention_forward(in[0], in[1], in[2], in[3], ops::Axis::time, in[4], in[5], no_qk);
    ops::self_attention_backward(in[0], in[1], in[2], in[3], ops::Axis::time, in[4], in[5], in[6],
                                 dqkv, dwq, dwk, no_qk);
    std::vector<Tensor> result{dqkv};
    if (s.norm) result.insert(result.end(), {dwq, dwk});
    return result;
  };
  cases.push_back(std::move(c));
}

void add_temporal(Cases& cases, CaseSize size) {
  const auto add = [&](const Temporal& s, DType dtype) {
    add_temporal_forward(cases, s, dtype);
    add_temporal_backward(cases, s, dtype);
  };
  if (size == CaseSize::real) {
    for (const Temporal& s : {Temporal{1, 15, 1590, 16, 72}, Temporal{1, 4, 256, 16, 72},
                              Temporal{1, 30, 1590, 16, 72}, Temporal{2, 5, 3600, 16, 72}})
      add(s, DType::bf16);
    add({1, 15, 1590, 16, 72}, DType::f32);
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Temporal& s :
         {Temporal{1, 1, 3, 2, 72, false, true, 3.0f}, Temporal{2, 1, 11, 3, 72},
          Temporal{2, 15, 3, 4, 72}, Temporal{1, 16, 2, 2, 64}, Temporal{1, 4, 5, 3, 72},
          Temporal{1, 30, 2, 4, 72}, Temporal{2, 5, 3, 4, 72}, Temporal{1, 8, 3, 2, 64},
          Temporal{3, 3, 1, 1, 128}, Temporal{1, 6, 2, 2, 72, false, false, 12.0f},
          Temporal{1, 17, 1, 2, 128, true, false}, Temporal{1, 33, 1, 2, 72, false},
          Temporal{1, 100, 1, 2, 64}, Temporal{1, 128, 1, 1, 72}, Temporal{1, 128, 1, 1, 128},
          Temporal{1, 7, 3, 2, 8}, Temporal{2, 9, 2, 3, 10, false, false},
          Temporal{1, 15, 2, 4, 64, false, false, 12.0f}})
      add(s, dtype);
  add({1, 40, 1, 1, 16, false, false, 12.0f}, DType::f32);
}

// ops::attention_*: keys of `lengths` rows a sample, then `padding` rows that are no sample's.
struct Plain {
  std::int64_t N, H, D;
  std::vector<std::int32_t> lengths;
  std::vector<float> bias = {};  // of the last keys
  std::int64_t padding = 0;
  bool offsets = true;  // else equal keys, without offsets
  float deviation = 1.0f;

  std::int64_t B() const { return std::ssize(lengths); }
  std::int64_t C() const { return H * D; }
  std::int64_t first(std::int64_t b) const {
    return std::accumulate(lengths.begin(), lengths.begin() + b, std::int64_t{0});
  }
  std::int64_t rows() const { return first(B()) + padding; }
  // Calls f(scores, first element of the query, first element of its keys, sample, head, query).
  template <class F>
  void query(const std::vector<Values>& in, std::int64_t b, std::int64_t h, std::int64_t i,
             F&& f) const {
    const std::int64_t at = (b * N + i) * C() + h * D, key = first(b) * C() + h * D;
    const double last = bias.empty() ? 0.0 : static_cast<double>(bias[b]);
    f(fp64::scores_of(in[0].data() + at, in[1].data() + key, C(), lengths[b], D, last), at, key);
  }
  template <class F>
  void every_query(const std::vector<Values>& in, F&& f) const {
    for (std::int64_t b = 0; b < B(); ++b)
      for (std::int64_t h = 0; h < H; ++h)
        for (std::int64_t i = 0; i < N; ++i)
          query(in, b, h, i, [&](const Values& scores, std::int64_t at, std::int64_t key) {
            f(scores, at, key, (b * H + h) * N + i);
          });
  }
};

// Rows of the first and the last head that are checked where all of them are too many.
std::vector<std::int64_t> some_rows(std::int64_t n) { return {0, n / 3, n - 1}; }

// q, k, v, offsets, bias; then out, lse, dout.
void add_plain(Cases& cases, const Plain& a, DType dtype) {
  const std::int64_t B = a.B(), N = a.N, C = a.C(), rows = a.rows();
  const Shape q_shape{B, N, C}, lse_shape{B, a.H, N};
  const Shape k_shape = a.offsets ? Shape{rows, C} : Shape{B, rows / B, C};
  const std::int32_t longest = *std::max_element(a.lengths.begin(), a.lengths.end());
  const auto element = static_cast<double>(size_of(dtype));
  const double queries = element * static_cast<double>(B * N * C);
  const double keys = element * static_cast<double>(2 * rows * C);
  const double products = 2.0 * static_cast<double>(N * a.first(B)) * static_cast<double>(C);
  const double statistics = 4.0 * static_cast<double>(B * a.H * N);
  const bool large = products > 1e11;

  KernelCase f;
  f.op = "attention_forward";
  f.shape = fmt::format("B{} N{} H{} D{} keys {}{}{}{}", B, N, a.H, a.D, a.first(B),
                        a.offsets ? "" : " equal", a.bias.empty() ? "" : " bias",
                        a.deviation > 1.0f ? " large" : "");
  f.dtype = dtype;
  f.inputs = {random_tensor(q_shape, dtype, 1, a.deviation),
              random_tensor(k_shape, dtype, 2, a.deviation),
              random_tensor(k_shape, dtype, 3, a.deviation), Tensor(), Tensor()};
  // The padding must not be read.
  for (const int t : {1, 2})
    std::memset(static_cast<std::byte*>(f.inputs[t].raw()) +
                    static_cast<std::size_t>(a.first(B) * C) * size_of(dtype),
                0xff, static_cast<std::size_t>(a.padding * C) * size_of(dtype));
  if (a.offsets) {
    f.inputs[3] = Tensor::host({B + 1}, DType::i32);
    for (std::int64_t b = 0; b <= B; ++b)
      f.inputs[3].data<std::int32_t>()[b] = static_cast<std::int32_t>(a.first(b));
  }
  if (!a.bias.empty()) {
    f.inputs[4] = Tensor::host({B}, DType::f32);
    std::copy(a.bias.begin(), a.bias.end(), f.inputs[4].data<float>());
  }
  const auto forward = [=](const Tensors& in) {
    Tensor out = Tensor::empty(q_shape, dtype), lse = Tensor::empty(lse_shape, DType::f32);
    ops::attention_forward(in[0], in[1], in[2], in[3], in[4], static_cast<int>(a.H), out, lse);
    return Tensors{out, lse};
  };
  f.run = forward;
  f.reference = [=](const std::vector<Values>& in) {
    Values out(B * N * C), lse(B * a.H * N);
    a.every_query(in, [&](const Values& scores, std::int64_t at, std::int64_t key, std::int64_t i) {
      lse[i] = fp64::attend(scores, in[2].data() + key, C, a.D, out.data() + at);
    });
    return std::vector<Values>{out, lse};
  };
  f.bytes = 2 * queries + keys + statistics;
  f.flops = 2 * products;
  f.bound = longest >= 256 ? Bound::tensor_cores : Bound::bandwidth;
  f.tolerance = tolerance_of(dtype, false, a.deviation);

  KernelCase b = f;
  b.op = "attention_backward";
  const Tensor dout = random_tensor(q_shape, dtype, 4);
  b.run = [=](Tensors& in) {
    Tensor dq = Tensor::empty(q_shape, dtype), dk = Tensor::empty(k_shape, dtype),
           dv = Tensor::empty(k_shape, dtype);
    ops::attention_backward(in[0], in[1], in[2], in[3], in[4], static_cast<int>(a.H), in[5], in[6],
                            in[7], dq, dk, dv);
    return Tensors{dq, dk, dv};
  };
  b.reference = [=](const std::vector<Values>& in) {
    Values dq(B * N * C), dk(rows * C), dv(rows * C);
    a.every_query(in, [&](const Values& scores, std::int64_t at, std::int64_t key, std::int64_t) {
      fp64::attend_backward(scores, in[0].data() + at, in[1].data() + key, in[2].data() + key, C,
                            a.D, in[7].data() + at, dq.data() + at, dk.data() + key,
                            dv.data() + key);
    });
    return std::vector<Values>{dq, dk, dv};
  };
  b.bytes = 4 * queries + 2 * keys + statistics;
  b.flops = 5 * products;
  b.tolerance = tolerance_of(dtype, true, a.deviation);

  if (!large) {
    Tensor out = Tensor::host(q_shape, dtype), lse = Tensor::host(lse_shape, DType::f32);
    ops::attention_forward(f.inputs[0], f.inputs[1], f.inputs[2], f.inputs[3], f.inputs[4],
                           static_cast<int>(a.H), out, lse);
    b.inputs.insert(b.inputs.end(), {out, lse, dout});
  } else {
    f.reference = b.reference = nullptr;
    f.pieces = [=](const std::vector<Values>& in) {
      std::vector<Piece> some;
      for (const std::int64_t h : {std::int64_t{0}, a.H - 1})
        for (const std::int64_t i : some_rows(N))
          a.query(in, 0, h, i, [&](const Values& scores, std::int64_t at, std::int64_t key) {
            Values out(a.D);
            const double lse = fp64::attend(scores, in[2].data() + key, C, a.D, out.data());
            some.push_back({0, at, out});
            some.push_back({1, h * N + i, {lse}});
          });
      return some;
    };
    b.inputs.insert(b.inputs.end(), {Tensor(), Tensor(), dout});
    b.prepare = [=](Tensors& in) {
      const Tensors made = forward(in);
      in[5] = made[0];
      in[6] = made[1];
    };
    // Keys by the given lse and out, which spares the sums of all queries.
    b.pieces = [=](const std::vector<Values>& in) {
      std::vector<Piece> some;
      const double scale = 1 / std::sqrt(static_cast<double>(a.D));
      for (const std::int64_t h : {std::int64_t{0}, a.H - 1}) {
        for (const std::int64_t i : some_rows(N))
          a.query(in, 0, h, i, [&](const Values& scores, std::int64_t at, std::int64_t key) {
            Values dq(a.D);
            fp64::attend_backward(scores, in[0].data() + at, in[1].data() + key, in[2].data() + key,
                                  C, a.D, in[7].data() + at, dq.data(), nullptr, nullptr);
            some.push_back({0, at, dq});
          });
        for (const std::int64_t j : some_rows(a.lengths[0])) {
          const std::int64_t key = j * C + h * a.D;
          Values dk(a.D), dv(a.D);
          for (std::int64_t i = 0; i < N; ++i) {
            const std::int64_t at = i * C + h * a.D;
            const auto dot = [&](int x, int y, std::int64_t other) {
              return std::inner_product(in[x].begin() + at, in[x].begin() + at + a.D,
                                        in[y].begin() + other, 0.0);
            };
            const double bias = a.bias.empty() || j + 1 < a.lengths[0] ? 0.0 : a.bias[0];
            const double p = std::exp(dot(0, 1, key) * scale + bias - in[6][h * N + i]);
            const double ds = p * (dot(7, 2, key) - dot(7, 5, at)) * scale;
            for (std::int64_t d = 0; d < a.D; ++d) {
              dk[d] += ds * in[0][at + d];
              dv[d] += p * in[7][at + d];
            }
          }
          some.push_back({1, key, dk});
          some.push_back({2, key, dv});
        }
      }
      return some;
    };
  }
  cases.push_back(std::move(f));
  cases.push_back(std::move(b));
}

void add_small_plain(Cases& cases, DType dtype) {
  for (const Plain& a : std::vector<Plain>{
           // Self attention: equal keys, with and without offsets, several blocks of keys.
           {67, 2, 128, {67, 67}, {}, 0, false},
           {301, 1, 128, {301}, {}, 0, false},
           {130, 2, 64, {130}, {}, 0, false},
           {139, 1, 72, {139, 139}, {}},
           {270, 3, 128, {270}, {}},
           {35, 1, 24, {35}, {}, 0, false},
           // Cross attention with equal keys: more blocks of queries than are under way at once,
           // more tiles of keys than multiprocessors, a head size between the instances.
           {450, 1, 128, {200, 200}, {}, 0, false},
           {200, 5, 72, {300, 300}, {}, 0, false},
           {330, 3, 96, {140}, {}, 0, false},
           // Scores far below 0: rows beyond the last key would have probabilities without bound.
           {70, 4, 64, {2}, {}, 0, false, 12.0f},
           // Captions with one key for all of their padding, one of full length, one empty.
           {70, 2, 128, {5, 1, 66, 40}, {4.0f, 6.2383246f, 0.0f, 3.2188758f}, 3},
           {33, 1, 64, {0, 40, 3}, {0.5f, 1.0f, 2.0f}, 1},
           {45, 2, 72, {257, 7}, {5.5f, 0.0f}, 0},
           // Many queries: the key side shares them out; several pieces of them on the CPU.
           {1600, 1, 128, {130, 9}, {0.0f, 4.6151205f}, 2},
           {600, 1, 8, {11, 2}, {}, 1},
           // More tiles than multiprocessors, several blocks of keys.
           {200, 3, 128, {220, 7, 225}, {1.0f, 2.0f, -3.0f}, 3},
           {70, 1, 128, {270}, {2.0f}, 0, true, 8.0f}})
    add_plain(cases, a, dtype);
}

void add_relative(Cases& cases, const std::vector<std::int32_t>& lengths, std::int64_t H,
                  std::int64_t D, DType dtype) {
  Tensor offsets = Tensor::host({static_cast<std::int64_t>(lengths.size()) + 1}, DType::i32);
  offsets.data<std::int32_t>()[0] = 0;
  std::partial_sum(lengths.begin(), lengths.end(), offsets.data<std::int32_t>() + 1);
  const std::int64_t M = offsets.data<std::int32_t>()[lengths.size()];
  std::int64_t longest = 0;
  double pairs = 0;
  for (const std::int32_t n : lengths) {
    longest = std::max<std::int64_t>(longest, n);
    pairs += static_cast<double>(n) * n;
  }
  auto c = make_case("relative_attention_forward",
                     fmt::format("{} captions to {} H{} D{}", lengths.size(), longest, H, D), dtype,
                     static_cast<double>(4 * M * H * D) * static_cast<double>(size_of(dtype)), 0);
  c.flops = 4 * pairs * static_cast<double>(H * D);
  c.bound = Bound::tensor_cores;
  // bf16: probabilities are rounded before the product with v.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 2e-5;
  c.inputs = {random_tensor({3, M, H, D}, dtype, 1, 0.4f), random_tensor({32, H}, DType::f32, 2),
              offsets};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty({M, H * D}, dtype);
    ops::relative_attention_forward(in[0], in[1], in[2], longest, out);
    return std::vector<Tensor>{out};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values out(M * H * D);
    for (std::size_t b = 0; b + 1 < in[2].size(); ++b)
      for (auto i = static_cast<std::int64_t>(in[2][b]);
           i < static_cast<std::int64_t>(in[2][b + 1]); ++i)
        for (std::int64_t h = 0; h < H; ++h) {
          const auto first = static_cast<std::int64_t>(in[2][b]);
          Values scores(static_cast<std::int64_t>(in[2][b + 1]) - first);
          const auto row = [&](int part, std::int64_t r) {
            return in[0].data() + ((part * M + r) * H + h) * D;
          };
          for (std::int64_t j = 0; j < std::ssize(scores); ++j) {
            scores[j] = in[1][ops::relative_bucket(static_cast<int>(first + j - i)) * H + h];
            for (std::int64_t d = 0; d < D; ++d) scores[j] += row(0, i)[d] * row(1, first + j)[d];
          }
          fp64::attend(scores, row(2, first), H * D, D, out.data() + (i * H + h) * D);
        }
    return std::vector<Values>{out};
  };
  cases.push_back(std::move(c));
}

void add_wide_attention(Cases& cases, std::int64_t N, std::int64_t P, std::int64_t C, DType dtype) {
  const std::string text = fmt::format("N{} P{} C{}", N, P, C);
  const Shape rows{N, P, C};
  const double work = static_cast<double>(N * P) * static_cast<double>(P * C);
  const double activation = static_cast<double>(N * P * C) * static_cast<double>(size_of(dtype));
  const Tensor qkv = random_tensor({N, P, 3, C}, dtype, 1);
  auto forward = make_case("wide_attention_forward", text, dtype, 4 * activation,
                           dtype == DType::bf16 ? 1.0 / 64 : 2e-5);
  forward.flops = 4 * work;
  forward.bound = Bound::tensor_cores;
  forward.inputs = {qkv};
  forward.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty(rows, dtype), lse = Tensor::empty({N, P}, DType::f32);
    ops::wide_attention_forward(in[0], out, lse);
    return std::vector<Tensor>{out, lse};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values out(N * P * C), lse;
    for (std::int64_t i = 0; i < N * P; ++i) {
      const double *frame = in[0].data() + i / P * P * 3 * C, *q = frame + i % P * 3 * C;
      Values scores(P);
      for (std::int64_t j = 0; j < P; ++j)
        for (std::int64_t c = 0; c < C; ++c)
          scores[j] += q[c] * frame[j * 3 * C + C + c] / std::sqrt(static_cast<double>(C));
      lse.push_back(fp64::attend(scores, frame + 2 * C, 3 * C, C, out.data() + i * C));
    }
    return std::vector<Values>{out, lse};
  };
  auto backward = make_case("wide_attention_backward", text, dtype, 8 * activation,
                            dtype == DType::bf16 ? 1.0 / 32 : 5e-5);
  backward.flops = 10 * work;
  backward.bound = Bound::tensor_cores;
  // bf16: probabilities and their gradients are rounded before the products.
  backward.inputs = {qkv, random_tensor(rows, dtype, 2)};
  backward.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty(rows, dtype), lse = Tensor::empty({N, P}, DType::f32),
           dqkv = Tensor::empty({N, P, 3, C}, dtype);
    ops::wide_attention_forward(in[0], out, lse);
    ops::wide_attention_backward(in[0], out, lse, in[1], dqkv);
    return std::vector<Tensor>{dqkv};
  };
  backward.reference = [=](const std::vector<Values>& in) {
    Values d(N * P * 3 * C);
    for (std::int64_t i = 0; i < N * P; ++i) {
      const std::int64_t frame = i / P * P * 3 * C, at = frame + i % P * 3 * C;
      const double *q = in[0].data() + at, *k = in[0].data() + frame + C;
      fp64::attend_backward(fp64::scores_of(q, k, 3 * C, P, C, 0), q, k, k + C, 3 * C, C,
                            in[1].data() + i * C, d.data() + at, d.data() + frame + C,
                            d.data() + frame + 2 * C);
    }
    return std::vector<Values>{d};
  };
  cases.push_back(std::move(forward));
  cases.push_back(std::move(backward));
}

void add_small(Cases& cases, DType dtype) {
  using ops::Axis;
  // Every head size of the instances and some between them; lengths below, at and beyond the tiles
  // of 32, 64 and 128.
  for (const Self& a : std::vector<Self>{{1, 1, 1, 1, 8},
                                         {1, 2, 67, 2, 72},
                                         {1, 1, 131, 1, 72, Axis::space, false},
                                         {1, 1, 64, 2, 64},
                                         {2, 3, 11, 3, 72, Axis::space, true, true},
                                         {1, 2, 23, 5, 64, Axis::space, true, true},
                                         {1, 1, 97, 1, 128, Axis::space, true, true},
                                         {2, 1, 33, 2, 16, Axis::space, true, true},
                                         {1, 2, 40, 1, 24},
                                         {1, 1, 35, 1, 6},
                                         {1, 1, 39, 1, 70, Axis::space, true, true},
                                         {1, 1, 70, 1, 72, Axis::space, false, false, 8.0f}})
    add_self(cases, a, dtype);
  // Many tiles of keys; more tiles of queries than multiprocessors, for kernels whose blocks stay.
  add_self(cases, {1, 1, 400, 1, 72}, dtype);
  add_self(cases, {2, 20, 5, 4, 72}, dtype);
  // More frames than temporal.cu takes.
  add_self(cases, {1, 131, 2, 1, 72, Axis::time, true, true}, dtype);
  add_cross(cases, 21, 2, 8, {5, 0, 33}, 2, dtype);
  add_cross(cases, 70, 2, 72, {1, 65}, 0, dtype);
  add_cross(cases, 1, 1, 64, {7}, 61, dtype);
  add_cross(cases, 33, 1, 128, {0, 40, 3}, 1, dtype);
  add_cross(cases, 20, 1, 10, {12, 4}, 3, dtype);
  add_cross(cases, 70, 1, 72, {80, 9}, 3, dtype, 8.0f);
  // Enough queries that the key side shares them out over two blocks: over 512, on sm_90a 2048.
  add_cross(cases, 600, 1, 8, {11, 2}, 1, dtype);
  add_cross(cases, 2100, 1, 72, {11, 0, 130}, 1, dtype);
  // More tiles than multiprocessors, several blocks of 112 and of 128 keys.
  add_cross(cases, 200, 3, 72, {220, 7, 0, 225}, 3, dtype);
  add_cross(cases, 130, 2, 64, {257, 255}, 0, dtype);
  add_cross(cases, 70, 1, 128, {140, 129}, 2, dtype);
}

void add_real(Cases& cases) {
  using ops::Axis;
  const DType dtype = DType::bf16;
  add_self(cases, {1, 15, 1590, 16, 72}, dtype);
  add_self(cases, {8, 4, 256, 16, 72}, dtype);
  // The kernels without the norm, at the head sizes that others publish.
  for (const std::int64_t D : {64, 72, 128})
    add_self(cases, {1, 9, 1590, 16, D, Axis::space, false}, dtype);
  add_self(cases, {1, 4, 256, 16, 72}, DType::f32);
  add_cross(cases, 23850, 16, 72, {300}, 0, dtype);
  add_cross(cases, 1024, 16, 72, {300, 120, 57, 300, 0, 211, 90, 16}, 10, dtype);
  add_cross(cases, 1024, 16, 72, {300}, 0, DType::f32);
  // 81 frames of 480p: self attention, and cross attention with all rows of a text and with few.
  add_plain(cases, {32760, 12, 128, {32760}, {}, 0, false}, dtype);
  add_plain(cases, {32760, 12, 128, {513}, {1.0f}}, dtype);
  add_plain(cases, {32760, 12, 128, {101}, {6.0185932f}}, dtype);
}

}  // namespace

void attention_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    add_real(cases);
  } else {
    add_small(cases, DType::f32);
    add_small(cases, DType::bf16);
    add_small_plain(cases, DType::f32);
    add_small_plain(cases, DType::bf16);
  }
  add_temporal(cases, size);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (size == CaseSize::real) {
      // T5-XXL: 32 captions of 300 rows. The VAE's middle block at 480p.
      add_relative(cases, std::vector<std::int32_t>(32, 300), 64, 64, dtype);
      add_wide_attention(cases, 1, 60 * 107, 512, dtype);
      continue;
    }
    // Captions of one row; distances beyond the last bucket's; several tiles; heads for the tensor
    // cores and others.
    add_relative(cases, {1, 7, 70}, 2, 32, dtype);
    add_relative(cases, {110, 3}, 1, 64, dtype);
    add_relative(cases, {5, 9}, 2, 12, dtype);
    add_relative(cases, {66}, 1, 128, dtype);
    // One position; several tiles of queries; rows that the library's alignment does not fit.
    add_wide_attention(cases, 1, 1, 8, dtype);
    add_wide_attention(cases, 1, 601, 4, dtype);  // several accesses a thread
    add_wide_attention(cases, 2, 33, 16, dtype);
    add_wide_attention(cases, 1, 40, 6, dtype);
  }
}

}  // namespace weft
