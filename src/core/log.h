// Messages of the job: rank 0 informs, other ranks only warn. Everything goes to stderr, so that
// stdout is free for requested results (tables, JSON). A message is one line: whatever a name or a
// value in it holds is escaped by printable().
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace weft {

// "1 file", "2 files": in messages of numbers that may be one. `plural` where an s is not enough.
inline std::string counted(std::int64_t n, std::string_view noun, std::string_view plural = {}) {
  if (n == 1 || !plural.empty()) return fmt::format("{} {}", n, n == 1 ? noun : plural);
  return fmt::format("{} {}s", n, noun);
}

// Untrusted text (names of files, values of lists, messages of libraries) as one line that a
// terminal, a log or a page shows and does not obey: escapes line breaks, all other control
// characters, bytes that are not UTF-8 and characters that change the direction of writing: \n,
// \x1b, \xff, \u202e. The middle of more than `longest` bytes is left out, since the cause of an
// error comes last. `kept`: control characters that may stay.
std::string printable(std::string_view text, std::size_t longest = 200, std::string_view kept = {});

}  // namespace weft

namespace weft::log {

// Set once after MPI_Init. Before that every process speaks as rank 0.
void set_rank(int rank, int size);
int rank();

void write_info(const std::string& line);
void write_warn(const std::string& line);
// `below`: lines of weft's own that belong to it.
void write_error(const std::string& line, const std::string& below = "");

// Rank 0 only.
template <class... A>
void info(fmt::format_string<A...> f, A&&... a) {
  if (rank() == 0) write_info(fmt::format(f, std::forward<A>(a)...));
}
// Any rank; prefixed with rank and host if there are several. Kept for the summary at the end.
template <class... A>
void warn(fmt::format_string<A...> f, A&&... a) {
  write_warn(fmt::format(f, std::forward<A>(a)...));
}
template <class... A>
void error(fmt::format_string<A...> f, A&&... a) {
  write_error(fmt::format(f, std::forward<A>(a)...));
}

// Whether messages go to a terminal of rank 0 that can redraw a line: its own, or mpirun's.
bool is_live();
// The line that stays below all messages, until the next call; "" removes it.
void live(const std::string& line);

// Reports once what went wrong and what to do. Ranks other than 0 wait a moment first: most errors
// are the same on all ranks, and main ends the job once the first rank has reported.
void report(Error& e);

// This rank's warnings so far, for the summary at the end. The first of many of one kind are shown,
// then one each time their number has doubled.
std::vector<std::string> warnings();
// A warning without what differs from one to the next: numbers, names of files, quoted words.
std::string kind_of_warning(std::string_view text);
// A WARN line for each kind with warnings that were not shown: how many. Then counting begins anew.
// For the end of a job; the program calls it too.
void sum_up_warnings();

}  // namespace weft::log
