#include "models/wan/names.h"

namespace weft {
namespace {

std::string name_in_diffusers(const std::string& name) {
  // In order: head.modulation goes before those of the blocks. Released norm1 and norm2 have no
  // parameters; diffusers counts the affine one in the order of use, so it is norm2 there.
  return renamed_parts(name, {{"time_embedding.0", "condition_embedder.time_embedder.linear_1"},
                              {"time_embedding.2", "condition_embedder.time_embedder.linear_2"},
                              {"time_projection.1", "condition_embedder.time_proj"},
                              {"text_embedding.0", "condition_embedder.text_embedder.linear_1"},
                              {"text_embedding.2", "condition_embedder.text_embedder.linear_2"},
                              {"head.modulation", "scale_shift_table"},
                              {"head.head", "proj_out"},
                              {"modulation", "scale_shift_table"},
                              {"self_attn", "attn1"},
                              {"cross_attn", "attn2"},
                              {"q", "to_q"},
                              {"k", "to_k"},
                              {"v", "to_v"},
                              {"o", "to_out.0"},
                              {"norm3", "norm2"},
                              {"ffn.0", "ffn.net.0.proj"},
                              {"ffn.2", "ffn.net.2"}});
}

}  // namespace

WeightNames wan_weight_names() {
  WeightNames names;
  names.others = [](const std::string& name) {
    return std::vector<std::string>{"model.diffusion_model." + name, name_in_diffusers(name)};
  };
  return names;
}

}  // namespace weft
