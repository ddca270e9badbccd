#include "tests/probe/probe_case.h"

#include "ops/pointwise.h"

namespace weft {

void ProbeOutputs::add(const std::string& name, const Tensor& t) {
  Tensor values = t;
  if (t.dtype() == DType::bf16) {
    values = Tensor::empty(t.shape(), DType::f32);
    ops::convert(t, values);
  }
  tensors_.emplace_back(name, values.to_host());
}

void ProbeOutputs::add_gradients(const ParameterTable& table) {
  for (const auto& p : table.all())
    if (p->trainable) add("grad." + p->name, p->grad);
}

void ProbeOutputs::write(const std::string& path) const {
  std::vector<SafetensorWrite> list;
  for (const auto& [name, t] : tensors_)
    list.push_back({name,
                    t.dtype(),
                    {t.shape().dims().begin(), t.shape().dims().end()},
                    {static_cast<const std::byte*>(t.raw()), t.bytes()}});
  write_safetensors(path, list);
}

}  // namespace weft
