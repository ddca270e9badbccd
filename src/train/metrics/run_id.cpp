#include "train/metrics/run_id.h"

#include <array>
#include <fstream>
#include <random>
#include <sstream>

#include "core/hash.h"
#include "core/json.h"
#include "core/seal.h"

namespace weft {

std::string stored_run_id(const std::filesystem::path& run_dir) {
  std::stringstream text;
  text << std::ifstream(run_dir / "run.json").rdbuf();
  const auto j = try_parse_json(text.str());
  if (!j.is_object() || !seal_holds(text.str())) return "";
  const auto id = j.find("id");
  return id != j.end() && id->is_string() ? id->get<std::string>() : "";
}

std::string new_run_id() {
  std::random_device random;
  std::array<std::uint32_t, 4> bits{};
  for (std::uint32_t& b : bits) b = random();
  return to_hex(hash128(std::as_bytes(std::span(bits))));
}

}  // namespace weft
