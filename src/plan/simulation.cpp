// Finds and loads the module that plays the simulation.
#include "plan/simulation.h"

#include <dlfcn.h>

#include <filesystem>
#include <optional>

#include "core/error.h"

namespace weft::simulation {
namespace {

namespace fs = std::filesystem;

// Beside the program, or where an installation or a bundle keeps its libraries.
std::optional<fs::path> find_module() {
  std::error_code ec;
  const fs::path here = fs::read_symlink("/proc/self/exe", ec).parent_path();
  for (const char* place : {"weft_simulation.so", "../lib/weft_simulation.so"})
    if (fs::exists(here / place, ec)) return here / place;
  return std::nullopt;
}

const Player& player() {
  static const Player loaded = [] {
    const std::optional<fs::path> module = find_module();
    WEFT_CHECK(module, Exit::usage,
               "install SimGrid (Debian: libsimgrid-dev) and build again; weft plan estimates "
               "without it",
               "this weft was built without SimGrid, which plays the simulation: there is no "
               "weft_simulation.so beside the program");
    // RTLD_LOCAL: SimGrid's library also defines MPI functions (SMPI), which the rest of the
    // program must not see.
    void* library = dlopen(module->c_str(), RTLD_NOW | RTLD_LOCAL);
    WEFT_CHECK(library != nullptr, Exit::usage,
               "is SimGrid's library where it was when weft was built?", "{}", dlerror());
    void* entry = dlsym(library, "weft_simulation_player");
    WEFT_CHECK(entry != nullptr, Exit::usage, "build weft again", "{}", dlerror());
    return reinterpret_cast<Player (*)()>(entry)();
  }();
  return loaded;
}

}  // namespace

bool available() { return find_module().has_value(); }
void check_available() { player(); }

std::vector<StepTimes> play(const Network& network, int ranks, const Overlapped& job, int steps,
                            int warmup) {
  return player().overlapped(network, ranks, job, steps, warmup);
}

std::vector<StepTimes> play(const Network& network, int ranks, const Barriers& job, int steps,
                            int warmup) {
  return player().barriers(network, ranks, job, steps, warmup);
}

double play_collective(const Network& network, int ranks, Collective kind, double bytes) {
  return player().collective(network, ranks, kind, bytes);
}

}  // namespace weft::simulation
