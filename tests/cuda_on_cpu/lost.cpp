#include "lost.h"

#include <mpi.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "faults.h"
#include "fibers.h"

namespace emulation {
namespace {

// WEFT_EMULATION_FAULT=WHAT:N or WHAT:N@RANK.
struct Order {
  std::string what;  // a call's name, or "kernel"
  unsigned long long number = 0;
  int rank = -1;  // of the world; -1: all

  Order() {
    const char* text = std::getenv("WEFT_EMULATION_FAULT");
    if (text == nullptr) return;
    char name[64] = "";
    if (std::sscanf(text, "%63[A-Za-z0-9]:%llu@%d", name, &number, &rank) < 2 || number == 0)
      die("WEFT_EMULATION_FAULT=%s: write CALL:N, kernel:N, or either with @RANK", text);
    what = name;
  }
};
const Order& order() {
  static const Order one;
  return one;
}

std::atomic<bool> lost = false, told = false;
std::atomic<unsigned long long> met = 0;

int rank_in_world() {
  int begun = 0, rank = 0;
  MPI_Initialized(&begun);
  if (begun != 0) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

// Whether this is what the order waits for.
bool meets(const char* what) {
  const Order& o = order();
  return o.what == what && (o.rank < 0 || o.rank == rank_in_world()) && ++met == o.number;
}

}  // namespace

bool gpu_is_lost() { return lost; }

bool call_fails(const char* call) {
  if (order().what.empty()) return false;
  if (!lost && meets(call)) lost = true;
  return failed_meanwhile(call);
}

bool failed_meanwhile(const char* call) {
  if (lost && !told.exchange(true))
    std::fprintf(stderr, "cuda_on_cpu: %s is the first call that fails\n", call);
  return lost;
}

bool kernel_faults() {
  if (order().what.empty() || !meets("kernel")) return false;
  return lost = true;
}

}  // namespace emulation
