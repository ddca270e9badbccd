#include "resources.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "emulated_device.h"
#include "faults.h"

namespace emulation {
namespace {

// As tools/kernel_resources.py writes a kernel's name.
std::string name_on_the_page(std::string name) {
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (std::size_t at = 0; (at = name.find(from, at)) != std::string::npos; at += to.size())
      name.replace(at, from.size(), to);
  };
  for (const char* left_out :
       {"weft::kernels::", "weft::ops::cuda::", "(anonymous namespace)::", "(int)", "(bool)"})
    replace(left_out, "");
  replace("__nv_bfloat16", "bf16");
  return name;
}

// Registers by name. Kernels of several files that share a name: the fewest, so that none is
// refused without cause.
std::map<std::string, int> read(const std::string& path) {
  std::map<std::string, int> found;
  std::ifstream page(path);
  if (!page) die("WEFT_EMULATION_RESOURCES=%s cannot be read", path.c_str());
  for (std::string line; std::getline(page, line);) {
    const auto open = line.find(" `"), close = line.find("` | ");
    if (open == std::string::npos || close == std::string::npos) continue;
    const std::string name = line.substr(open + 2, close - open - 2);
    const int registers = std::atoi(line.c_str() + close + 4);
    const auto [at, is_new] = found.emplace(name, registers);
    if (!is_new && registers < at->second) at->second = registers;
  }
  return found;
}

}  // namespace

int registers_of(const void* kernel) {
  constexpr int unknown = 64;
  static std::string path;
  static std::map<std::string, int> page;
  static std::map<const void*, int> known;
  const char* wanted = std::getenv("WEFT_EMULATION_RESOURCES");
  if (wanted == nullptr) return unknown;
  if (path != wanted) {
    path = wanted;
    page = read(path);
    known.clear();
  }
  const auto [at, is_new] = known.emplace(kernel, unknown);
  if (is_new)
    if (const auto found = page.find(name_on_the_page(name_of(kernel))); found != page.end())
      at->second = found->second;
  return at->second;
}

int registers_of_block(const void* kernel, std::size_t threads) {
  const int of_warp = (registers_of(kernel) * 32 + 255) / 256 * 256;
  return of_warp * static_cast<int>((threads + 31) / 32);
}

}  // namespace emulation
