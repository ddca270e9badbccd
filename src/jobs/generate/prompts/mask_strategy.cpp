#include "jobs/generate/prompts/mask_strategy.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "core/error.h"

namespace weft {
namespace {

template <class T>
T number(const std::string& field, const std::string& group, const std::string& where) {
  const auto first = field.find_first_not_of(' ');
  const std::string s = first == std::string::npos
                            ? ""
                            : field.substr(first, field.find_last_not_of(' ') - first + 1);
  T value{};
  const auto [end, failed] = std::from_chars(s.data(), s.data() + s.size(), value);
  WEFT_CHECK(
      failed == std::errc() && end == s.data() + s.size(), Exit::data,
      "a group is loop,reference,reference start,target start,length,edit ratio: whole numbers, "
      "and a ratio from 0 to 1",
      "{}: mask strategy group \"{}\": \"{}\" is no number for its place", where, group, field);
  return value;
}

}  // namespace

std::vector<MaskGroup> parse_mask_strategy(const std::string& text, const std::string& where) {
  std::vector<MaskGroup> groups;
  if (text.empty()) return groups;
  std::istringstream all(text + ";");
  for (std::string group; std::getline(all, group, ';');) {
    std::vector<std::string> fields;
    std::istringstream in(group + ",");
    for (std::string field; std::getline(in, field, ',');) fields.push_back(field);
    WEFT_CHECK(fields.size() <= 6, Exit::data,
               "a group has at most loop,reference,reference start,target start,length,edit ratio",
               "{}: mask strategy group \"{}\" has {} fields", where, group, fields.size());
    MaskGroup g;
    std::int64_t* const whole[] = {&g.loop, &g.reference, &g.reference_start, &g.target_start,
                                   &g.length};
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (i < 5)
        *whole[i] = number<std::int64_t>(fields[i], group, where);
      else
        g.edit = number<double>(fields[i], group, where);
    WEFT_CHECK(g.edit >= 0 && g.edit <= 1, Exit::data, "0 keeps the frames, 1 makes them anew",
               "{}: mask strategy group \"{}\": edit ratio {}", where, group, g.edit);
    WEFT_CHECK(g.length >= 1, Exit::data, "place 1 latent frame or more",
               "{}: mask strategy group \"{}\": length {}", where, group, g.length);
    groups.push_back(g);
  }
  return groups;
}

std::int64_t snap(std::int64_t position, std::int64_t align, std::int64_t frames) {
  if (align == 0) return position;
  std::int64_t t = position / align;
  if (2 * (position % align) > align && t < frames / align - 1) ++t;
  return t * align;
}

namespace {

// A group in a clip of `frames`, of a reference of `given`.
Placement place(const MaskGroup& g, std::int64_t given, std::int64_t frames, std::int64_t align,
                const std::string& where) {
  Placement p{g.reference, g.reference_start, g.target_start, 0, g.edit};
  if (p.from < 0) p.from += given;
  if (p.to < 0) p.to += frames;
  const bool inside = p.from >= 0 && p.to >= 0;
  if (inside) {
    p.from = snap(p.from, align, given);
    p.to = snap(p.to, align, frames);
    p.length = std::min({g.length, frames - p.to, given - p.from});
  }
  WEFT_CHECK(inside && p.length >= 1, Exit::data,
             "starts count latent frames (5 to 17 frames), from the end where they are negative",
             "{}: the mask strategy places latent frame {} of reference {}, which has {}, at {} "
             "of a clip of {}",
             where, g.reference_start, g.reference, given, g.target_start, frames);
  return p;
}

}  // namespace

std::vector<Placement> place_references(const std::vector<MaskGroup>& groups, std::int64_t loop,
                                        std::int64_t frames,
                                        const std::vector<std::int64_t>& references,
                                        std::int64_t align, const std::string& where) {
  std::vector<Placement> placements;
  for (const MaskGroup& g : groups) {
    if (g.loop != loop) continue;
    WEFT_CHECK(g.reference >= 0 && g.reference < static_cast<std::int64_t>(references.size()),
               Exit::data, "references are counted from 0, in the order of their list",
               "{}: the mask strategy asks for reference {}, there are {}", where, g.reference,
               references.size());
    const std::int64_t given = references[static_cast<std::size_t>(g.reference)];
    placements.push_back(place(g, given, frames, align, where));
  }
  return placements;
}

LatentRange frames_taken(const std::vector<MaskGroup>& groups, std::int64_t loops,
                         std::int64_t reference, std::int64_t given, std::int64_t frames,
                         std::int64_t align, const std::string& where) {
  LatentRange range;
  for (const MaskGroup& g : groups) {
    if (g.reference != reference || g.loop < 0 || g.loop >= loops) continue;
    const Placement p = place(g, given, frames, align, where);
    const bool none = range.last == 0;
    range.first = none ? p.from : std::min(range.first, p.from);
    range.last = std::max(range.last, p.from + p.length);
  }
  return range;
}

std::vector<float> edit_ratios(const std::vector<Placement>& placements, std::int64_t frames) {
  std::vector<float> edit(static_cast<std::size_t>(frames), 1.0f);
  for (const Placement& p : placements)
    std::fill_n(edit.begin() + p.to, p.length, static_cast<float>(p.edit));
  return edit;
}

}  // namespace weft
