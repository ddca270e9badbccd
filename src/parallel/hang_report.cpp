#include "parallel/hang_report.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/error.h"

namespace weft {

namespace {

constexpr std::size_t table_rows = 16;  // with more ranks: only the late ones, and `others` more
constexpr std::size_t others = 4;
constexpr std::size_t named_in_cause = 8;

// Sent ahead of the records.
struct Head {
  std::int64_t step = 0;
  double phase_seconds = 0;
  std::uint64_t issued = 0, begun = 0, completed = 0;
  std::array<char, 32> phase{};
  std::uint64_t stalled = 0;
};

std::optional<FlightRecord::Entry> entry(const RankState& s, std::uint64_t number) {
  const auto at = std::find_if(s.records.begin(), s.records.end(),
                               [&](const auto& e) { return e.number == number; });
  return at == s.records.end() ? std::nullopt : std::optional(*at);
}

// The operation that all ranks wait for: the first that some rank has begun and not completed. 0:
// none.
std::uint64_t pending_operation(std::span<const RankState> states) {
  std::uint64_t first = 0;
  for (const RankState& s : states)
    if (s.answers && s.begun > s.completed && (first == 0 || s.completed + 1 < first))
      first = s.completed + 1;
  return first;
}

// Why a rank is late, or "". If an operation is pending, the ranks that have not reached it hold up
// the others; if none is, the ranks whose step stands still are late.
std::string lateness(const RankState& s, std::uint64_t operation) {
  if (!s.answers) return "does not answer";
  std::string where;
  if (!s.phase.empty())
    where = fmt::format("in {} of step {} for {:.0f} s", s.phase, s.step + 1, s.phase_seconds);
  if (operation > 0 && s.issued < operation)
    return where.empty() ? "has not issued it" : "has not issued it: " + where;
  if (operation > 0 && s.begun < operation) return "has issued it, but its GPU has not come to it";
  if (operation == 0 && s.stalled) return where;
  return "";
}

// "rank 2" or "ranks 2, 3, 5"
std::string list(const std::vector<std::size_t>& which, std::span<const RankName> names) {
  std::string text = which.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(which.size(), named_in_cause); ++i)
    text += fmt::format("{}{}", i > 0 ? ", " : "", names[which[i]].rank);
  if (which.size() > named_in_cause)
    text += fmt::format(" and {} more", which.size() - named_in_cause);
  return text;
}

// A finding, and the ranks it holds for. Sorted, the rarest comes first: "rank 2 has A, the others
// B".
using Groups = std::vector<std::pair<std::string, std::vector<std::size_t>>>;

void add(Groups& groups, const std::string& what, std::size_t rank) {
  for (auto& [text, who] : groups)
    if (text == what) return who.push_back(rank);
  groups.push_back({what, {rank}});
}

bool has_majority(const Groups& sorted) {
  return sorted.back().second.size() > sorted[sorted.size() - 2].second.size();
}

void sort(Groups& groups) {
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
}

std::string contrast(Groups groups, std::span<const RankName> names) {
  sort(groups);
  const bool clear = has_majority(groups);
  std::string text;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& [what, who] = groups[g];
    if (g > 0) text += ", ";
    if (clear && g + 1 == groups.size())
      text += "the others " + what;
    else
      text += fmt::format("{} {} {}", list(who, names), who.size() > 1 ? "have" : "has", what);
  }
  return text;
}

// The first collective that differs among the ranks that have issued it.
struct Difference {
  std::string text;                // empty: none
  std::vector<std::size_t> ranks;  // whose collective differs from the majority's
};

Difference difference(std::span<const RankState> states, std::span<const RankName> names) {
  // Compare only numbers that every ring still holds: an overwritten entry is not a difference.
  std::uint64_t first = 1, last = 0;
  for (const RankState& s : states) {
    if (!s.answers) continue;
    if (!s.records.empty()) first = std::max(first, s.records.front().number);
    last = std::max(last, s.issued);
  }
  for (std::uint64_t n = first; n <= last; ++n) {
    Groups rounded, exact;
    for (std::size_t r = 0; r < states.size(); ++r)
      if (const auto e = entry(states[r], n)) {
        add(rounded, e->describe(), r);
        add(exact, fmt::format("{} ({}, {} bytes)", e->kind.data(), name_of(e->dtype), e->bytes),
            r);
      }
    if (exact.size() < 2) continue;
    // Report the first one only: later ones differ as a consequence. Give the size in bytes where
    // it looks alike in MiB.
    Difference d{fmt::format("collective {} differs: {}", n,
                             contrast(rounded.size() < exact.size() ? exact : rounded, names)),
                 {}};
    sort(exact);
    if (has_majority(exact))
      for (std::size_t g = 0; g + 1 < exact.size(); ++g)
        d.ranks.insert(d.ranks.end(), exact[g].second.begin(), exact[g].second.end());
    return d;
  }
  return {};
}

// "rank 2 has issued 56 collectives, the others 57", or "" where it says little.
std::string behind(std::span<const RankState> states, std::span<const RankName> names) {
  Groups groups;
  for (std::size_t r = 0; r < states.size(); ++r)
    if (states[r].answers) add(groups, fmt::format("{}", states[r].issued), r);
  return groups.size() == 2 ? "issued collectives: " + contrast(std::move(groups), names) : "";
}

std::string numbered(const RankState& s, std::uint64_t number) {
  if (number == 0) return "-";
  const auto e = entry(s, number);
  return e ? fmt::format("{} {}", number, e->describe()) : fmt::format("{}", number);
}

using Row = std::array<std::string, 7>;

Row row(const RankState& s, const RankName& name) {
  if (!s.answers)
    return {fmt::format("{}", name.rank), name.host, "-", "-", "-", "does not answer", ""};
  const bool in_step = !s.phase.empty();
  return {fmt::format("{}", name.rank),
          name.host,
          in_step ? fmt::format("{}", s.step + 1) : "-",
          in_step ? s.phase : "-",
          in_step ? fmt::format("{:.1f}", s.phase_seconds) : "-",
          numbered(s, s.completed),
          s.issued > s.completed ? numbered(s, s.completed + 1) : "-"};
}

std::string table(const std::vector<Row>& rows, const std::vector<std::string>& marks) {
  const Row head = {"rank", "host", "step", "phase", "seconds", "last done", "pending"};
  std::array<std::size_t, 7> width{};
  for (std::size_t c = 0; c < width.size(); ++c) {
    width[c] = head[c].size();
    for (const Row& r : rows) width[c] = std::max(width[c], r[c].size());
  }
  const auto line = [&](const Row& r, const std::string& mark) {
    std::string text = fmt::format("\n  {:<7}  ", mark);
    for (std::size_t c = 0; c < r.size(); ++c) {
      const bool number = c == 0 || c == 2 || c == 4;
      text += number ? fmt::format("{:>{}}  ", r[c], width[c])
                     : fmt::format("{:<{}}  ", r[c], width[c]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::string text = line(head, "");
  for (std::size_t i = 0; i < rows.size(); ++i) text += line(rows[i], marks[i]);
  return text;
}

}  // namespace

std::vector<char> RankState::to_bytes() const {
  Head head{step, phase_seconds, issued, begun, completed, {}, stalled ? 1U : 0U};
  std::copy_n(phase.begin(), std::min(phase.size(), head.phase.size() - 1), head.phase.begin());
  std::vector<char> bytes(sizeof head + records.size() * sizeof records[0]);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (!records.empty())
    std::memcpy(bytes.data() + sizeof head, records.data(), bytes.size() - sizeof head);
  return bytes;
}

RankState RankState::from_bytes(std::span<const char> bytes) {
  Head head;
  WEFT_ASSERT(bytes.size() >= sizeof head);
  std::memcpy(&head, bytes.data(), sizeof head);
  RankState s{
      true,       head.stalled != 0, head.step, head.phase.data(), head.phase_seconds, head.issued,
      head.begun, head.completed,    {}};
  s.records.resize((bytes.size() - sizeof head) / sizeof s.records[0]);
  if (!s.records.empty())
    std::memcpy(s.records.data(), bytes.data() + sizeof head,
                s.records.size() * sizeof s.records[0]);
  return s;
}

std::string hang_report(const std::string& complaint, std::span<const RankState> states,
                        std::span<const RankName> names) {
  const std::uint64_t operation = pending_operation(states);
  std::vector<std::string> mark(states.size());
  const Difference differs = difference(states, names);
  for (const std::size_t r : differs.ranks) mark[r] = "differs";
  std::string late;
  std::size_t count = 0;
  for (std::size_t r = 0; r < states.size(); ++r) {
    const std::string why = lateness(states[r], operation);
    if (why.empty()) continue;
    mark[r] = "late";
    if (++count > named_in_cause) continue;
    late += fmt::format("{}rank {} on {} ({})", count == 1 ? "late: " : ", ", names[r].rank,
                        names[r].host, why);
  }
  if (count > named_in_cause) late += fmt::format(" and {} more", count - named_in_cause);

  // Differing counts explain a hang only where nothing better does: ranks that run ahead differ
  // too.
  std::string text = complaint, counts;
  if (!differs.text.empty())
    text = differs.text + "; " + complaint;
  else if (count == 0 && operation > 0)
    late = "every rank is in it: the network between them, or a GPU, stands still";
  else
    counts = behind(states, names);
  if (!late.empty()) text += "; " + late;
  if (!counts.empty()) text += "; " + counts;

  std::vector<Row> rows;
  std::vector<std::string> marks;
  std::size_t more = states.size() <= table_rows ? states.size() : others;
  for (std::size_t r = 0; r < states.size(); ++r) {
    if (mark[r].empty() && (more == 0 || more-- == 0)) continue;
    rows.push_back(row(states[r], names[r]));
    marks.push_back(mark[r]);
  }
  text += table(rows, marks);
  if (rows.size() < states.size())
    text += fmt::format("\n           ... {} more ranks, none of them late",
                        states.size() - rows.size());
  return text;
}

std::string FlightRecord::Entry::describe() const {
  return fmt::format("{} ({}, {:.3f} MiB)", kind.data(), name_of(dtype),
                     static_cast<double>(bytes) / (1 << 20));
}

void FlightRecord::issued(std::uint64_t number, const Collective& what) {
  if (number > 0) {
    Slot& s = slots_[number % length];
    // 0 while the fields change: entries() reads the number before and after its copy, and drops
    // the entry if it is not the expected one.
    s.number = 0;
    s.bytes = what.bytes;
    s.kind = what.kind;
    s.dtype = what.dtype;
    s.number = number;
  }
  issued_ = number;
}

std::vector<FlightRecord::Entry> FlightRecord::entries() const {
  const std::uint64_t last = issued_;
  std::vector<Entry> found;
  found.reserve(length);
  for (std::uint64_t n = last > length ? last - length + 1 : 1; n <= last; ++n) {
    const Slot& s = slots_[n % length];
    if (s.number != n) continue;
    Entry e{n, s.bytes, {}, s.dtype};
    const std::string_view kind = s.kind.load();
    std::copy_n(kind.begin(), std::min(kind.size(), e.kind.size() - 1), e.kind.begin());
    if (s.number == n) found.push_back(e);
  }
  return found;
}

}  // namespace weft
