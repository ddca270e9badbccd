// What a rank does within a step, as its watchdog tells it to the others.
#pragma once

#include <array>
#include <cstddef>

namespace weft {

enum class Phase {
  none,  // in no step: only operations are watched
  plan,
  data,
  compute,
  sums,
  optimizer,
  wait_for_gpu,
  log,
  step_again,
  measuring,
  save,
  validation,
  samples
};

struct PhaseTraits {
  const char* name;         // in messages
  bool on_storage = false;  // reads or writes: may take ten times the limit of a hang
};
constexpr std::array<PhaseTraits, 13> phase_traits{{{"-"},
                                                    {"plan"},
                                                    {"data", true},
                                                    {"compute"},
                                                    {"sums"},
                                                    {"optimizer"},
                                                    {"wait for the GPU"},
                                                    {"log"},
                                                    {"non-finite step again"},
                                                    {"measuring", true},
                                                    {"save", true},
                                                    {"validation", true},
                                                    {"samples", true}}};
static_assert(phase_traits.size() == static_cast<std::size_t>(Phase::samples) + 1);
constexpr const PhaseTraits& traits_of(Phase p) {
  return phase_traits[static_cast<std::size_t>(p)];
}

}  // namespace weft
