#include "plan/machine.h"

#include <charconv>

#include "config/deck.h"
#include "core/error.h"

namespace weft {
namespace {

// A number with nothing behind it; 0 if the text is anything else.
double number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : 0;
}

}  // namespace

Machine described_machine(const std::string& fabric, double memory_gb) {
  Machine m;
  m.name = fabric;
  m.memory_bytes = memory_gb * 1e9;
  const auto cross = fabric.find('x');
  const double cards = number(fabric.substr(0, cross));
  const double gbits = cross == std::string::npos ? 0 : number(fabric.substr(cross + 1));
  if (cards < 1 || cards > 64 || cards != static_cast<int>(cards) || gbits <= 0 || gbits > 1e5) {
    const std::string near = nearest_name(fabric, {"8x400", "1x200", "local"});
    throw Error(
        Exit::usage, fmt::format("--fabric {} is no fabric that is known", fabric),
        near.empty() || near == fabric
            ? "write 8x400 (eight cards of 400 Gb/s a node), 1x200, any other CARDSxGBITS, or local"
            : fmt::format("did you mean {}?", near),
        __FILE__, __LINE__);
  }
  m.cards_a_node = static_cast<int>(cards);
  m.card_bandwidth = gbits * 1e9 / 8;
  return m;
}

}  // namespace weft
