// cuDNN's graph interface: descriptors keep what they are told and are checked when they are made
// final, as the library's are; convolution.cpp computes. Engines are offered in an order that is
// meant to hurt: first one that rounds f32 to TF32, one that does not repeat its bits, one that is
// proposed and then cannot be had, and only then a sound one, which wants workspace and fills it.
#include <cstring>
#include <map>
#include <memory>

#include "convolution.h"
#include "memory.h"
#include "streams.h"

using emulation::ConvGraph;
using emulation::ConvPass;
using emulation::ConvTensor;

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

namespace {

enum class Engine : std::int64_t { tf32, unsteady, absent, sound, modest };
constexpr std::size_t workspace_of_sound = 4096;

struct Descriptor {
  cudnnBackendDescriptorType_t type{};
  bool final = false;
  std::map<int, std::vector<std::int64_t>> numbers;  // also enums, booleans, handles and addresses
  std::map<int, float> reals;
  std::map<int, std::vector<std::shared_ptr<const Descriptor>>> parts;
  std::shared_ptr<const ConvGraph> graph;  // of what is made from an operation graph
  Engine engine = Engine::sound;

  std::int64_t number(int name, std::int64_t otherwise = 0) const {
    const auto it = numbers.find(name);
    return it == numbers.end() || it->second.empty() ? otherwise : it->second[0];
  }
  std::vector<std::int64_t> list(int name) const {
    const auto it = numbers.find(name);
    return it == numbers.end() ? std::vector<std::int64_t>() : it->second;
  }
  const Descriptor* part(int name) const {
    const auto it = parts.find(name);
    return it == parts.end() || it->second.empty() ? nullptr : it->second[0].get();
  }
};
// What the program holds.
struct Held {
  std::shared_ptr<Descriptor> to;
};
Descriptor& of(cudnnBackendDescriptor_t d) { return *static_cast<Held*>(d)->to; }

std::size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
      return 8;
    default:
      return 4;
  }
}

ConvTensor tensor_of(const Descriptor& d) {
  ConvTensor t;
  t.type = static_cast<cudnnDataType_t>(d.number(CUDNN_ATTR_TENSOR_DATA_TYPE, -1));
  t.id = d.number(CUDNN_ATTR_TENSOR_UNIQUE_ID, -1);
  t.alignment = d.number(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  t.is_virtual = d.number(CUDNN_ATTR_TENSOR_IS_VIRTUAL) != 0;
  t.sizes = d.list(CUDNN_ATTR_TENSOR_DIMENSIONS);
  t.strides = d.list(CUDNN_ATTR_TENSOR_STRIDES);
  return t;
}

bool tensor_is_sound(const Descriptor& d) {
  const ConvTensor t = tensor_of(d);
  if ((t.type != CUDNN_DATA_FLOAT && t.type != CUDNN_DATA_BFLOAT16) || t.id < 0 ||
      t.alignment < 1 || t.sizes.size() < 4 || t.sizes.size() != t.strides.size())
    return false;
  for (std::size_t i = 0; i < t.sizes.size(); ++i)
    if (t.sizes[i] < 1 || t.strides[i] < 1) return false;
  return true;
}

// The attributes of a convolution's node: convolution, w, x, y behind alpha and beta, the same for
// all passes but for their first number and the order of w, x, y.
struct Node {
  ConvPass pass;
  int alpha, beta, convolution, w, x, y;
};
bool node_of(cudnnBackendDescriptorType_t type, Node& n) {
  switch (type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      n = {ConvPass::forward, 700, 701, 702, 703, 704, 705};
      return true;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      n = {ConvPass::backward_data, 706, 707, 708, 709, 710, 711};
      return true;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      n = {ConvPass::backward_filter, 712, 713, 714, 715, 716, 717};
      return true;
    default:
      return false;
  }
}

// The operations of a graph as one convolution and what is added to it; null where it is none.
std::shared_ptr<ConvGraph> graph_of(const Descriptor& d) {
  const auto it = d.parts.find(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (it == d.parts.end() || it->second.empty()) return nullptr;
  Node n{};
  const Descriptor& first = *it->second[0];
  if (!node_of(first.type, n)) return nullptr;
  const Descriptor *shape = first.part(n.convolution), *w = first.part(n.w), *x = first.part(n.x),
                   *y = first.part(n.y);
  if (shape == nullptr || w == nullptr || x == nullptr || y == nullptr) return nullptr;
  auto g = std::make_shared<ConvGraph>();
  g->pass = n.pass;
  g->x = tensor_of(*x);
  g->w = tensor_of(*w);
  g->y = g->result = tensor_of(*y);
  g->before = shape->list(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  g->after = shape->list(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
  g->stride = shape->list(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  g->dilation = shape->list(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  g->alpha = first.reals.at(n.alpha);
  g->beta = first.reals.at(n.beta);
  for (std::size_t i = 1; i < it->second.size(); ++i) {
    const Descriptor& add = *it->second[i];
    if (add.type != CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) return nullptr;
    const ConvTensor in = tensor_of(*add.part(CUDNN_ATTR_OPERATION_POINTWISE_XDESC)),
                     b = tensor_of(*add.part(CUDNN_ATTR_OPERATION_POINTWISE_BDESC));
    if (in.id != g->result.id || !in.is_virtual) return nullptr;
    g->added.push_back(b);
    g->result = tensor_of(*add.part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC));
  }
  return emulation::fault_of(*g).empty() && !g->result.is_virtual ? g : nullptr;
}

// Which engines there are. As in the library: a bias of the operands' type or none, a residual only
// with a bias; here also nothing fused for 5 channels, so that programs show what they do then.
std::vector<Engine> engines_of(const ConvGraph& g, cudnnBackendHeurMode_t mode) {
  const std::size_t added = g.added.size();
  if (added > 0 && (g.y.sizes[1] == 5 || g.added.back().sizes == g.y.sizes || added > 2)) return {};
  for (const ConvTensor& t : g.added)
    if (t.type != g.x.type) return {};
  if (g.x.type != g.w.type || g.x.type != g.result.type) return {};
  if (mode == CUDNN_HEUR_MODE_FALLBACK) return {Engine::modest};
  // Nothing sound among the first proposals for an odd number of channels.
  if (g.x.sizes[1] % 2 == 1) return {Engine::tf32, Engine::unsteady, Engine::absent};
  return {Engine::tf32, Engine::unsteady, Engine::absent, Engine::sound, Engine::modest};
}

}  // namespace

const char* cudnnGetErrorString(cudnnStatus_t s) {
  return s == CUDNN_STATUS_SUCCESS         ? "CUDNN_STATUS_SUCCESS"
         : s == CUDNN_STATUS_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED"
         : s < CUDNN_STATUS_NOT_SUPPORTED  ? "CUDNN_STATUS_BAD_PARAM"
                                           : "CUDNN_STATUS_EXECUTION_FAILED";
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  emulation::touch_device();
  {
    const emulation::Device device;
    if (!emulation::charge(emulation::cudnn_bytes)) return CUDNN_STATUS_EXECUTION_FAILED;
  }
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  *descriptor = new Held{std::make_shared<Descriptor>()};
  of(*descriptor).type = type;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete static_cast<Held*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       const void* values) {
  Descriptor& d = of(descriptor);
  if (d.final || count < 0 || (count > 0 && values == nullptr)) return CUDNN_STATUS_BAD_PARAM;
  // The library takes a factor as double too where it computes in float, and then reads half of it:
  // cuDNN 9.14 on an H100 made zeros of every convolution whose alpha was the double 1.0.
  if (type == CUDNN_TYPE_FLOAT || type == CUDNN_TYPE_DOUBLE) {
    std::memcpy(&d.reals[name], values, sizeof(float));
    return CUDNN_STATUS_SUCCESS;
  }
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto& parts = d.parts[name];
    parts.clear();
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& part = static_cast<Held*>(static_cast<void* const*>(values)[i])->to;
      if (!part->final) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
      parts.push_back(part);
    }
    return CUDNN_STATUS_SUCCESS;
  }
  const std::size_t bytes = bytes_of(type);
  auto& numbers = d.numbers[name];
  numbers.assign(count, 0);
  for (std::size_t i = 0; i < numbers.size(); ++i)
    std::memcpy(&numbers[i], static_cast<const char*>(values) + i * bytes, bytes);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  if (emulation::call_fails(__func__)) return CUDNN_STATUS_EXECUTION_FAILED;
  Descriptor& d = of(descriptor);
  if (d.final) return CUDNN_STATUS_BAD_PARAM;
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      if (!tensor_is_sound(d)) return CUDNN_STATUS_BAD_PARAM;
      break;
    case CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR:
      if (d.number(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, -1) != CUDNN_DATA_FLOAT ||
          d.number(CUDNN_ATTR_CONVOLUTION_CONV_MODE, -1) != CUDNN_CROSS_CORRELATION)
        return CUDNN_STATUS_NOT_SUPPORTED;
      for (const std::int64_t x : d.list(CUDNN_ATTR_CONVOLUTION_DILATIONS))
        if (x < 1) return CUDNN_STATUS_BAD_PARAM;
      break;
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      if (d.number(CUDNN_ATTR_OPERATIONGRAPH_HANDLE) == 0) return CUDNN_STATUS_BAD_PARAM;
      d.graph = graph_of(d);
      if (d.graph == nullptr) return CUDNN_STATUS_BAD_PARAM;
      break;
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      if (d.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) == nullptr) return CUDNN_STATUS_BAD_PARAM;
      break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: {
      const Descriptor* config = d.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
      if (config == nullptr || d.number(CUDNN_ATTR_EXECUTION_PLAN_HANDLE) == 0)
        return CUDNN_STATUS_BAD_PARAM;
      if (config->engine == Engine::absent) return CUDNN_STATUS_NOT_SUPPORTED;
      d.graph = config->graph;
      d.engine = config->engine;
      break;
    }
    default:
      break;
  }
  d.final = true;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, std::int64_t asked,
                                       std::int64_t* there, void* values) {
  const Descriptor& d = of(descriptor);
  if (!d.final) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  *there = 0;
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    const auto& graph = d.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->graph;
    for (const Engine e : engines_of(
             *graph, static_cast<cudnnBackendHeurMode_t>(d.number(CUDNN_ATTR_ENGINEHEUR_MODE)))) {
      if (*there == asked) break;
      Descriptor& config = of(static_cast<cudnnBackendDescriptor_t*>(values)[(*there)++]);
      config.graph = graph;
      config.engine = e;
      config.final = true;
    }
  } else if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {
    Descriptor& engine = of(*static_cast<cudnnBackendDescriptor_t*>(values));
    engine.graph = d.graph;
    engine.engine = d.engine;
    engine.final = true;
    *there = 1;
  } else if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) {
    auto* const notes = static_cast<cudnnBackendNumericalNote_t*>(values);
    if (d.engine == Engine::tf32) notes[(*there)++] = CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    if (d.engine == Engine::unsteady) notes[(*there)++] = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
  } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
    *static_cast<std::int64_t*>(values) = d.engine == Engine::sound ? workspace_of_sound : 0;
    *there = 1;
  } else {
    return CUDNN_STATUS_NOT_SUPPORTED;
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan_descriptor,
                                  cudnnBackendDescriptor_t operands) {
  const emulation::Device device;
  if (emulation::call_fails(__func__)) return CUDNN_STATUS_EXECUTION_FAILED;
  const Descriptor &plan = of(plan_descriptor), &pack = of(operands);
  if (!plan.final || !pack.final) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  ConvGraph g = *plan.graph;
  g.rounds_inputs = plan.engine == Engine::tf32 && g.x.type == CUDNN_DATA_FLOAT;
  g.noise = plan.engine == Engine::unsteady ? 0.1f : 0.0f;
  const auto ids = pack.list(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS),
             addresses = pack.list(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  if (ids.size() != addresses.size()) return CUDNN_STATUS_BAD_PARAM;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  const auto find = [&](const ConvTensor& t) -> void* {
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (ids[i] == t.id) {
        void* const p = reinterpret_cast<void*>(addresses[i]);
        if (addresses[i] % t.alignment != 0) status = CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
        if (p == nullptr || emulation::where_is(p, static_cast<std::size_t>(t.extent())) !=
                                emulation::Where::device)
          status = CUDNN_STATUS_BAD_PARAM;
        return p;
      }
    status = CUDNN_STATUS_BAD_PARAM;
    return nullptr;
  };
  void *const x = find(g.x), *const w = find(g.w), *const y = find(g.result);
  std::vector<void*> added;
  for (const ConvTensor& t : g.added) {
    added.push_back(find(t));
    if (added.back() == y)
      status = CUDNN_STATUS_BAD_PARAM;  // what is added must not be overwritten
  }
  void* const workspace = reinterpret_cast<void*>(pack.number(CUDNN_ATTR_VARIANT_PACK_WORKSPACE));
  const bool wants = plan.engine == Engine::sound;
  if (wants && (workspace == nullptr ||
                emulation::where_is(workspace, workspace_of_sound) != emulation::Where::device))
    status = CUDNN_STATUS_BAD_PARAM;
  if (status != CUDNN_STATUS_SUCCESS) return status;
  const cudaError_t error =
      emulation::enqueue(handle->stream, emulation::simple("cudnnBackendExecute", [=] {
                           // What the library leaves in the workspace is nobody's business.
                           if (wants) std::memset(workspace, 0xff, workspace_of_sound);
                           emulation::convolve(g, x, w, y, added);
                         }));
  return error == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}
