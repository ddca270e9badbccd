// A libcudnn.so.9 that stands before the real one on a machine without a GPU: no handle is made,
// the device is described (WEFT_DEVICE, as CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION wants it),
// nothing is executed. Everything else is passed on, so that the library's own heuristics and
// engines judge what weft asks of it.
#include <cudnn.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>

namespace {

template <class F>
F* real(const char* name) {
  static void* const library = dlopen(std::getenv("WEFT_REAL_CUDNN"), RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<F*>(dlsym(library, name));
}
#define REAL(name) real<decltype(::name)>(#name)

cudnnBackendDescriptor_t device() {
  static const cudnnBackendDescriptor_t described = [] {
    const std::string text = std::getenv("WEFT_DEVICE");
    cudnnBackendDescriptor_t d = nullptr;
    REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d);
    REAL(cudnnBackendSetAttribute)
    (d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
     static_cast<std::int64_t>(text.size()), text.data());
    if (REAL(cudnnBackendFinalize)(d) != CUDNN_STATUS_SUCCESS) std::abort();
    return d;
  }();
  return described;
}

std::map<cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t> types;

}  // namespace

extern "C" {

// Of the engine that was looked at last: its number, whether it works on tensor cores, the
// workspace that its plan wants. And how many were looked at.
std::int64_t weft_engine = -1, weft_tensor_cores = 0, weft_workspace = -1, weft_looked_at = 0;

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = reinterpret_cast<cudnnHandle_t>(0x10);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) { return CUDNN_STATUS_SUCCESS; }
const char* cudnnGetErrorString(cudnnStatus_t s) { return REAL(cudnnGetErrorString)(s); }

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* d) {
  const cudnnStatus_t status = REAL(cudnnBackendCreateDescriptor)(type, d);
  types[*d] = type;
  return status;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
  return REAL(cudnnBackendDestroyDescriptor)(d);
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       const void* values) {
  if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) return CUDNN_STATUS_SUCCESS;
  if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) {
    const cudnnBackendDescriptor_t on = device();
    return REAL(cudnnBackendSetAttribute)(d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &on);
  }
  return REAL(cudnnBackendSetAttribute)(d, name, type, count, values);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
  if (types[d] == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
    const cudnnBackendDescriptor_t on = device();
    REAL(cudnnBackendSetAttribute)
    (d, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &on);
  }
  return REAL(cudnnBackendFinalize)(d);
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       std::int64_t* there, void* values) {
  const auto get = REAL(cudnnBackendGetAttribute);
  const cudnnStatus_t status = get(d, name, type, count, there, values);
  if (status != CUDNN_STATUS_SUCCESS) return status;
  std::int64_t one = 0;
  if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) {
    const auto* notes = static_cast<const cudnnBackendNumericalNote_t*>(values);
    weft_tensor_cores = std::count(notes, notes + *there, CUDNN_NUMERICAL_NOTE_TENSOR_CORE) > 0;
  }
  if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {
    ++weft_looked_at;
    get(*static_cast<cudnnBackendDescriptor_t*>(values), CUDNN_ATTR_ENGINE_GLOBAL_INDEX,
        CUDNN_TYPE_INT64, 1, &one, &weft_engine);
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
    auto& bytes = *static_cast<std::int64_t*>(values);
    weft_workspace = bytes;
  }
  return status;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t,
                                  cudnnBackendDescriptor_t) {
  return CUDNN_STATUS_SUCCESS;
}
}
