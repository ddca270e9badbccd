// A library for LD_PRELOAD that puts faults between weft and the system. WEFT_SHIM says which, with commas between them:
//   init_signal=N     sends the process signal N within MPI_Init_thread, as somebody does who stops a job at once
//   slow_reads=MS:AT:FILE   the AT-th pread of a clip (and all behind it) by a rank, of a file whose name ends with FILE takes MS milliseconds longer
#include <dlfcn.h>
#include <mpi.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// The text behind "NAME=" in WEFT_SHIM; null where it is not asked for.
const char* wish(const char* name) {
  const char* all = std::getenv("WEFT_SHIM");
  const char* found = all == nullptr ? nullptr : std::strstr(all, name);
  return found == nullptr ? nullptr : found + std::strlen(name) + 1;
}

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

std::atomic<bool> is_rank = false;  // not a process that a rank has started

void delay_read(int fd, size_t bytes) {
  static const char* const asked = wish("slow_reads");
  if (asked == nullptr || !is_rank || bytes < 1000)
    return;  // a clip, and not a look at the file's head
  long milliseconds = 0;
  int at = 0;
  char ending[64] = {}, link[64], name[PATH_MAX] = {};
  if (std::sscanf(asked, "%ld:%d:%63[^,]", &milliseconds, &at, ending) != 3) return;
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, name, sizeof name - 1);
  const auto wanted = static_cast<ssize_t>(std::strlen(ending));
  if (length < wanted || std::strcmp(name + length - wanted, ending) != 0) return;
  static std::atomic<int> reads = 0;
  if (++reads < at) return;
  const timespec pause{milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&pause, nullptr);
}

}  // namespace

extern "C" {

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  if (const char* signal = wish("init_signal")) kill(getpid(), std::atoi(signal));
  is_rank = true;
  return next<decltype(&MPI_Init_thread)>("MPI_Init_thread")(argc, argv, required, provided);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  delay_read(fd, bytes);
  return next<decltype(&pread)>("pread")(fd, to, bytes, offset);
}

ssize_t pread64(int fd, void* to, size_t bytes, off64_t offset) {
  delay_read(fd, bytes);
  return next<decltype(&pread64)>("pread64")(fd, to, bytes, offset);
}
}
