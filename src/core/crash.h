// Abnormal ends: a signal such as SIGSEGV, abort(), an exception that nobody catches. The rank says
// what it was, where it was at work and by which calls, in one piece, and ends by the signal as it
// would have without: mpirun then ends the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace weft::crash {

// Takes SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and std::terminate. Before MPI_Init, which takes
// those that nobody has; on the main thread, which gets a stack of its own to tell of an overflow
// on.
void watch();

// What this rank is at from here on, such as ("step", 12), or a clip by its name, which is copied.
// nullptr: nowhere. For the main thread; costs a few stores.
void at(const char* what, std::int64_t number);
void at(const char* what, const char* name);
inline void at(std::nullptr_t) { at(nullptr, std::int64_t{0}); }

// " in step 12", or "" where there is no place.
std::string place();

}  // namespace weft::crash
