// Files of each layout fill the same parameters; the default negative prompt is the released one.
#include "models/wan/dit.h"

#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "core/hash.h"
#include "tests/folder.h"
#include "text/cleaning.h"

namespace weft {
namespace {

// Every kind of parameter: as released, and in diffusers (docs/models/wan.md, Weights).
const std::vector<std::pair<std::string, std::string>>& layouts() {
  static const std::vector<std::pair<std::string, std::string>> names = [] {
    std::vector<std::pair<std::string, std::string>> list = {
        {"patch_embedding.weight", "patch_embedding.weight"},
        {"text_embedding.0.weight", "condition_embedder.text_embedder.linear_1.weight"},
        {"text_embedding.2.bias", "condition_embedder.text_embedder.linear_2.bias"},
        {"time_embedding.0.bias", "condition_embedder.time_embedder.linear_1.bias"},
        {"time_embedding.2.weight", "condition_embedder.time_embedder.linear_2.weight"},
        {"time_projection.1.weight", "condition_embedder.time_proj.weight"},
        {"head.modulation", "scale_shift_table"},
        {"head.head.weight", "proj_out.weight"},
        {"head.head.bias", "proj_out.bias"}};
    for (const std::string b : {"blocks.0.", "blocks.11."}) {
      list.push_back({b + "modulation", b + "scale_shift_table"});
      list.push_back({b + "norm3.weight", b + "norm2.weight"});
      list.push_back({b + "norm3.bias", b + "norm2.bias"});
      list.push_back({b + "ffn.0.weight", b + "ffn.net.0.proj.weight"});
      list.push_back({b + "ffn.2.bias", b + "ffn.net.2.bias"});
      for (const auto& [ours, theirs] :
           {std::pair("self_attn", "attn1"), std::pair("cross_attn", "attn2")}) {
        for (const auto& [l, r] : {std::pair("q", "to_q"), std::pair("k", "to_k"),
                                   std::pair("v", "to_v"), std::pair("o", "to_out.0")})
          list.push_back({b + ours + "." + l + ".weight", b + theirs + "." + r + ".weight"});
        for (const char* norm : {".norm_q.weight", ".norm_k.weight"})
          list.push_back({b + ours + norm, b + theirs + norm});
      }
    }
    return list;
  }();
  return names;
}

using WanNames = FolderTest;

TEST_F(WanNames, FilesOfEveryLayoutLoadAlike) {
  const auto n = layouts().size();
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(i + 1);
  const auto write = [&](const std::function<std::string(std::size_t)>& name) {
    std::vector<SafetensorWrite> list;
    for (std::size_t i = 0; i < n; ++i)
      list.push_back({name(i), DType::f32, {1}, std::as_bytes(std::span(&values[i], 1))});
    write_safetensors(dir_ / "wan.safetensors", list);
  };
  const auto check = [&](const char* layout) {
    ParameterTable table;
    for (const auto& [name, other] : layouts()) table.add(name, {1}, {}, false);
    table.allocate_for_inference(false);
    load_weights(dir_ / "wan.safetensors", table, wan_weight_names());
    for (std::size_t i = 0; i < n; ++i)
      EXPECT_EQ(table.find(layouts()[i].first)->value.data<float>()[0], values[i])
          << layout << ": " << layouts()[i].first;
  };
  write([](std::size_t i) { return layouts()[i].first; });
  check("released");
  write([](std::size_t i) { return "model.diffusion_model." + layouts()[i].first; });
  check("repackaged");
  write([](std::size_t i) { return layouts()[i].second; });
  check("diffusers");

  write([](std::size_t i) { return i == 0 ? "patch_embedding.wieght" : layouts()[i].second; });
  EXPECT_THROW(check("a slip"), Error);
}

// Digests of a text whose SHA-256 is
// ce96e0324e4b54ce4b6e867f669ca520952e1a34cc116543516b1897f0d3c47e, and cleaned
// 42811917cca5c2c7e47e55003083c67a4f9122f03b95a1cfe8a4001ea6a2e5d3.
TEST(WanNegativePrompt, IsTheReleasedOne) {
  const std::string text = wan_negative_prompt;
  EXPECT_EQ(text.size(), 403u);
  EXPECT_EQ(to_hex(hash128(std::string_view(text))), "b8dd1629a92cb9b090694ce631c14ff4");
  EXPECT_EQ(to_hex(hash128(std::string_view(clean_basic(text)))),
            "57a7e9993494d51006098371c4ba59a5");
}

}  // namespace
}  // namespace weft
