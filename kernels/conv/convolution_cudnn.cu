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
#include <deque>
#include <map>
#include <optional>
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

constexpr int most_proposals = 32;

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
  void finalize(const char* what) {
    check(cudnn().finalize(d_), std::string("cudnnBackendFinalize of ") + what, __LINE__);
  }
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

// The tensors of a graph, in memory and between its nodes.
enum Id : std::int64_t {
  id_x = 'x',
  id_w = 'w',
  id_y = 'y',
  id_bias = 'b',
  id_residual = 'r',
  id_products = 's',
  id_with_residual = 't'
};

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

std::vector<std::int64_t> spatial_of(const Convolution& c,
                                     const std::array<std::int64_t, 3>& values) {
  return {values.end() - c.spatial, values.end()};
}

// Dimensions in the library's order (samples, channels, then those of space), channels last in
// memory.
Descriptor describe_tensor(std::int64_t id, cudnnDataType_t type, std::int64_t samples,
                           std::int64_t channels, const std::vector<std::int64_t>& space) {
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

// A convolution's graph: the convolution, and behind it the additions of a residual and of a bias.
// The library reads all descriptors until the plan is done with, so they live as long as this.
class Graph {
 public:
  explicit Graph(const Key& key);

  // What the library proposes for it, best first. Empty where it knows nothing.
  std::vector<Descriptor> proposals(cudnnBackendHeurMode_t mode) const;

 private:
  const Descriptor& keep(Descriptor d) { return kept_.emplace_back(std::move(d)); }
  const Descriptor& in_memory(std::int64_t id, std::int64_t samples, std::int64_t channels,
                              const std::vector<std::int64_t>& space, std::int64_t alignment);
  const Descriptor& passing(std::int64_t id);
  void convolve(const Descriptor& x, const Descriptor& w, const Descriptor& y);
  void add(const Descriptor& a, const Descriptor& b, const Descriptor& sum);
  void finish();

  const Convolution c_;
  std::deque<Descriptor> kept_;    // tensors and what nodes compute: their addresses stay
  std::vector<Descriptor> nodes_;  // in order
  std::optional<Descriptor> graph_;
};

Graph::Graph(const Key& key) : c_(key.convolution) {
  const auto out = spatial_of(c_, c_.out);
  const auto& [of_x, of_w, of_y, of_bias, of_residual] = key.alignments;
  const Descriptor& x = in_memory(id_x, c_.samples, c_.in_channels, spatial_of(c_, c_.in), of_x);
  // Fewer input channels than x has tell the library that there are groups.
  const Descriptor& w =
      in_memory(id_w, c_.out_channels, c_.in_channels / c_.groups, spatial_of(c_, c_.kernel), of_w);
  const Descriptor& y = in_memory(id_y, c_.samples, c_.out_channels, out, of_y);
  if (!c_.bias) {
    convolve(x, w, y);
  } else {
    const Descriptor& products = passing(id_products);
    convolve(x, w, products);
    const Descriptor* sum = &products;
    if (c_.residual) {
      const Descriptor& residual =
          in_memory(id_residual, c_.samples, c_.out_channels, out, of_residual);
      const Descriptor& with_residual = passing(id_with_residual);
      add(*sum, residual, with_residual);
      sum = &with_residual;
    }
    const std::vector<std::int64_t> everywhere(c_.spatial, 1);
    add(*sum, in_memory(id_bias, 1, c_.out_channels, everywhere, of_bias), y);
  }
  finish();
}

// An operand, of the convolution's type.
const Descriptor& Graph::in_memory(std::int64_t id, std::int64_t samples, std::int64_t channels,
                                   const std::vector<std::int64_t>& space, std::int64_t alignment) {
  const cudnnDataType_t type = c_.type == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT;
  Descriptor d = describe_tensor(id, type, samples, channels, space);
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, alignment);
  d.finalize("tensor");
  return keep(std::move(d));
}

// A result of y's shape between two nodes, in f32, which exists in registers alone.
const Descriptor& Graph::passing(std::int64_t id) {
  Descriptor d =
      describe_tensor(id, CUDNN_DATA_FLOAT, c_.samples, c_.out_channels, spatial_of(c_, c_.out));
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::int64_t{16});
  d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
  d.finalize("tensor between nodes");
  return keep(std::move(d));
}

void Graph::convolve(const Descriptor& x, const Descriptor& w, const Descriptor& y) {
  const Names name = names_of(c_.pass);
  Descriptor& node = nodes_.emplace_back(name.type);
  // In the type of the computation: cuDNN silently accepts doubles too and reads half of one as a
  // float, so that 1.0 becomes 0.
  node.set(name.alpha, CUDNN_TYPE_FLOAT, 1.0f);
  node.set(name.beta, CUDNN_TYPE_FLOAT, c_.accumulate ? 1.0f : 0.0f);
  node.set(name.convolution, keep(geometry(c_)));
  node.set(name.w, w);
  node.set(name.x, x);
  node.set(name.y, y);
  node.finalize("convolution node");
}

void Graph::add(const Descriptor& a, const Descriptor& b, const Descriptor& sum) {
  Descriptor addition(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  addition.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, CUDNN_POINTWISE_ADD);
  addition.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  addition.finalize("pointwise");
  Descriptor& node = nodes_.emplace_back(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, keep(std::move(addition)));
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a);
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
  node.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, sum);
  node.finalize("pointwise node");
}

// The graph of the nodes; none where the library cannot run such nodes together.
void Graph::finish() {
  std::vector<cudnnBackendDescriptor_t> nodes;
  for (const Descriptor& n : nodes_) nodes.push_back(n.raw());
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, library().handle);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, nodes.data(),
            nodes.size());
  if (graph.try_finalize()) graph_ = std::move(graph);
}

std::vector<Descriptor> Graph::proposals(cudnnBackendHeurMode_t mode) const {
  if (!graph_) return {};
  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, *graph_);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (!heuristics.try_finalize()) return {};
  std::vector<Descriptor> configs;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (int i = 0; i < most_proposals; ++i)
    raw.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).raw());
  const std::int64_t found = heuristics.get(
      CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(), most_proposals);
  while (std::ssize(configs) > found) configs.pop_back();
  return configs;
}

// Whether results with that note repeat their bits and are as exact as weft promises.
bool is_welcome(cudnnBackendNumericalNote_t note, const Key& key) {
  switch (note) {
    case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC:
    case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6:
    case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13:
      return false;
    case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
      return key.convolution.type != DType::f32;
    case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
      return key.convolution.type != DType::f32 || key.tf32;
    default:
      return true;
  }
}

// Whether all that the library notes of a proposal's engine is.
bool has_welcome_engine(const Descriptor& config, const Key& key) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.raw();
  if (config.get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw, 1) != 1)
    return false;
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  const std::int64_t count = engine.get(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                        notes.data(), notes.size());
  return std::all_of(notes.begin(), notes.begin() + count,
                     [&](cudnnBackendNumericalNote_t note) { return is_welcome(note, key); });
}

// What runs a proposal; none where it cannot be had, or wants more workspace than there is.
std::optional<Descriptor> execution_plan(const Descriptor& config) {
  Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, library().handle);
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (!plan.try_finalize()) return std::nullopt;
  std::int64_t bytes = 0;
  plan.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &bytes, 1);
  if (bytes > ops::conv_scratch.workspace) return std::nullopt;
  return plan;
}

// A convolution's graph and how it is run: by the first proposal that is welcome and can be had.
struct Plan {
  explicit Plan(const Key& key) : graph(key) {
    for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK})
      for (Descriptor& proposal : graph.proposals(mode)) {
        if (!has_welcome_engine(proposal, key)) continue;
        execution = execution_plan(proposal);
        if (!execution) continue;
        config = std::move(proposal);
        return;
      }
  }

  Graph graph;
  std::optional<Descriptor> config, execution;  // none: the library cannot
};

}  // namespace

bool convolve(const Convolution& c, const ConvolutionOperands& at) {
  const std::array<const void*, 5> pointers{at.x, at.w, at.y, at.bias, at.residual};
  Key key{c, {}, c.type == DType::f32 && tf32_allowed()};
  for (std::size_t i = 0; i < pointers.size(); ++i) key.alignments[i] = alignment_of(pointers[i]);
  // Never destroyed: at process exit the library may be unloaded first.
  static auto& plans = *new std::map<Key, Plan>;
  auto it = plans.find(key);
  if (it == plans.end()) it = plans.try_emplace(key, key).first;
  const Plan& plan = it->second;
  if (!plan.execution) return false;

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
  check(cudnn().execute(library().handle, plan.execution->raw(), pack.raw()),
        "cudnnBackendExecute of " + describe(c), __LINE__);
  return true;
}

#endif

}  // namespace weft::kernels
