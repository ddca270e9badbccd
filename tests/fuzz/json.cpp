// JSON from outside: both ways to parse agree, nothing nests deeper than the limit, and what is
// written reads back.
#include "core/json.h"

#include "fuzz.h"

namespace {

int depth_of(const nlohmann::json& j) {
  int deepest = 0;
  if (j.is_structured())
    for (const auto& item : j) deepest = std::max(deepest, depth_of(item));
  return deepest + (j.is_structured() ? 1 : 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const std::string_view text = fuzz::text_of(data, size);
  const nlohmann::json j = try_parse_json(text);
  bool thrown = false;
  try {
    fuzz::require(parse_json(text) == j, "the two ways differ");
  } catch (const nlohmann::json::exception&) {
    thrown = true;
  }
  fuzz::require(thrown == j.is_discarded(), "one way takes what the other refuses");
  if (thrown) return 0;
  fuzz::require(depth_of(j) <= deepest_json, "too deep");
  fuzz::require(parse_json(j.dump()) == j, "written and read it is another");
  return 0;
}
