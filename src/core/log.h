// What the job says to a person: rank 0 speaks, other ranks only warn. Everything goes to stderr,
// so that stdout stays free for results that are asked for (tables, JSON).
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "core/error.h"

namespace weft::log {

// Set once after MPI_Init. Before that every process speaks as rank 0.
void set_rank(int rank, int size);
int rank();

void write_info(const std::string& line);
void write_warn(const std::string& line);
void write_error(const std::string& line);

// Rank 0 only.
template <class... A>
void info(fmt::format_string<A...> f, A&&... a) {
  if (rank() == 0) write_info(fmt::format(f, std::forward<A>(a)...));
}
// Any rank, prefixed with rank and host where there are several. Kept for the end table.
template <class... A>
void warn(fmt::format_string<A...> f, A&&... a) {
  write_warn(fmt::format(f, std::forward<A>(a)...));
}
template <class... A>
void error(fmt::format_string<A...> f, A&&... a) {
  write_error(fmt::format(f, std::forward<A>(a)...));
}

// Says once what went wrong and what to do. Ranks other than 0 wait a moment first, since most
// errors meet all ranks alike and the first rank's word is enough: main ends the job when it has
// spoken.
void report(Error& e);

// The warnings of this rank so far, so that the summary at the end can repeat them.
std::vector<std::string> warnings();

}  // namespace weft::log
