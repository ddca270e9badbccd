// Convolutions by cuDNN 9's graph interface. CPU twin src/ops/cpu/conv/, cases
// tests/kernels/conv.cpp. The library was asked without an H200 which engines it offers there
// for the VAE's shapes (docs/gpu.md).
//
// A convolution is a graph of one node, or of three with residual and bias behind it, whose engine
// is the first that the library's own model of time (heuristics, mode A, then its fall-backs)
// proposes and that passes three tests: it repeats its bits, it rounds f32 to TF32 only where
// device.tf32 allows that, and its workspace stays below a limit. The graph interface and not the
// older one because zeros before and after a dimension may differ there: a causal convolution and
// the down-sampling one, padded on one side alone, run as they are. What the library fuses it takes
// in the operands' type: the bias is rounded to bf16 there.
#ifdef WEFT_CUDNN
#include <cudnn.h>
#endif
#ifndef WEFT_CUDA_ON_CPU
#include <dlfcn.h>
#endif

#include <algorithm>
#include <map>
#include <vector>

#include "conv/convolution.cuh"
#include "launch.cuh"
#include "ops/conv.h"
#include "tensor/device.h"
#include "tensor/device_cuda.h"

namespace weft::kernels {

std::string describe(const Convolution& c) {
  constexpr const char* passes[] = {"forward", "backward input", "backward weight"};
  const auto list = [&](const std::array<std::int64_t, 3>& v, std::int64_t first,
                        std::int64_t last) {
    std::string t = "[";
    if (first > 0) t += std::to_string(first) + ",";
    for (int i = 3 - c.spatial; i < 3; ++i) t += std::to_string(v[i]) + (i < 2 ? "," : "");
    return t + (last > 0 ? "," + std::to_string(last) + "]" : "]");
  };
  return std::string(passes[static_cast<int>(c.pass)]) + " " + std::string(name_of(c.type)) +
         " x " + list(c.in, c.samples, c.in_channels) + " w " +
         list(c.kernel, c.out_channels, c.in_channels / c.groups) + " stride " +
         list(c.stride, 0, 0) + " dilation " + list(c.dilation, 0, 0) + " pad " +
         list(c.before, 0, 0) + "-" + list(c.after, 0, 0) + (c.bias ? " bias" : "") +
         (c.residual ? " residual" : "") + (c.accumulate ? " accumulate" : "");
}

#ifndef WEFT_CUDNN

bool convolve(const Convolution& c, const ConvolutionOperands&) {
  throw Error(Exit::usage,
              "this weft was built without cuDNN: no convolution on a GPU (" + describe(c) + ")",
              "install cuDNN 9 with its headers and build again, or run with device.kind=cpu",
              __FILE__, __LINE__);
}

#else
namespace {

constexpr int proposals = 32;

// The library's functions. It is loaded with the first convolution: a job without any needs no
// cuDNN.
struct Functions {
  decltype(&::cudnnCreate) create;
  decltype(&::cudnnSetStream) set_stream;
  decltype(&::cudnnGetErrorString) error_string;
  decltype(&::cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&::cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&::cudnnBackendSetAttribute) set_attribute;
  decltype(&::cudnnBackendGetAttribute) get_attribute;
  decltype(&::cudnnBackendFinalize) finalize;
  decltype(&::cudnnBackendExecute) execute;

#ifdef WEFT_CUDA_ON_CPU
  Functions()
      : create(::cudnnCreate),
        set_stream(::cudnnSetStream),
        error_string(::cudnnGetErrorString),
        create_descriptor(::cudnnBackendCreateDescriptor),
        destroy_descriptor(::cudnnBackendDestroyDescriptor),
        set_attribute(::cudnnBackendSetAttribute),
        get_attribute(::cudnnBackendGetAttribute),
        finalize(::cudnnBackendFinalize),
        execute(::cudnnBackendExecute) {}
#else
  Functions() {
    void* const library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) fail(dlerror());
    find(library, "cudnnCreate", create);
    find(library, "cudnnSetStream", set_stream);
    find(library, "cudnnGetErrorString", error_string);
    find(library, "cudnnBackendCreateDescriptor", create_descriptor);
    find(library, "cudnnBackendDestroyDescriptor", destroy_descriptor);
    find(library, "cudnnBackendSetAttribute", set_attribute);
    find(library, "cudnnBackendGetAttribute", get_attribute);
    find(library, "cudnnBackendFinalize", finalize);
    find(library, "cudnnBackendExecute", execute);
  }
  template <class F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) fail(dlerror());
  }
  [[noreturn]] static void fail(const char* why) {
    throw Error(Exit::usage,
                std::string("convolutions on a GPU need cuDNN 9, which cannot be loaded: ") +
                    (why == nullptr ? "unknown" : why),
                "load the site's cuDNN module, or pip install nvidia-cudnn-cu13 and put its lib "
                "folder on LD_LIBRARY_PATH, or run with device.kind=cpu",
                __FILE__, __LINE__);
  }
#endif
};

const Functions& cudnn() {
  static const Functions functions;
  return functions;
}

void check(cudnnStatus_t status, const std::string& what, int line) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw_if_gpu_failed(("cuDNN: " + what).c_str(), __FILE__, line);
  throw Error(Exit::hardware, "cuDNN: " + what + " failed: " + cudnn().error_string(status),
              "see `weft doctor`; a library older than the build's, or a sick GPU, shows there",
              __FILE__, line);
}

// One a process: the compute stream runs one convolution at a time.
struct Library {
  cudnnHandle_t handle = nullptr;

  Library() {
    check(cudnn().create(&handle), "cudnnCreate", __LINE__);
    check(cudnn().set_stream(handle, cuda_stream(Stream::compute)), "cudnnSetStream", __LINE__);
  }
};

Library& library() {
  static Library one;
  return one;
}

// A descriptor of the library's.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    check(cudnn().create_descriptor(type, &d_), "cudnnBackendCreateDescriptor", __LINE__);
  }
  ~Descriptor() {
    if (d_ != nullptr) cudnn().destroy_descriptor(d_);
  }
  Descriptor(Descriptor&& other) noexcept : d_(std::exchange(other.d_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(d_, other.d_);
    return *this;
  }

  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T* values,
           std::size_t count) {
    check(cudnn().set_attribute(d_, name, type, static_cast<std::int64_t>(count), values),
          "attribute " + std::to_string(static_cast<int>(name)), __LINE__);
  }
  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    set(name, type, &value, 1);
  }
  void set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.d_);
  }
  void set(cudnnBackendAttributeName_t name, const std::vector<std::int64_t>& values) {
    set(name, CUDNN_TYPE_INT64, values.data(), values.size());
  }
  bool try_finalize() {
    if (cudnn().finalize(d_) == CUDNN_STATUS_SUCCESS) return true;
    throw_if_gpu_failed("cudnnBackendFinalize", __FILE__, __LINE__);
    return false;
  }
  void finalize(const char* what) { check(cudnn().finalize(d_), what, __LINE__); }
  // How many there are; up to `count` are written.
  template <class T>
  std::int64_t get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T* values,
                   std::int64_t count) const {
    std::int64_t there = 0;
    const cudnnStatus_t status = cudnn().get_attribute(d_, name, type, count, &there, values);
    return status == CUDNN_STATUS_SUCCESS ? there : 0;
  }
  cudnnBackendDescriptor_t raw() const { return d_; }

 private:
  cudnnBackendDescriptor_t d_ = nullptr;
};

enum Id : std::int64_t { id_x = 'x', id_w = 'w', id_y = 'y', id_bias = 'b', id_residual = 'r' };

// The largest power of two, up to 16, that divides the address: see alignment_of() in
// product_lt.cu.
std::int64_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return p == nullptr ? 16
                      : static_cast<std::int64_t>(std::min<std::uintptr_t>(address & -address, 16));
}

struct Key {
  Convolution convolution;
  std::array<std::int64_t, 5> alignments;  // of x, w, y, bias, residual
  bool tf32;                               // f32 may be rounded to it
  auto operator<=>(const Key&) const = default;
};

// Everything that a convolution's plan refers to lives as long as it does.
struct Plan {
  std::vector<Descriptor> parts;
  std::vector<Descriptor> plan;  // none: the library cannot
};

std::vector<std::int64_t> spatial_of(const Convolution& c,
                                     const std::array<std::int64_t, 3>& values) {
  return {values.end() - c.spatial, values.end()};
}

// Dimensions in the library's order (samples, channels, then those of space), channels last in
// memory.
Descriptor tensor(std::int64_t id, cudnnDataType_t type, std::int64_t samples,
                  std::int64_t channels, const std::vector<std::int64_t>& space,
                  std::int64_t alignment, bool is_virtual = false) {
  std::vector<std::int64_t> sizes{samples, channels}, strides(2 + space.size());
  sizes.insert(sizes.end(), space.begin(), space.end());
  strides[1] = 1;
  std::int64_t step = channels;
  for (std::size_t i = sizes.size() - 1; i >= 2; --i) {
    strides[i] = step;
    step *= sizes[i];
  }
  strides[0] = step;
  Descriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes);
  d.set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, alignment);
  if (is_virtual) d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
  d.finalize("tensor");
  return d;
}

Descriptor geometry(const Convolution& c) {
  Descriptor d(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  d.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, std::int64_t{c.spatial});
  d.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  d.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
  d.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, spatial_of(c, c.before));
  d.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, spatial_of(c, c.after));
  d.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, spatial_of(c, c.stride));
  d.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, spatial_of(c, c.dilation));
  d.finalize("convolution");
  return d;
}

// The attributes of the three passes' nodes.
struct Names {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t alpha, beta, convolution, w, x, y;
};
Names names_of(Pass pass) {
  switch (pass) {
    case Pass::backward_input:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY};
    case Pass::backward_weight:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY};
    default:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y};
  }
}

// The graph's nodes, in order; what they refer to goes to `parts`.
std::vector<Descriptor> nodes_of(const Key& key, std::vector<Descriptor>& parts) {
  const Convolution& c = key.convolution;
  const cudnnDataType_t type = c.type == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT;
  const auto out = spatial_of(c, c.out);
  // An intermediate result in f32, which exists in registers alone.
  const auto passing = [&](std::int64_t id) {
    return tensor(id, CUDNN_DATA_FLOAT, c.samples, c.out_channels, out, 16, true);
  };
  Descriptor x =
      tensor(id_x, type, c.samples, c.in_channels, spatial_of(c, c.in), key.alignments[0]);
  // Fewer input channels than x has tell the library that there are groups.
  Descriptor w = tensor(id_w, type, c.out_channels, c.in_channels / c.groups,
                        spatial_of(c, c.kernel), key.alignments[1]);
  Descriptor y = tensor(id_y, type, c.samples, c.out_channels, out, key.alignments[2]);
  Descriptor sum = c.bias ? passing('s') : std::move(y);
  Descriptor shape = geometry(c);

  std::vector<Descriptor> nodes;
  const Names name = names_of(c.pass);
  Descriptor& node = nodes.emplace_back(name.type);
  // In the type of the computation: cuDNN silently accepts doubles too and reads half of one as a
  // float, so that 1.0 becomes 0.
  node.set(name.alpha, CUDNN_TYPE_FLOAT, 1.0f);
  node.set(name.beta, CUDNN_TYPE_FLOAT, c.accumulate ? 1.0f : 0.0f);
  node.set(name.convolution, shape);
  node.set(name.w, w);
  node.set(name.x, x);
  node.set(name.y, sum);
  node.finalize("convolution node");

  const auto add = [&](const Descriptor& a, const Descriptor& b, const Descriptor& to) {
    Descriptor pointwise(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    pointwise.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, CUDNN_POINTWISE_ADD);
    pointwise.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    pointwise.finalize("pointwise");
    Descriptor& n = nodes.emplace_back(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    n.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise);
    n.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a);
    n.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    n.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, to);
    n.finalize("pointwise node");
    parts.push_back(std::move(pointwise));
  };
  if (c.residual) {
    Descriptor residual =
        tensor(id_residual, type, c.samples, c.out_channels, out, key.alignments[4]);
    Descriptor added = passing('t');
    add(sum, residual, added);
    parts.push_back(std::move(residual));
    std::swap(sum, added);
    parts.push_back(std::move(added));
  }
  if (c.bias) {
    Descriptor bias = tensor(id_bias, type, 1, c.out_channels,
                             std::vector<std::int64_t>(c.spatial, 1), key.alignments[3]);
    add(sum, bias, y);
    parts.push_back(std::move(bias));
  }
  for (Descriptor* d : {&x, &w, &y, &sum, &shape}) parts.push_back(std::move(*d));
  return nodes;
}

// Whether an engine repeats its bits and computes as exactly as weft promises.
bool is_welcome(const Descriptor& config, const Key& key) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.raw();
  if (config.get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw, 1) != 1)
    return false;
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  const std::int64_t count = engine.get(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                        notes.data(), notes.size());
  return std::none_of(notes.begin(), notes.begin() + count, [&](cudnnBackendNumericalNote_t n) {
    return n == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC ||
           n == CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION ||
           n == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 ||
           n == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13 ||
           (key.convolution.type == DType::f32 &&
            (n == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS ||
             (n == CUDNN_NUMERICAL_NOTE_TENSOR_CORE && !key.tf32)));
  });
}

// Takes the first engine of the library's list that is acceptable, small enough and available.
bool choose(const Descriptor& graph, cudnnBackendHeurMode_t mode, const Key& key, Plan& plan) {
  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (!heuristics.try_finalize()) return false;
  std::vector<Descriptor> configs;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (int i = 0; i < proposals; ++i)
    raw.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).raw());
  const std::int64_t found = heuristics.get(CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(), proposals);
  for (std::int64_t i = 0; i < std::min<std::int64_t>(found, proposals); ++i) {
    Descriptor& config = configs[i];
    if (!is_welcome(config, key)) continue;
    Descriptor made(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    check(cudnn().set_attribute(made.raw(), CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1,
                                &library().handle),
          "plan's handle", __LINE__);
    made.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (!made.try_finalize()) continue;
    std::int64_t bytes = 0;
    made.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &bytes, 1);
    if (bytes > ops::conv_scratch.workspace) continue;
    plan.plan.push_back(std::move(made));
    plan.parts.push_back(std::move(config));
    return true;
  }
  return false;
}

Plan make_plan(const Key& key) {
  Plan plan;
  std::vector<Descriptor> nodes = nodes_of(key, plan.parts);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& n : nodes) raw.push_back(n.raw());
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  check(cudnn().set_attribute(graph.raw(), CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1,
                              &library().handle),
        "graph's handle", __LINE__);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(), raw.size());
  if (graph.try_finalize() && !choose(graph, CUDNN_HEUR_MODE_A, key, plan))
    choose(graph, CUDNN_HEUR_MODE_FALLBACK, key, plan);
  std::move(nodes.begin(), nodes.end(), std::back_inserter(plan.parts));
  plan.parts.push_back(std::move(graph));
  return plan;
}

}  // namespace

bool convolve(const Convolution& c, const ConvolutionOperands& at) {
  const std::array<const void*, 5> pointers{at.x, at.w, at.y, at.bias, at.residual};
  Key key{c, {}, c.type == DType::f32 && tf32_allowed()};
  for (std::size_t i = 0; i < pointers.size(); ++i) key.alignments[i] = alignment_of(pointers[i]);
  // Never destroyed: at process exit the library may be unloaded first.
  static auto& plans = *new std::map<Key, Plan>;
  auto it = plans.find(key);
  if (it == plans.end()) it = plans.emplace(key, make_plan(key)).first;
  const Plan& plan = it->second;
  if (plan.plan.empty()) return false;

  constexpr std::array<std::int64_t, 5> ids{id_x, id_w, id_y, id_bias, id_residual};
  std::vector<std::int64_t> used;
  std::vector<const void*> addresses;
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (pointers[i] != nullptr && (i < 3 || (i == 3 ? c.bias : c.residual))) {
      used.push_back(ids[i]);
      addresses.push_back(pointers[i]);
    }
  // Always the whole limit, whatever the engine needs: a plan made without the library knows only
  // the limit.
  const Tensor workspace = Tensor::empty({ops::conv_scratch.workspace / 4}, DType::f32);
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, used);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, addresses.data(),
           addresses.size());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace.raw());
  pack.finalize("operands");
  check(cudnn().execute(library().handle, plan.plan.front().raw(), pack.raw()), describe(c),
        __LINE__);
  return true;
}

#endif

}  // namespace weft::kernels
